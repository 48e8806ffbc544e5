#include <algorithm>
#include <limits>
#include <optional>

#include "../../torch-ext/torch_binding.h"
#include "../common/tensors.h"
#include "describe.h"
#include "grouped.h"

namespace {

// out of a call that is described but for act, z and out.
Tensor decode(DecodeArgs a, const Operand &x, bool by_slot) try {
  const OnDevice guard(x.device);
  const int capability = capability_of(x.device);
  const bool grouped = a.transposed || !by_slot;
  GroupedPlan plan;
  if (grouped && !plan_grouped(a, by_slot, capability, &plan)) return Tensor();
  const uint64_t slots = a.num_tokens * a.top_k, act_bytes = sizeof(uint16_t) * slots * a.intermediate;
  const uint64_t z_bytes = sizeof(float) * slots * std::max(a.up_lora.rank, a.down_lora.rank);
  const Scratch scratch(grouped ? plan.bytes : act_bytes + z_bytes);
  Tensor out = empty({a.num_tokens, a.hidden}, x.dtype, x.device);
  if (!grouped) {
    a.act = scratch.get();
    a.z = reinterpret_cast<float *>(static_cast<char *>(scratch.get()) + act_bytes);
  }
  a.out = out.data_ptr();
  const cudaStream_t stream = current_stream(x.device);
  const cudaError_t error = grouped ? grouped_experts(a, plan, scratch.get(), stream)
                                    : decode_experts(a, capability >= 9, stream);
  if (error == cudaErrorCooperativeLaunchTooLarge) {  // where others limit the multiprocessors of this process
    cudaGetLastError();
    return Tensor();
  }
  check_launch("decode_experts", error);
  return out;
} catch (const NoMemory &) {
  return Tensor();
}

}  // namespace

Tensor decode_experts_op(const Tensor &x, const Tensor &ids, const Tensor &weights, const Tensor &up,
                         const Tensor &down, int64_t kind, const std::optional<Tensor> &up_scales,
                         const std::optional<Tensor> &down_scales, const std::optional<Tensor> &up_bias,
                         const std::optional<Tensor> &down_bias, double alpha, double limit, double up_offset) {
  DecodeArgs a{};
  const Operand rows(x);
  const bool taken = describe(rows, ids, weights, up, down, kind, up_scales, down_scales, up_bias, down_bias, alpha,
                              limit, up_offset, &a);
  return taken ? decode(a, rows, kind & Kind::BY_SLOT) : Tensor();
}

Tensor decode_lora_experts_op(const Tensor &x, const Tensor &ids, const Tensor &weights, const Tensor &up,
                              const Tensor &down, int64_t kind, const std::optional<Tensor> &up_scales,
                              const std::optional<Tensor> &down_scales, const std::optional<Tensor> &up_bias,
                              const std::optional<Tensor> &down_bias, double alpha, double limit, double up_offset,
                              const std::optional<Tensor> &up_a, const std::optional<Tensor> &up_b,
                              const std::optional<Tensor> &down_a, const std::optional<Tensor> &down_b,
                              double up_scaling, double down_scaling, const std::optional<Tensor> &adapters) {
  DecodeArgs a{};
  const Operand rows(x);
  const bool taken = describe(rows, ids, weights, up, down, kind, up_scales, down_scales, up_bias, down_bias, alpha,
                              limit, up_offset, &a) &&
                     describe_loras(rows, up_a, up_b, down_a, down_b, up_scaling, down_scaling, adapters, &a);
  return taken ? decode(a, rows, kind & Kind::BY_SLOT) : Tensor();
}

Tensor decode_plain_experts_op(const Tensor &x, const Tensor &ids, const Tensor &weights, const Tensor &up,
                               const Tensor &down, int64_t kind) {
  constexpr double NO_LIMIT = std::numeric_limits<double>::infinity();
  return decode_experts_op(x, ids, weights, up, down, kind, {}, {}, {}, {}, 1., NO_LIMIT, 0.);
}
