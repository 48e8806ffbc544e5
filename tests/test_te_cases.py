"""What TransformerEngine tests of its grouped linear layer and grouped MLP, as tests of ours.

Shapes, splits, combinations and tolerances are those of TransformerEngine at d0067d0; TABLE says what became of each of
its tests, but for those of files that test quantization. Where it compares two of its own paths bit by bit and we have
one path, ours is compared with fp64. Random cotangents take the place of its sums of outputs.
"""

import ast
from pathlib import Path
from typing import NamedTuple, Tuple

import pytest
import torch
from te_steps import OURS


class Te(NamedTuple):
    """A test of TransformerEngine: our tests that cover it, and what differs or why it is left out."""

    te_test: str
    covered_by: Tuple[str, ...] = ()
    note: str = ""


FP8, NVFP4 = "left out: FP8 quantization", "left out: NVFP4 quantization"
SITU = "left out: SiTU-GLU is no activation of the package, and cuDNN's dispatch"
BUFFERS = "left out: the package allocates its outputs; rows of no group are written as 0, not left to the caller"
SAVED = "a choice between quantized and original input; ours saves x itself, always"
ACCURACY = ("test_linear_accuracy",)
LAYOUTS = ("test_parameter_layouts",)
MLP = ("test_mlp", "test_mlp_of_modules")

TABLE = {
    "test_grouped_linear.py": [
        Te("test_grouped_linear_accuracy", ACCURACY, "2048 and 4096 x 768 -> 3072 on a GPU, smaller on a CPU"),
        Te("test_grouped_linear_row_scaled_quantized_backward", note=NVFP4),
        Te("test_grouped_linear_accuracy_cutlass", ACCURACY, "one kernel, whatever the backend"),
        Te("test_grouped_linear_accuracy_save_original_input", ACCURACY, SAVED),
        Te("test_grouped_linear_accuracy_single_gemm", ACCURACY, "the cases of one group"),
        Te("test_padding_grouped_linear_accuracy", ("test_padded_groups",), "without FP8, which is what needs padding"),
        Te("test_padding_grouped_linear_accuracy_save_original_input", ("test_padded_groups",), SAVED),
        Te("test_grouped_gemm", ("test_gemm",), "16 x 10027 rows on a GPU; y and dx don't accumulate into a buffer"),
        Te("test_grouped_gemm_cutlass_empty_groups", ("test_zero_work",)),
        Te("test_grouped_gemm_grouped_tensor", ("test_gemm_of_parameters",), "bias of y only, as a layer has it"),
        Te("test_grouped_gemm_grouped_tensor_zero_work_bias", ("test_zero_work",)),
        Te("test_grouped_gemm_grouped_tensor_zero_work", ("test_zero_work",), "without FP8"),
        Te("test_grouped_gemm_grouped_tensor_mxfp8", note=FP8),
        Te("test_fp8_grouped_gemm", note=FP8),
        Te(
            "test_single_grouped_weight_rejects_host_m_splits", ("test_splits_on_the_host",),
            "a tensor on the CPU is refused; a list is taken, whatever the layout, except under graph capture",
        ),
        Te("test_single_grouped_weight_matches_discrete_grouped_tensor_path", LAYOUTS, "bitwise"),
        Te("test_single_grouped_weight_mxfp8_workspace_cache", note=FP8),
        Te("test_single_grouped_weight_with_disabled_weight_preswizzle", note=FP8),
        Te("test_single_grouped_primary_mxfp8_bypasses_weight_workspace", note=FP8),
        Te("test_grouped_parameter_layout_matches_cpu_m_splits", LAYOUTS, "biases are delayed like weights"),
        Te("test_grouped_tensor_save_original_input_matches_saved_grouped_input", LAYOUTS, SAVED),
        Te("test_grouped_linear_grouped_tensor_path_matches_legacy", ("test_list_is_as_good_as_tensor",), "bitwise"),
        Te("test_grouped_linear_grouped_tensor_path_single_grouped_bias_delay_wgrad", LAYOUTS),
        Te(
            "test_grouped_linear_returns_single_grouped_bias_parameter", ("test_bias_scaled_by_the_caller",),
            "no return_bias: bias_scales does what it is for",
        ),
        Te("test_grouped_linear_caller_output_buffers", ("test_what_has_no_group_is_never_read",), BUFFERS),
        Te("test_grouped_linear_grouped_tensor_path_skips_non_rht_nvfp4", note=NVFP4),
        Te("test_grouped_linear_delay_wgrad_rejects_implicit_fallback", note="left out: there is no other path"),
        Te("test_grouped_linear_fused_path_cuda_graph_safe", ("test_graph_of_linear",)),
        Te("test_grouped_linear_fused_path_fp8_block_scaling_blackwell_error", note=FP8),
        Te("test_swizzle_scales_and_pack_ptrs_for_discrete_weights", note="left out: scale layouts of FP8 for cuDNN"),
    ],
    "test_grouped_mlp.py": [
        Te("test_cudnn_frontend_situglu_feature_detection", note=SITU),
        Te("test_meta_single_grouped_weight_with_delayed_wgrad", ("test_meta_module",)),
        Te("test_single_grouped_bias_uses_registered_packed_storage", ("test_parameters_are_what_is_computed_with",)),
        Te("test_grouped_linear", ("test_linear_requires_grad",), "without quantization"),
        Te("test_grouped_linear_prequantized_mxfp8_input", note=FP8),
        Te(
            "test_grouped_linear_prequantized_mxfp8_grad", ("test_scaled_bias_of_frozen_weights",),
            "without FP8: the three kinds of bias, weights frozen or not",
        ),
        Te("test_grouped_linear_cuda_graph_safe", ("test_graph_of_linear",)),
        Te("test_grouped_mlp", MLP, "interleaved: in turn, not in blocks of 32; smaller on a CPU"),
        Te("test_grouped_mlp_situglu_mxfp8_fallback", note=SITU),
        Te("test_grouped_mlp_glu_mxfp8_real_cudnn_fusion", note=SITU),
        Te("test_grouped_mlp_situglu_nvfp4_real_cudnn_hadamard_fusion", note=SITU),
        Te("test_grouped_mlp_prequantized_mxfp8_input", note=FP8),
        Te("test_grouped_mlp_prequantized_mxfp8_grad", note=FP8),
        Te("test_grouped_mlp_fp16", ("test_mlp",)),
        Te("test_grouped_mlp_single_group_mxfp8", ("test_mlp",), "without FP8"),
        Te("test_single_grouped_weight_eval_preserves_columnwise_usage", note=FP8),
        Te("test_grouped_mlp_mcore_integrations", ("test_mlp_of_modules",)),
        Te("test_grouped_mlp_single_weight_numerics", ("test_mlp_of_modules",), "bitwise, the biases too; without FP8"),
        Te("test_grouped_mlp_caller_buffers", note=BUFFERS),
        Te("test_grouped_mlp_overwrite_main_grad", ("test_overwrite_main_grad",)),
        Te("test_grouped_mlp_cuda_graph_safe_mxfp8", ("test_graph_of_mlp",), "without FP8"),
        Te("test_grouped_gemm_quant_cute_matches_mxfp8_quantized", note=FP8),
    ],
    "test_fusible_ops.py": [  # those of grouped layers and of activations with scales
        Te("test_grouped_linear", ("test_linear_requires_grad",), "without quantization"),
        Te("test_grouped_linear_caller_buffers", note=BUFFERS),
        Te("test_scaled_swiglu", ("test_scaled_activation",), "as an MLP of identities"),
        Te("test_scaled_situglu", note=SITU),
        Te("test_scaled_srelu", ("test_scaled_activation",)),
        Te("test_interleaved_scaled_swiglu", ("test_scaled_activation",), "blocks of 32: an order of weight rows"),
        Te("test_scaled_glu_rejects_activation_recompute_in_mlp", ("test_recompute_changes_nothing",), "ours can"),
        Te("test_scaled_srelu_activation_recompute_in_mlp_config", ("test_recompute_saves_inputs_alone",)),
        Te("test_scaled_clamped_qgeglu", ("test_scaled_activation",)),
        Te("test_interleaved_scaled_clamped_qgeglu", ("test_scaled_activation",)),
        Te("test_grouped_mlp", MLP),
        Te("test_grouped_mlp_nvfp4_rht_srelu", note=NVFP4),
    ],
    "test_grouped_tensor.py": [  # those of grouped layers
        Te("test_splits_to_offsets_multi", ("test_splits_agree",), "without the strides of its kernels"),
        Te("test_grouped_linear_load_state_dict_multi_to_single_param", ("test_checkpoint_of_the_other_layout",)),
        Te("test_grouped_linear_load_state_dict_single_to_multi_param", ("test_checkpoint_of_the_other_layout",)),
    ],
    "test_sanity.py": [  # those of the layer without quantization, as below
        Te("test_sanity_grouped_linear", ("test_zero_work", "test_parameters_are_what_is_computed_with")),
        Te("test_inference_mode", ("test_inference_mode",)),
    ],
    "test_cuda_graphs.py": [
        Te("test_make_graphed_callables", ("test_graph_of_linear",), "captured by torch.cuda.graph"),
    ],
    "test_cpu_offloading.py": [
        Te("test_sanity", ("test_offloaded_activations",), "by PyTorch's save_on_cpu: the package has no offloading"),
        Te("test_memory", note="left out: what its own offloading leaves on the GPU"),
        Te("test_manual_synchronization", note="left out: its own offloading's schedule"),
        Te("test_numerics", ("test_offloaded_activations",), "bitwise"),
    ],
    "debug/test_log.py": [
        Te("test_log_grouped_gemm", note="left out: statistics of tensors that its debugging writes"),
    ],
    "test_ops_grouped_linear_distributed_weight.py": [
        Te("test_ops_grouped_linear_distributed_weight_dispatch", note="left out: weights that another library shards"),
    ],
}  # fmt: skip
ROWS_OF_TABLE = {
    "test_grouped_linear.py": 30,
    "test_grouped_mlp.py": 22,
    "test_fusible_ops.py": 12,
    "test_grouped_tensor.py": 3,
    "test_sanity.py": 2,
    "test_cuda_graphs.py": 1,
    "test_cpu_offloading.py": 4,
    "debug/test_log.py": 1,
    "test_ops_grouped_linear_distributed_weight.py": 1,
}


def test_table_is_complete_and_names_tests_that_exist():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("test_*.py")]
    ours = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    for file, rows in TABLE.items():
        assert len({row.te_test for row in rows}) == len(rows) == ROWS_OF_TABLE[file], file
        for row in rows:
            assert set(row.covered_by) <= ours, f"{row.te_test}: no test of ours is called {row.covered_by}"
            assert row.covered_by or row.note.startswith("left out"), f"{row.te_test}: neither covered nor left out"


# What, dtype, rtol, atol and the test of TransformerEngine. No row where it asks for the bits of its own other kernel.
TES = [
    ("linear", torch.float32, 1e-3, 1e-5, "test_grouped_linear"),
    ("linear", torch.float16, 1e-3, 1e-5, "test_grouped_linear"),
    ("linear", torch.bfloat16, 1.6e-2, 1e-5, "test_grouped_linear"),
    ("linear", torch.bfloat16, 1.6e-2, 1e-5, "test_grouped_gemm_grouped_tensor"),
    ("linear", torch.bfloat16, 1e-2, 5e-3, "test_grouped_parameter_layout_matches_cpu_m_splits"),
    ("linear", torch.bfloat16, 5e-2, 5e-3, "test_grouped_linear_returns_single_grouped_bias_parameter"),
    ("sums", torch.float32, 1e-3, 1e-3, "test_grouped_linear_accuracy_cutlass"),
    ("sums", torch.float32, 1.5e-2, 1.5e-2, "test_grouped_gemm"),
    ("sums", torch.float16, 1.5e-2, 1.5e-2, "test_grouped_gemm"),
    ("sums", torch.bfloat16, 1.5e-2, 1.5e-2, "test_grouped_gemm"),
    ("mlp", torch.float32, 0.125, 0.25, "test_grouped_mlp"),
    ("mlp", torch.float16, 0.125, 0.25, "test_grouped_mlp_fp16"),
    ("mlp", torch.bfloat16, 0.125, 0.25, "test_grouped_mlp"),
    ("activation", torch.float32, 1.3e-6, 1e-5, "test_scaled_swiglu"),
    ("activation", torch.float32, 1.3e-6, 1e-5, "test_scaled_srelu"),
    ("activation", torch.float32, 1.3e-6, 1e-5, "test_scaled_clamped_qgeglu"),
    ("same", torch.bfloat16, 1e-2, 5e-3, "test_grouped_linear_grouped_tensor_path_matches_legacy"),
    ("same", torch.bfloat16, 1e-2, 5e-3, "test_single_grouped_weight_matches_discrete_grouped_tensor_path"),
    ("same", torch.bfloat16, 0.0, 0.0, "test_grouped_mlp_single_weight_numerics"),
    ("same", torch.bfloat16, 0.0, 0.0, "test_grouped_mlp_overwrite_main_grad"),
    ("same", torch.bfloat16, 1e-2, 5e-3, "test_grouped_linear_fused_path_cuda_graph_safe"),
    ("same", torch.float16, 1e-3, 1e-5, "test_grouped_linear_cuda_graph_safe"),
    ("same", torch.bfloat16, 1.6e-2, 1e-5, "test_grouped_mlp_cuda_graph_safe_mxfp8"),
]


@pytest.mark.parametrize("what, dtype, rtol, atol, te_test", TES)
def test_tolerances_are_no_wider_than_theirs(what, dtype, rtol, atol, te_test):
    assert OURS[what][dtype][0] <= rtol and OURS[what][dtype][1] <= atol
    assert any(te_test == row.te_test and row.covered_by for rows in TABLE.values() for row in rows)
