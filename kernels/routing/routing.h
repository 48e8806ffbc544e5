// Stable counting sort of slots by expert, and the tile schedule of the sorted rows, in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

struct RouteArgs {
  const void *ids;   // (S / top_k, top_k) int32 or int64; outside of [0, num_experts): a sentinel
  int64_t stride_it, stride_ik;
  int top_k;
  int *counts;       // scratch: `RoutePlan::scratch` entries
  int *schedule;     // out: expert offsets (E + 1,), tile offsets (E + 1,), the expert of each tile
  int *row_to_slot;  // (num_rows,) out: the first R are written
  int *slot_to_row;  // (S,) out: -1 for a sentinel, and for a slot whose row would be num_rows or more
  int *num_routed;   // () out: R, rows that there is no room for among them; or null
  int num_slots, num_experts, num_rows;
  int block_m;  // a power of two
  bool wide_ids;
};

// Which blocks exchange their counts: one block alone, those of one cluster, or all of a grid that runs at once.
enum class Reach { block, cluster, grid };

// How many blocks of how many threads share the work, each thread with so many slots.
struct RoutePlan {
  Reach reach;
  int blocks, threads, rounds;
  bool dependent;  // launched while the kernel before it ends
  int scratch(int num_experts) const { return reach == Reach::block ? 0 : blocks * num_experts; }
};

constexpr int MAX_EXPERTS = 1024;
constexpr int MAX_BLOCK_M = 128;
constexpr int64_t MAX_ROWS = (int64_t{1} << 31) - 1 - MAX_BLOCK_M;  // or slots: 32 bits count a tile past the last one

// Whether kernels can make a schedule of so many groups, rows at most and entries, with tiles of block_m rows.
inline bool fits_schedule(int64_t num_groups, int64_t num_rows, int64_t block_m, int64_t schedule_size) {
  return num_groups >= 1 && num_groups <= MAX_EXPERTS && num_rows >= 0 && num_rows <= MAX_ROWS && block_m >= 1 &&
         block_m <= MAX_BLOCK_M &&
         schedule_size >= 2 * (num_groups + 1) + num_rows / block_m + std::min(num_groups, num_rows);
}

// The plan for so many slots on the current device; false if they are too many to be routed in one launch. capability:
// the major one.
bool plan_route(int num_slots, int num_experts, int capability, RoutePlan *plan);

// Rows are sorted by expert and, within an expert, by slot. R is the number of slots that are no sentinels. Offsets and
// tiles end at num_rows.
cudaError_t route_slots(const RouteArgs &args, const RoutePlan &plan, cudaStream_t stream);
