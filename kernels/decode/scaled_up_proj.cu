#include "../common/launch.cuh"
#include "choose.cuh"
#include "launches.h"
#include "scaled_up_proj.cuh"

cudaError_t launch_scaled_up_proj(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return choose_gated(a, [&](auto element, auto gated) {
    constexpr int COLUMNS = gated ? 2 : 4, PIECES = 2;  // 8 pieces in the registers of a lane
    const dim3 grid((a.intermediate + COLUMNS - 1) / COLUMNS, a.num_tokens * a.top_k);
    const auto kernel = scaled_up_proj_kernel<decltype(element), gated, COLUMNS, PIECES>;
    return launch(kernel, grid, WARP, 0, stream, {dependent}, a);
  });
}
