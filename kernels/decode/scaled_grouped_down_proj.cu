#include "../common/launch.cuh"
#include "choose.cuh"
#include "scaled_grouped_down_proj.cuh"

cudaError_t launch_scaled_grouped_down_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  using Shape = TileShape<2, 2, 10>;  // one block of scales of each row under way, in many blocks
  return choose_element(a, [&](auto element) {
    constexpr int COLUMNS = 2 * FRAGMENT;
    const dim3 grid((a.hidden + COLUMNS - 1) / COLUMNS, a.max_tiles);
    const auto kernel = a.down_lora.rank ? scaled_grouped_down_proj_kernel<decltype(element), true, Shape>
                                         : scaled_grouped_down_proj_kernel<decltype(element), false, Shape>;
    return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
  });
}
