"""What TransformerEngine tests of its grouped linear layer and grouped MLP, and which of our tests covers it.

Shapes, splits, combinations and tolerances are those of TransformerEngine at d0067d0, but for files that test
quantization. Where it compares two of its own paths bit by bit and we have one path, ours is compared with fp64.
Random cotangents take the place of its sums of outputs. Its large shapes are for a GPU, with smaller ones on a CPU.
"""

import ast

from hub import ROOT

# By our test. Of files on sanity, CUDA graphs and offloading those of the layer without quantization.
COVERED = {
    # Rows of zeros, which FP8 pads groups with, are as any; ours saves x itself, always.
    "test_linear_accuracy": """test_grouped_linear_accuracy test_grouped_linear_accuracy_cutlass
        test_grouped_linear_accuracy_save_original_input test_grouped_linear_accuracy_single_gemm
        test_padding_grouped_linear_accuracy test_padding_grouped_linear_accuracy_save_original_input""",
    # y and dx don't accumulate into a buffer. bias_scales does what return_bias is for.
    "test_gemm": """test_grouped_gemm test_grouped_gemm_grouped_tensor
        test_grouped_linear_returns_single_grouped_bias_parameter""",
    "test_main_grad": """test_grouped_gemm_cutlass_empty_groups test_grouped_gemm_grouped_tensor_zero_work_bias
        test_grouped_gemm_grouped_tensor_zero_work test_sanity_grouped_linear""",
    # A tensor on the CPU is refused; a list is taken, whatever the layout, except under graph capture.
    "test_wrong_inputs_are_named": "test_single_grouped_weight_rejects_host_m_splits",
    "test_splits": "test_grouped_linear_grouped_tensor_path_matches_legacy test_splits_to_offsets_multi",
    "test_parameter_layouts": """test_single_grouped_weight_matches_discrete_grouped_tensor_path
        test_grouped_parameter_layout_matches_cpu_m_splits test_grouped_mlp_overwrite_main_grad
        test_grouped_tensor_save_original_input_matches_saved_grouped_input
        test_grouped_linear_grouped_tensor_path_single_grouped_bias_delay_wgrad""",
    # In test_grouped_mlp.py and test_fusible_ops.py.
    "test_linear_requires_grad": "test_grouped_linear test_grouped_linear_prequantized_mxfp8_grad",
    "test_graph_of_linear": """test_grouped_linear_fused_path_cuda_graph_safe test_grouped_linear_cuda_graph_safe
        test_make_graphed_callables""",
    "test_meta_and_fake": "test_meta_single_grouped_weight_with_delayed_wgrad",
    "test_no_grad": "test_single_grouped_bias_uses_registered_packed_storage test_inference_mode",
    # Interleaved: in turn, not in blocks of 32, which are an order of weight rows.
    "test_mlp": "test_grouped_mlp test_grouped_mlp_fp16 test_grouped_mlp_single_group_mxfp8",
    "test_two_layers": "test_grouped_mlp_mcore_integrations test_grouped_mlp_single_weight_numerics",
    "test_graph_of_mlp": "test_grouped_mlp_cuda_graph_safe_mxfp8",
    "test_scaled_activation": """test_scaled_swiglu test_scaled_srelu test_scaled_clamped_qgeglu
        test_interleaved_scaled_swiglu test_interleaved_scaled_clamped_qgeglu""",
    "test_recompute_changes_nothing": "test_scaled_glu_rejects_activation_recompute_in_mlp",
    "test_recompute_saves_inputs_alone": "test_scaled_srelu_activation_recompute_in_mlp_config",
    "test_checkpoints_of_every_form_load_into_every_form": """
        test_grouped_linear_load_state_dict_multi_to_single_param
        test_grouped_linear_load_state_dict_single_to_multi_param""",
    "test_activations_that_are_not_kept": "test_sanity test_numerics",
}
LEFT_OUT = {
    "FP8 and NVFP4 quantization": """test_fp8_grouped_gemm test_grouped_linear_row_scaled_quantized_backward
        test_grouped_gemm_grouped_tensor_mxfp8 test_single_grouped_weight_mxfp8_workspace_cache
        test_single_grouped_weight_with_disabled_weight_preswizzle test_grouped_mlp_nvfp4_rht_srelu
        test_single_grouped_primary_mxfp8_bypasses_weight_workspace test_grouped_mlp_prequantized_mxfp8_input
        test_grouped_linear_grouped_tensor_path_skips_non_rht_nvfp4 test_grouped_linear_prequantized_mxfp8_input
        test_grouped_linear_fused_path_fp8_block_scaling_blackwell_error test_grouped_mlp_prequantized_mxfp8_grad
        test_swizzle_scales_and_pack_ptrs_for_discrete_weights test_grouped_gemm_quant_cute_matches_mxfp8_quantized
        test_single_grouped_weight_eval_preserves_columnwise_usage""",
    "SiTU-GLU is no activation of the package, and cuDNN's dispatch": """test_scaled_situglu
        test_cudnn_frontend_situglu_feature_detection test_grouped_mlp_situglu_mxfp8_fallback
        test_grouped_mlp_glu_mxfp8_real_cudnn_fusion test_grouped_mlp_situglu_nvfp4_real_cudnn_hadamard_fusion""",
    "the package allocates its outputs; rows of no group are written as 0, not left to the caller": """
        test_grouped_linear_caller_output_buffers test_grouped_linear_caller_buffers test_grouped_mlp_caller_buffers""",
    "there is no other path to fall back to": "test_grouped_linear_delay_wgrad_rejects_implicit_fallback",
    "what its own offloading leaves on the GPU, and when": "test_memory test_manual_synchronization",
    "statistics of tensors that its debugging writes": "test_log_grouped_gemm",
    "weights that another library shards": "test_ops_grouped_linear_distributed_weight_dispatch",
}


def test_tables_name_tests_once_and_ours_exist():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    assert COVERED.keys() <= {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    theirs = " ".join([*COVERED.values(), *LEFT_OUT.values()]).split()
    assert len(set(theirs)) == len(theirs)
