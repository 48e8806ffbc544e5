#pragma once

#include "low_rank.cuh"

constexpr int PROJECT_THREADS = 128;

// The values of 8 neighbours, of one piece or two.
template <typename Element, int PIECES>
__device__ __forceinline__ void widen(const uint4 (&pieces)[PIECES], float2 (&values)[PIECE / 2]) {
  if constexpr (PIECES == 2) {
    const unsigned words[] = {pieces[0].x, pieces[0].y, pieces[0].z, pieces[0].w,
                              pieces[1].x, pieces[1].y, pieces[1].z, pieces[1].w};
#pragma unroll
    for (int i = 0; i < PIECE / 2; ++i)
      values[i] = make_float2(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
  } else {
    const unsigned pairs[] = {pieces[0].x, pieces[0].y, pieces[0].z, pieces[0].w};
#pragma unroll
    for (int i = 0; i < PIECE / 2; ++i) values[i] = unpack<Element>(pairs[i]);
  }
}

// <a, v> of 8 neighbours, always in this order.
__device__ __forceinline__ float dot_values(const float2 (&a)[PIECE / 2], const float2 (&v)[PIECE / 2], float acc) {
#pragma unroll
  for (int i = 0; i < PIECE / 2; ++i) acc = fmaf(a[i].y, v[i].y, fmaf(a[i].x, v[i].x, acc));
  return acc;
}

// The sum over THREADS threads, a warp or a block; the first of them gets it.
template <int THREADS>
__device__ __forceinline__ float sum_over(float value) {
  float values[] = {value}, sum = 0.f;
  value = warp_sums(values);
  if constexpr (THREADS == WARP) return value;
  constexpr int WARPS = THREADS / WARP;
  __shared__ float parts[WARPS];
  if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += parts[w];
  return sum;
}

// z[s] = scaling a[l, e] v for every slot s with an expert e and an adapter l; others stay unwritten. OF_TOKENS: the
// pair is that of up, and v is x[t] of the slot's token. Else it is that of down, and v is act[slot_to_row[s]], where
// slot_to_row is null act[s].
// THREADS of a block, a warp or all, make one rank. They go along K, STEPS pieces of v of each at a time; without
// OF_TOKENS the first ones of a are on their way before the wait for act.
// Grid: (r / ranks of a block, S). The next kernel may start once all blocks that have a z to make have begun and the
// others have ended. With OF_TOKENS it finds what came before this kernel complete, but has to wait for z. Without, the
// caller guarantees that it launches this after the up-projection, which the next kernel's wait covers as well: all
// blocks wait for act.
// The bound of BLOCKS leaves registers enough: to save some the compiler would mix loads with sums.
template <typename Element, typename FactorElement, bool OF_TOKENS, int THREADS, int STEPS, int BLOCKS>
__global__ void __launch_bounds__(PROJECT_THREADS, BLOCKS) project_kernel(const DecodeArgs a, const int *slot_to_row) {
  constexpr int WIDTH = sizeof(FactorElement) / sizeof(Element);  // pieces of as many numbers as one of v
  if (OF_TOKENS) wait_for_stream();
  const LowRank &pair = OF_TOKENS ? a.up_lora : a.down_lora;
  const int rank = blockIdx.x * (PROJECT_THREADS / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
  const int slot = blockIdx.y, token = slot / a.top_k;
  const int expert = load_expert(a, token, slot - token * a.top_k);
  const int adapter = expert < 0 ? -1 : load_adapter(a, token);
  if (adapter < 0 || rank >= pair.rank) {
    wait_for_stream();
    return;
  }
  let_next_start();
  const int row = OF_TOKENS ? token : slot_to_row ? slot_to_row[slot] : slot;
  const int length = (OF_TOKENS ? a.hidden : a.intermediate) / PIECE;
  const uint4 *v = OF_TOKENS ? row_at<Element>(a.x, row * a.stride_xt)
                             : row_at<Element>(a.act, int64_t(row) * a.intermediate);
  const uint4 *factor = row_at<char>(factor_at(pair.a, adapter, expert), rank * pair.a.stride_n);
  float sum = 0.f;
  bool waits = !OF_TOKENS;
  for (int start = thread; start < length + thread; start += STEPS * THREADS) {
    uint4 pieces[STEPS][WIDTH], rows[STEPS][1];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const int at = start + s * THREADS;
        pieces[s][i] = load_cached(factor + at * WIDTH + i, at < length);
      }
    if (waits) wait_for_stream();
    waits = false;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = start + s * THREADS;
      rows[s][0] = load_cached(v + at, at < length);
    }
    let_next_start();  // again: here it keeps loads and sums apart
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      float2 factors[PIECE / 2], values[PIECE / 2];
      widen<FactorElement>(pieces[s], factors);
      widen<Element>(rows[s], values);
      sum = dot_values(factors, values, sum);
    }
  }
  sum = sum_over<THREADS>(sum);
  if (thread == 0) a.z[int64_t(slot) * pair.rank + rank] = pair.scaling * sum;
}
