"""Whole models, and eager experts, that are spread over ranks, next to one process: checks that `ranks` runs."""

import math
import tempfile
from typing import Dict, Iterator, List, Sequence

import expert_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from expert_parallel import OURS, grouped_moe, raised
from poison import poisoned_allocations
from ranks import device
from torch import Tensor
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

WITH_MOST, BATCH, CONTEXT, VOCABULARY = "with ep_max_tokens of a model", 2, 12, 64
CONFIG = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    num_hidden_layers=2, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True,
)  # fmt: skip
# fp32: sums in another order are off by 2^-24 each, two layers forward and back make a few 1e-7 of the largest number.
BOUND = 5e-6


def prepare() -> None:
    grouped_moe.register_experts_implementation(OURS)
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=4 * BATCH * CONTEXT)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def shared_folder() -> str:
    """A new folder, the same on all ranks."""
    folder = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


def save_model() -> str:
    """The folder of a model that all ranks can load. Experts matter: their outputs are as large as the rest."""
    folder = shared_folder()
    if rank() == 0:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG))
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.data.mul_(10.0)
            layer.mlp.experts.down_proj.data.mul_(10.0)
        model.save_pretrained(folder)
    dist.barrier()
    return folder


def load(folder: str, name: str, layout: Dict[str, int], **options) -> PreTrainedModel:
    config = DistributedConfig(**layout, ep_implementation=name)
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, experts_implementation=OURS, **options
    ).train()


def shared() -> Dict[str, int]:
    """Ranks that have one batch."""
    return {"tp_size": size(), "ep_size": size()}


def own() -> Dict[str, int]:
    """Ranks with a batch each."""
    return {"fsdp_size": size(), "ep_size": size()}


def load_whole(folder: str, **options) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **options)
    return model.to(device()).train()


def batches(steps: int) -> Iterator[List[Tensor]]:
    """The ids (BATCH, CONTEXT) of each rank: sequences that count up, with noise."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        start = torch.randint(0, VOCABULARY, (size() * BATCH, 1), generator=generator) + torch.arange(CONTEXT)
        noise = torch.randint(0, VOCABULARY, start.shape, generator=generator)
        ids = torch.where(torch.rand(start.shape, generator=generator) < 0.3, noise, start % VOCABULARY)
        yield list(ids.to(device()).chunk(size()))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(what: str, got: Tensor, want: Tensor) -> None:
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error <= BOUND, f"{what}: expected within {BOUND:.0e} of the largest number, got {error:.1e}"


def check_eager_without_rows():
    """Eager experts without a row give an output without a graph; other ranks wait for their backward all the same."""
    batches = expert_parallel.make_batches(expert_parallel.UNEVEN[: size()], torch.arange(expert_parallel.TOP_K))
    want = expert_parallel.expected(batches, rank())
    for frozen in (False, True):
        experts = expert_parallel.make_module(OURS).requires_grad_(not frozen)
        experts.config._experts_implementation = "eager"
        for with_x in (True, False) if not frozen else (True,):
            experts.zero_grad()
            x = batches[rank()].x.clone().requires_grad_(with_x)
            experts(x, batches[rank()].ids, batches[rank()].weights).backward(batches[rank()].dout)
            found = {"x": x.grad} if with_x else {}
            if not (rank() or frozen):
                grads = {name: getattr(experts, name).grad for name in expert_parallel.WEIGHTS}
                found.update({name: expert_parallel.local(grad) for name, grad in grads.items()})
            expert_parallel.compare(f"eager, frozen: {frozen}, x: {with_x}", found, want)


def check_logits_and_gradients():
    """Four ranks also as pairs: two that share a batch, two that have all experts."""
    folder, ids = save_model(), next(batches(1))
    cases = [(shared(), name) for name in (OURS, "all_reduce", "all_to_all")]
    cases += [(own(), name) for name in (OURS, WITH_MOST, "all_to_all")]
    if size() == 4:
        cases += [({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, WITH_MOST), ({"fsdp_size": 4, "ep_size": 2}, OURS)]
    for layout, name in cases:
        sharing = layout.get("tp_size", 1)
        given, mine = torch.cat(ids[: size() // sharing]), rank() // sharing
        model, one = load(folder, name, layout), load_whole(folder)
        got, want = model(input_ids=ids[mine], labels=ids[mine]), one(input_ids=given, labels=given)
        assert_near(f"{name}, logits", whole(got.logits), want.logits.chunk(size() // sharing)[mine])
        got.loss.backward()
        want.loss.backward()
        for (parameter, value), right in zip(model.named_parameters(), one.parameters()):
            assert_near(f"{name}, {layout}, {parameter}", whole(value.grad), right.grad)
        if sharing == size():
            options = {"max_new_tokens": 6, "do_sample": False}
            tokens, right = (each.eval().generate(ids[0][:, :5], **options) for each in (model, one))
            assert torch.equal(tokens, right)


def train(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, data: Sequence[List[Tensor]], max_norm: float = math.inf
) -> List[float]:
    """The losses of all ranks' batches, as means. One process takes them as one, and may clip gradients."""
    losses, spread = [], isinstance(next(model.parameters()), DTensor)
    for ids in data:
        mine = ids[rank()] if spread else torch.cat(ids)
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        if max_norm < math.inf:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if spread:
            dist.all_reduce(mean)
        losses.append(mean.item() / (size() if spread else 1))
    return losses


def sgd(model: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def record_ids(model: PreTrainedModel) -> List[Tensor]:
    """Grows by the ids that each forward of the model gets."""
    seen = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    return seen


def choose_by_token(model: PreTrainedModel) -> None:
    """Has the experts of a token be those of its id, so that rounding decides nothing; routing weights become fp32."""
    generator, seen = torch.Generator().manual_seed(4), record_ids(model)

    def route(table: Tensor, output: tuple) -> tuple:
        chosen = table[seen[-1].flatten()]
        scores = output[0].float().softmax(-1).gather(1, chosen)
        return output[0], scores / scores.sum(1, keepdim=True), chosen

    for layer in model.model.layers:
        table = torch.rand((VOCABULARY, CONFIG["num_experts"]), generator=generator).topk(3).indices.to(device())
        layer.mlp.gate.register_forward_hook(lambda _, __, output, table=table: route(table, output))


# Largest relative difference of a loss from that of one process with eager experts. Seen on a CPU in 50 steps: in
# fp32 8e-7, and 6e-7 between two implementations in one process; in bf16, whose parameters add up roundings of 2^-9,
# 2e-2 and 9e-3.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 6e-2}


def check_training():
    """FSDP2 and EP, gradient checkpointing, bf16 with fp32 routing weights, NaN in fresh memory."""
    folder = save_model()
    for (dtype, bound), steps in zip(BOUNDS.items(), (50, 25)):
        data = list(batches(steps))
        losses = []
        for model in (load_whole(folder, dtype=dtype), load(folder, WITH_MOST, own(), dtype=dtype)):
            if dtype == torch.bfloat16:
                choose_by_token(model)
            if losses:
                model.gradient_checkpointing_enable()
            with poisoned_allocations():
                losses.append(train(model, sgd(model), data))
        want, got = losses
        off = [abs(a - b) / b for a, b in zip(got, want)]
        assert want[-1] < 0.95 * want[0] and all(map(math.isfinite, got)) and max(off) <= bound


check_training.sizes = (2,)


def check_resumed_training():
    """Saved after two steps and loaded by another model: two more steps give the same numbers, bit by bit."""
    folder, data, checkpoint = save_model(), list(batches(4)), shared_folder()
    model = load(folder, WITH_MOST, own())
    optimizer = sgd(model)
    train(model, optimizer, data[:2])
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=checkpoint)
    losses = train(model, optimizer, data[2:])

    other = load(folder, WITH_MOST, own())
    its_optimizer = sgd(other)
    train(other, its_optimizer, data[3:])  # so that nothing is as it was saved
    state = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer)))
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train(other, its_optimizer, data[2:]) == losses
    for (name, one), two in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(one.to_local(), two.to_local()), name


def clip(model: PreTrainedModel, most: float) -> Tensor:
    """`clip_grad_norm_` for gradients on several meshes, as docs/expert-parallelism.md describes it."""
    meshes = {}
    for parameter in model.parameters():
        meshes.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [get_total_norm([p.grad for p in parameters]).full_tensor() for parameters in meshes.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in meshes.values():
        clip_grads_with_norm_(parameters, most, norm)
    return norm


def check_clipping():
    """By a norm for each mesh; PyTorch's function for all of them at once raises."""
    folder, ids, most = save_model(), next(batches(1)), 0.1
    one, model = load_whole(folder), load(folder, WITH_MOST, own())
    for each, mine in ((one, torch.cat(ids)), (model, ids[rank()])):
        each(input_ids=mine, labels=mine).loss.backward()
    assert "must have the same mesh" in raised(RuntimeError, lambda: clip_grad_norm_(model.parameters(), most))
    want = clip_grad_norm_(one.parameters(), most)
    assert want > 2 * most
    assert_near("norm", clip(model, most), want)
    for (name, got), right in zip(model.named_parameters(), one.parameters()):
        assert_near(name, whole(got.grad), right.grad)


def check_trainer():
    """The losses that the Trainer reports are those of a loop in one process over the same batches."""
    folder, steps, rate, epsilon, max_norm = save_model(), 6, 1e-3, 1e-4, 0.1
    rows = [{"input_ids": row, "labels": row} for ids in batches(steps) for row in torch.cat(ids)]
    arguments = transformers.TrainingArguments(
        shared_folder(), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=rate, adam_epsilon=epsilon,
        lr_scheduler_type="constant", max_grad_norm=max_norm, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=device() == "cpu", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    model = load(folder, WITH_MOST, own())
    seen = record_ids(model)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    seen = [torch.stack(seen)] * size()
    dist.all_gather_object(seen, seen[0])
    one = load_whole(folder)
    optimizer = torch.optim.AdamW(one.parameters(), lr=rate, eps=epsilon, weight_decay=0.0)
    want = train(one, optimizer, [[ids.to(device()) for ids in step] for step in zip(*seen)], max_norm)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == steps and max(abs(a - b) / b for a, b in zip(losses, want)) <= BOUNDS[torch.float32]
