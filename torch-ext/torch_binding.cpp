#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "decode_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias,"
      " int activation, float alpha, float limit, float up_offset, bool gated, bool interleaved) -> Tensor");
  ops.def(
      "route_rows(Tensor ids, int num_experts, int num_rows, int block_m, int schedule_size)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("decode_experts", TORCH_BOX(&decode_experts_op));
  ops.impl("route_rows", TORCH_BOX(&route_rows_op));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
