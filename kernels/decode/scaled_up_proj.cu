#include "../common/launch.cuh"
#include "launches.h"
#include "scaled_up_proj.cuh"

namespace {

template <typename Element, bool GATED>
cudaError_t launch_kernel(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int COLUMNS = GATED ? 2 : 4, PIECES = 2;  // 8 pieces in the registers of a lane
  const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.num_tokens * a.top_k);
  return launch(scaled_up_proj_kernel<Element, GATED, COLUMNS, PIECES>, grid, WARP, 0, stream, {dependent}, a);
}

template <typename Element>
cudaError_t choose_gated(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return a.gated ? launch_kernel<Element, true>(a, dependent, stream)
                 : launch_kernel<Element, false>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_scaled_up_proj(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_gated<__nv_bfloat16>(a, dependent, stream)
                                     : choose_gated<__half>(a, dependent, stream);
}
