#pragma once

#include "low_rank.cuh"
#include "scales.cuh"

// out[t] = sum over the routed slots s of token t, with expert e, of weights[s] (down[e] act[s] + down_bias[e]);
// down[e][n, k] = scale of its block times its code, and what is between two scales of a row is summed up by itself.
// As `down_proj_kernel`, with pieces of 16 codes: half a warp goes along a row, and two choices are side by side, so
// that rows of 768 codes leave no lane without a piece.
// Grid: (H / WARPS, T). The caller guarantees that it launches this after `scaled_up_proj_kernel`, or after
// `project_kernel` behind that.
// The bound of 5 blocks leaves 96 registers: with fewer the compiler would load act a piece at a time.
template <typename Element, bool LOW_RANK, int WARPS, int CHOICES, int PIECES>
__global__ void __launch_bounds__(WARPS *WARP, 5) scaled_down_proj_kernel(const DecodeArgs a) {
  constexpr int LANES = WARP / 2;
  const int token = blockIdx.y, lane = threadIdx.x % WARP, column = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (column >= a.hidden) return;
  const int expert = lane < a.top_k ? load_expert(a, token, lane) : -1;
  const float weight = expert >= 0 ? load_weight(a, token, lane) : 0.f;
  const int row = a.intermediate / CODES, side = lane / LANES, seat = lane % LANES;
  const uint4 *w = row_at<char>(a.down, column * a.stride_dn);
  const uint4 *act = row_at<Element>(a.act, int64_t(token) * a.top_k * a.intermediate);
  const int64_t of_expert = a.stride_de / CODES;
  const char *of_column = scales_of(a.down_scales, 0, column);
  float sum = 0.f;
  bool waits = true;
  for (int first = 0; first < a.top_k; first += 2 * CHOICES)
    for (int step = 0; step < row; step += LANES * PIECES) {
      const int start = step + seat;
      uint4 pieces[CHOICES][PIECES];
      unsigned bits[CHOICES][PIECES];
      const char *scale_rows[CHOICES];
      bool routed[CHOICES];
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) {
        const int choice = first + 2 * c + side, e = __shfl_sync(0xffffffffu, expert, choice);
        routed[c] = choice < a.top_k && e >= 0;
        scale_rows[c] = of_column + e * a.down_scales.stride_e;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          const int at = start + i * LANES;
          pieces[c][i] = load_once(w + e * of_expert + at, routed[c] && at < row);
        }
      }
      load_scales<LANES>(a.down_scales, scale_rows, routed, start, row, bits);
      if (waits) wait_for_stream();
      waits = false;
      float scales[CHOICES][PIECES];
      widen_scales(a.down_scales.type, bits, scales);
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) {
        uint4 v[PIECES][2];
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int at = start + i * LANES, of_slot = (first + 2 * c + side) * row;
            v[i][j] = routed[c] && at < row ? act[2 * (of_slot + at) + j] : make_uint4(0, 0, 0, 0);
          }
        float product = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          float2 values[CODES / 2];
          unpack_pieces<Element>(v[i], values);
          product = fmaf(dot_codes(pieces[c][i], values), scales[c][i], product);
        }
        sum = fmaf(__shfl_sync(0xffffffffu, weight, first + 2 * c + side), product, sum);
      }
    }
  if (expert >= 0 && a.down_bias)
    sum = fmaf(weight, load_bias<Element>(a.down_bias, expert * a.stride_dbe + column * a.stride_dbn), sum);
  if constexpr (LOW_RANK) sum = add_ranks_of_choices(a, token, column, expert, weight, sum);
  float sums[] = {sum};
  sum = warp_sums(sums);
  if (lane == 0) static_cast<Element *>(a.out)[int64_t(token) * a.hidden + column] = from_float<Element>(sum);
}
