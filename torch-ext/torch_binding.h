// The ops of the CUDA build.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

// The experts block for a few tokens, (T, H); an undefined tensor, None in Python, if the kernels are not for the call
// or, as those of all ops are, if there is no memory for it.
// x: (T, H) bf16 or fp16. ids, weights: (T, top_k), int32 or int64 and bf16, fp16 or fp32, any strides; top_k up to 32,
// T top_k up to 65535. up: (E, 2 I, H), or (E, I, H) if not gated; down: (E, H, I); or both with their last dimensions
// exchanged; E up to 1024, H and I up to 2^28. x and both weights are contiguous along the dimension that is summed
// over, in rows that begin at multiples of 16 bytes and have whole ones; plain weights may be so along the other one
// instead, if I is a multiple of 8. Biases: in the dtype of x, any strides.
// kind: ACTIVATION times an index into the package's ACTIVATION_NAMES, plus EXCHANGED if dimensions are exchanged, plus
// BY_SLOT if each slot reads the weights of its expert itself, plus HALVES_APART if both halves of up have blocks of
// their own, plus GATED, plus INTERLEAVED, plus UP_EXPONENTS and DOWN_EXPONENTS where scales are e8m0, for which the
// stable ABI has no name: see `Kind` in kernels/decode/describe.h.
// Slots that do not read weights themselves are sorted by expert, whose weights are read once for several of them.
// limit: infinite for none.
// Scales, of both weights or of none: (E, blocks of rows, blocks of the inner dimension), fp32, bf16 or e8m0, any
// strides. The weights are e4m3 codes then, each times the scale of its block of 128 x 128.
torch::stable::Tensor decode_experts_op(
    const torch::stable::Tensor &x, const torch::stable::Tensor &ids, const torch::stable::Tensor &weights,
    const torch::stable::Tensor &up, const torch::stable::Tensor &down, int64_t kind,
    const std::optional<torch::stable::Tensor> &up_scales, const std::optional<torch::stable::Tensor> &down_scales,
    const std::optional<torch::stable::Tensor> &up_bias, const std::optional<torch::stable::Tensor> &down_bias,
    double alpha, double limit, double up_offset);

// The same with low-rank pairs, of one weight or both: up_scaling up_b[l, e] up_a[l, e] is added to up[e] for tokens
// with adapter l, and so is down's pair to down. a: (E or 1, r, K), rows contiguous and at multiples of 16 bytes.
// b: (E or 1, N, r), any strides. r up to 256. Several adapters: (L, E or 1, r, K) and (L, E or 1, N, r), with adapters
// (T,), int32 or int64, outside of [0, L) for none. Each factor is bf16, fp16 or fp32.
torch::stable::Tensor decode_lora_experts_op(
    const torch::stable::Tensor &x, const torch::stable::Tensor &ids, const torch::stable::Tensor &weights,
    const torch::stable::Tensor &up, const torch::stable::Tensor &down, int64_t kind,
    const std::optional<torch::stable::Tensor> &up_scales, const std::optional<torch::stable::Tensor> &down_scales,
    const std::optional<torch::stable::Tensor> &up_bias, const std::optional<torch::stable::Tensor> &down_bias,
    double alpha, double limit, double up_offset, const std::optional<torch::stable::Tensor> &up_a,
    const std::optional<torch::stable::Tensor> &up_b, const std::optional<torch::stable::Tensor> &down_a,
    const std::optional<torch::stable::Tensor> &down_b, double up_scaling, double down_scaling,
    const std::optional<torch::stable::Tensor> &adapters);

// `decode_experts_op` without scales and biases, with the parameters that an activation has by default: each argument
// of an op takes the host 0.2 us.
torch::stable::Tensor decode_plain_experts_op(
    const torch::stable::Tensor &x, const torch::stable::Tensor &ids, const torch::stable::Tensor &weights,
    const torch::stable::Tensor &up, const torch::stable::Tensor &down, int64_t kind);

// (schedule, row_to_slot, slot_to_row, num_routed), as the package's `rows.Rows` describes them; num_routed: (1,), R,
// if there are fewer rows than slots, else empty. Undefined tensors if there are too many slots for one launch.
// The caller guarantees that num_rows is at most the slots there are, and a schedule of `rows.schedule_size` entries.
std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> route_rows_op(
    const torch::stable::Tensor &ids, int64_t num_experts, int64_t num_rows, int64_t block_m, int64_t schedule_size);

// The schedule of rows in place, as `rows.Rows` describes it, from sizes (G,) or offsets (G + 1,), int32 or int64, of
// any values and any stride. The caller guarantees a schedule of `rows.schedule_size` entries.
torch::stable::Tensor split_rows_op(const torch::stable::Tensor &splits, int64_t num_groups, int64_t num_rows,
                                    int64_t block_m, int64_t schedule_size);
