"""Trains a small Qwen3-MoE twice on the same batches, once with `grouped_moe` and once with transformers' `eager`.

Prints both losses and speeds, draws the losses, lets the trained model write a sentence, and runs it once more as two
expert-parallel processes (expert_parallel.py). Start it with `make demo`.
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import torch
from corpus import Vocabulary, python_reference
from hub import load_package
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.utils import logging

matplotlib.use("Agg")  # draws to a file: no display needed
from matplotlib import pyplot  # noqa: E402

SEED = 0
BATCH, CONTEXT = 8, 128
# AdamW divides a gradient by its own size, down to EPSILON. At the default of 1e-8 that blows rounding errors up to
# full updates wherever a gradient is close to 0, and the two runs would part.
LEARNING_RATE, EPSILON = 1.5e-3, 1e-4
PROMPT = "The value of the"
SAMPLING = {"max_new_tokens": 32, "do_sample": True, "temperature": 0.6, "top_k": 10}

# Relative differences of the losses. The two runs add the same fp32 numbers in another order (a unit in the last place
# is 2^-23 = 1.2e-7), and training feeds that back through the weights. For the first steps it stays there, while a
# gradient that is off by a percent already shows. Later the router meets two experts so close that rounding decides
# between them; from then on that word takes another way in the two runs.
EARLY_STEPS, EARLY_BOUND = 10, 1e-6
LATE_BOUND = 1e-3


def step_count(text: str) -> int:
    """The type of an argument: a number of steps, one or more."""
    steps = int(text)
    if steps < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {steps}")
    return steps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=step_count, default=30, help="training steps of each of the two models")
    parser.add_argument("--device", default=None, help="cpu, cuda or xpu; the machine's accelerator if it has one")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"), help="file of the loss plot")
    parser.add_argument("--no-parallel", action="store_true", help="leave out the expert-parallel part")
    return parser.parse_args()


def default_device() -> str:
    return next((name for name in ("cuda", "xpu") if getattr(torch, name).is_available()), "cpu")


def small_config(vocab_size: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=128,  # as many as Qwen3-30B-A3B has
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=2 * CONTEXT,
    )


def build_models(config: Qwen3MoeConfig, implementations: list[str], device: str) -> dict[str, PreTrainedModel]:
    """One model per implementation of the experts, all of them with the same weights."""
    models = {}
    for name in implementations:
        torch.manual_seed(SEED)
        own_config = copy.deepcopy(config)  # the model keeps it, and the experts read their implementation from it
        models[name] = AutoModelForCausalLM.from_config(own_config, experts_implementation=name).to(device).train()
    return models


def batches(ids: torch.Tensor, steps: int, device: str) -> Iterator[torch.Tensor]:
    """(BATCH, CONTEXT) windows of the text, at random places that depend on the seed alone."""
    generator = torch.Generator().manual_seed(SEED)
    windows = ids.unfold(0, CONTEXT, 1)
    for _ in range(steps):
        yield windows[torch.randint(len(windows), (BATCH,), generator=generator)].to(device)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adamw(model: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def train(models: dict[str, PreTrainedModel], ids: torch.Tensor, steps: int, device: str) -> tuple[dict, dict]:
    """Losses and seconds of every step, per model. The models take turns at each batch, so what else the machine does
    slows both alike."""
    optimizers = {name: adamw(model) for name, model in models.items()}
    losses = {name: [] for name in models}
    seconds = {name: [] for name in models}
    with tqdm(batches(ids, steps, device), total=steps, desc="training", unit="step") as progress:
        for batch in progress:
            for name, model in models.items():
                start = time.perf_counter()
                losses[name].append(train_step(model, optimizers[name], batch))
                if device != "cpu":
                    torch.accelerator.synchronize()
                seconds[name].append(time.perf_counter() - start)
            progress.set_postfix({name: f"{values[-1]:.4f}" for name, values in losses.items()})
    return losses, seconds


def relative_differences(losses: dict[str, list[float]]) -> torch.Tensor:
    ours, reference = (torch.tensor(values, dtype=torch.float64) for values in losses.values())
    return (ours - reference).abs() / reference.abs()


def print_losses(losses: dict[str, list[float]]) -> None:
    ours, reference = losses
    print(f"\n{'step':>5} {ours:>14} {reference:>14} {'difference':>12}")
    differences = relative_differences(losses)
    last = len(differences) - 1
    for step in sorted({*range(0, last, 5), last}):
        print(f"{step:5d} {losses[ours][step]:14.8f} {losses[reference][step]:14.8f} {differences[step]:12.1e}")


def print_speed(seconds: dict[str, list[float]]) -> None:
    """Median over the steps after the first, which also pays for compilation and allocation."""
    print()
    for name, values in seconds.items():
        typical = torch.tensor(values[1:] or values).median().item()
        print(f"{name:>14}: {BATCH * CONTEXT / typical:10,.0f} tokens/s (forward, backward and optimizer)")


def check_losses(losses: dict[str, list[float]]) -> None:
    differences = relative_differences(losses)
    early, largest = differences[:EARLY_STEPS].max(), differences.max()
    print(f"\nlosses differ by {early:.1e} in the first {EARLY_STEPS} steps (bound {EARLY_BOUND:.0e}),", end=" ")
    print(f"by {largest:.1e} over all (bound {LATE_BOUND:.0e})")
    if not (early <= EARLY_BOUND and largest <= LATE_BOUND):
        raise SystemExit("the losses are not equal to rounding")


def plot_losses(losses: dict[str, list[float]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(values, style, label=name, linewidth=2)
    axes.set(xlabel="step", ylabel="loss (nats per word)", title="Qwen3-MoE, the same batches, two implementations")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"loss plot: {path}")


def sentence(model: PreTrainedModel, vocabulary: Vocabulary, device: str) -> str:
    prompt = vocabulary.encode(PROMPT)[None].to(device)
    torch.manual_seed(SEED)  # ranks that share a model draw the same words
    words = model.eval().generate(prompt, generation_config=GenerationConfig(**SAMPLING))
    return vocabulary.decode(words[0])


def run_expert_parallel(model: PreTrainedModel) -> None:
    """Two processes on this machine's CPU, also where there is a GPU: one GPU can't hold two ranks."""
    processes = 2
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
    }
    script = Path(__file__).with_name("expert_parallel.py")
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run([*launcher, str(script), checkpoint], env=environment, check=True)


def main() -> None:
    arguments = parse_arguments()
    device = arguments.device or default_device()
    logging.disable_progress_bar()
    ours = load_package().register_experts_implementation()

    text = python_reference()
    vocabulary = Vocabulary(text)
    ids = vocabulary.encode(text)
    models = build_models(small_config(len(vocabulary)), [ours, "eager"], device)
    parameters = sum(parameter.numel() for parameter in models[ours].parameters())
    print(f"{parameters / 1e6:.1f} M parameters in fp32 on {device}, {len(ids)} words of text", flush=True)

    losses, seconds = train(models, ids, arguments.steps, device)
    print_losses(losses)
    print_speed(seconds)
    check_losses(losses)
    plot_losses(losses, arguments.output)
    print(f"\n{ours} writes: {sentence(models[ours], vocabulary, device)!r}\n", flush=True)
    if not arguments.no_parallel:
        run_expert_parallel(models[ours])


if __name__ == "__main__":
    main()
