#pragma once

#include "low_rank.cuh"

// out[t] = sum over the routed slots s of token t, with expert e, of weights[s] (down[e] act[s] + down_bias[e]).
// A warp makes one column: it goes along the rows of CHOICES choices at a time, PIECES pieces of 16 bytes per lane of
// each. The first are on their way before the wait for act. Lane k knows the expert and the weight of choice k.
// Grid: (H / WARPS, T). The caller guarantees that it launches this after `up_proj_kernel`, or after
// `project_kernel` behind that.
template <typename Element, bool LOW_RANK, int WARPS, int CHOICES, int PIECES>
__global__ void __launch_bounds__(WARPS *WARP) down_proj_kernel(const DecodeArgs a) {
  const int token = blockIdx.y, lane = threadIdx.x % WARP, column = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (column >= a.hidden) return;
  const int expert = lane < a.top_k ? load_expert(a, token, lane) : -1;
  const float weight = expert >= 0 ? load_weight(a, token, lane) : 0.f;
  const int row = a.intermediate / PIECE;
  const uint4 *w = row_at<Element>(a.down, column * a.stride_dn);
  const uint4 *act = row_at<Element>(a.act, int64_t(token) * a.top_k * a.intermediate);
  const int64_t of_expert = a.stride_de / PIECE;
  float sum = 0.f;
  bool waits = true;
  for (int first = 0; first < a.top_k; first += CHOICES)
    for (int start = lane; start < row + lane; start += WARP * PIECES) {
      uint4 pieces[CHOICES][PIECES];
      bool routed[CHOICES];
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) {
        const int e = __shfl_sync(0xffffffffu, expert, first + c);
        routed[c] = first + c < a.top_k && e >= 0;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          const int at = start + i * WARP;
          pieces[c][i] = load_once(w + e * of_expert + at, routed[c] && at < row);
        }
      }
      if (waits) wait_for_stream();
      waits = false;
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) {
        float product = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          const int at = start + i * WARP;
          const uint4 v = routed[c] && at < row ? act[(first + c) * row + at] : make_uint4(0, 0, 0, 0);
          product = dot<Element>(pieces[c][i], v, product);
        }
        sum = fmaf(__shfl_sync(0xffffffffu, weight, first + c), product, sum);
      }
    }
  if (expert >= 0 && a.down_bias)
    sum = fmaf(weight, load_bias<Element>(a.down_bias, expert * a.stride_dbe + column * a.stride_dbn), sum);
  if constexpr (LOW_RANK) sum = add_ranks_of_choices(a, token, column, expert, weight, sum);
  float sums[] = {sum};
  sum = warp_sums(sums);
  if (lane == 0) static_cast<Element *>(a.out)[int64_t(token) * a.hidden + column] = from_float<Element>(sum);
}
