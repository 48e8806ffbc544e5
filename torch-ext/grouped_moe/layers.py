"""Stateless Hub layers, for `kernels.kernelize` and `kernels.use_kernel_mapping`."""

from torch import Tensor, nn

from .integrations.transformers import experts_forward


class GroupedMoeExperts(nn.Module):
    """Replaces the forward of an experts module with the attributes of transformers' ones; see docs/hub-layer.md.

    It computes with the module's `act_fn`, silu without one, and with its `_apply_gate`, act_fn(gate) * up without one.
    To use it, mark a class of yours by `kernels.use_kernel_forward_from_hub("GroupedMoeExperts")`, or any other, such
    as transformers' own, by `kernels.replace_kernel_forward_from_hub(Experts, "GroupedMoeExperts")`. Map that name to a
    `kernels.LayerRepository` of this package, and `kernels.kernelize` a model.
    """

    has_backward: bool = True
    can_torch_compile: bool = True

    gate_up_proj: Tensor  # (E, 2 I, H), or (E, H, 2 I) with is_transposed
    down_proj: Tensor  # (E, H, I), or (E, I, H) with is_transposed
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (T, H). top_k_index, top_k_weights: (T, top_k). Returns (T, H)."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
