#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "decode_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, int kind,"
      " Tensor? up_scales, Tensor? down_scales, Tensor? up_bias, Tensor? down_bias,"
      " float alpha, float limit, float up_offset) -> Tensor");
  ops.def(
      "decode_lora_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, int kind,"
      " Tensor? up_scales, Tensor? down_scales, Tensor? up_bias, Tensor? down_bias,"
      " float alpha, float limit, float up_offset, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b,"
      " float up_scaling, float down_scaling, Tensor? adapters) -> Tensor");
  ops.def(
      "decode_plain_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, int kind) -> Tensor");
  ops.def(
      "route_rows(Tensor ids, int num_experts, int num_rows, int block_m, int schedule_size)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  ops.def(
      "split_rows(Tensor splits, int num_groups, int num_rows, int block_m, int schedule_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("decode_experts", TORCH_BOX(&decode_experts_op));
  ops.impl("decode_lora_experts", TORCH_BOX(&decode_lora_experts_op));
  ops.impl("decode_plain_experts", TORCH_BOX(&decode_plain_experts_op));
  ops.impl("route_rows", TORCH_BOX(&route_rows_op));
  ops.impl("split_rows", TORCH_BOX(&split_rows_op));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
