// From the arguments of an op to those of kernels.
#pragma once

#include <optional>

#include "../common/tensors.h"
#include "decode.h"

// The bits of an op's kind: the package's `backends.native.decode` has the same.
struct Kind {
  static constexpr int64_t INTERLEAVED = 1, GATED = 2, HALVES_APART = 4, BY_SLOT = 8, EXCHANGED = 16;
  static constexpr int64_t UP_EXPONENTS = 32, DOWN_EXPONENTS = 64, ACTIVATION = 128;
};

// All of a but low-rank pairs, act, z and out, which are 0, from the arguments of `decode_experts_op`; false if the
// kernels are not for them.
bool describe(const Operand &x, const Operand &ids, const Operand &weights, const Operand &up, const Operand &down,
              int64_t kind, const std::optional<Operand> &up_scales, const std::optional<Operand> &down_scales,
              const std::optional<Operand> &up_bias, const std::optional<Operand> &down_bias, double alpha,
              double limit, double up_offset, DecodeArgs *a);

// The low-rank pairs, one or both, for a call that is described otherwise, from the arguments of
// `decode_lora_experts_op`; false if the kernels are not for them.
bool describe_loras(const Operand &x, const std::optional<Operand> &up_a, const std::optional<Operand> &up_b,
                    const std::optional<Operand> &down_a, const std::optional<Operand> &down_b, double up_scaling,
                    double down_scaling, const std::optional<Operand> &adapters, DecodeArgs *a);
