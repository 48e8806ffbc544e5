#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../common/dependent.cuh"
#include "routing.h"
#include "scan.cuh"

// Shared memory of a block, E entries each.
struct RouteMemory {
  int *count;         // slots of each expert in this block's chunk
  int *earlier;       // in earlier chunks
  int *total;         // in all chunks
  uint16_t *of_warp;  // (warps, E): in the chunk, before the slots of a warp in the round
  static size_t bytes(int num_experts, int warps) {
    return num_experts * (3 * sizeof(int) + warps * sizeof(uint16_t));
  }
};

__device__ __forceinline__ int load_expert(const RouteArgs &a, int slot) {  // -1 for a sentinel and past the last slot
  if (slot >= a.num_slots) return -1;
  const int token = slot / a.top_k;
  const int64_t at = token * a.stride_it + (slot - token * a.top_k) * a.stride_ik;
  const int64_t id = a.wide_ids ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int *>(a.ids)[at];
  return id >= 0 && id < a.num_experts ? static_cast<int>(id) : -1;
}

// The slots of its expert in the block's chunk that come before this thread's, whose round it is; for a sentinel,
// anything. Adds the round's slots to m.count.
__device__ __forceinline__ int rank_in_chunk(int expert, int num_experts, const RouteMemory &m) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  for (int i = threadIdx.x; i < warps * num_experts; i += blockDim.x) m.of_warp[i] = 0;
  __syncthreads();
  const unsigned peers = __match_any_sync(0xffffffffu, expert);
  const int rank = __popc(peers & ((1u << lane) - 1));
  if (expert >= 0 && rank == 0) m.of_warp[warp * num_experts + expert] = __popc(peers);
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int running = m.count[e];
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const int count = m.of_warp[w * num_experts + e];
      m.of_warp[w * num_experts + e] = running;
      running += count;
    }
    m.count[e] = running;
  }
  __syncthreads();
  return expert < 0 ? 0 : m.of_warp[warp * num_experts + expert] + rank;
}

template <Reach REACH>
__device__ __forceinline__ void meet() {  // of all blocks of the grid: what they have stored is visible
  if constexpr (REACH == Reach::grid) cooperative_groups::this_grid().sync();
#if __CUDA_ARCH__ >= 900
  if constexpr (REACH == Reach::cluster) cooperative_groups::this_cluster().sync();
#endif
}

// earlier[e] = sum of counts[:chunk, e], total[e] = sum of counts[:, e]: a warp adds up every 32nd chunk.
__device__ __forceinline__ void add_up_chunks(const RouteArgs &a, const RouteMemory &m) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  const int chunk = blockIdx.x, chunks = gridDim.x;
  for (int e = threadIdx.x; e < a.num_experts; e += blockDim.x) m.earlier[e] = m.total[e] = 0;
  __syncthreads();
  if (warp >= chunks) return;
  for (int e = lane; e < a.num_experts; e += WARP) {
    int earlier = 0, total = 0;
#pragma unroll 4
    for (int c = warp; c < chunks; c += warps) {
      const int count = __ldcg(a.counts + int64_t(c) * a.num_experts + e);
      total += count;
      if (c < chunk) earlier += count;
    }
    atomicAdd(m.earlier + e, earlier);
    atomicAdd(m.total + e, total);
  }
}

// row = offsets[e] + slots of e in earlier chunks + slots of e before this one in its chunk. Every block adds up the
// counts of all chunks, and scans the experts' totals, itself; the first one writes the offsets. The slot of a tile's
// first row writes the tile's expert.
// Grid: (chunks,), of E threads or more each; one block if there are no slots. With Reach::cluster all are in one
// cluster, with Reach::grid the launch is cooperative. Chunks have ROUNDS slots for each thread.
template <Reach REACH, int ROUNDS>
__global__ void __launch_bounds__(MAX_WARPS *WARP, 1) route_kernel(const RouteArgs a) {
  extern __shared__ int memory[];
  __shared__ int partial[2][MAX_WARPS];
  const int E = a.num_experts, thread = threadIdx.x;
  const RouteMemory m{memory, memory + E, memory + 2 * E, reinterpret_cast<uint16_t *>(memory + 3 * E)};
  wait_for_stream();
  const int begin = blockIdx.x * ROUNDS * blockDim.x + thread;
  int expert[ROUNDS], rank[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) expert[r] = load_expert(a, begin + r * blockDim.x);
  for (int e = thread; e < E; e += blockDim.x) m.count[e] = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    if (r) __syncthreads();  // all have read their ranks of the round before
    rank[r] = rank_in_chunk(expert[r], E, m);
  }
  if constexpr (REACH == Reach::block) {
    for (int e = thread; e < E; e += blockDim.x) m.earlier[e] = 0, m.total[e] = m.count[e];
  } else {
    for (int e = thread; e < E; e += blockDim.x) a.counts[int64_t(blockIdx.x) * E + e] = m.count[e];
    meet<REACH>();
    add_up_chunks(a, m);
  }
  __syncthreads();

  int end = block_inclusive_scan(thread < E ? m.total[thread] : 0, partial[0]);
  const int first_row = thread < E ? end - m.total[thread] : end;
  if (a.num_routed && blockIdx.x == 0 && thread == E - 1) *a.num_routed = end;
  end = min(end, a.num_rows);
  const int rows = end - min(first_row, a.num_rows), tiles = (rows + a.block_m - 1) / a.block_m;
  const int tile_end = block_inclusive_scan(tiles, partial[1]);
  int *tile_offsets = a.schedule + E + 1, *tile_experts = tile_offsets + E + 1;
  if (blockIdx.x == 0 && thread < E) {
    if (thread == 0) a.schedule[0] = tile_offsets[0] = 0;
    a.schedule[thread + 1] = end;
    tile_offsets[thread + 1] = tile_end;
  }
  if (thread < E) m.count[thread] = first_row, m.total[thread] = tile_end - tiles;
  __syncthreads();

#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int slot = begin + r * blockDim.x, e = expert[r];
    if (slot >= a.num_slots) break;
    int row = -1;
    if (e >= 0) {
      const int in_expert = m.earlier[e] + rank[r];
      row = m.count[e] + in_expert;
      if (row < a.num_rows) {
        a.row_to_slot[row] = slot;
        if (in_expert % a.block_m == 0) tile_experts[m.total[e] + in_expert / a.block_m] = e;
      } else {
        row = -1;
      }
    }
    a.slot_to_row[slot] = row;
  }
}
