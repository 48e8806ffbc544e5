// Scans over the threads of a block, of ints from 0 on.
#pragma once

constexpr int WARP = 32, MAX_WARPS = 32;

// What a scan adds up by: of two values, and of those of all lanes of a warp. 0 changes nothing.
struct Sum {
  __device__ int operator()(int a, int b) const { return a + b; }
  __device__ int of_warp(int v) const { return __reduce_add_sync(0xffffffffu, v); }
};

struct Largest {
  __device__ int operator()(int a, int b) const { return max(a, b); }
  __device__ int of_warp(int v) const { return __reduce_max_sync(0xffffffffu, v); }
};

// The sum, or the cap if that is less; for values up to the cap.
struct CappedSum {
  int cap;
  __device__ int operator()(int a, int b) const {
    return static_cast<int>(min(static_cast<unsigned>(a) + static_cast<unsigned>(b), static_cast<unsigned>(cap)));
  }
  __device__ int of_warp(int v) const {
#pragma unroll
    for (int offset = WARP / 2; offset; offset /= 2) v = (*this)(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
};

// The sum of v over the threads up to and with this one; all threads of a block of whole warps call it. partial: 32
// ints of shared memory that nothing else uses until the next barrier.
template <typename Add = Sum>
__device__ __forceinline__ int block_inclusive_scan(int v, int *partial, const Add &add = {}) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, v, offset);
    if (lane >= offset) v = add(v, other);
  }
  if (lane == WARP - 1) partial[warp] = v;
  __syncthreads();
  return add(v, add.of_warp(lane < warp ? partial[lane] : 0));
}
