#include "../common/launch.cuh"
#include "down_proj.cuh"
#include "launches.h"

namespace {

constexpr int WARPS = 4;

template <typename Element, int CHOICES, int PIECES>
cudaError_t launch_kernel(const DecodeArgs &a, cudaStream_t stream) {
  const dim3 grid((a.hidden + WARPS - 1) / WARPS, a.num_tokens);
  return launch(down_proj_kernel<Element, WARPS, CHOICES, PIECES, true>, grid, WARPS * WARP, 0, stream,
                {/*dependent=*/true}, a);
}

template <typename Element>
cudaError_t choose_pieces(const DecodeArgs &a, cudaStream_t stream) {
  const int pieces = (a.intermediate + WARP * PIECE - 1) / (WARP * PIECE);  // per lane of a row
  if (pieces <= 2) return launch_kernel<Element, 8, 2>(a, stream);
  return pieces == 3 ? launch_kernel<Element, 8, 3>(a, stream) : launch_kernel<Element, 4, 4>(a, stream);
}

}  // namespace

cudaError_t launch_down_proj(const DecodeArgs &a, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_pieces<__nv_bfloat16>(a, stream) : choose_pieces<__half>(a, stream);
}
