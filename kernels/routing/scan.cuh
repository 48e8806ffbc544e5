#pragma once

// The sum of v over the threads up to and with this one; all threads of a block of whole warps call it. partial: 32
// ints of shared memory that nothing else uses until the next barrier.
__device__ __forceinline__ int block_inclusive_scan(int v, int *partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, v, offset);
    if (lane >= offset) v += other;
  }
  if (lane == 31) partial[warp] = v;
  __syncthreads();
  const int of_warp = lane < warp ? partial[lane] : 0;
  return v + __reduce_add_sync(0xffffffffu, of_warp);
}
