#pragma once

#include "grouped_up_proj.cuh"
#include "scaled_tiles.cuh"

// act[r] = a(up[e] x[t] + up_bias[e]) for every row r of token t, with expert e; up[e][n, k] = scale of its block times
// its code, and what is between two scales of a row is summed up by itself.
// As `grouped_up_proj_kernel`, with pieces of 16 codes.
// Grid: (I / columns of a block, tiles at most). Fragments divide parts of rows.
template <typename Element, bool GATED, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) scaled_grouped_up_proj_kernel(const GroupedArgs a) {
  constexpr int COLUMNS = GATED ? FRAGMENT : 2 * FRAGMENT;
  if (!a.up_lora.rank) wait_for_stream();
  Tile tile = {static_cast<int>(blockIdx.y)};
  if (!find_expert<Shape>(a, &tile)) return;
  const int split = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  const int column = blockIdx.x * COLUMNS, mine = column + g;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const int to_fragment = GATED ? to_up : FRAGMENT;
  LaneRows w;
  w.first = row_at<char>(a.up, tile.expert * a.stride_ue + int64_t(mine) * step * a.stride_un);
  w.to_half = static_cast<int>(HALF * step * a.stride_un / CODES);
  w.to_fragment = static_cast<int>(to_fragment * a.stride_un / CODES);
  const char *scale_rows[2];
  bool wanted[2];
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    scale_rows[f] = scales_of(a.up_scales, tile.expert, column * step + f * to_fragment);
    wanted[f] = column + (GATED ? 0 : f * FRAGMENT) < a.intermediate;
    w.wanted[f][0] = w.wanted[f][1] = wanted[f];
  }
  const auto locate = [&] { return find_token<Shape>(a, &tile, g); };
  float acc[2][4] = {};
  multiply_scaled_tile<Element, Shape>(w, a.up_scales, scale_rows, wanted, row_at<Element>(a.x, 0),
                                       a.hidden / CODES, split, locate, acc);
  if (a.up_lora.rank)
    add_ranks_of_tile<Shape>(a, a.up_lora, tile, w.wanted, mine * step, HALF * step, to_fragment, split, acc);
  add_up_splits<Shape>(acc, tile.rows, [&](int n, int row, const float (&sums)[2]) {
    store_act_row<Element, GATED>(a, tile, row, column, n, sums);
  });
}
