"""Parameters of experts modules that are no plain tensors: sharded ones run, quantized ones are refused by name."""

import itertools

import pytest
import torch
from experts_modules import EXPERTS, GPT_OSS, build, make_custom, make_inputs, run
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def shard(experts: torch.nn.Module, name: str, local: torch.Tensor, mesh, placement=Shard(0)) -> None:
    sharded = DTensor.from_local(local, mesh, [placement], run_check=False)
    setattr(experts, name, torch.nn.Parameter(sharded, requires_grad=experts.get_parameter(name).requires_grad))


def test_expert_parallel_dtensors(implementation, two_ranks, device):
    """A rank's half of the experts as DTensors, as transformers shards them: as without, and DTensor gradients."""
    experts = build(GPT_OSS, device)
    *inputs, cotangent = make_inputs(device)
    inputs[1].masked_fill_(inputs[1] == 1, EXPERTS)
    expected = run(experts, implementation, inputs, cotangent)
    for name, parameter in list(experts.named_parameters()):
        shard(experts, name, parameter.detach(), two_ranks)
    actual = run(experts, implementation, inputs, cotangent)
    for name, tensor in actual.items():
        parameter = dict(experts.named_parameters()).get(name)
        assert isinstance(tensor, DTensor) == (parameter is not None)
        assert parameter is None or tensor.shape == parameter.shape == (2 * EXPERTS, *parameter.shape[1:])
        assert torch.equal(tensor if parameter is None else tensor.to_local(), expected[name])


class Plain(torch.Tensor):
    """A subclass that only adds a name."""


class OwnFunctions(torch.Tensor):
    """As torchao's for FP8 training: some functions are other ones, such as grouped GEMMs."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class OwnOperations(torch.Tensor):
    """As torchao's quantized weights: a shape and a dtype over other data, with few operations."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.view):
            return cls(args[0])
        raise NotImplementedError(f"{function} of quantized tensors")


def convert(experts: torch.nn.Module, name: str, function) -> None:
    converted = function(getattr(experts, name).detach())
    setattr(experts, name, torch.nn.Parameter(converted, requires_grad=False))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"])
@pytest.mark.parametrize("kind, sharded", [(OwnFunctions, False), (OwnOperations, False), (OwnOperations, True)])
def test_parameters_with_operations_of_their_own_are_named(implementation, two_ranks, device, name, kind, sharded):
    """torchao's may also be what a DTensor is made of."""
    experts = build(GPT_OSS, device, implementation)
    convert(experts, name, OwnOperations if kind is OwnOperations else lambda tensor: tensor.as_subclass(kind))
    if sharded:
        shard(experts, name, getattr(experts, name), two_ranks)
    message = f"^{name}: expected a plain tensor or a DTensor, got {kind.__name__}, whose own"
    with pytest.raises(TypeError, match=message):
        experts(*make_inputs(device)[:3])


def test_dtypes_and_numbers_of_experts(implementation, device):
    """The output has the dtype of hidden states, as in eager: norms may be fp32 before bf16 experts, say."""
    experts = build(GPT_OSS, device, implementation).to(torch.bfloat16)
    x, ids, weights, _ = make_inputs(device)
    for dtype in (torch.bfloat16, torch.float32):
        assert experts(x.to(dtype), ids, weights).dtype == dtype
    experts.num_experts += 1
    with pytest.raises(ValueError, match=f"num_experts: expected {EXPERTS} as in gate_up_proj, got {EXPERTS + 1}"):
        experts(x, ids, weights)
    experts.num_experts -= 1
    convert(experts, "gate_up_proj", torch.Tensor.byte)
    with pytest.raises(TypeError, match="^gate_up_proj: expected one of .*, got torch.uint8"):
        experts(x, ids, weights)


@pytest.mark.parametrize("way", ["compile", "export", "functional", "vmap", "subclass"])
def test_tracing_functorch_and_plain_subclasses_pass(implementation, device, way, fresh_compiler):
    """FakeTensor, FunctionalTensor and what functorch wraps are the compiler's and not the user's.

    Cold: the gate of a class that was not seen before is probed on real values all the same.
    """
    experts = make_custom(device)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, "eager", inputs, cotangent)["output"]
    experts.config._experts_implementation = implementation
    with torch.no_grad():
        if way == "compile":
            actual = torch.compile(experts, fullgraph=True, backend="aot_eager")(*inputs)
        elif way == "export":
            actual = torch.export.export(experts, tuple(inputs), strict=False).module()(*inputs)
        elif way == "functional":
            actual = torch.func.functionalize(lambda *args: experts(*args))(*inputs)
        elif way == "subclass":
            for name in ("gate_up_proj", "down_proj"):
                convert(experts, name, lambda tensor: tensor.as_subclass(Plain))
            actual = experts(*inputs)
        else:
            parameters = {name: torch.stack((p, p)) for name, p in experts.named_parameters()}
            call = torch.vmap(lambda given: torch.func.functional_call(experts, given, tuple(inputs)))
            actual = call(parameters)[1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("up, down, ranks, refused", [
    (Shard(0), Shard(0), 2, False),
    (Replicate(), Replicate(), 2, False),
    (_StridedShard(1, split_factor=2), Shard(2), 2, False),
    (Shard(1), Shard(2), 2, True),
    (Shard(1), Shard(2), 1, False),
], ids=["experts", "whole", "halves", "gate-or-up", "both"])  # fmt: skip
def test_parts_of_gate_and_up(implementation, two_ranks, device, up, down, ranks, refused, compiled, fresh_compiler):
    """A plain Shard of both, one after the other, would give a rank one of them, cut in two as if it were both."""
    experts = make_custom(device)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, implementation, inputs, cotangent)["output"]
    mesh = two_ranks if ranks == 2 else DeviceMesh(device, [0])
    for name, placement in (("gate_up_proj", up), ("down_proj", down)):
        shard(experts, name, getattr(experts, name).detach(), mesh, placement)
    forward = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    if not refused:
        assert torch.equal(forward(*inputs), expected)
        return
    with pytest.raises((ValueError, RuntimeError), match="gate_up_proj: expected parts with as much of gate as of up"):
        forward(*inputs)


@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_which_parts_are_halves(module, two_ranks, device, transposed, concatenated):
    """Gate and up that alternate may be cut anywhere, and so may an up-projection without a gate."""
    experts, read = torch.nn.Module(), module("integrations.transformers_gate").local_parameter
    experts.is_transposed, experts.is_concatenated = transposed, concatenated
    for name, dim in itertools.product(("gate_up_proj", "up_proj"), (1, 2)):
        experts.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 4, 6, device=device)))
        shard(experts, name, getattr(experts, name).detach(), two_ranks, Shard(dim))
        if name == "gate_up_proj" and concatenated and dim == 1 + transposed:
            with pytest.raises(ValueError, match=f"gate_up_proj: .* as much of gate as of up, got Shard.{dim}"):
                read(experts, name)
        else:
            assert read(experts, name).shape == (2, 4, 6)
