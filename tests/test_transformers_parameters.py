"""Parameters of experts modules that are no plain tensors: sharded ones run, quantized ones are refused by name."""

import pytest
import torch
from test_shim import HIDDEN, NUM_EXPERTS, TOKENS
from test_shim import make_experts as make_biased
from test_shim import make_inputs as make_biased_inputs
from test_transformers_experts import make_custom, make_inputs, run
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only


@pytest.fixture
def expert_mesh(device):
    """Two ranks, of which this is the first, without the second: nothing here communicates."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh(device, (2,))
    torch.distributed.destroy_process_group()


def test_expert_parallel_dtensors(implementation, expert_mesh, device):
    """A rank's half of the experts as DTensors, as transformers shards them: as without, and DTensor gradients."""
    experts = make_biased(device, implementation, num_experts=NUM_EXPERTS // 2)
    inputs = make_biased_inputs(device, num_experts=NUM_EXPERTS // 2)
    cotangent = torch.randn(TOKENS, HIDDEN, device=device)
    parameters = dict(experts.named_parameters())
    expected = experts(*inputs)
    grads = torch.autograd.grad(expected, (inputs[0], inputs[2], *parameters.values()), cotangent)
    for name, parameter in parameters.items():
        sharded = DTensor.from_local(parameter.detach(), expert_mesh, [Shard(0)], run_check=False)
        setattr(experts, name, torch.nn.Parameter(sharded))
    leaves = (inputs[0], inputs[2], *experts.parameters())
    actual = experts(*inputs)
    actual_grads = torch.autograd.grad(actual, leaves, cotangent)
    assert torch.equal(actual, expected)
    for leaf, grad, reference in zip(leaves, actual_grads, grads):
        assert isinstance(grad, DTensor) == isinstance(leaf, DTensor) and grad.shape == leaf.shape
        assert torch.equal(grad.to_local() if isinstance(grad, DTensor) else grad, reference)
    assert experts.gate_up_proj.shape[0] == NUM_EXPERTS


class Plain(torch.Tensor):
    """A subclass that only adds a name."""


class Fp8Training(torch.Tensor):
    """As torchao's for FP8 training: grouped GEMMs are other ones, and all else is as with the tensor inside."""

    @staticmethod
    def __new__(cls, tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)
        made.inside = tensor
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "grouped_mm" in function.__name__:
            raise NotImplementedError("an FP8 GEMM")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda each: each.inside, (args, kwargs or {}))
        out = function(*args, **kwargs)
        return cls(out) if function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.view) else out


class Quantized(torch.Tensor):
    """As torchao's quantized weights: a shape and a dtype over other data, with few operations."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)
        made.data_in_int8 = tensor.to(torch.int8)
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of quantized tensors")


MAKERS = {
    "training": Fp8Training,
    "quantized": Quantized,
    "plain": lambda tensor: tensor.as_subclass(Plain),
}


def convert(experts: torch.nn.Module, name: str, kind: str) -> None:
    tensor = getattr(experts, name).detach()
    setattr(experts, name, torch.nn.Parameter(MAKERS[kind](tensor), requires_grad=False))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("kind", ["training", "quantized"])
def test_parameters_with_operations_of_their_own_are_named(implementation, device, name, kind):
    experts = make_custom(device)
    experts.config._experts_implementation = implementation
    convert(experts, name, kind)
    message = f"^{name}: expected a plain tensor or a DTensor, got {type(getattr(experts, name)).__name__}, whose own"
    with pytest.raises(TypeError, match=message):
        experts(*make_inputs(device)[:3])


def test_biases_with_operations_of_their_own_are_named(implementation, device):
    experts = make_biased(device, implementation)
    convert(experts, "down_proj_bias", "training")
    with pytest.raises(TypeError, match="^down_proj_bias: expected a plain tensor or a DTensor, got Fp8Training"):
        experts(*make_biased_inputs(device))


def test_a_shard_with_operations_of_its_own_is_named(implementation, expert_mesh, device):
    """torchao's may be what a DTensor is made of."""
    experts = make_custom(device)
    experts.config._experts_implementation = implementation
    local = MAKERS["training"](experts.down_proj.detach())
    sharded = DTensor.from_local(local, expert_mesh, [Shard(0)], run_check=False)
    experts.down_proj = torch.nn.Parameter(sharded, requires_grad=False)
    with pytest.raises(TypeError, match="^down_proj: expected a plain tensor or a DTensor, got Fp8Training"):
        experts(*make_inputs(device)[:3])


def test_tensors_that_only_have_another_class_pass(implementation, device):
    experts = make_custom(device)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, implementation, inputs, cotangent)
    for name in ("gate_up_proj", "down_proj"):
        convert(experts, name, "plain")
    with torch.no_grad():
        assert torch.equal(experts(*inputs), expected.out)


@pytest.mark.parametrize("way", ["compile", "export", "functional", "vmap"])
def test_tracing_and_functorch_pass(implementation, device, way):
    """FakeTensor, FunctionalTensor and what functorch wraps are the compiler's and not the user's."""
    experts = make_custom(device)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, implementation, inputs, cotangent).out
    with torch.no_grad():
        if way == "compile":
            actual = torch.compile(experts, fullgraph=True, backend="aot_eager")(*inputs)
        elif way == "export":
            actual = torch.export.export(experts, tuple(inputs), strict=False).module()(*inputs)
        elif way == "functional":
            actual = torch.func.functionalize(lambda *args: experts(*args))(*inputs)
        else:
            parameters = {name: torch.stack((p, p)) for name, p in experts.named_parameters()}
            call = torch.vmap(lambda given: torch.func.functional_call(experts, given, tuple(inputs)))
            actual = call(parameters)[1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
