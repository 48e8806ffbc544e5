#pragma once

#include "activation.cuh"
#include "elements.cuh"

// act of COLUMNS columns of a slot from acc, each lane's part of the products of their rows: gate rows, then up rows.
template <typename Element, bool GATED, int COLUMNS, int ROWS>
__device__ __forceinline__ void store_columns(const DecodeArgs &a, int slot, int expert, int column,
                                              float (&acc)[ROWS]) {
  const int lane = threadIdx.x, step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const float sum = warp_sums(acc);  // of row r in lanes [r * 32 / ROWS, (r + 1) * 32 / ROWS)
  const float other = __shfl_down_sync(0xffffffffu, sum, WARP / 2);
  const int c = lane / (WARP / ROWS), mine = column + c;
  if (lane % (WARP / ROWS) || c >= COLUMNS || mine >= a.intermediate) return;
  const int64_t bias = expert * a.stride_ube + mine * step * a.stride_ubn;
  const float gate = sum + load_bias<Element>(a.up_bias, bias);
  float value;
  if constexpr (GATED)
    value = gated(gate, other + load_bias<Element>(a.up_bias, bias + to_up * a.stride_ubn), a.activation);
  else
    value = activate(clamp_above(gate, a.activation.limit), a.activation);
  static_cast<Element *>(a.act)[int64_t(slot) * a.intermediate + mine] = from_float<Element>(value);
}
