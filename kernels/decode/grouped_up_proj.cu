#include "../common/launch.cuh"
#include "grouped_up_proj.cuh"

namespace {

template <typename Element, bool GATED, typename Shape>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int COLUMNS = Shape::GROUPS * (GATED ? FRAGMENT : 2 * FRAGMENT);
  const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.max_tiles);
  return launch(grouped_up_proj_kernel<Element, GATED, Shape>, grid, Shape::THREADS, 0, stream, {dependent}, a);
}

// As many pieces of weights under way as leave registers for those of the rows, in 16 warps of a multiprocessor. Where
// rows of the activation are long, two groups share them, as well as those of x, through L1.
template <typename Element, bool GATED>
cudaError_t choose_shape(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  using Short = TileShape<1, 4, 4, 4>;
  using Long = TileShape<2, 4, 4, 2>;
  return a.intermediate > LONG_ROW ? launch_kernel<Element, GATED, Long>(a, dependent, stream)
                                   : launch_kernel<Element, GATED, Short>(a, dependent, stream);
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
