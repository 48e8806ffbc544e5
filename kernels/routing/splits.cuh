#pragma once

#include <cstdint>

#include "../common/dependent.cuh"
#include "routing.h"
#include "scan.cuh"
#include "splits.h"

__device__ __forceinline__ int load_split(const SplitArgs &a, int index) {  // within [0, num_rows]
  const int64_t at = index * a.stride;
  const int64_t v = a.wide ? static_cast<const int64_t *>(a.splits)[at] : static_cast<const int *>(a.splits)[at];
  return static_cast<int>(min(max(v, int64_t{0}), int64_t{a.num_rows}));
}

// offsets[g + 1] = min(sum of sizes[:g + 1], num_rows), or the maximum of offsets[:g + 2]; the tiles of block_m rows
// before each group, and the group of each tile.
// Grid: (blocks,), of G threads or more each, in whole warps. Every block scans all groups, the first one writes the
// offsets, and all share the tiles. The caller guarantees room in the schedule for all tiles.
__global__ void __launch_bounds__(MAX_WARPS *WARP, 1) schedule_kernel(const SplitArgs a) {
  __shared__ int partial[2][MAX_WARPS], ends[MAX_EXPERTS + 1], tile_ends[MAX_EXPERTS];
  const int G = a.num_groups, thread = threadIdx.x;
  wait_for_stream();
  const int first = a.are_sizes ? 0 : load_split(a, 0);
  const int split = thread < G ? load_split(a, a.are_sizes ? thread : thread + 1) : 0;
  const int end = a.are_sizes ? block_inclusive_scan(split, partial[0], CappedSum{a.num_rows})
                              : block_inclusive_scan(max(split, first), partial[0], Largest{});
  if (thread < G) ends[thread + 1] = end;
  if (thread == 0) ends[0] = first;
  __syncthreads();
  const int tiles = thread < G ? (end - ends[thread] + a.block_m - 1) / a.block_m : 0;
  const int tile_end = block_inclusive_scan(tiles, partial[1]);
  int *tile_offsets = a.schedule + G + 1, *tile_groups = tile_offsets + G + 1;
  if (thread < G) tile_ends[thread] = tile_end;
  if (blockIdx.x == 0 && thread < G) {
    if (thread == 0) a.schedule[0] = first, tile_offsets[0] = 0;
    a.schedule[thread + 1] = end;
    tile_offsets[thread + 1] = tile_end;
  }
  __syncthreads();
  for (int tile = blockIdx.x * blockDim.x + thread; tile < tile_ends[G - 1]; tile += gridDim.x * blockDim.x) {
    int group = 0;  // the first one that ends past the tile
    for (int step = MAX_EXPERTS / 2; step; step /= 2)
      if (group + step <= G && tile_ends[group + step - 1] <= tile) group += step;
    tile_groups[tile] = group;
  }
}
