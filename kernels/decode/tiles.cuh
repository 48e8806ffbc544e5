// A tile of rows of one expert times its weights: what the two products of the grouped way share.
#pragma once

#include "../common/dependent.cuh"
#include "grouped.h"
#include "mma.cuh"

constexpr int FRAGMENT = 16;  // weight rows of an instruction, which has half as many rows of tokens
constexpr int HALF = FRAGMENT / 2;
static_assert(TILE_ROWS == HALF);

// What a block makes: two fragments of weight rows times a tile, by SPLITS warps that share K. A warp has STEPS pieces
// of each row and lane under way at once. BLOCKS of them have room on a multiprocessor: that bounds their registers.
template <int SPLITS_, int STEPS_, int BLOCKS_>
struct TileShape {
  static constexpr int SPLITS = SPLITS_, STEPS = STEPS_, BLOCKS = BLOCKS_;
  static constexpr int THREADS = SPLITS * WARP;
  static constexpr bool ALWAYS_ROUTED = true;  // else there may be no schedule: each slot is a tile and a row then
};

// An entry of the schedule or of a map of rows, or `otherwise` if it is not wanted. Volatile and by a predicate, as
// `load_once`. Past L1, as routing may have ended during this kernel.
__device__ __forceinline__ int load_index(const int *address, bool wanted = true, int otherwise = 0) {
  int index = otherwise;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.cg.s32 %0, [%1]; }"
               : "+r"(index)
               : "l"(address), "r"(static_cast<unsigned>(wanted))
               : "memory");
  return index;
}

// Rows [first_row, first_row + rows) of an expert.
struct Tile {
  int index, expert, first_row, rows;
};

// Finds the expert of tile `index`; false past the last one, and for a slot without an expert. Routing has ended, but
// perhaps not the kernel before.
template <typename Shape>
__device__ __forceinline__ bool find_expert(const GroupedArgs &a, Tile *tile) {
  if (!Shape::ALWAYS_ROUTED && !a.schedule) {
    tile->expert = load_expert(a, tile->index / a.top_k, tile->index % a.top_k);
    return tile->expert >= 0;
  }
  const int *tile_offsets = a.schedule + a.num_experts + 1;
  if (tile->index >= load_index(tile_offsets + a.num_experts)) return false;
  tile->expert = load_index(tile_offsets + a.num_experts + 1 + tile->index);
  return true;
}

// Finds the rows, which weights do not wait for.
template <typename Shape>
__device__ __forceinline__ void find_rows(const GroupedArgs &a, Tile *tile) {
  if (!Shape::ALWAYS_ROUTED && !a.schedule) {
    tile->first_row = tile->index;
    tile->rows = 1;
    return;
  }
  const int *offsets = a.schedule + tile->expert, *tile_offsets = offsets + a.num_experts + 1;
  const int begin = load_index(offsets), end = load_index(offsets + 1), tiles_before = load_index(tile_offsets);
  tile->first_row = begin + (tile->index - tiles_before) * TILE_ROWS;
  tile->rows = min(end - tile->first_row, TILE_ROWS);
}

// The slot of row g of a tile, -1 if there is none.
template <typename Shape>
__device__ __forceinline__ int find_slot(const GroupedArgs &a, const Tile &tile, int g) {
  const int row = tile.first_row + g;
  if (!Shape::ALWAYS_ROUTED && !a.schedule) return g < tile.rows ? row : -1;
  return load_index(a.row_to_slot + row, g < tile.rows, -1);
}

// The weight rows of a lane 4 g + t: rows g and g + 8 of each of its warp's two fragments.
struct LaneRows {
  const uint4 *first;        // row g of the first fragment
  int to_half, to_fragment;  // pieces from it to row g + 8, and to the second fragment
  bool wanted[2][2];         // [fragment][whether g + 8]
};

constexpr int QUAD = 4;  // lanes that share a row

// Pieces [fragment][whether g + 8][step] of a lane's rows, at places from `at` on, of `length`.
template <int STEPS>
__device__ __forceinline__ void load_weights(const LaneRows &w, int at, int length, uint4 (&pieces)[2][2][STEPS]) {
#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const uint4 *address = w.first + f * w.to_fragment + r * w.to_half + at + s * QUAD;
        pieces[f][r][s] = load_once(address, w.wanted[f][r] && at + s * QUAD < length);
      }
}

// Pieces of row g of a tile, at places from `at` on, of `length`. row: where it begins, in pieces, -1 if there is none.
template <int STEPS>
__device__ __forceinline__ void load_tokens(const uint4 *tokens, int row, int at, int length, uint4 (&pieces)[STEPS]) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
    pieces[s] = load_cached(tokens + row + at + s * QUAD, row >= 0 && at + s * QUAD < length);
}

// acc[f] += fragment f times the tile, over the warp's share of K, of `length` pieces in all: every SPLITS-th run of 4
// STEPS pieces. locate() finds row g of the tile, in pieces from `tokens` on, or -1 for none; every warp calls it once,
// when its first weights are on their way.
template <typename Element, typename Shape, typename Locate>
__device__ __forceinline__ void multiply_tile(const LaneRows &w, const uint4 *tokens, int length, int split,
                                              const Locate &locate, float (&acc)[2][4]) {
  constexpr int STEPS = Shape::STEPS;
  int row = 0;
  bool located = false;
  for (int start = split * STEPS * QUAD; start < length; start += Shape::SPLITS * STEPS * QUAD) {
    const int mine = start + threadIdx.x % QUAD;
    uint4 pieces[2][2][STEPS], v[STEPS];
    load_weights(w, mine, length, pieces);
    if (!located) row = locate();
    located = true;
    load_tokens(tokens, row, mine, length, v);
    let_next_start();  // here, where it keeps loads and sums apart as well
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int f = 0; f < 2; ++f) multiply_pieces<Element>(pieces[f][0][s], pieces[f][1][s], v[s], acc[f]);
  }
  if (!located) locate();
}

// Adds up what the warps have, in order, and calls store(n, row, sums) for each row of the tile: of weight row n of
// both fragments. All threads of the block call it.
template <typename Shape, typename Store>
__device__ __forceinline__ void add_up_splits(const float (&acc)[2][4], int rows, const Store &store) {
  constexpr int SPLITS = Shape::SPLITS;
  __shared__ float parts[SPLITS][2][4][WARP + 1];  // no two of a warp's reads in one bank
  const int lane = threadIdx.x % WARP, split = threadIdx.x / WARP;
#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int c = 0; c < 4; ++c) parts[split][f][c][lane] = acc[f][c];
  __syncthreads();
  for (int at = split * WARP + lane; at < rows * FRAGMENT; at += SPLITS * WARP) {
    // Sum c of lane 4 g + t is that of weight row g + 8 (c / 2) and token 2 t + c % 2.
    const int n = at % FRAGMENT, row = at / FRAGMENT, c = n / HALF * 2 + row % 2, owner = n % HALF * 4 + row / 2;
    float sums[2] = {};
#pragma unroll
    for (int s = 0; s < SPLITS; ++s)
#pragma unroll
      for (int f = 0; f < 2; ++f) sums[f] += parts[s][f][c][owner];
    store(n, row, sums);
  }
}
