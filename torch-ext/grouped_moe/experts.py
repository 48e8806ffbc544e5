"""The whole experts block, one op per direction: route, up-projection with activation, down-projection, combine."""

from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import add_op_namespace_prefix, ops
from ._torch import experts as _torch_experts
from .activation import Activation, as_activation
from .block import Block, Grads, Needs, empty_grads, make_block, pack_kind
from .grouped_linear import launch_gemm, launch_group_sum, launch_wgrad, nk_strides, unit_rows
from .permute import launch_combine
from .routing import Schedule, make_schedule, route_indices
from .tuning import choose_block_m, dgrad_config, gemm_config, on_device_of, persistent_grid, spec_of

Indices = Tuple[Tensor, Tensor, Tensor]  # expert_offsets, row_to_slot, slot_to_row


def launch_up_proj(
    block: Block, x: Tensor, top_k: int, indices: Indices, schedule: Schedule, save: bool, activate: bool
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(preact (S, P) if save, activation (S, I) if activate); rows past R stay unwritten."""
    from ._triton.experts import up_proj_kernel

    offsets, row_to_slot, _ = indices
    num_slots, n = row_to_slot.shape[0], block.intermediate
    preact = x.new_empty((num_slots, block.preact_width)) if save else None
    a = x.new_empty((num_slots, n)) if activate else None
    spec = spec_of(x)
    config = gemm_config(schedule.block_m, n, x.dtype, spec, weight_tiles=2 if block.gated else 1)
    if num_slots:
        up_proj_kernel[persistent_grid(config, schedule.max_tiles, n, spec)](
            x, *x.stride(), block.up, *nk_strides(block.up, block.transposed),
            block.up_bias, *_bias_strides(block.up_bias),
            preact, a, row_to_slot, offsets, schedule.tile_offsets, schedule.tile_to_expert,
            K=x.shape[1], TOP_K=top_k, **block.kernel_options(), **config.launch_options(),
        )  # fmt: skip
    return preact, a


def _bias_strides(bias: Optional[Tensor]) -> Tuple[int, int]:
    return (0, 0) if bias is None else bias.stride()


def launch_down_dgrad(
    block: Block, dout: Tensor, weights: Tensor, preact: Tensor, indices: Indices, schedule: Schedule, needs: Needs
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """(dpreact, activation times routing weight, partial sums of <dout, y>), each None where nothing needs it.

    A recomputed preact is overwritten by dpreact: nobody else has seen it.
    """
    from ._triton.experts import down_dgrad_kernel
    from ._triton.rows import bias_dot_kernel

    offsets, row_to_slot, _ = indices
    num_slots, n = row_to_slot.shape[0], block.intermediate
    spec = spec_of(dout)
    config = dgrad_config(schedule.block_m, n, dout.dtype, spec, block.interleaved)
    dpreact = scaled_act = partials = None
    if needs.x or needs.up or needs.up_bias:
        dpreact = preact if block.recompute else torch.empty_like(preact)
    if needs.down:
        scaled_act = dout.new_empty((num_slots, n))
    n_tiles = -(-n // config.block_n)
    if needs.weights:
        partials = dout.new_empty((n_tiles + (block.down_bias is not None), num_slots), dtype=torch.float32)
    map_args = (row_to_slot, offsets, schedule.tile_offsets, schedule.tile_to_expert)
    down_dgrad_kernel[persistent_grid(config, schedule.max_tiles, n, spec)](
        dout, *dout.stride(), block.down, *nk_strides(block.down, not block.transposed), weights,
        preact, dpreact, scaled_act, partials, num_slots, *map_args,
        K=dout.shape[1], TOP_K=weights.shape[1], **block.kernel_options(), **config.launch_options(),
    )  # fmt: skip
    if needs.weights and block.down_bias is not None:
        bias_dot_kernel[(schedule.max_tiles,)](
            dout, dout.stride(0), block.down_bias, *block.down_bias.stride(), partials[n_tiles], *map_args,
            NUM_EXPERTS=block.num_experts, N=dout.shape[1], TOP_K=weights.shape[1],
            BLOCK_M=schedule.block_m, BLOCK_N=64,
        )  # fmt: skip
    return dpreact, scaled_act, partials


def _sum_partials(partials: Tensor, slot_to_row: Tensor, out: Tensor) -> None:
    from ._triton.rows import sum_partials_kernel

    num_slots = slot_to_row.shape[0]
    sum_partials_kernel[(-(-num_slots // 256),)](
        partials, partials.stride(0), slot_to_row, out, num_slots, NUM_PARTIALS=partials.shape[0], BLOCK=256
    )


def forward_triton(block: Block, x: Tensor, weights: Tensor, indices: Indices, save: bool) -> Tuple[Tensor, Tensor]:
    """(out (T, H), preact (S, P) or empty) by the Triton kernels."""
    offsets, row_to_slot, slot_to_row = indices
    num_slots, top_k = row_to_slot.shape[0], weights.shape[1]
    schedule = make_schedule(offsets, num_slots, choose_block_m(num_slots, block.num_experts, x.dtype))
    preact, a = launch_up_proj(block, x, top_k, indices, schedule, save, activate=True)
    down_strides = nk_strides(block.down, block.transposed)
    y = launch_gemm(a, block.down, down_strides, x.shape[1], block.down_bias, offsets, schedule)
    return launch_combine(y, weights, slot_to_row, top_k), preact if save else x.new_empty(0)


def backward_triton(
    block: Block,
    dout: Tensor,
    x: Optional[Tensor],
    weights: Tensor,
    preact: Tensor,
    indices: Indices,
    needs: Needs,
    grads: Grads,
) -> None:
    """Fills `grads` by the Triton kernels, in an order that lets each buffer go before the next one comes.

    x is for the gradient of the up-projection and for recomputing alone.
    """
    offsets, row_to_slot, slot_to_row = indices
    num_slots, top_k = row_to_slot.shape[0], weights.shape[1]
    dout = unit_rows(dout)
    schedule = make_schedule(offsets, num_slots, choose_block_m(num_slots, block.num_experts, dout.dtype))
    if block.recompute:
        preact, _ = launch_up_proj(block, x, top_k, indices, schedule, save=True, activate=False)
    dpreact, scaled_act, partials = launch_down_dgrad(block, dout, weights, preact, indices, schedule, needs)
    del preact
    if needs.weights:
        _sum_partials(partials, slot_to_row, grads.weights)
    if needs.down:
        dw = grads.down.transpose(1, 2) if block.transposed else grads.down
        launch_wgrad(dout, top_k, scaled_act, 0, row_to_slot, offsets, dw)
    del scaled_act, partials
    if needs.down_bias:
        launch_group_sum(dout, top_k, weights, row_to_slot, offsets, grads.down_bias)
    if needs.up:
        dw = grads.up.transpose(1, 2) if block.transposed else grads.up
        launch_wgrad(dpreact, 0, x, top_k, row_to_slot, offsets, dw)
    if needs.up_bias:
        launch_group_sum(dpreact, 0, None, None, offsets, grads.up_bias)
    if needs.x:
        up_strides = nk_strides(block.up, not block.transposed)
        dx_rows = launch_gemm(dpreact, block.up, up_strides, dout.shape[1], None, offsets, schedule)
        launch_combine(dx_rows, None, slot_to_row, top_k, out=grads.x)


@torch.library.custom_op(add_op_namespace_prefix("experts"), mutates_args=())
def _experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: str,
    parameters: Sequence[float],
    flags: Sequence[bool],
    save: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    if x.device.type == "cpu":
        indices = route_indices(top_k_index, block.num_experts)
        return (*_torch_experts.forward(block, x, top_k_weights, indices, save), *indices)
    with on_device_of(x):
        indices = route_indices(top_k_index, block.num_experts)
        return (*forward_triton(block, x, top_k_weights, indices, save), *indices)


@torch.library.register_fake(add_op_namespace_prefix("experts"))
def _experts_fake(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, activation, parameters, flags, save):
    num_slots = top_k_index.shape[0] * top_k_index.shape[1]
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    return (
        x.new_empty((x.shape[0], x.shape[1])),
        x.new_empty((num_slots, block.preact_width) if save else (0,)),
        x.new_empty(up.shape[0] + 1, dtype=torch.int32),
        x.new_empty(num_slots, dtype=torch.int32),
        x.new_empty(num_slots, dtype=torch.int32),
    )


@torch.library.custom_op(add_op_namespace_prefix("experts_backward"), mutates_args=())
def _experts_backward(
    dout: Tensor,
    x: Optional[Tensor],
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    preact: Tensor,
    expert_offsets: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    activation: str,
    parameters: Sequence[float],
    flags: Sequence[bool],
    needs: Sequence[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    wanted = Needs(*needs)
    grads = empty_grads(wanted, block, dout, top_k_weights)
    indices = (expert_offsets, row_to_slot, slot_to_row)
    if dout.device.type == "cpu":
        _torch_experts.backward(block, dout, x, top_k_weights, preact, indices, wanted, grads)
    else:
        with on_device_of(dout):
            backward_triton(block, dout, x, top_k_weights, preact, indices, wanted, grads)
    return tuple(grads)


@torch.library.register_fake(add_op_namespace_prefix("experts_backward"))
def _experts_backward_fake(
    dout, x, top_k_weights, up, down, up_bias, down_bias, preact, expert_offsets, row_to_slot, slot_to_row,
    activation, parameters, flags, needs,
):  # fmt: skip
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    return tuple(empty_grads(Needs(*needs), block, dout, top_k_weights))


def _setup_context(ctx, inputs, output):
    x, _, top_k_weights, up, down, up_bias, down_bias, activation, parameters, flags, _ = inputs
    _, preact, *indices = output
    ctx.kind = activation, parameters, flags
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(preact)
    reads_x = ctx.needs_input_grad[3] or flags[-1]  # recompute
    ctx.save_for_backward(x if reads_x else None, top_k_weights, up, down, up_bias, down_bias, preact, *indices)


def _backward(ctx, dout, *_):
    wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5, 6)]
    if dout is None:
        return (None,) * len(ctx.needs_input_grad)
    grads = ops.experts_backward(dout, *ctx.saved_tensors, *ctx.kind, wanted)
    dx, dweights, dup, ddown, dup_bias, ddown_bias = (g if want else None for g, want in zip(grads, wanted))
    return (dx, None, dweights, dup, ddown, dup_bias, ddown_bias) + (None,) * 4


torch.library.register_autograd(add_op_namespace_prefix("experts"), _backward, setup_context=_setup_context)


def grouped_mm_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Optional[Tensor] = None,
    down_proj_bias: Optional[Tensor] = None,
    activation: Union[str, Activation] = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    recompute: bool = False,
) -> Tensor:
    """The experts block: out[t] = sum over k of top_k_weights[t, k] * expert(top_k_index[t, k], hidden_states[t]),

    expert(e, x) = down_proj[e] a(gate_up_proj[e] x + gate_up_proj_bias[e]) + down_proj_bias[e], with the activation a
    of `Activation`. Ids outside [0, E) are sentinels: the contract is that of `route`.

    hidden_states: (T, H) bf16, fp16 or fp32 (fp64, too, on CPU). top_k_index: (T, top_k) int32 or int64.
    top_k_weights: (T, top_k), any of these floating dtypes, kept as it is. gate_up_proj: (E, 2 I, H), or (E, I, H)
    if not gated; down_proj: (E, H, I); with transposed=True (E, H, 2 I) and (E, I, H); of any strides, in the dtype of
    hidden_states. Biases: (E, 2 I) or (E, I), and (E, H). interleaved: gate and up columns alternate instead of
    [gate | up]. E up to 1024. Returns (T, H) in the dtype of hidden_states. Under autocast hidden states, weights and
    biases are cast as `F.linear` does.

    Differentiable once, in reverse mode, in all floating tensors; only gradients that are asked for are computed.
    Sums are in fp32 (fp64 for fp64) and in fixed order: results repeat bitwise. No host sync.

    Memory in elements of the dtype, S = T top_k, P = 2 I (I if not gated), small index tensors apart. Saved for
    backward: T H (hidden_states itself; not if gate_up_proj is frozen) + S P; with recompute=True T H. Transient in
    forward: S I, then
    S (I + H); in backward, beyond the gradients: S P + S I, then S P + S H; with recompute=True the same, since the
    recomputed pre-activation becomes its own gradient in place.

    Raises TypeError or ValueError that names the argument, before anything is launched.
    """
    kind = as_activation(activation)
    if not gated and (interleaved or kind.up_offset):
        raise ValueError("gated: expected True with interleaved or an activation with up_offset, got False")
    dtype = checks.autocast_dtype(hidden_states.device.type) if isinstance(hidden_states, Tensor) else None
    x, up, down, up_bias, down_bias = (
        checks.autocast(tensor, dtype)
        for tensor in (hidden_states, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    )
    checks.check_block(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed)
    tensors = (x, top_k_weights, up, down, up_bias, down_bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    out, *_ = ops.experts(
        x, top_k_index, top_k_weights.contiguous(), up, down, up_bias, down_bias,
        *pack_kind(kind, gated, interleaved, transposed, recompute), needs_grad and not recompute,
    )  # fmt: skip
    return out
