#include "../common/launch.cuh"
#include "combine.cuh"

namespace {

template <typename Element>
cudaError_t launch_kernel(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  const dim3 grid((a.hidden / PIECE + COMBINE_THREADS - 1) / COMBINE_THREADS, a.num_tokens);
  return launch(combine_kernel<Element>, grid, COMBINE_THREADS, 0, stream, {dependent}, a);
}

}  // namespace

cudaError_t launch_combine(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return a.dtype == Scalar::bfloat16 ? launch_kernel<__nv_bfloat16>(a, dependent, stream)
                                     : launch_kernel<__half>(a, dependent, stream);
}
