#include "../common/launch.cuh"
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

template <typename Element, bool OF_TOKENS>
cudaError_t choose_factor(const DecodeArgs &a, const int *slot_to_row, bool dependent, cudaStream_t stream) {
  switch ((OF_TOKENS ? a.up_lora : a.down_lora).a.dtype) {
    case Scalar::bfloat16:
      return launch_kernel<Element, __nv_bfloat16, OF_TOKENS>(a, slot_to_row, dependent, stream);
    case Scalar::float16:
      return launch_kernel<Element, __half, OF_TOKENS>(a, slot_to_row, dependent, stream);
    default:
      return launch_kernel<Element, float, OF_TOKENS>(a, slot_to_row, dependent, stream);
  }
}

}  // namespace

cudaError_t launch_project_tokens(const DecodeArgs &a, bool dependent, cudaStream_t stream) {
  if (!a.up_lora.rank) return cudaSuccess;
  return a.dtype == Scalar::bfloat16 ? choose_factor<__nv_bfloat16, true>(a, nullptr, dependent, stream)
                                     : choose_factor<__half, true>(a, nullptr, dependent, stream);
}

cudaError_t launch_project_act(const DecodeArgs &a, const int *slot_to_row, bool dependent, cudaStream_t stream) {
  if (!a.down_lora.rank) return cudaSuccess;
  return a.dtype == Scalar::bfloat16 ? choose_factor<__nv_bfloat16, false>(a, slot_to_row, dependent, stream)
                                     : choose_factor<__half, false>(a, slot_to_row, dependent, stream);
}
