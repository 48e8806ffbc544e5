#pragma once

#include "../common/dependent.cuh"
#include "elements.cuh"
#include "grouped.h"

constexpr int COMBINE_THREADS = 64;

// out[t] = sum over the routed slots s of token t, in order, of weights[s] y[row of s].
// A thread makes the columns of one piece, with CHOICES choices of the token at a time under way. Lane k knows the row
// and the weight of choice k.
// Grid: (pieces of H / COMBINE_THREADS, T). The caller guarantees that it launches this after the down-projection,
// before which routing has ended: rows and weights are read before the wait for y.
template <typename Element>
__global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(const GroupedArgs a) {
  constexpr int CHOICES = 8;
  const int token = blockIdx.y, piece = blockIdx.x * COMBINE_THREADS + threadIdx.x, lane = threadIdx.x % WARP;
  const int slot = token * a.top_k + lane, width = a.hidden / PIECE;
  int row = -1;
  if (lane < a.top_k) row = a.schedule ? __ldcg(a.slot_to_row + slot) : load_expert(a, token, lane) < 0 ? -1 : slot;
  const float weight = row >= 0 ? load_weight(a, token, lane) : 0.f;
  const uint4 *y = static_cast<const uint4 *>(a.y) + piece;
  wait_for_stream();
  float2 sums[PIECE / 2] = {};
  for (int first = 0; first < a.top_k; first += CHOICES) {
    uint4 pieces[CHOICES];
#pragma unroll
    for (int c = 0; c < CHOICES; ++c) {
      const int r = __shfl_sync(0xffffffffu, row, first + c);  // -1 past the last choice
      pieces[c] = load_once(y + int64_t(r) * width, r >= 0 && piece < width);
    }
#pragma unroll
    for (int c = 0; c < CHOICES; ++c) {
      const float factor = __shfl_sync(0xffffffffu, weight, first + c);
      const unsigned pairs[] = {pieces[c].x, pieces[c].y, pieces[c].z, pieces[c].w};
#pragma unroll
      for (int i = 0; i < PIECE / 2; ++i) {
        const float2 values = unpack<Element>(pairs[i]);
        sums[i] = make_float2(fmaf(factor, values.x, sums[i].x), fmaf(factor, values.y, sums[i].y));
      }
    }
  }
  if (piece >= width) return;
  uint4 *out = static_cast<uint4 *>(a.out) + int64_t(token) * width + piece;
  *out = make_uint4(pack<Element>(sums[0]), pack<Element>(sums[1]), pack<Element>(sums[2]), pack<Element>(sums[3]));
}
