#include "../common/launch.cuh"
#include "down_proj.cuh"
#include "launches.h"

namespace {

constexpr int WARPS = 4;

template <typename Element, int CHOICES, int PIECES>
cudaError_t launch_kernel(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  const dim3 grid((a.hidden + WARPS - 1) / WARPS, a.num_tokens);
  const auto kernel = a.down_lora.rank ? down_proj_kernel<Element, true, WARPS, CHOICES, PIECES>
                                       : down_proj_kernel<Element, false, WARPS, CHOICES, PIECES>;
  return launch(kernel, grid, WARPS * WARP, 0, stream, {dependent}, a);
}

// Six to eight pieces in the registers of a lane: more leave too few warps to a multiprocessor. As few as possible of
// them past the end of a row.
template <typename Element>
cudaError_t choose_pieces(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  const auto steps = [&](int pieces) { return (a.intermediate + pieces * WARP * PIECE - 1) / (pieces * WARP * PIECE); };
  if (steps(2) == 1) return launch_kernel<Element, 4, 2>(a, dependent, stream);
  return 3 * steps(3) <= 4 * steps(4) ? launch_kernel<Element, 2, 3>(a, dependent, stream)
                                      : launch_kernel<Element, 2, 4>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_down_proj(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_pieces<__nv_bfloat16>(a, dependent, stream)
                                     : choose_pieces<__half>(a, dependent, stream);
}
