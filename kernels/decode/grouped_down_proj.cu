#include "../common/launch.cuh"
#include "grouped_down_proj.cuh"

namespace {

constexpr int SHORT_ROW = 1024;  // of the activation, in Elements

template <typename Element, typename Shape>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int COLUMNS = 2 * FRAGMENT;
  const dim3 grid((a.hidden + COLUMNS - 1) / COLUMNS, a.max_tiles);
  const auto kernel = a.down_lora.rank ? grouped_down_proj_kernel<Element, true, Shape>
                                       : grouped_down_proj_kernel<Element, false, Shape>;
  return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
}

// Many pieces under way in few warps, or many small blocks where rows are short.
template <typename Element>
cudaError_t choose_shape(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.intermediate > SHORT_ROW ? launch_kernel<Element, TileShape<4, 6, 3>>(a, dependent, stream)
                                    : launch_kernel<Element, TileShape<2, 4, 8>>(a, dependent, stream);
}

}  // namespace

cudaError_t launch_grouped_down_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_shape<__nv_bfloat16>(a, dependent, stream)
                                     : choose_shape<__half>(a, dependent, stream);
}
