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

// sums[i] += the product of 16 codes of each of weight rows g and g + 8 and of as many elements, in two pieces, of rows
// g of all eights.
template <typename Element, int EIGHTS>
__device__ __forceinline__ void multiply_codes(const uint4 &w, const uint4 &w8, const uint4 (&v)[EIGHTS][2],
                                               float (&sums)[EIGHTS][4]) {
  const unsigned words[] = {w.x, w.y, w.z, w.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    unsigned pairs[2], pairs8[2];
    widen_pairs<Element>(words[j], pairs);
    widen_pairs<Element>(words8[j], pairs8);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const uint4 &piece = v[i][j / 2];
      const unsigned low = j % 2 ? piece.z : piece.x, high = j % 2 ? piece.w : piece.y;
      multiply_pairs<Element>(pairs[0], pairs8[0], pairs[1], pairs8[1], low, high, sums[i]);
    }
  }
}

// As `multiply_tile`, a block of scales at a time: two pieces of each row and lane. length counts pieces of codes,
// locate those of Elements. scale_rows: the first scales of both fragments, each of which lies in one block of rows.
template <typename Element, typename Shape, typename Locate>
__device__ __forceinline__ void multiply_scaled_tile(const LaneRows &w, const Scales &scales,
                                                     const char *const (&scale_rows)[2], const bool (&wanted)[2],
                                                     const uint4 *tokens, int length, int split, const Locate &locate,
                                                     float (&acc)[2][Shape::EIGHTS][4]) {
  constexpr int QUAD = 4, STEPS = 2, RUN = QUAD * STEPS, EIGHTS = Shape::EIGHTS;
  static_assert(Shape::STEPS == STEPS && RUN * CODES == SCALE_BLOCK);
  int rows[EIGHTS] = {};
  bool located = false;
  for (int start = split * RUN; start < length; start += Shape::SPLITS * RUN) {
    const int mine = start + threadIdx.x % QUAD;
    uint4 pieces[2][2][STEPS], v[STEPS][EIGHTS][2];
    unsigned bits[2][1];
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          const int at = mine + s * QUAD;
          const uint4 *address = w.first + f * w.to_fragment + r * w.to_eighth + at;
          pieces[f][r][s] = load_once(address, w.wanted[f][r] && at < length);
        }
    load_scales<RUN>(scales, scale_rows, wanted, start, length, bits);
    if (!located) locate(rows);
    located = true;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = mine + s * QUAD;
          v[s][i][j] = load_cached(tokens + rows[i] + 2 * at + j, rows[i] >= 0 && at < length);
        }
    let_next_start();  // here, where it keeps loads and sums apart as well
    float sums[2][EIGHTS][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int f = 0; f < 2; ++f)
        multiply_codes<Element>(pieces[f][0][s], pieces[f][1][s], v[s], sums[f]);
    float factors[2][1];
    widen_scales(scales.type, bits, factors);
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[f][i][c] = fmaf(factors[f][0], sums[f][i][c], acc[f][i][c]);
  }
  if (!located) locate(rows);
}
