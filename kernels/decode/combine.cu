#include "../common/launch.cuh"
#include "combine.cuh"

namespace {

template <typename Element>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  constexpr int THREADS = 64, CHOICES = 8;
  const dim3 grid((a.hidden / PIECE + THREADS - 1) / THREADS, a.num_tokens);
  return launch(combine_kernel<Element, THREADS, CHOICES>, grid, THREADS, 0, stream, {dependent}, a);
}

}  // namespace

cudaError_t launch_combine(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? launch_kernel<__nv_bfloat16>(a, dependent, stream)
                                     : launch_kernel<__half>(a, dependent, stream);
}
