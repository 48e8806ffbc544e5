#pragma once

#include "grouped_up_proj.cuh"
#include "transposed_tiles.cuh"

// act[r] = a(up[e] x[t] + up_bias[e]) for every row r of token t, with expert e, of weights (E, H, 2 I) or (E, H, I).
// Two halves where these are gate and up, of which a block makes the same columns; one where they alternate, or without
// a gate.
// Grid: (N / halves / 64, tiles at most). The next kernel may start once all blocks have begun: it finds routing
// complete, but has to wait for act. With a low-rank pair as `grouped_up_proj_kernel`.
template <typename Element, bool GATED, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS)
    transposed_grouped_up_proj_kernel(const GroupedArgs a) {
  constexpr int HALVES = Shape::HALVES, EACH = GATED && HALVES == 1 ? 2 : 1;  // columns of the weight for one of act
  if (!a.up_lora.rank) wait_for_stream();
  Tile tile = {static_cast<int>(blockIdx.y)};
  if (!find_expert<Shape>(a, &tile)) return;
  const int g = threadIdx.x % WARP / QUAD, first_column = blockIdx.x * BLOCK_COLUMNS;
  const int column = first_column + g * PIECE;
  const bool wanted = column < EACH * a.intermediate;
  const uint4 *w = row_at<Element>(a.up, tile.expert * a.stride_ue + column);
  const auto locate = [&] { return find_token<Shape>(a, &tile, g); };
  float acc[HALVES][COLUMN_PAIRS][4] = {};
  multiply_transposed<Element, Shape>(w, static_cast<int>(a.stride_un / PIECE), a.intermediate / PIECE, wanted,
                                      row_at<Element>(a.x, 0), a.hidden / PIECE, locate, acc);
  if (a.up_lora.rank)
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      add_ranks_of_columns<Shape>(a, a.up_lora, tile, column + h * a.intermediate, wanted, acc[h]);
  add_up_columns<Shape>(acc, tile.rows, [&](int n, int row, const float (&sums)[2]) {
    Element *act = static_cast<Element *>(a.act) + int64_t(tile.first_row + row) * a.intermediate;
    const int at = (first_column + n) / EACH;
    store_act<Element, GATED>(a, act, tile.expert, at, sums[0], sums[1]);
    if (!GATED) store_act<Element, GATED>(a, act, tile.expert, at + 1, sums[1], 0.f);
  });
}
