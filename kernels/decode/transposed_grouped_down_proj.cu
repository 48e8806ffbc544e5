#include "../common/launch.cuh"
#include "transposed_grouped_down_proj.cuh"

namespace {

template <typename Element>
cudaError_t choose_shape(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  const dim3 grid((a.hidden + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, a.max_tiles);
  return launch_shape<1>(a.intermediate, [&](auto shape) {
    using Shape = decltype(shape);
    const auto kernel = a.down_lora.rank ? transposed_grouped_down_proj_kernel<Element, true, Shape>
                                         : transposed_grouped_down_proj_kernel<Element, false, Shape>;
    return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
  });
}

}  // namespace

cudaError_t launch_transposed_grouped_down_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? choose_shape<__nv_bfloat16>(a, dependent, stream)
                                     : choose_shape<__half>(a, dependent, stream);
}
