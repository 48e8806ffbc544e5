#include "splits.cuh"

#include "../common/launch.cuh"

cudaError_t schedule_rows(const SplitArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int TILES = 4, MAX_BLOCKS = 32;  // tiles of a thread, about, where there are many
  const int threads = (a.num_groups + WARP - 1) / WARP * WARP;
  const int64_t tiles = a.num_rows / a.block_m + a.num_groups;
  const int blocks = static_cast<int>(min(tiles / (TILES * threads) + 1, int64_t{MAX_BLOCKS}));
  LaunchOptions options;
  options.dependent = dependent;
  return launch(schedule_kernel, dim3(blocks), threads, 0, stream, options, a);
}
