#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/dependent.cuh"
#include "routing.h"
#include "scan.cuh"

// Shared memory of a block: E entries each, and one more if E is odd.
struct RouteMemory {
  int *count;         // slots of each expert in this block's chunk
  int *earlier;       // in earlier chunks
  int *total;         // in all chunks
  int *first_row;     // of each expert
  int *first_tile;    // of each expert
  uint32_t *of_warp;  // (warps, E / 2) pairs of 16 bits: slots in the chunk before those of a warp in the round

  __device__ RouteMemory(int *memory, int num_experts)
      : count(memory), earlier(end_of(count, num_experts)), total(end_of(earlier, num_experts)),
        first_row(end_of(total, num_experts)), first_tile(end_of(first_row, num_experts)),
        of_warp(reinterpret_cast<uint32_t *>(end_of(first_tile, num_experts))) {}
  __host__ __device__ static int pairs(int num_experts) { return (num_experts + 1) / 2; }
  static size_t bytes(int num_experts, int warps) { return pairs(num_experts) * (5 * 2 + warps) * sizeof(int); }

 private:
  __device__ static int *end_of(int *begin, int num_experts) { return begin + 2 * pairs(num_experts); }
};

__device__ __forceinline__ int load_expert(const RouteArgs &a, int slot) {  // -1 for a sentinel and past the last slot
  if (slot >= a.num_slots) return -1;
  const int token = a.top_k == 1 ? slot : slot / a.top_k;
  const int64_t at = token * a.stride_it + (slot - token * a.top_k) * a.stride_ik;
  const int64_t id = a.wide_ids ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int *>(a.ids)[at];
  return id >= 0 && id < a.num_experts ? static_cast<int>(id) : -1;
}

// The slots of its expert in the block's chunk that come before this thread's, whose round it is; for a sentinel,
// anything. Adds the round's slots to m.count.
__device__ __forceinline__ int rank_in_chunk(int expert, int num_experts, const RouteMemory &m) {
  constexpr int BATCH = 8;  // loads under way
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  const int pairs = m.pairs(num_experts), pair = threadIdx.x;
  for (int i = threadIdx.x; i < warps * pairs; i += blockDim.x) m.of_warp[i] = 0;
  __syncthreads();
  const unsigned peers = __match_any_sync(0xffffffffu, expert);
  const int rank = __popc(peers & ((1u << lane) - 1));
  uint16_t *own = reinterpret_cast<uint16_t *>(m.of_warp + warp * pairs);
  if (expert >= 0 && rank == 0) own[expert] = __popc(peers);
  __syncthreads();
  if (pair < pairs) {  // a chunk has fewer than 2^16 slots: nothing is carried from one of a pair to the other
    uint32_t running = m.count[2 * pair] | m.count[2 * pair + 1] << 16, *column = m.of_warp + pair;
    for (int first = 0; first < warps; first += BATCH, column += BATCH * pairs) {
      uint32_t counts[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) counts[i] = first + i < warps ? column[i * pairs] : 0;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i < warps) column[i * pairs] = running;
        running += counts[i];
      }
    }
    m.count[2 * pair] = running & 0xffff;
    m.count[2 * pair + 1] = running >> 16;
  }
  __syncthreads();
  return expert < 0 ? 0 : own[expert] + rank;
}

// A barrier of all blocks of the grid, behind which what they have stored is visible.
template <Reach REACH>
__device__ __forceinline__ void sync_blocks() {
  if constexpr (REACH == Reach::grid) cooperative_groups::this_grid().sync();
#if __CUDA_ARCH__ >= 900
  if constexpr (REACH == Reach::cluster) cooperative_groups::this_cluster().sync();
#endif
}

// earlier[e] = slots of e in earlier chunks, total[e] = in all, both 0 before: `parts` threads share the chunks of e.
__device__ __forceinline__ void add_up_chunks(const RouteArgs &a, const RouteMemory &m, int e, int part, int parts) {
  if (part >= parts) return;
  int earlier = 0, total = 0;
#pragma unroll 8
  for (int chunk = part; chunk < gridDim.x; chunk += parts) {
    const int count = __ldcg(a.counts + int64_t(chunk) * a.num_experts + e);
    total += count;
    if (chunk < blockIdx.x) earlier += count;
  }
  atomicAdd(m.earlier + e, earlier);
  atomicAdd(m.total + e, total);
}

// row = offsets[e] + slots of e in earlier chunks + slots of e before this one in its chunk. Every block adds up the
// counts of all chunks, and scans the experts' totals, itself; the first one writes the offsets. The slot of a tile's
// first row writes the tile's expert.
// Grid: (chunks,), of E threads or more each, in whole warps; one block if there are no slots. The caller guarantees
// that all are in one cluster with Reach::cluster and that the launch is cooperative with Reach::grid. Chunks have
// ROUNDS slots for each thread. block_m is a power of two.
template <Reach REACH, int ROUNDS>
__global__ void __launch_bounds__(MAX_WARPS *WARP, 1) route_kernel(const RouteArgs a) {
  extern __shared__ int memory[];
  __shared__ int partial[2][MAX_WARPS];
  const int E = a.num_experts, thread = threadIdx.x, tile_shift = __ffs(a.block_m) - 1;
  const int parts = blockDim.x / E, part = thread / E;
  const RouteMemory m(memory, E);
  wait_for_stream();
  const int begin = blockIdx.x * ROUNDS * blockDim.x + thread;
  int expert[ROUNDS], rank[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) expert[r] = load_expert(a, begin + r * blockDim.x);
  for (int i = thread; i < 3 * 2 * m.pairs(E); i += blockDim.x) m.count[i] = 0;  // and earlier, and total
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    if (r) __syncthreads();  // all have read their ranks of the round before
    rank[r] = rank_in_chunk(expert[r], E, m);
  }
  if constexpr (REACH == Reach::block) {
    if (thread < E) m.total[thread] = m.count[thread];
  } else {
    if (thread < E) a.counts[int64_t(blockIdx.x) * E + thread] = m.count[thread];
    sync_blocks<REACH>();
    add_up_chunks(a, m, thread - part * E, part, parts);
  }
  __syncthreads();

  const int total = thread < E ? m.total[thread] : 0;
  int end = block_inclusive_scan(total, partial[0]);
  const int first_row = end - total;
  if (a.num_routed && blockIdx.x == 0 && thread == E - 1) *a.num_routed = end;
  end = min(end, a.num_rows);
  const int rows = end - min(first_row, a.num_rows), tiles = (rows + a.block_m - 1) >> tile_shift;
  const int tile_end = block_inclusive_scan(tiles, partial[1]);
  int *tile_offsets = a.schedule + E + 1, *tile_experts = tile_offsets + E + 1;
  if (thread < E) m.first_row[thread] = first_row, m.first_tile[thread] = tile_end - tiles;
  if (blockIdx.x == 0 && thread < E) {
    if (thread == 0) a.schedule[0] = tile_offsets[0] = 0;
    a.schedule[thread + 1] = end;
    tile_offsets[thread + 1] = tile_end;
  }
  __syncthreads();

#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int slot = begin + r * blockDim.x, e = expert[r];
    if (slot >= a.num_slots) break;
    int row = -1;
    if (e >= 0) {
      const int in_expert = m.earlier[e] + rank[r];
      row = m.first_row[e] + in_expert;
      if (row < a.num_rows) {
        a.row_to_slot[row] = slot;
        if ((in_expert & (a.block_m - 1)) == 0) tile_experts[m.first_tile[e] + (in_expert >> tile_shift)] = e;
      } else {
        row = -1;
      }
    }
    a.slot_to_row[slot] = row;
  }
}
