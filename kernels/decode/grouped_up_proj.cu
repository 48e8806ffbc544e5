#include "../common/launch.cuh"
#include "grouped_up_proj.cuh"

namespace {

using Shape = TileShape<4, 6, 3>;  // many pieces under way in few warps

template <typename Element, bool GATED>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int COLUMNS = GATED ? FRAGMENT : 2 * FRAGMENT;
  const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.max_tiles);
  return launch(grouped_up_proj_kernel<Element, GATED, Shape>, grid, Shape::THREADS, 0, stream, {dependent}, a);
}

template <typename Element>
cudaError_t choose_gated(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.gated ? launch_kernel<Element, true>(a, dependent, stream)
                 : launch_kernel<Element, false>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_grouped_up_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_gated<__nv_bfloat16>(a, dependent, stream)
                                     : choose_gated<__half>(a, dependent, stream);
}
