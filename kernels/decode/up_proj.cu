#include "../common/launch.cuh"
#include "launches.h"
#include "up_proj.cuh"

namespace {

template <typename Element, bool GATED, int WARPS, int COLUMNS, int PIECES>
cudaError_t launch_kernel(const DecodeArgs &a, cudaStream_t stream) {
  const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.num_tokens * a.top_k);
  return launch(up_proj_kernel<Element, GATED, WARPS, COLUMNS, PIECES>, grid, WARPS * WARP, 0, stream,
                {/*dependent=*/true}, a);
}

// Blocks that go along 2048 or 1024 elements at a time: the fewer where the more would leave a long tail.
template <typename Element, bool GATED>
cudaError_t choose_step(const DecodeArgs &a, cudaStream_t stream) {
  constexpr int COLUMNS = GATED ? 4 : 8;
  return a.hidden % 2048 ? launch_kernel<Element, GATED, 2, COLUMNS, 2>(a, stream)
                         : launch_kernel<Element, GATED, 4, COLUMNS, 2>(a, stream);
}

template <typename Element>
cudaError_t choose_gated(const DecodeArgs &a, cudaStream_t stream) {
  return a.gated ? choose_step<Element, true>(a, stream) : choose_step<Element, false>(a, stream);
}

}  // namespace

cudaError_t launch_up_proj(const DecodeArgs &a, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_gated<__nv_bfloat16>(a, stream) : choose_gated<__half>(a, stream);
}
