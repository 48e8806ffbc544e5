#pragma once

#include "../common/dependent.cuh"
#include "columns.cuh"

// act[s] = a(up[e] x[t] + up_bias[e]) for every routed slot s of token t, with expert e.
// A block is one warp and makes COLUMNS columns. It goes along the rows of their weights, PIECES pieces of 16 bytes per
// lane of each row at a time, all of which are on their way together.
// Grid: (I / COLUMNS, S). The next kernel may start once all blocks have begun: it finds x and ids complete, but has to
// wait for act. With a low-rank pair the caller launches this after `project_kernel`, which has waited for x and
// ids: this one waits for z alone, behind its loop.
// The bound of 16 blocks leaves 128 registers: to save some the compiler would mix loads with sums.
template <typename Element, bool GATED, int COLUMNS, int PIECES>
__global__ void __launch_bounds__(WARP, 16) up_proj_kernel(const DecodeArgs a) {
  constexpr int ROWS = GATED ? 2 * COLUMNS : COLUMNS;  // gate rows, then up rows
  if (!a.up_lora.rank) wait_for_stream();
  const int slot = blockIdx.y, token = slot / a.top_k, expert = load_expert(a, token, slot - token * a.top_k);
  if (expert < 0) return;
  const int column = blockIdx.x * COLUMNS, row = a.hidden / PIECE, lane = threadIdx.x;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const uint4 *x = row_at<Element>(a.x, token * a.stride_xt);
  const uint4 *w = row_at<Element>(a.up, expert * a.stride_ue + column * step * a.stride_un);
  const int64_t to_next = step * a.stride_un / PIECE, to_up_row = to_up * a.stride_un / PIECE;
  float acc[ROWS] = {};
  for (int start = lane; start < row + lane; start += WARP * PIECES) {
    uint4 pieces[ROWS][PIECES], v[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int at = start + i * WARP;
      v[i] = at < row ? x[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const int c = r % COLUMNS, at = start + i * WARP;
        const uint4 *address = w + c * to_next + (r < COLUMNS ? 0 : to_up_row) + at;
        pieces[r][i] = load_once(address, at < row && column + c < a.intermediate);
      }
    let_next_start();  // here, where it keeps loads and sums apart as well
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[r] = dot<Element>(pieces[r][i], v[i], acc[r]);
  }
  store_columns<Element, GATED, COLUMNS>(a, slot, expert, column, acc);
}
