// What a low-rank pair adds: <z[s], b[l, e, n]> to the product of weight row n and slot s, of expert e and adapter l.
#pragma once

#include "../common/dependent.cuh"
#include "elements.cuh"

// The adapter of a token, -1 for none.
__device__ __forceinline__ int load_adapter(const DecodeArgs &a, int token) {
  if (!a.adapters) return 0;
  const int64_t at = token * a.stride_adapters;
  const int64_t adapter =
      a.wide_adapters ? static_cast<const int64_t *>(a.adapters)[at] : static_cast<const int *>(a.adapters)[at];
  return adapter >= 0 && adapter < a.num_adapters ? static_cast<int>(adapter) : -1;
}

// Where the factor of an adapter and an expert begins.
__device__ __forceinline__ const char *factor_at(const Factor &f, int adapter, int expert) {
  return static_cast<const char *>(f.data) + adapter * f.stride_l + expert * f.stride_e;
}

// A number of a factor before it has a type: one of both is loaded, so that there is no branch between loads.
struct FactorBits {
  unsigned wide, narrow;
};

__device__ __forceinline__ FactorBits load_factor(const Factor &f, const char *address, bool wanted) {
  const bool is_wide = f.dtype == Scalar::float32;
  return {load_bits<4>(address, wanted && is_wide), load_bits<2>(address, wanted && !is_wide)};
}

__device__ __forceinline__ float to_float(const Factor &f, const FactorBits &bits) {
  const __half_raw half = {static_cast<unsigned short>(bits.narrow)};
  const float narrow = f.dtype == Scalar::bfloat16 ? __uint_as_float(bits.narrow << 16) : __half2float(half);
  return f.dtype == Scalar::float32 ? __uint_as_float(bits.wide) : narrow;
}

// Adds to acc a lane's part, every 32nd rank, of what up's pair adds to COLUMNS columns of a slot: gate rows, then up
// rows. Waits for z, with or without an adapter: whoever waits for this kernel relies on it.
template <int COLUMNS, int ROWS>
__device__ __forceinline__ void add_ranks(const DecodeArgs &a, int slot, int expert, int column, float (&acc)[ROWS]) {
  const LowRank &pair = a.up_lora;
  wait_for_stream();
  const int adapter = load_adapter(a, slot / a.top_k);
  if (adapter < 0) return;
  const int step = a.interleaved ? 2 : 1, to_up = a.interleaved ? 1 : a.intermediate;
  const float *z = a.z + int64_t(slot) * pair.rank;
  const char *b = factor_at(pair.b, adapter, expert) + column * step * pair.b.stride_n;
#pragma unroll 1
  for (int k = threadIdx.x; k < pair.rank; k += WARP) {
    const float factor = z[k];
    FactorBits bits[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int c = r % COLUMNS, n = c * step + (r < COLUMNS ? 0 : to_up);
      bits[r] = load_factor(pair.b, b + n * pair.b.stride_n + k * pair.b.stride_k, column + c < a.intermediate);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[r] = fmaf(factor, to_float(pair.b, bits[r]), acc[r]);
  }
}

// sum + a lane's part of what down's pair adds to a column of a token: every 32nd rank of all choices, one after the
// other. Lane k knows the expert and the weight of choice k. The kernel has waited for z.
__device__ __forceinline__ float add_ranks_of_choices(const DecodeArgs &a, int token, int column, int expert,
                                                      float weight, float sum) {
  constexpr int STEPS = 4;
  const LowRank &pair = a.down_lora;
  const int adapter = load_adapter(a, token), lane = threadIdx.x % WARP, count = a.top_k * pair.rank;
  if (adapter < 0) return sum;
  const char *z = reinterpret_cast<const char *>(a.z + int64_t(token) * count);
  const char *b = factor_at(pair.b, adapter, 0) + column * pair.b.stride_n;
#pragma unroll 1
  for (int first = lane; first < count + lane; first += STEPS * WARP) {
    unsigned rows[STEPS];
    float weights[STEPS];
    FactorBits bits[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = first + s * WARP, choice = at / pair.rank, rank = at - choice * pair.rank;
      const int e = __shfl_sync(0xffffffffu, expert, choice);  // of any choice past the last one
      const bool routed = at < count && e >= 0;
      weights[s] = __shfl_sync(0xffffffffu, weight, choice);
      rows[s] = load_bits<4>(z + at * sizeof(float), routed);
      bits[s] = load_factor(pair.b, b + e * pair.b.stride_e + rank * pair.b.stride_k, routed);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      sum = fmaf(weights[s] * __uint_as_float(rows[s]), to_float(pair.b, bits[s]), sum);
  }
  return sum;
}
