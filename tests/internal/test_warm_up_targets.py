"""What `warm_up` takes and refuses, and what its results must not depend on."""

import pytest
import torch
from experts_modules import Ungated
from layers_to_warm import experts_of, fp8, qwen3
from poison import poisoned_allocations

pytest_plugins = ["driver_stub", "layers_to_warm"]


def test_scales_of_activations_say_nothing_of_inputs(grouped_moe, compiles):
    """They are in fp32, as those of weights are."""
    experts = experts_of(fp8(activation_scheme="static"))
    assert grouped_moe.warm_up(experts, (1, 64), backward=True, progress=False) > 15
    assert grouped_moe.warm_up(fp8(), (1, 64), backward=True, progress=False) == 0


@pytest.mark.parametrize("kind", ["unknown", "fp8", "frozen"])
def test_parametrized_layers_that_calls_refuse(grouped_moe, compiles, kind):
    """For a step of their class, or because codes are computed."""

    class Unknown(Ungated):
        def _apply_router(self):
            pass

    frozen = grouped_moe.GroupedLinear(2, 64, 64).quantize_blocks_()
    layer = {"unknown": Unknown, "fp8": lambda: experts_of(fp8()), "frozen": lambda: frozen}[kind]()
    name = "weight" if layer is frozen else "down_proj"
    torch.nn.utils.parametrize.register_parametrization(layer, name, torch.nn.Identity())
    with pytest.raises(ValueError, match="_apply_router" if kind == "unknown" else f"^{name}: .*got a parametrization"):
        grouped_moe.warm_up(layer, (1, 8), progress=False)


@pytest.mark.parametrize("kind", ["experts", "model", "linear"])
def test_parameters_that_are_sharded_by_fsdp(grouped_moe, compiles, two_ranks, kind):
    """A forward has them whole, as they are between unshard and reshard."""
    from torch.distributed.fsdp import fully_shard

    model = grouped_moe.GroupedLinear(8, 256, 384) if kind == "linear" else qwen3()
    sharded = experts_of(model) if kind == "experts" else model
    fully_shard(sharded, mesh=two_ranks)
    with pytest.raises(ValueError, match="^target: expected whole parameters .*fully_shard.* call unshard"):
        grouped_moe.warm_up(model, (1, 64), backward=True, progress=False)
    sharded.unshard()
    if kind == "experts":
        sharded.num_experts += 1
        with pytest.raises(ValueError, match="^num_experts: expected 64 as in gate_up_proj, got 65"):
            grouped_moe.warm_up(model, (1, 64), progress=False)
        sharded.num_experts -= 1
    assert grouped_moe.warm_up(model, (1, 64), backward=True, progress=False) > 5


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.autograd.detect_anomaly])
@pytest.mark.parametrize("make", [qwen3, lambda grouped_moe: grouped_moe.GroupedLinear(8, 256, 384, delay_wgrad=True)])
def test_a_mode_of_the_callers_changes_nothing(grouped_moe, compiles, make, mode):
    """In the first pass nothing is launched: gradients are memory that nobody wrote."""
    model = make() if make is qwen3 else make(grouped_moe)
    with mode(), poisoned_allocations():
        count = grouped_moe.warm_up(model, (1, 64), backward=True, progress=False)
    assert count > 5 and grouped_moe.warm_up(model, (1, 64), backward=True, progress=False) == 0


def test_a_forward_that_others_put_there_is_not_run(grouped_moe, compiles):
    """As accelerate does: it would compute with the module's own parameters, and change their main_grad."""
    layer = grouped_moe.GroupedLinear(8, 256, 384, accumulate_into_main_grad=True)
    forward, calls = layer.forward, []
    layer.forward = lambda *args: calls.append(args) or forward(*args)
    layer.weight.main_grad = torch.zeros(8, 384, 256)
    assert grouped_moe.warm_up(layer, (1, 64), backward=True, progress=False) > 5 and not calls


def test_parameters_that_are_made_in_inference_mode(grouped_moe, compiles):
    with torch.inference_mode():
        layer = grouped_moe.GroupedLinear(8, 256, 384)
    assert grouped_moe.warm_up(layer, (1, 64), progress=False) > 2


def test_on_a_cpu_there_is_nothing_to_compile(grouped_moe):
    assert grouped_moe.warm_up(Ungated(), backward=True) == 0
    assert grouped_moe.warm_up(grouped_moe.GroupedLinear(2, 16, 16)) == 0


@pytest.mark.parametrize("change, error, message", [
    ({"target": "model"}, TypeError, "^target: expected a torch.nn.Module, got str"),
    ({"target": torch.nn.Linear(2, 2)}, ValueError, "^target: expected experts or GroupedLinear .* got Linear"),
    ({"target": Ungated().to("meta")}, ValueError, "^target: .*meta"),
    ({"num_tokens": 4096}, TypeError, "^num_tokens: expected a pair of ints, got 4096"),
    ({"num_tokens": (1, 2.0)}, TypeError, "^num_tokens: expected a pair of ints"),
    ({"num_tokens": (1, 2, 3)}, ValueError, "^num_tokens: "),
    ({"num_tokens": (0, 8)}, ValueError, "^num_tokens: .*1 or more, got \\(0, 8\\)"),
    ({"num_tokens": (8, 4)}, ValueError, "^num_tokens: "),
    ({"backward": 1}, TypeError, "^backward: expected True or False, got 1"),
    ({"progress": None}, TypeError, "^progress: expected True or False, got None"),
    ({"top_k": 2.0}, TypeError, "^top_k: expected an int or None, got float"),
    ({"top_k": 0}, ValueError, "^top_k: expected above 0, got 0"),
], ids=str)  # fmt: skip
def test_wrong_arguments(grouped_moe, change, error, message):
    with pytest.raises(error, match=message):
        grouped_moe.warm_up(**{"target": Ungated(), **change})


def test_experts_that_lie_otherwise(grouped_moe, compiles):
    """As llama4's, which keep their own code: they are no target, and in a model they are left out."""
    experts, other = Ungated(), Ungated()
    other.up_proj = torch.nn.Parameter(other.up_proj.detach().mT.contiguous())
    with pytest.raises(ValueError, match="^target: expected experts or GroupedLinear layers in it, got Ungated"):
        grouped_moe.warm_up(other, progress=False)
    assert grouped_moe.warm_up(torch.nn.Sequential(other, experts), (1, 2), top_k=2, progress=False) > 0


def test_an_unknown_top_k(grouped_moe, compiles):
    experts = Ungated()
    del experts.top_k
    with pytest.raises(ValueError, match="^top_k: expected the number of experts of a token"):
        grouped_moe.warm_up(experts, progress=False)
    assert grouped_moe.warm_up(experts, (1, 2), top_k=2, progress=False) > 0
