#pragma once

#include "grouped_down_proj.cuh"
#include "scaled_tiles.cuh"

// y[r] = down[e] act[r] + down_bias[e] for every row r, with expert e; down[e][n, k] = scale of its block times its
// code, and what is between two scales of a row is summed up by itself.
// As `grouped_down_proj_kernel`, with pieces of 16 codes.
// Grid: (H / columns of a block, tiles at most). The caller guarantees that it launches this after
// `scaled_grouped_up_proj_kernel`, before which routing has ended, or after `project_kernel` behind that.
template <typename Element, bool LOW_RANK, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) scaled_grouped_down_proj_kernel(const GroupedArgs a) {
  Tile tile = {static_cast<int>(blockIdx.y)};
  if (!find_expert<Shape>(a, &tile)) return;
  const int split = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  const int column = blockIdx.x * 2 * FRAGMENT, mine = column + g;
  LaneRows w;
  w.first = row_at<char>(a.down, tile.expert * a.stride_de + mine * a.stride_dn);
  w.to_half = static_cast<int>(HALF * a.stride_dn / CODES);
  w.to_fragment = static_cast<int>(FRAGMENT * a.stride_dn / CODES);
  const char *scale_rows[2];
  bool wanted[2];
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    scale_rows[f] = scales_of(a.down_scales, tile.expert, column + f * FRAGMENT);
    wanted[f] = column + f * FRAGMENT < a.hidden;
    w.wanted[f][0] = w.wanted[f][1] = wanted[f];
  }
  const auto locate = [&] { return find_act_row<Shape>(a, &tile, g); };
  float acc[2][4] = {};
  multiply_scaled_tile<Element, Shape>(w, a.down_scales, scale_rows, wanted, row_at<Element>(a.act, 0),
                                       a.intermediate / CODES, split, locate, acc);
  if constexpr (LOW_RANK)
    add_ranks_of_tile<Shape>(a, a.down_lora, tile, w.wanted, mine, HALF, FRAGMENT, split, acc);
  add_up_splits<Shape>(acc, tile.rows, [&](int n, int row, const float (&sums)[2]) {
    store_y_row<Element>(a, tile, row, column, n, sums);
  });
}
