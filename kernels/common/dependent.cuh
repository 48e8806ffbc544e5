// Programmatic dependent launch, from compute capability 9.0 on; before it kernels simply follow each other.
#pragma once

// Waits until all earlier kernels of the stream have ended and their stores are visible.
__device__ __forceinline__ void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start once every block of this one has come here or has ended.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
