#include "../common/launch.cuh"
#include "choose.cuh"
#include "grouped_down_proj.cuh"

cudaError_t launch_grouped_down_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  const auto launch_shape = [&](auto element, auto shape) {
    using Shape = decltype(shape);
    constexpr int COLUMNS = 2 * FRAGMENT;
    const dim3 grid((a.hidden + COLUMNS - 1) / COLUMNS, a.max_tiles);
    const auto kernel = a.down_lora.rank ? grouped_down_proj_kernel<decltype(element), true, Shape>
                                         : grouped_down_proj_kernel<decltype(element), false, Shape>;
    return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
  };
  constexpr int SHORT_ROW = 1024;  // of the activation, in Elements
  return choose_element(a, [&](auto element) {  // many pieces in few warps, or many small blocks where rows are short
    return a.intermediate > SHORT_ROW ? launch_shape(element, TileShape<4, 6, 3>())
                                      : launch_shape(element, TileShape<2, 4, 8>());
  });
}
