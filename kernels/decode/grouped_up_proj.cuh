#pragma once

#include "columns.cuh"
#include "tile_ranks.cuh"

// The token of row g of a tile, in pieces of x, or -1.
template <typename Shape>
__device__ __forceinline__ int find_token(const GroupedArgs &a, Tile *tile, int g) {
  let_next_start();  // here, where it keeps what follows behind the first weights
  find_rows<Shape>(a, tile);
  const int slot = find_slot<Shape>(a, *tile, g);
  return slot < 0 ? -1 : slot / a.top_k * static_cast<int>(a.stride_xt / PIECE);
}

// act of weight row n of both fragments of a row of a tile.
template <typename Element, bool GATED>
__device__ __forceinline__ void store_act_row(const GroupedArgs &a, const Tile &tile, int row, int column, int n,
                                              const float (&sums)[2]) {
  Element *act = static_cast<Element *>(a.act) + int64_t(tile.first_row + row) * a.intermediate;
  store_act<Element, GATED>(a, act, tile.expert, column + n, sums[0], sums[1]);
  if (!GATED) store_act<Element, GATED>(a, act, tile.expert, column + FRAGMENT + n, sums[1], 0.f);
}

// act[r] = a(up[e] x[t] + up_bias[e]) for every row r of token t, with expert e.
// A block has 16 columns, gate rows and up rows, or 32 if not gated; its warps add up their shares of K.
// Grid: (I / columns of a block, tiles at most). The next kernel may start once all blocks have begun: it finds routing
// complete, but has to wait for act. With a low-rank pair the caller launches this after `project_kernel`, which has
// waited for routing: this one waits for z alone, behind its loop.
template <typename Element, bool GATED, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) grouped_up_proj_kernel(const GroupedArgs a) {
  constexpr int COLUMNS = GATED ? FRAGMENT : 2 * FRAGMENT;
  if (!a.up_lora.rank) wait_for_stream();
  Tile tile = {static_cast<int>(blockIdx.y)};
  if (!find_expert<Shape>(a, &tile)) return;
  const int split = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  const int column = blockIdx.x * COLUMNS, mine = column + g;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  LaneRows w;
  w.first = row_at<Element>(a.up, tile.expert * a.stride_ue + int64_t(mine) * step * a.stride_un);
  w.to_half = static_cast<int>(step * a.stride_un);
  w.to_fragment = static_cast<int>((GATED ? to_up : FRAGMENT) * a.stride_un / PIECE);
#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int r = 0; r < 2; ++r) w.wanted[f][r] = mine + r * HALF + (GATED ? 0 : f * FRAGMENT) < a.intermediate;
  const auto locate = [&] { return find_token<Shape>(a, &tile, g); };
  float acc[2][4] = {};
  multiply_tile<Element, Shape>(w, row_at<Element>(a.x, 0), a.hidden / PIECE, split, locate, acc);
  if (a.up_lora.rank)
    add_ranks_of_tile<Shape>(a, a.up_lora, tile, w.wanted, mine * step, HALF * step, GATED ? to_up : FRAGMENT,
                             split, acc);
  add_up_splits<Shape>(acc, tile.rows, [&](int n, int row, const float (&sums)[2]) {
    store_act_row<Element, GATED>(a, tile, row, column, n, sums);
  });
}
