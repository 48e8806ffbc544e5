#include "../common/launch.cuh"
#include "launches.h"
#include "scaled_down_proj.cuh"

namespace {

constexpr int WARPS = 4;

template <typename Element, int CHOICES, int PIECES>
cudaError_t launch_kernel(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  const dim3 grid((a.hidden + WARPS - 1) / WARPS, a.num_tokens);
  const auto kernel = a.down_lora.rank ? scaled_down_proj_kernel<Element, true, WARPS, CHOICES, PIECES>
                                       : scaled_down_proj_kernel<Element, false, WARPS, CHOICES, PIECES>;
  return launch(kernel, grid, WARPS * WARP, 0, stream, {dependent}, a);
}

// As for plain weights, with half as many lanes and twice as many elements in a piece.
template <typename Element>
cudaError_t choose_pieces(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int ELEMENTS = WARP / 2 * CODES;
  const auto steps = [&](int pieces) { return (a.intermediate + pieces * ELEMENTS - 1) / (pieces * ELEMENTS); };
  if (steps(2) == 1) return launch_kernel<Element, 4, 2>(a, dependent, stream);
  return 3 * steps(3) <= 4 * steps(4) ? launch_kernel<Element, 2, 3>(a, dependent, stream)
                                      : launch_kernel<Element, 2, 4>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_scaled_down_proj(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_pieces<__nv_bfloat16>(a, dependent, stream)
                                     : choose_pieces<__half>(a, dependent, stream);
}
