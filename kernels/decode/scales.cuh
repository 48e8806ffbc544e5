// Weights of e4m3 codes with a scale per block: pieces of 16 codes, each of which lies in one block.
#pragma once

#include "../common/float8.cuh"
#include "elements.cuh"

// The place of the first scale of a row of an expert's weights.
__device__ __forceinline__ const char *scales_of(const Scales &s, int expert, int row) {
  const int blocks = (s.part_rows + SCALE_BLOCK - 1) / SCALE_BLOCK;
  const int block = row < s.part_rows ? row / SCALE_BLOCK : blocks + (row - s.part_rows) / SCALE_BLOCK;
  return static_cast<const char *>(s.data) + expert * s.stride_e + block * s.stride_n;
}

// The bits of the scales of a lane's pieces, those of number start + i LANES of each row that is wanted.
template <ScaleType TYPE, int LANES, int ROWS, int PIECES>
__device__ __forceinline__ void load_scales_of(const Scales &s, const char *const (&rows)[ROWS],
                                               const bool (&wanted)[ROWS], int start, int row,
                                               unsigned (&bits)[ROWS][PIECES]) {
  constexpr int SHARE = SCALE_BLOCK / CODES;  // pieces of a block
  const int64_t first = start / SHARE * s.stride_k, step = LANES / SHARE * s.stride_k;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
      bits[r][i] = load_bits<static_cast<int>(TYPE)>(rows[r] + first + i * step, wanted[r] && start + i * LANES < row);
}

// One branch for all of them: a predicate for each type would have each load wait for the one before.
template <int LANES, int ROWS, int PIECES>
__device__ __forceinline__ void load_scales(const Scales &s, const char *const (&rows)[ROWS],
                                            const bool (&wanted)[ROWS], int start, int row,
                                            unsigned (&bits)[ROWS][PIECES]) {
  if (s.type == ScaleType::float32)
    load_scales_of<ScaleType::float32, LANES>(s, rows, wanted, start, row, bits);
  else if (s.type == ScaleType::bfloat16)
    load_scales_of<ScaleType::bfloat16, LANES>(s, rows, wanted, start, row, bits);
  else
    load_scales_of<ScaleType::exponent, LANES>(s, rows, wanted, start, row, bits);
}

// The scales of their bits. One branch for all of them, too.
template <int ROWS, int PIECES>
__device__ __forceinline__ void widen_scales(ScaleType type, unsigned (&bits)[ROWS][PIECES],
                                             float (&scales)[ROWS][PIECES]) {
  if (type != ScaleType::float32)
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        bits[r][i] = type == ScaleType::bfloat16 ? bits[r][i] << 16 : __float_as_uint(widen_exponent(bits[r][i]));
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < PIECES; ++i) scales[r][i] = __uint_as_float(bits[r][i]);
}

// The values of 16 neighbours of a row of Elements, from two pieces.
template <typename Element>
__device__ __forceinline__ void unpack_pieces(const uint4 (&pieces)[2], float2 (&values)[CODES / 2]) {
  const unsigned pairs[] = {pieces[0].x, pieces[0].y, pieces[0].z, pieces[0].w,
                            pieces[1].x, pieces[1].y, pieces[1].z, pieces[1].w};
#pragma unroll
  for (int i = 0; i < CODES / 2; ++i) values[i] = unpack<Element>(pairs[i]);
}

// <codes, values> of a piece, always in this order.
__device__ __forceinline__ float dot_codes(const uint4 &codes, const float2 (&values)[CODES / 2]) {
  const unsigned words[] = {codes.x, codes.y, codes.z, codes.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 low, high;
    widen_codes(words[i], low, high);
    const float2 &x = values[2 * i], &y = values[2 * i + 1];
    sum = fmaf(high.y, y.y, fmaf(high.x, y.x, fmaf(low.y, x.y, fmaf(low.x, x.x, sum))));
  }
  return sum;
}
