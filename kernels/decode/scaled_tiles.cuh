// As tiles.cuh, for weights of e4m3 codes with a scale per block.
#pragma once

#include <type_traits>

#include "scales.cuh"
#include "tiles.cuh"

// The values of four codes as two pairs of Elements, exactly.
template <typename Element>
__device__ __forceinline__ void widen_pairs(unsigned codes, unsigned (&pairs)[2]) {
  if constexpr (std::is_same_v<Element, __half>) {
    widen_codes(codes, pairs);
  } else {
    float2 low, high;
    widen_codes(codes, low, high);
    pairs[0] = pack<Element>(low);
    pairs[1] = pack<Element>(high);
  }
}

// sums += the product of 16 codes of each of weight rows g and g + 8 and of as many elements, in two pieces, of row g
// of the tile.
template <typename Element>
__device__ __forceinline__ void multiply_codes(const uint4 &w, const uint4 &w8, const uint4 (&v)[2],
                                               float (&sums)[4]) {
  const unsigned words[] = {w.x, w.y, w.z, w.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    unsigned pairs[2], pairs8[2];
    widen_pairs<Element>(words[j], pairs);
    widen_pairs<Element>(words8[j], pairs8);
    const unsigned low = j % 2 ? v[j / 2].z : v[j / 2].x, high = j % 2 ? v[j / 2].w : v[j / 2].y;
    multiply_pairs<Element>(pairs[0], pairs8[0], pairs[1], pairs8[1], low, high, sums);
  }
}

// As `multiply_tile`, with a scale for each block of K: two pieces of each of the four lanes of a row. length counts
// pieces of codes, locate those of Elements. scale_rows: the first scales of both fragments, each of which lies in one
// block of rows.
template <typename Element, typename Shape, typename Locate>
__device__ __forceinline__ void multiply_scaled_tile(const LaneRows &w, const Scales &scales,
                                                     const char *const (&scale_rows)[2], const bool (&wanted)[2],
                                                     const uint4 *tokens, int length, int split, const Locate &locate,
                                                     float (&acc)[2][4]) {
  constexpr int STEPS = Shape::STEPS, RUN = QUAD * STEPS, SHARE = SCALE_BLOCK / CODES, BLOCKS = RUN / SHARE;
  constexpr int STEPS_OF_BLOCK = STEPS / BLOCKS;
  static_assert(BLOCKS * SHARE == RUN);
  int row = 0;
  bool located = false;
  for (int start = split * RUN; start < length; start += Shape::SPLITS * RUN) {
    const int mine = start + threadIdx.x % QUAD;
    uint4 pieces[2][2][STEPS], v[STEPS][2];
    unsigned bits[2][BLOCKS];
    load_weights(w, mine, length, pieces);
    load_scales<SHARE>(scales, scale_rows, wanted, start, length, bits);
    if (!located) row = locate();
    located = true;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = mine + s * QUAD;
        v[s][j] = load_cached(tokens + row + 2 * at + j, row >= 0 && at < length);
      }
    let_next_start();  // here, where it keeps loads and sums apart as well
    float factors[2][BLOCKS];
    widen_scales(scales.type, bits, factors);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      float sums[2][4] = {};
#pragma unroll
      for (int s = b * STEPS_OF_BLOCK; s < (b + 1) * STEPS_OF_BLOCK; ++s)
#pragma unroll
        for (int f = 0; f < 2; ++f) multiply_codes<Element>(pieces[f][0][s], pieces[f][1][s], v[s], sums[f]);
#pragma unroll
      for (int f = 0; f < 2; ++f)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[f][c] = fmaf(factors[f][b], sums[f][c], acc[f][c]);
    }
  }
  if (!located) locate();
}
