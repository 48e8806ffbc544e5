// 8-bit floats in registers: e4m3 codes, and exponents of e8m0.
#pragma once

#include <cuda_fp16.h>

// The values of four e4m3 codes, the lowest byte first, as two pairs of fp16, exactly; NaN codes stay NaN.
__device__ __forceinline__ void widen_codes(unsigned codes, unsigned (&halves)[2]) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "  cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(codes));
#else
  // The bits as those of an fp16, whose exponent is 8 larger: subnormal codes as well. All ones carry into bit 14.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned spread = __byte_perm(codes, 0, i ? 0x3424 : 0x1404), magnitude = (spread >> 1) & 0x3f803f80u;
    const unsigned nan = (magnitude + 0x00800080u) & 0x40004000u;
    const unsigned bits = (spread & 0x80008000u) | magnitude | (nan >> 4) * 31u;
    const __half2 scaled = __hmul2(*reinterpret_cast<const __half2 *>(&bits), __float2half2_rn(256.f));
    halves[i] = *reinterpret_cast<const unsigned *>(&scaled);
  }
#endif
}

// The same in fp32.
__device__ __forceinline__ void widen_codes(unsigned codes, float2 &low, float2 &high) {
  unsigned halves[2];
  widen_codes(codes, halves);
  low = __half22float2(*reinterpret_cast<const __half2 *>(&halves[0]));
  high = __half22float2(*reinterpret_cast<const __half2 *>(&halves[1]));
}

// 2^(byte - 127), exactly; 255 is NaN.
__device__ __forceinline__ float widen_exponent(unsigned byte) {
  const unsigned power = byte ? byte << 23 : 1u << 22;
  return __uint_as_float(byte == 255 ? 0x7fffffffu : power);
}
