#include "../common/launch.cuh"
#include "choose.cuh"
#include "combine.cuh"

cudaError_t launch_combine(const GroupedArgs &a, bool dependent, cudaStream_t stream) {
  return choose_element(a, [&](auto element) {
    const dim3 grid((a.hidden / PIECE + COMBINE_THREADS - 1) / COMBINE_THREADS, a.num_tokens);
    return launch(combine_kernel<decltype(element)>, grid, COMBINE_THREADS, 0, stream, {dependent}, a);
  });
}
