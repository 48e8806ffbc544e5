#pragma once

#include "../common/dependent.cuh"
#include "columns.cuh"
#include "scales.cuh"

// act[s] = a(up[e] x[t] + up_bias[e]) for every routed slot s of token t, with expert e; up[e][n, k] = scale of its
// block times its code, and what is between two scales of a row is summed up by itself.
// As `up_proj_kernel`, with pieces of 16 codes: the COLUMNS columns of a block share their scales, gate and up apart.
// Grid: (I / COLUMNS, S). COLUMNS divides parts of rows.
template <typename Element, bool GATED, int COLUMNS, int PIECES>
__global__ void __launch_bounds__(WARP, 24) scaled_up_proj_kernel(const DecodeArgs a) {
  constexpr int HALVES = GATED ? 2 : 1, ROWS = HALVES * COLUMNS;  // gate rows, then up rows
  if (!a.up_lora.rank) wait_for_stream();
  const int slot = blockIdx.y, token = slot / a.top_k, expert = load_expert(a, token, slot - token * a.top_k);
  if (expert < 0) return;
  const int column = blockIdx.x * COLUMNS, row = a.hidden / CODES, lane = threadIdx.x;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const uint4 *x = row_at<Element>(a.x, token * a.stride_xt);
  const uint4 *w = row_at<char>(a.up, expert * a.stride_ue + column * step * a.stride_un);
  const int64_t to_next = step * a.stride_un / CODES, to_up_row = to_up * a.stride_un / CODES;
  const char *scale_rows[HALVES];
  bool wanted[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    scale_rows[h] = scales_of(a.up_scales, expert, column * step + h * to_up);
    wanted[h] = true;
  }
  float acc[ROWS] = {};
  for (int start = lane; start < row + lane; start += WARP * PIECES) {
    uint4 pieces[ROWS][PIECES];
    unsigned bits[HALVES][PIECES];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const int c = r % COLUMNS, at = start + i * WARP;
        const uint4 *address = w + c * to_next + (r < COLUMNS ? 0 : to_up_row) + at;
        pieces[r][i] = load_once(address, at < row && column + c < a.intermediate);
      }
    load_scales<WARP>(a.up_scales, scale_rows, wanted, start, row, bits);
    let_next_start();  // here, where it keeps loads and sums apart as well
    float scales[HALVES][PIECES];
    widen_scales(a.up_scales.type, bits, scales);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int at = start + i * WARP;
      uint4 v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) v[j] = at < row ? x[2 * at + j] : make_uint4(0, 0, 0, 0);
      float2 values[CODES / 2];
      unpack_pieces<Element>(v, values);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        acc[r] = fmaf(dot_codes(pieces[r][i], values), scales[r / COLUMNS][i], acc[r]);
    }
  }
  store_columns<Element, GATED, COLUMNS>(a, slot, expert, column, acc);
}
