#pragma once

#include "low_rank.cuh"
#include "tiles.cuh"

// RANKS neighbours as loaded: of 4 bytes a word for each, of 2 bytes, PACKED, a pair in each of the first two words.
static_assert(RANKS == 4);
struct FactorRun {
  unsigned words[RANKS];
};

// The first `count` of RANKS neighbours from an address on, zeros after. PACKED: there are RANKS, side by side from a
// multiple of their size on.
template <int BYTES, bool PACKED>
__device__ __forceinline__ FactorRun load_run(const char *address, int64_t stride, int count) {
  FactorRun run;
  if constexpr (PACKED && BYTES == 4) {
    const uint4 v = load_cached(reinterpret_cast<const uint4 *>(address), count > 0);
    run = {{v.x, v.y, v.z, v.w}};
  } else if constexpr (PACKED) {
    const uint2 v = load_cached(reinterpret_cast<const uint2 *>(address), count > 0);
    run = {{v.x, v.y}};
  } else {
#pragma unroll
    for (int i = 0; i < RANKS; ++i) run.words[i] = load_bits<BYTES>(address + i * stride, i < count);
  }
  return run;
}

// The numbers of a run.
template <bool PACKED>
__device__ __forceinline__ void widen_run(Scalar dtype, const FactorRun &run, float (&values)[RANKS]) {
  if (dtype == Scalar::float32) {
#pragma unroll
    for (int i = 0; i < RANKS; ++i) values[i] = __uint_as_float(run.words[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < RANKS / 2; ++i) {
    const unsigned pair = PACKED ? run.words[i] : run.words[2 * i] | run.words[2 * i + 1] << 16;
    const float2 two = dtype == Scalar::bfloat16 ? unpack<__nv_bfloat16>(pair) : unpack<__half>(pair);
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

// What a lane adds up: of two rows of a tile with z[j], and of weight rows that lie half * to_half + f * to_fragment
// bytes after b[j] and are wanted[f][half]. one_factor: whether both rows, or the only one that is adapted, take b[0].
template <int FRAGMENTS>
struct RankRows {
  const char *z[2], *b[2];
  bool adapted[2], one_factor, wanted[FRAGMENTS][2];
  int64_t to_half, to_fragment;
};

// Runs [fragment][half] of ranks from k on.
template <int BYTES, bool PACKED, int FRAGMENTS>
__device__ __forceinline__ void load_runs(const LowRank &pair, const RankRows<FRAGMENTS> &rows, const char *b, int k,
                                          FactorRun (&runs)[FRAGMENTS][2]) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      runs[f][half] = load_run<BYTES, PACKED>(
          b + half * rows.to_half + f * rows.to_fragment + k * pair.b.stride_k, pair.b.stride_k,
          rows.wanted[f][half] ? pair.rank - k : 0);
}

// acc += the products of RANKS ranks from k on. A lane has some adapted row.
template <int BYTES, bool PACKED, int FRAGMENTS>
__device__ __forceinline__ void add_run(const LowRank &pair, const RankRows<FRAGMENTS> &rows, int k,
                                        float (&acc)[FRAGMENTS][4]) {
  FactorRun z[2], b[FRAGMENTS][2];
#pragma unroll
  for (int j = 0; j < 2; ++j)
    z[j] = load_run<4, PACKED>(rows.z[j] + k * sizeof(float), sizeof(float), rows.adapted[j] ? pair.rank - k : 0);
  load_runs<BYTES, PACKED>(pair, rows, rows.b[0], k, b);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!rows.adapted[j]) continue;
    if (j == 1 && !rows.one_factor) load_runs<BYTES, PACKED>(pair, rows, rows.b[1], k, b);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[RANKS], &sum = acc[f][2 * half + j];
        widen_run<PACKED>(BYTES == 4 ? Scalar::float32 : pair.b.dtype, b[f][half], values);
#pragma unroll
        for (int i = 0; i < RANKS; ++i) sum = fmaf(__uint_as_float(z[j].words[i]), values[i], sum);
      }
  }
}

// Adds to acc a warp's part, every SPLITS-th run of RANKS ranks, of what a pair adds to the rows of a tile. Lane
// 4 g + t has weight rows n + half * to_half + f * to_fragment, which are wanted[f][half], and rows 2 t and 2 t + 1 of
// the tile, as in `multiply_pairs`. Waits for z.
template <typename Shape, int FRAGMENTS>
__device__ __forceinline__ void add_ranks_of_tile(const GroupedArgs &a, const LowRank &pair, const Tile &tile,
                                                  const bool (&wanted)[FRAGMENTS][2], int n, int to_half,
                                                  int to_fragment, int split, float (&acc)[FRAGMENTS][4]) {
  wait_for_stream();
  RankRows<FRAGMENTS> rows;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int slot = find_slot<Shape>(a, tile, threadIdx.x % QUAD * 2 + j);
    const int adapter = slot < 0 ? -1 : load_adapter(a, slot / a.top_k);
    rows.adapted[j] = adapter >= 0;
    rows.z[j] = reinterpret_cast<const char *>(a.z + int64_t(slot) * pair.rank);
    rows.b[j] = factor_at(pair.b, adapter, tile.expert) + n * pair.b.stride_n;
  }
  if (!rows.adapted[0] && !rows.adapted[1]) return;
  if (!rows.adapted[0]) rows.b[0] = rows.b[1];
  rows.one_factor = !rows.adapted[1] || rows.b[0] == rows.b[1];
  rows.to_half = to_half * pair.b.stride_n;
  rows.to_fragment = to_fragment * pair.b.stride_n;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.wanted[f][half] = wanted[f][half];
  const bool is_wide = pair.b.dtype == Scalar::float32;
#pragma unroll 1
  for (int k = split * RANKS; k < pair.rank; k += Shape::SPLITS * RANKS) {
    if (pair.b_in_runs)
      is_wide ? add_run<4, true>(pair, rows, k, acc) : add_run<2, true>(pair, rows, k, acc);
    else
      is_wide ? add_run<4, false>(pair, rows, k, acc) : add_run<2, false>(pair, rows, k, acc);
  }
}
