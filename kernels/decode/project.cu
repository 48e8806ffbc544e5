#include "../common/launch.cuh"
#include "choose.cuh"
#include "launches.h"
#include "project.cuh"

namespace {

constexpr int MANY_SUMS = 1024;  // a block for each of so many would be more than run at once

// Each rank of a slot, a sum, is made by a block where there are few, else by a warp.
template <typename Element, typename FactorElement, bool OF_TOKENS>
cudaError_t launch_kernel(const DecodeArgs &a, const int *slot_to_row, bool dependent, cudaStream_t stream) {
  const int rank = (OF_TOKENS ? a.up_lora : a.down_lora).rank, slots = a.num_tokens * a.top_k;
  const bool many = rank * slots > MANY_SUMS;
  const dim3 grid(many ? (rank * WARP + PROJECT_THREADS - 1) / PROJECT_THREADS : rank, slots);
  const auto kernel = many ? project_kernel<Element, FactorElement, OF_TOKENS, WARP, 8, 4>
                           : project_kernel<Element, FactorElement, OF_TOKENS, PROJECT_THREADS, 4, 8>;
  return launch(kernel, grid, PROJECT_THREADS, 0, stream, {dependent}, a, slot_to_row);
}

template <bool OF_TOKENS>
cudaError_t choose_factor(const DecodeArgs &a, const int *slot_to_row, bool dependent, cudaStream_t stream) {
  const LowRank &pair = OF_TOKENS ? a.up_lora : a.down_lora;
  if (!pair.rank) return cudaSuccess;
  return choose_element(a, [&](auto element) {
    using Element = decltype(element);
    switch (pair.a.dtype) {
      case Scalar::bfloat16:
        return launch_kernel<Element, __nv_bfloat16, OF_TOKENS>(a, slot_to_row, dependent, stream);
      case Scalar::float16:
        return launch_kernel<Element, __half, OF_TOKENS>(a, slot_to_row, dependent, stream);
      default:
        return launch_kernel<Element, float, OF_TOKENS>(a, slot_to_row, dependent, stream);
    }
  });
}

}  // namespace

cudaError_t launch_project_tokens(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  return choose_factor<true>(a, nullptr, dependent, stream);
}

cudaError_t launch_project_act(const DecodeArgs &a, const int *slot_to_row, bool dependent, cudaStream_t stream) {
  return choose_factor<false>(a, slot_to_row, dependent, stream);
}
