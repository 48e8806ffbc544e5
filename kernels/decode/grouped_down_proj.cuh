#pragma once

#include "tile_ranks.cuh"

// Row g of a tile, in pieces of act, or -1.
template <typename Shape>
__device__ __forceinline__ int find_act_row(const GroupedArgs &a, Tile *tile, int g) {
  wait_for_stream();
  find_rows<Shape>(a, tile);
  return g < tile->rows ? (tile->first_row + g) * (a.intermediate / PIECE) : -1;
}

// y of a column of a row of a tile.
template <typename Element>
__device__ __forceinline__ void store_y(const GroupedArgs &a, const Tile &tile, int row, int column, float sum) {
  if (column >= a.hidden) return;
  const float bias = load_bias<Element>(a.down_bias, tile.expert * a.stride_dbe + column * a.stride_dbn);
  static_cast<Element *>(a.y)[int64_t(tile.first_row + row) * a.hidden + column] = from_float<Element>(sum + bias);
}

// y of weight row n of both fragments of a row of a tile.
template <typename Element>
__device__ __forceinline__ void store_y_row(const GroupedArgs &a, const Tile &tile, int row, int column, int n,
                                            const float (&sums)[2]) {
#pragma unroll
  for (int f = 0; f < 2; ++f) store_y<Element>(a, tile, row, column + f * FRAGMENT + n, sums[f]);
}

// y[r] = down[e] act[r] + down_bias[e] for every row r, with expert e.
// As `grouped_up_proj_kernel` if not gated. The first weights are on their way before the wait for act.
// Grid: (H / columns of a block, tiles at most). The caller guarantees that it launches this after
// `grouped_up_proj_kernel`, before which routing has ended, or after `project_kernel` behind that.
template <typename Element, bool LOW_RANK, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::BLOCKS) grouped_down_proj_kernel(const GroupedArgs a) {
  Tile tile = {static_cast<int>(blockIdx.y)};
  if (!find_expert<Shape>(a, &tile)) return;
  const int split = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  const int column = blockIdx.x * 2 * FRAGMENT, mine = column + g;
  LaneRows w;
  w.first = row_at<Element>(a.down, tile.expert * a.stride_de + mine * a.stride_dn);
  w.to_half = static_cast<int>(a.stride_dn);
  w.to_fragment = static_cast<int>(FRAGMENT / PIECE * a.stride_dn);
#pragma unroll
  for (int f = 0; f < 2; ++f)
#pragma unroll
    for (int r = 0; r < 2; ++r) w.wanted[f][r] = mine + r * HALF + f * FRAGMENT < a.hidden;
  const auto locate = [&] { return find_act_row<Shape>(a, &tile, g); };
  float acc[2][4] = {};
  multiply_tile<Element, Shape>(w, row_at<Element>(a.act, 0), a.intermediate / PIECE, split, locate, acc);
  if constexpr (LOW_RANK)
    add_ranks_of_tile<Shape>(a, a.down_lora, tile, w.wanted, mine, HALF, FRAGMENT, split, acc);
  add_up_splits<Shape>(acc, tile.rows, [&](int n, int row, const float (&sums)[2]) {
    store_y_row<Element>(a, tile, row, column, n, sums);
  });
}
