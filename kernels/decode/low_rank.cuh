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

// What down's pair adds to the product of a column and choice k of a token, for lane k, which knows the expert of that
// choice. Half a warp goes along the ranks, and two choices are side by side. The kernel has waited for z.
__device__ __forceinline__ float ranks_of_choice(const DecodeArgs &a, int token, int column, int expert) {
  constexpr int CHOICES = 4, SIDES = 2, LANES = WARP / SIDES;
  const LowRank &pair = a.down_lora;
  const int adapter = load_adapter(a, token), side = threadIdx.x % WARP / LANES, seat = threadIdx.x % LANES;
  if (adapter < 0) return 0.f;
  const char *z = reinterpret_cast<const char *>(a.z + int64_t(token) * a.top_k * pair.rank);
  const char *b = factor_at(pair.b, adapter, 0) + column * pair.b.stride_n;
  float product = 0.f;
#pragma unroll 1
  for (int first = 0; first < a.top_k; first += SIDES * CHOICES) {
    float parts[CHOICES] = {};
#pragma unroll 1
    for (int start = 0; start < pair.rank; start += LANES) {
      const int rank = start + seat;
      unsigned rows[CHOICES];
      FactorBits bits[CHOICES];
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) {
        const int choice = first + SIDES * c + side, e = __shfl_sync(0xffffffffu, expert, choice);
        const bool wanted = e >= 0 && rank < pair.rank;
        rows[c] = load_bits<4>(z + (choice * pair.rank + rank) * sizeof(float), wanted);
        bits[c] = load_factor(pair.b, b + e * pair.b.stride_e + rank * pair.b.stride_k, wanted);
      }
#pragma unroll
      for (int c = 0; c < CHOICES; ++c) parts[c] = fmaf(__uint_as_float(rows[c]), to_float(pair.b, bits[c]), parts[c]);
    }
    product += sum_of_choice<SIDES>(parts, first);
  }
  return product;
}
