#pragma once

#include "activation.cuh"
#include "low_rank.cuh"

// One element of act, of sums without biases; up only if gated.
template <typename Element, bool GATED>
__device__ __forceinline__ void store_act(const DecodeArgs &a, Element *act, int expert, int column, float gate,
                                          float up) {
  if (column >= a.intermediate) return;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const int64_t bias = expert * a.stride_ube + column * step * a.stride_ubn;
  gate += load_bias<Element>(a.up_bias, bias);
  float value;
  if constexpr (GATED)
    value = gated(gate, up + load_bias<Element>(a.up_bias, bias + to_up * a.stride_ubn), a.activation);
  else
    value = activate(clamp_above(gate, a.activation.limit), a.activation);
  act[column] = from_float<Element>(value);
}

// act of COLUMNS columns of a slot from acc, each lane's part of the products of their rows: gate rows, then up rows.
template <typename Element, bool GATED, int COLUMNS, int ROWS>
__device__ __forceinline__ void store_columns(const DecodeArgs &a, int slot, int expert, int column,
                                              float (&acc)[ROWS]) {
  const int lane = threadIdx.x;
  if (a.up_lora.rank) add_ranks<COLUMNS>(a, slot, expert, column, acc);
  const float sum = warp_sums(acc);  // of row r in lanes [r * 32 / ROWS, (r + 1) * 32 / ROWS)
  const float other = __shfl_down_sync(0xffffffffu, sum, WARP / 2);
  const int c = lane / (WARP / ROWS);
  if (lane % (WARP / ROWS) || c >= COLUMNS) return;
  Element *act = static_cast<Element *>(a.act) + int64_t(slot) * a.intermediate;
  store_act<Element, GATED>(a, act, expert, column + c, sum, other);
}
