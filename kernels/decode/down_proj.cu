#include "../common/launch.cuh"
#include "choose.cuh"
#include "down_proj.cuh"
#include "launches.h"

cudaError_t launch_down_proj(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return choose_pieces(a, WARP * PIECE, [&](auto element, auto choices, auto pieces) {
    constexpr int WARPS = 4;
    const dim3 grid((a.hidden + WARPS - 1) / WARPS, a.num_tokens);
    const auto kernel = a.down_lora.rank ? down_proj_kernel<decltype(element), true, WARPS, choices, pieces>
                                         : down_proj_kernel<decltype(element), false, WARPS, choices, pieces>;
    return launch(kernel, grid, WARPS * WARP, 0, stream, {dependent}, a);
  });
}
