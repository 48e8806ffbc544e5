"""LoRA by peft on experts that are spread over ranks, next to one process: checks that `ranks` runs."""

import warnings
from typing import Dict, Sequence

import expert_parallel_models
import peft
import torch
import torch.distributed as dist
from expert_parallel import OURS, raised
from expert_parallel_models import WITH_MOST, assert_near, batches, load, load_whole, own, prepare, save_model, shared
from torch import Tensor, nn
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size

__all__ = ["prepare"]

BOTH, ONE = ("experts.gate_up_proj", "experts.down_proj"), ("experts.gate_up_proj",)


def add_adapters(model: nn.Module, targets: Sequence[str]) -> nn.Module:
    """The same ones on all ranks."""
    torch.manual_seed(5)
    options = {"r": 3, "lora_alpha": 6, "target_modules": [], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(target_parameters=list(targets), **options))


def gradients(model: nn.Module) -> Dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_logits_near(what: str, model: nn.Module, one: nn.Module, ids: Sequence[Tensor]) -> None:
    """Those of this rank's batch. `one` is in one process, and gets all batches."""
    with torch.no_grad():
        got, want = model(input_ids=ids[rank()]).logits, one(input_ids=torch.cat(ids)).logits
    assert_near(what, got, want.chunk(size())[rank()])


def check_logits_and_gradients_of_adapters():
    """The gradient of all batches' mean loss, on every rank; twice the same, with and without checkpointing."""
    folder, ids = save_model(), next(batches(1))
    cases = [(own(), WITH_MOST, BOTH), (own(), OURS, BOTH), (shared(), OURS, ONE)]
    if size() == 4:
        cases += [
            ({"fsdp_size": 4, "ep_size": 2}, OURS, BOTH),
            ({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, OURS, ONE),
        ]
    for layout, name, targets in cases:
        sharing = layout.get("tp_size", 1)
        given, mine = torch.cat(ids[: size() // sharing]), rank() // sharing
        one = add_adapters(load_whole(folder), targets)
        want = one(input_ids=given, labels=given)
        want.loss.backward()
        model = add_adapters(load(folder, name, layout), targets)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="grouped_moe: LoRA")
            for checkpointing in (False, True):
                model.zero_grad()
                if checkpointing:
                    model.gradient_checkpointing_enable()
                got = model(input_ids=ids[mine], labels=ids[mine])
                assert_near(f"{name}, {layout}, logits", got.logits, want.logits.chunk(size() // sharing)[mine])
                got.loss.backward()
                found = gradients(model)
                assert found.keys() == gradients(one).keys()
                for parameter, right in gradients(one).items():
                    mean = found[parameter].clone()
                    dist.all_reduce(mean, dist.ReduceOp.SUM)
                    assert_near(f"{name}, {layout}, {parameter}", mean / size(), right)
                    if layout["ep_size"] == size():
                        assert_near(f"{name}, {layout}, {parameter}, before the mean", found[parameter], right)


def check_adapters_of_one_weight():
    """Those of the other one are disabled."""
    folder, ids = save_model(), next(batches(1))
    model, one = add_adapters(load(folder, OURS, own()), BOTH), add_adapters(load_whole(folder), BOTH)
    for disabled in BOTH:
        for wrapper in (*model.modules(), *one.modules()):
            if isinstance(wrapper, peft.tuners.lora.ParamWrapper):
                wrapper.enable_adapters(not disabled.endswith(wrapper.parameter_name))
        assert_logits_near(f"without {disabled}", model, one, ids)


def check_saved_adapters():
    """By all ranks, as the gathering of sharded weights asks for; one process loads and merges what the first wrote."""
    folder, ids, saved = save_model(), next(batches(1)), expert_parallel_models.shared_folder()
    model = add_adapters(load(folder, OURS, own()), BOTH)
    model.save_pretrained(saved, is_main_process=rank() == 0)
    dist.barrier()
    assert "mixed torch.Tensor and DTensor" in raised(RuntimeError, model.merge_adapter)
    model = add_adapters(load(folder, OURS, own()), BOTH)
    one = peft.PeftModel.from_pretrained(load_whole(folder), saved).merge_and_unload()
    assert_logits_near("logits", model, one, ids)


def check_what_is_left_to_peft():
    """A warning names why, before peft's own error."""
    model = add_adapters(load(save_model(), "all_to_all", own()), ONE)
    ids = next(batches(1))[rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "mixed torch.Tensor and DTensor" in raised(RuntimeError, lambda: model(input_ids=ids))
    assert any("no ep_implementation of this package" in str(warning.message) for warning in caught)


def check_compile():
    """Fullgraph, where a rank's shared batch makes all of the model one graph."""
    model, ids = add_adapters(load(save_model(), OURS, shared()), ONE), next(batches(1))[0]
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    losses, found = [], []
    for forward in (model, compiled):
        model.zero_grad()
        losses.append(forward(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        found.append(gradients(model))
    assert_near("loss", losses[1], losses[0])
    for name, grad in found[0].items():
        assert_near(name, found[1][name], grad)


check_compile.sizes = (2,)
