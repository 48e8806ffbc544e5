// From the arguments of an op to those of kernels.
#pragma once

#include <optional>

#include "../common/tensors.h"
#include "decode.h"

// All of a but low-rank pairs, act, z and out, which are 0, from the arguments of `decode_experts_op`; false if the
// kernels are not for them.
bool describe(const Tensor &x, const Tensor &ids, const Tensor &weights, const Tensor &up, const Tensor &down,
              int64_t kind, const std::optional<Tensor> &up_scales, const std::optional<Tensor> &down_scales,
              const std::optional<Tensor> &up_bias, const std::optional<Tensor> &down_bias, double alpha, double limit,
              double up_offset, DecodeArgs *a);

// The low-rank pairs, one or both, for a call that is described otherwise, from the arguments of
// `decode_lora_experts_op`; false if the kernels are not for them.
bool describe_loras(const Tensor &x, const std::optional<Tensor> &up_a, const std::optional<Tensor> &up_b,
                    const std::optional<Tensor> &down_a, const std::optional<Tensor> &down_b, double up_scaling,
                    double down_scaling, const std::optional<Tensor> &adapters, DecodeArgs *a);
