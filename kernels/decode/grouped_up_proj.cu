#include "../common/launch.cuh"
#include "grouped_up_proj.cuh"

namespace {

template <typename Element, bool GATED, typename Shape>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int COLUMNS = Shape::GROUPS * (GATED ? FRAGMENT : 2 * FRAGMENT);
  const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.max_tiles);
  return launch(grouped_up_proj_kernel<Element, GATED, Shape>, grid, Shape::THREADS, 0, stream, {dependent}, a);
}

// As many pieces of weights as leave registers for those of the rows, in 12 to 16 warps of a multiprocessor. Groups
// share rows through L1: of more rows there are more groups.
template <typename Element, bool GATED>
cudaError_t choose_shape(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  switch (a.block_m) {
    case 8:
      return launch_kernel<Element, GATED, TileShape<8, 1, 4, 4, 4>>(a, dependent, stream);
    case 16:
      return launch_kernel<Element, GATED, TileShape<16, 2, 4, 2, 2>>(a, dependent, stream);
    default:
      return launch_kernel<Element, GATED, TileShape<32, 4, 1, 3, 3>>(a, dependent, stream);
  }
}

template <typename Element>
cudaError_t choose_gated(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.gated ? choose_shape<Element, true>(a, dependent, stream)
                 : choose_shape<Element, false>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_grouped_up_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_gated<__nv_bfloat16>(a, dependent, stream)
                                     : choose_gated<__half>(a, dependent, stream);
}
