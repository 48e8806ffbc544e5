#pragma once

#include "../common/dependent.cuh"
#include "activation.cuh"
#include "elements.cuh"

// act[s] = a(up[e] x[t] + up_bias[e]) for every routed slot s of token t, with expert e.
// A block makes COLUMNS columns. Its threads go along the rows of their weights, PIECES pieces of 16 bytes of each row at
// a time; all these loads are on their way together.
// Grid: (I / COLUMNS, S). The next kernel may start once all blocks have begun: it finds x and ids complete, but has to
// wait for act.
template <typename Element, bool GATED, int WARPS, int COLUMNS, int PIECES>
__global__ void __launch_bounds__(WARPS *WARP) up_proj_kernel(const DecodeArgs a) {
  constexpr int THREADS = WARPS * WARP, ROWS = GATED ? 2 * COLUMNS : COLUMNS;  // gate rows, then up rows
  __shared__ float sums[WARPS][ROWS];
  wait_for_stream();
  const int slot = blockIdx.y, token = slot / a.top_k, expert = load_expert(a, token, slot - token * a.top_k);
  if (expert < 0) return;
  const int column = blockIdx.x * COLUMNS, row = a.hidden / PIECE;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const uint4 *x = row_at<Element>(a.x, token * a.stride_xt);
  const uint4 *w = row_at<Element>(a.up, expert * a.stride_ue + column * step * a.stride_un);
  const int64_t to_next = step * a.stride_un / PIECE, to_up_row = to_up * a.stride_un / PIECE;
  float acc[ROWS] = {};
  for (int start = threadIdx.x; start < row + int(threadIdx.x); start += THREADS * PIECES) {
    uint4 pieces[ROWS][PIECES], v[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int at = start + i * THREADS;
      v[i] = at < row ? x[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const int c = r % COLUMNS, at = start + i * THREADS;
        const uint4 *address = w + c * to_next + (r < COLUMNS ? 0 : to_up_row) + at;
        pieces[r][i] = load_once(address, at < row && column + c < a.intermediate);
      }
    let_next_start();  // here it also keeps the compiler from mixing loads with sums, with few loads on their way
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[r] = dot<Element>(pieces[r][i], v[i], acc[r]);
  }
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const float sum = warp_sums(acc);
  if (lane % (WARP / ROWS) == 0) sums[warp][lane / (WARP / ROWS)] = sum;
  __syncthreads();

  const int c = threadIdx.x, mine = column + c;
  if (c >= COLUMNS || mine >= a.intermediate) return;
  const int64_t bias = expert * a.stride_ube + mine * step * a.stride_ubn;
  float gate = load_bias<Element>(a.up_bias, bias), value;
  for (int i = 0; i < WARPS; ++i) gate += sums[i][c];
  if constexpr (GATED) {
    float up = load_bias<Element>(a.up_bias, bias + to_up * a.stride_ubn);
    for (int i = 0; i < WARPS; ++i) up += sums[i][COLUMNS + c];
    value = gated(gate, up, a.activation);
  } else {
    value = activate(clamp_above(gate, a.activation.limit), a.activation);
  }
  static_cast<Element *>(a.act)[int64_t(slot) * a.intermediate + mine] = from_float<Element>(value);
}
