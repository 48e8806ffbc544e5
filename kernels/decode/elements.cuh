// Elements in memory and in registers: 16-byte pieces of rows, scalars of the types that tensors have.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "decode.h"

constexpr int WARP = 32;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename Element>
__device__ __forceinline__ Element from_float(float v);
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// Two neighbours of a piece, the first one in the low half.
template <typename Element>
__device__ __forceinline__ float2 unpack(unsigned pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<__half>(unsigned pair) {
  return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

// Back into a pair.
template <typename Element>
__device__ __forceinline__ unsigned pack(float2 values);
template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float2 values) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(values.x, values.y);
  return *reinterpret_cast<const unsigned *>(&pair);
}
template <>
__device__ __forceinline__ unsigned pack<__half>(float2 values) {
  const __half2 pair = __floats2half2_rn(values.x, values.y);
  return *reinterpret_cast<const unsigned *>(&pair);
}

template <typename Element>
__device__ __forceinline__ float dot_pair(unsigned a, unsigned b, float acc) {
  const float2 x = unpack<Element>(a), y = unpack<Element>(b);
  return fmaf(x.y, y.y, fmaf(x.x, y.x, acc));
}

// acc + <a, b> of two pieces, always in this order.
template <typename Element>
__device__ __forceinline__ float dot(const uint4 &a, const uint4 &b, float acc) {
  acc = dot_pair<Element>(a.x, b.x, acc);
  acc = dot_pair<Element>(a.y, b.y, acc);
  acc = dot_pair<Element>(a.z, b.z, acc);
  return dot_pair<Element>(a.w, b.w, acc);
}

// The sums over a warp of ROWS values of each lane, ROWS a power of two: lanes [i * 32 / ROWS, (i + 1) * 32 / ROWS) get
// that of value i. Each step halves the values that a lane still adds up.
template <int ROWS>
__device__ __forceinline__ float warp_sums(float (&v)[ROWS]) {
  const int lane = threadIdx.x % WARP;
  int offset = WARP / 2;
#pragma unroll
  for (int rows = ROWS / 2; rows; rows /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const float keep = upper ? v[i + rows] : v[i], give = upper ? v[i] : v[i + rows];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, offset);
    }
  }
#pragma unroll
  for (; offset; offset /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
  return v[0];
}

// A piece of weights, which is read once: past L1; zeros unless wanted. Volatile, and no read of constant memory
// (ld.global.nc), which the compiler would move behind a wait that follows; a predicate, as branches would keep it from
// loading many pieces at a time.
__device__ __forceinline__ uint4 load_once(const uint4 *address, bool wanted) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.u32 wanted, %5, 0;\n"
      "  @wanted ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<unsigned>(wanted))
      : "memory");
  return v;
}

// The same of what other blocks of the multiprocessor read as well.
__device__ __forceinline__ uint4 load_cached(const uint4 *address, bool wanted) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.u32 wanted, %5, 0;\n"
      "  @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<unsigned>(wanted))
      : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_cached(const uint2 *address, bool wanted) {
  uint2 v = make_uint2(0, 0);
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2]; }"
               : "+r"(v.x), "+r"(v.y)
               : "l"(address), "r"(static_cast<unsigned>(wanted))
               : "memory");
  return v;
}

// A number of 4, 2 or 1 bytes in the same way, through L1.
template <int BYTES>
__device__ __forceinline__ unsigned load_bits(const char *address, bool wanted) {
  unsigned bits = 0;
  if constexpr (BYTES == 4)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
                 : "+r"(bits)
                 : "l"(address), "r"(static_cast<unsigned>(wanted))
                 : "memory");
  else if constexpr (BYTES == 2)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "+r"(bits)
                 : "l"(address), "r"(static_cast<unsigned>(wanted))
                 : "memory");
  else
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }"
                 : "+r"(bits)
                 : "l"(address), "r"(static_cast<unsigned>(wanted))
                 : "memory");
  return bits;
}

template <typename Element>
__device__ __forceinline__ const uint4 *row_at(const void *matrix, int64_t offset) {
  return reinterpret_cast<const uint4 *>(static_cast<const Element *>(matrix) + offset);
}

// The expert of a slot, -1 for a sentinel.
__device__ __forceinline__ int load_expert(const DecodeArgs &a, int token, int choice) {
  const int64_t at = token * a.stride_it + choice * a.stride_ik;
  const int64_t id = a.wide_ids ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int *>(a.ids)[at];
  return id >= 0 && id < a.num_experts ? static_cast<int>(id) : -1;
}

// The routing weight of a slot.
__device__ __forceinline__ float load_weight(const DecodeArgs &a, int token, int choice) {
  const int64_t at = token * a.stride_wt + choice * a.stride_wk;
  switch (a.weights_dtype) {
    case Scalar::bfloat16:
      return to_float(static_cast<const __nv_bfloat16 *>(a.weights)[at]);
    case Scalar::float16:
      return to_float(static_cast<const __half *>(a.weights)[at]);
    default:
      return static_cast<const float *>(a.weights)[at];
  }
}

// One element of a bias (E, N); 0 without a bias.
template <typename Element>
__device__ __forceinline__ float load_bias(const void *bias, int64_t offset) {
  return bias ? to_float(static_cast<const Element *>(bias)[offset]) : 0.f;
}
