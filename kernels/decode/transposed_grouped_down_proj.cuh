#pragma once

#include "grouped_down_proj.cuh"
#include "transposed_tiles.cuh"

// y[r] = down[e] act[r] + down_bias[e] for every row r, with expert e, of weights (E, I, H). The first weights are on
// their way before the wait for act.
// Grid: (H / 64, tiles at most). The caller guarantees that it launches this after
// `transposed_grouped_up_proj_kernel`, before which routing has ended, or after `project_kernel` behind that.
template <typename Element, bool LOW_RANK, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS)
    transposed_grouped_down_proj_kernel(const GroupedArgs a) {
  Tile tile = {static_cast<int>(blockIdx.y)};
  if (!find_expert<Shape>(a, &tile)) return;
  const int g = threadIdx.x % WARP / QUAD, first_column = blockIdx.x * BLOCK_COLUMNS;
  const int column = first_column + g * PIECE;
  const uint4 *w = row_at<Element>(a.down, tile.expert * a.stride_de + column);
  const auto locate = [&] { return find_act_row<Shape>(a, &tile, g); };
  float acc[1][COLUMN_PAIRS][4] = {};
  multiply_transposed<Element, Shape>(w, static_cast<int>(a.stride_dn / PIECE), 0, column < a.hidden,
                                      row_at<Element>(a.act, 0), a.intermediate / PIECE, locate, acc);
  if constexpr (LOW_RANK) add_ranks_of_columns<Shape>(a, a.down_lora, tile, column, column < a.hidden, acc[0]);
  add_up_columns<Shape>(acc, tile.rows, [&](int n, int row, const float (&sums)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) store_y<Element>(a, tile, row, first_column + n + j, sums[j]);
  });
}
