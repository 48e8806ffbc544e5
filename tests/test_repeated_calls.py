"""A linear layer's calls and steps that repeat: which plan they get, and over which tensors it launches.

On the stub of a GPU, by Triton's own launchers.
"""

import contextlib
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest_plugins = ["driver_stub"]
BF16 = torch.bfloat16
LEAST_ADDRESS = 2**22  # of memory, and more than all sizes here


def test_a_step_keeps_its_plans(module, grouped_moe, sent, linear, monkeypatch):
    """Later steps launch over their own tensors; what hooks return in other strides has a plan of its own, or none."""
    keys = []
    monkeypatch.setattr(linear, "plan_key", lambda *args: keys.append(args) or module("define").plan_key(*args))
    sizes, weight = torch.tensor([512] * 3), torch.zeros(3, 512, 256, dtype=BF16)

    def step(unpack=None, weight=weight) -> int:
        """How many plans of backwards there are after it."""
        x = torch.zeros(1536, 256, dtype=BF16)
        leaves, dy = [x.requires_grad_(), weight.requires_grad_()], torch.zeros(1536, 512, dtype=BF16)
        sent.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack)
        with hooks if unpack else contextlib.nullcontext():
            y = grouped_moe.grouped_linear(x, weight, sizes)
        dx, dw = torch.autograd.grad(y, leaves, dy)
        places = [{arg for arg in args if isinstance(arg, int)} | {arg[1] for arg in args if isinstance(arg, tuple)}
                  for args in sent]  # fmt: skip
        assert len(places) == 4
        assert {dy.data_ptr(), weight.data_ptr(), dx.data_ptr()} <= places[2]
        assert {dy.data_ptr(), dw.data_ptr()} <= places[3]
        assert (x.data_ptr() in places[3]) == (unpack not in (wide, spaced))
        return len(linear._backward_plans)

    def wide(tensor):
        return tensor if tensor.dim() != 2 else tensor.repeat(1, 2)[:, : tensor.shape[1]]

    def spaced(tensor):
        return tensor if tensor.dim() != 2 else tensor.repeat_interleave(2, 1)[:, ::2]

    assert [step() for _ in range(5)] == [1] * 5
    assert len(keys) == 2 + 2  # of the first two steps
    assert [step(lambda tensor: tensor) for _ in range(3)] == [1] * 3
    assert [step(weight=torch.zeros(3, 512, 256, dtype=BF16)) for _ in range(3)] == [1] * 3
    assert step(spaced) == 1
    assert step(wide) == 2
    assert step() == 2


def test_scales_with_gaps_are_copied(grouped_moe, sent, linear):
    """As hooks of saved tensors may return them: kernels read them one after the other."""
    x, weight, dy = (torch.zeros(*shape, dtype=BF16) for shape in ((1536, 256), (3, 512, 256), (1536, 512)))
    bias, scales, sizes, spaced = torch.zeros(3, 512, dtype=BF16), torch.zeros(1536), torch.tensor([512] * 3), []

    def unpack(tensor):
        if tensor.shape != scales.shape:
            return tensor
        spaced.append(tensor.repeat_interleave(2)[::2])
        return spaced[-1]

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            y = grouped_moe.grouped_linear(x, weight, sizes, bias.requires_grad_(), scales)
        sent.clear()
        torch.autograd.grad(y, bias, dy)
        assert len(sent) == 2
        assert all(spaced[-1].data_ptr() not in args for args in sent)


@pytest.mark.parametrize("number", [3, 4, 5], ids=["no bias", "bias", "scaled bias"])
def test_what_is_missing_is_named(grouped_moe, linear, number):
    """Also by a call like others but for a tensor that it lacks."""
    x, weight, sizes = torch.zeros(48, 256, dtype=BF16), torch.zeros(3, 512, 256, dtype=BF16), torch.tensor([16] * 3)
    given = [x, weight, sizes, torch.zeros(3, 512, dtype=BF16), torch.zeros(48)][:number]
    for _ in range(4):
        grouped_moe.grouped_linear(*given)
    for place, name in enumerate(("x", "weight", "splits")):
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            grouped_moe.grouped_linear(*given[:place], None, *given[place + 1 :])
    with pytest.raises(ValueError, match="bias"):
        grouped_moe.grouped_linear(x, weight, sizes, None, torch.zeros(48))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_repeated_calls_need_no_key(module, grouped_moe, linear, monkeypatch):
    """A key is made of calls that are not like the last one in all that their plan depends on, or that are watched."""
    from triton import knobs

    keys, weight, hook = [], torch.zeros(3, 512, 256, dtype=BF16), lambda metadata: None
    monkeypatch.setattr(linear, "plan_key", lambda *args: keys.append(args) or module("define").plan_key(*args))
    memory = torch.zeros(1536 * 512 + 1, dtype=BF16)
    x, sizes = memory[: 1536 * 256].view(1536, 256), torch.tensor([512] * 3)

    def num_keys(x=x, weight=weight, sizes=sizes, **kwargs) -> int:
        keys.clear()
        grouped_moe.grouped_linear(x, weight, sizes, **kwargs)
        return len(keys)

    def others():
        yield num_keys(memory[1 : 1 + 1536 * 256].view(1536, 256))  # misaligned
        yield num_keys(memory[: 1536 * 512].view(1536, 512)[:, :256])  # strides
        yield num_keys(x[:768])
        yield num_keys(sizes=sizes.int())
        yield num_keys(sizes=torch.tensor([0, *[512] * 3]).cumsum(0))
        yield num_keys(bias=torch.zeros(3, 512, dtype=BF16))
        yield num_keys(weight=weight.half(), x=x.half())
        yield num_keys(weight=torch.zeros(3, 256, 512, dtype=BF16), transposed=True)
        modes = DispatchMode(), FakeTensorMode(allow_non_fake_inputs=True), FunctionalTensorMode(), FunctionMode()
        for watched in (*modes, torch.profiler.profile(), torch.autocast("cpu", BF16)):
            with watched:
                number = num_keys()
            yield number
        with torch.device("meta"), FunctionMode():
            number = num_keys()
        yield number
        keys.clear()
        torch.func.vmap(lambda x: grouped_moe.grouped_linear(x, weight, sizes))(x[None])
        yield len(keys)
        knobs.runtime.launch_enter_hook.add(hook)
        number = num_keys()
        knobs.runtime.launch_enter_hook.remove(hook)
        yield number

    assert [num_keys() for _ in range(5)] == [1, 1, 0, 0, 0]
    assert num_keys(memory.clone()[: 1536 * 256].view(1536, 256)) == 0  # other memory
    with torch.device("meta"):
        assert num_keys() == 0
    for number in others():
        assert number > 0
        assert [num_keys() for _ in range(3)][-1] == 0
    full = [torch.zeros(1536, 256), torch.zeros(3, 512, 256)]
    assert [num_keys(*full) for _ in range(4)] == [1] * 4  # the precision of fp32 can change


@pytest.mark.parametrize("with_scales", [None, False, True], ids=["no bias", "bias", "scaled bias"])
def test_a_weight_used_in_two_ways(module, grouped_moe, sent, linear, monkeypatch, with_scales):
    """Transposed or not, with any of the inputs frozen: what is launched is as without memory of calls before."""
    x, weight, dy = (torch.zeros(*shape, dtype=BF16) for shape in ((1536, 256), (3, 256, 256), (1536, 256)))
    bias, scales = torch.zeros(3, 256, dtype=BF16), torch.zeros(1536)
    sizes, leaves = torch.tensor([512] * 3), [x, weight, bias, scales][: 2 if with_scales is None else 3 + with_scales]
    names, ways = ("bias", "bias_scales"), list(itertools.product((False, True), repeat=len(leaves)))

    def run():
        """What is launched, but for addresses that nobody gave."""
        given = {tensor.data_ptr() for tensor in (*leaves, sizes, dy)}
        for transposed, wanted, _ in itertools.product((False, True), ways[1:], range(4)):  # the last two need no key
            for leaf, is_wanted in zip(leaves, wanted):
                leaf.requires_grad_(is_wanted)
            sent.clear()
            y = grouped_moe.grouped_linear(x, weight, sizes, **dict(zip(names, leaves[2:])), transposed=transposed)
            torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], dy)
            for args in sent:
                args = (part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,)))
                yield [arg for arg in args if not isinstance(arg, int) or arg < LEAST_ADDRESS or arg in given]

    got = list(run())
    monkeypatch.setattr(module("plan").Plans, "again", lambda *args: None)
    assert got == list(run())


def test_plans_launch_on_the_current_device_alone(module, linear, sent, monkeypatch):
    x, weight, sizes = torch.zeros(48, 256, dtype=BF16), torch.zeros(3, 512, 256, dtype=BF16), torch.tensor([16] * 3)
    plan = linear._plan_of(x, weight, sizes, None, None, False)
    plan(x, weight, sizes, None, None)
    for current in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(plan, "device", torch.device("cuda", 1))
            patch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
            direct = plan._compiled([0, 1, 2])
            sent.clear()
            assert (direct(x, weight, sizes, None, None) is None) == (current == 0)
            assert len(sent) == 2 * current


def test_repeated_calls_compile(grouped_moe, linear):
    """A call that was repeated is traced as any other."""
    x, weight, sizes = torch.zeros(48, 256, dtype=BF16), torch.zeros(3, 512, 256, dtype=BF16), torch.tensor([16] * 3)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    for _ in range(4):
        grouped_moe.grouped_linear(x, weight, sizes)
    torch.compile(lambda x: grouped_moe.grouped_linear(x, weight, sizes), fullgraph=True, backend=backend)(x)
    assert any("grouped_linear" in target for target in targets)


@pytest.mark.parametrize("with_bias", [False, True])
def test_plans_of_eager_calls_are_no_reason_to_compile_again(grouped_moe, linear, with_bias):
    weight, bias = torch.zeros(3, 512, 256, dtype=BF16), torch.zeros(3, 512, dtype=BF16) if with_bias else None
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(grouped_moe.grouped_linear, fullgraph=True, backend=counter)
    for rows in (48, 32, 64, 96):
        x, sizes = torch.zeros(rows, 256, dtype=BF16), torch.tensor([rows // 4] * 3)
        for _ in range(3):
            grouped_moe.grouped_linear(x, weight, sizes, bias)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x, weight, sizes, bias)
    assert len(linear._plans) == 4 and counter.frame_count == 1


def test_what_is_noted_is_bounded(module, grouped_moe, linear, monkeypatch):
    monkeypatch.setattr(module("plan"), "MAX_KEPT", 4)
    x, sizes = torch.zeros(48, 256, dtype=BF16), torch.tensor([16] * 3)
    weights = [torch.zeros(3, 512, 256, dtype=BF16) for _ in range(9)]
    for weight in weights:
        for _ in range(3):
            grouped_moe.grouped_linear(x, weight, sizes)
        assert len(linear._plans.repeated) <= 4


def test_guards_of_other_versions(module, grouped_moe, linear, monkeypatch):
    def guards(*tensors):
        raise AssertionError("called with what it does not take")

    monkeypatch.setattr(module("plan"), "_dynamo_guards", lambda name: guards)
    x, weight, sizes = torch.zeros(48, 256, dtype=BF16), torch.zeros(3, 512, 256, dtype=BF16), torch.tensor([16] * 3)
    for _ in range(4):
        grouped_moe.grouped_linear(x, weight, sizes)
