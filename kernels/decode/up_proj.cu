#include "../common/launch.cuh"
#include "choose.cuh"
#include "launches.h"
#include "up_proj.cuh"

cudaError_t launch_up_proj(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return choose_gated(a, [&](auto element, auto gated) {
    constexpr int COLUMNS = gated ? 2 : 4, PIECES = 4;  // 16 pieces in the registers of a lane
    const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.num_tokens * a.top_k);
    const auto kernel = up_proj_kernel<decltype(element), gated, COLUMNS, PIECES>;
    return launch(kernel, grid, WARP, 0, stream, {dependent}, a);
  });
}
