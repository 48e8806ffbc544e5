"""LoRA training on FP8 experts beside the same on bf16 ones of the same values: losses, memory, time per step.

fp8                      experts in blocks of 128 x 128, as transformers holds those of a checkpoint
bf16                     experts of the values that these have, each rounded to the nearest in bf16
bf16, rounded at random  rounded up or down instead: what the rounding of weights changes in the losses
bf16, other adapters     as bf16, from another seed of the adapters: how far apart the losses of equal runs are

A Qwen3-MoE with layers of full size and random weights learns the reference of Python from adapters on its experts
alone. All runs see the same batches, in turn. Distances are those of losses from the losses of bf16, by the root of the
mean square over all steps. FP8 counts as wrong if its distance is more than MOST times that of the third run. That of
the last one is no bound for it: random experts with scales that are off by a tenth, or that got the codes of another
expert, learn as well as others, within that distance, but 20 times that of the third run away (of a small model).
"""

import re
import time
from collections import Counter
from pydoc_data.topics import topics
from types import ModuleType
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from machine import DEVICE
from timing import described, orders, synchronize, without_gc
from torch import Tensor, nn
from workload import QWEN3_30B, SMOKE, Layer

FP8, BF16, ROUNDED, OTHER = "fp8", "bf16", "bf16, rounded at random", "bf16, other adapters"
SEEDS = {FP8: 1, BF16: 1, ROUNDED: 1, OTHER: 2}  # of the adapters
WEIGHTS = ("gate_up_proj", "down_proj")
MOST = 4.0
LEARNING_RATE = 1e-3
SHOWN_EVERY = 5  # steps
LAST = 5  # steps whose losses are averaged for the final difference; the first ones, as many, compile
PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s+")


class Training(NamedTuple):
    """Layers of a size, trained for so many steps on so many sequences of so many tokens each.

    heads: those of queries, of keys and values, and their width. rank: of the adapters.
    """

    layer: Layer
    num_layers: int = 4
    heads: Tuple[int, int, int] = (32, 4, 128)
    vocabulary: int = 4096
    sequences: int = 8
    context: int = 512
    rank: int = 16
    steps: int = 50

    def __str__(self) -> str:
        tokens = self.sequences * self.context
        return f"{self.layer.name} {self.num_layers} layers r={self.rank} {self.steps} steps T={tokens}"


def cases(smoke: bool) -> List[Training]:
    """Batches of many rows per expert, and of few, which other kernels take."""
    if smoke:
        return [Training(SMOKE, 1, (2, 1, 32), 64, 2, 16, steps=15)]
    return [Training(QWEN3_30B), Training(QWEN3_30B, sequences=1)]


def encoded_text(vocabulary: int) -> Tensor:
    """Ids of the words and signs of Python's reference; the last id is for all that are too rare for the vocabulary."""
    pieces = PIECE.findall("\n".join(topics.values()))
    common = {piece: i for i, (piece, _) in enumerate(Counter(pieces).most_common(vocabulary - 1))}
    return torch.tensor([common.get(piece, vocabulary - 1) for piece in pieces])


def batches(case: Training) -> Iterator[Tensor]:
    """(sequences, context) windows of the text, at random places."""
    windows = encoded_text(case.vocabulary).unfold(0, case.context, 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(case.steps):
        yield windows[torch.randint(len(windows), (case.sequences,), generator=generator)].to(DEVICE)


def make_config(case: Training) -> object:
    """transformers' configuration of the model."""
    import transformers

    layer, (heads, kv_heads, width) = case.layer, case.heads
    return transformers.Qwen3MoeConfig(
        vocab_size=case.vocabulary, hidden_size=layer.hidden, moe_intermediate_size=layer.intermediate,
        num_experts=layer.experts, num_experts_per_tok=layer.top_k, num_hidden_layers=case.num_layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width, norm_topk_prob=True,
        decoder_sparse_step=1, max_position_embeddings=case.context, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def build_model(kernel: ModuleType, case: Training, run: str) -> nn.Module:
    """The model in bf16, with the same values each time, and with the experts of a run."""
    import transformers

    config, implementation = make_config(case), kernel.register_experts_implementation()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        build = transformers.AutoModelForCausalLM.from_config
        model = build(config, dtype=torch.bfloat16, experts_implementation=implementation)
    blocks = [block.mlp for block in model.model.layers]
    scaled = [{name: kernel.quantize_blocks(getattr(block.experts, name)) for name in WEIGHTS} for block in blocks]
    if run == FP8:
        hold_in_fp8(model)
    for block, weights in zip(blocks, scaled):
        for name, weight in weights.items():
            if run == FP8:
                values = weight.data
                setattr(block.experts, f"{name}_scale_inv", nn.Parameter(weight.scale_inv, False))
            else:
                values = round_at_random(weight.dequantize(torch.float32)) if run == ROUNDED else weight.dequantize()
            setattr(block.experts, name, nn.Parameter(values, False))
    return model


def round_at_random(values: Tensor) -> Tensor:
    """fp32 in bf16, rounded up as often as the distance says, so that the mean stays."""
    bits = values.view(torch.int32)
    return ((bits + torch.randint_like(bits, 2**16)) & -(2**16)).view(torch.float32).to(torch.bfloat16)


def hold_in_fp8(model: nn.Module, **options) -> None:
    """Puts transformers' FP8 experts, without memory, in place of the model's. Linear layers stay as they are.

    options: of transformers' configuration.
    """
    from transformers import FineGrainedFP8Config
    from transformers.integrations import finegrained_fp8

    others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    finegrained_fp8.replace_with_fp8_linear(model, others, FineGrainedFP8Config(**options))


def with_adapters(model: nn.Module, case: Training, seed: int) -> nn.Module:
    """The model with adapters on both weights of the experts, drawn as peft does it for plain weights."""
    import peft

    targets = [f"experts.{name}" for name in WEIGHTS]
    config = peft.LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(model, config).train()
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for name, factor in model.named_parameters():
        if "lora_A" in name:  # of FP8 weights peft has rounded them to FP8
            nn.init.kaiming_uniform_(factor, a=5**0.5, generator=generator)
    return model


class Run:
    """A model in training, with what each step took and its loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
        self.losses: List[float] = []
        self.milliseconds: List[float] = []
        self.added: List[int] = []  # bytes that a step took at its peak on top of what was there

    def step(self, ids: Tensor) -> None:
        """One update."""
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()  # 0 without a GPU
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()
        self.milliseconds.append((time.perf_counter() - start) * 1e3)
        self.losses.append(loss.item())
        self.added.append(torch.cuda.max_memory_allocated() - before)

    def resident(self) -> int:
        """Bytes of parameters, buffers and the optimizer's state."""
        state = [t for entry in self.optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def peak_mib(self, first: int) -> Optional[float]:
        """What is resident and what steps, from the first one that counts on, add at most. None without a GPU."""
        return (self.resident() + max(self.added[first:])) / 2**20 if DEVICE == "cuda" else None


def distance(ours: List[float], theirs: List[float]) -> Dict[str, float]:
    """How far apart two curves of losses are."""
    apart = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    final = apart[-LAST:].mean().item()
    return {"rms": apart.square().mean().sqrt().item(), "largest": apart.abs().max().item(), "final": final}


def measure(kernel: ModuleType, case: Training) -> List[dict]:
    """The cell of a case. Times and memory are those of the steps behind the first ones, which compile."""
    runs = {name: Run(with_adapters(build_model(kernel, case, name), case, seed)) for name, seed in SEEDS.items()}
    turns = orders(list(runs))
    with without_gc():
        for number, ids in enumerate(batches(case)):
            for name in turns[number % len(turns)]:
                runs[name].step(ids)
    losses = {name: run.losses for name, run in runs.items()}
    apart = {name: distance(values, losses[BF16]) for name, values in losses.items() if name != BF16}
    shown = sorted({*range(0, case.steps, SHOWN_EVERY), case.steps - 1})
    first = min(LAST, case.steps // 2)
    cell = {
        "name": str(case), **case._asdict(), "layer": case.layer.name, "learning_rate": LEARNING_RATE,
        "times": {"step": {name: described(run.milliseconds[first:]) for name, run in runs.items()}},
        "peak_mib": {name: run.peak_mib(first) for name, run in runs.items()},
        "resident_mib": {name: run.resident() / 2**20 for name, run in runs.items()},
        "shown_steps": shown, "losses": {name: [values[step] for step in shown] for name, values in losses.items()},
        "from_bf16": apart, "skipped": {}, "errors": {FP8: apart[FP8]},
        "wrong": [] if apart[FP8]["rms"] <= MOST * apart[ROUNDED]["rms"] else [FP8],
    }  # fmt: skip
    return [cell]
