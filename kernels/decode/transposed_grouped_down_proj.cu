#include "../common/launch.cuh"
#include "choose.cuh"
#include "transposed_grouped_down_proj.cuh"

cudaError_t launch_transposed_grouped_down_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  const dim3 grid((a.hidden + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, a.max_tiles);
  return choose_element(a, [&](auto element) {
    return choose_shape<1>(a.intermediate, [&](auto shape) {
      using Shape = decltype(shape);
      const auto kernel = a.down_lora.rank ? transposed_grouped_down_proj_kernel<decltype(element), true, Shape>
                                           : transposed_grouped_down_proj_kernel<decltype(element), false, Shape>;
      return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
    });
  });
}
