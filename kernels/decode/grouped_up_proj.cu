#include "../common/launch.cuh"
#include "choose.cuh"
#include "grouped_up_proj.cuh"

cudaError_t launch_grouped_up_proj(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  using Shape = TileShape<4, 6, 3>;  // many pieces under way in few warps
  return choose_gated(a, [&](auto element, auto gated) {
    constexpr int COLUMNS = gated ? FRAGMENT : 2 * FRAGMENT;
    const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.max_tiles);
    const auto kernel = grouped_up_proj_kernel<decltype(element), gated, Shape>;
    return launch(kernel, grid, Shape::THREADS, 0, stream, {dependent}, a);
  });
}
