// The tile schedule of rows that are sorted already, from sizes or offsets of their groups, in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

struct SplitArgs {
  const void *splits;  // (G,) sizes or (G + 1,) offsets, int32 or int64, of any values
  int64_t stride;
  int *schedule;  // out: group offsets (G + 1,), tile offsets (G + 1,), the group of each tile
  int num_groups, num_rows, block_m;
  bool are_sizes, wide;
};

// Offsets are in [0, num_rows] and do not decrease: of sizes their running sum, where negative ones count as 0; of
// offsets their running maximum. dependent: whether the device has dependent launches. G from 1 to MAX_EXPERTS.
cudaError_t schedule_rows(const SplitArgs &args, bool dependent, cudaStream_t stream);
