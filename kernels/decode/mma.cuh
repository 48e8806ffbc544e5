// Products of 16 weight rows and 8 rows of tokens on the tensor cores, from compute capability 8.0 on.
#pragma once

#include "elements.cuh"

// acc += the product of fragments, 16 deep. Lane 4 g + t has of weight rows g and g + 8 and of token g two pairs of
// neighbours along K each, of which only the order counts, as that of both operands is one. It gets the sums of weight
// row g for tokens 2 t and 2 t + 1, then those of row g + 8. The instruction wants the pairs' first halves of both
// weight rows before their second ones.
template <typename Element>
__device__ __forceinline__ void multiply_pairs(unsigned low, unsigned low8, unsigned high, unsigned high8,
                                               unsigned token_low, unsigned token_high, float (&acc)[4]);
template <>
__device__ __forceinline__ void multiply_pairs<__nv_bfloat16>(unsigned low, unsigned low8, unsigned high,
                                                              unsigned high8, unsigned token_low, unsigned token_high,
                                                              float (&acc)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(low), "r"(low8), "r"(high), "r"(high8), "r"(token_low), "r"(token_high));
}
template <>
__device__ __forceinline__ void multiply_pairs<__half>(unsigned low, unsigned low8, unsigned high, unsigned high8,
                                                       unsigned token_low, unsigned token_high, float (&acc)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(low), "r"(low8), "r"(high), "r"(high8), "r"(token_low), "r"(token_high));
}

// acc += the product of a piece of each of weight rows g and g + 8 and one of token g, at the same place of K: 32 deep,
// as the four lanes of a row have four pieces.
template <typename Element>
__device__ __forceinline__ void multiply_pieces(const uint4 &w, const uint4 &w8, const uint4 &token, float (&acc)[4]) {
  multiply_pairs<Element>(w.x, w8.x, w.y, w8.y, token.x, token.y, acc);
  multiply_pairs<Element>(w.z, w8.z, w.w, w8.w, token.z, token.w, acc);
}
