"""Fine-tunes a small Qwen3-MoE with LoRA on its experts by peft, once with `grouped_moe` and once with `eager`.

Both see the same batches. Prints losses, speeds, and what a forward keeps for its backward. `make demo` starts it last.
"""

import argparse
import copy

import torch
from corpus import Vocabulary, python_reference
from hub import load_package
from peft import LoraConfig, PeftModel, get_peft_model
from quickstart import (
    SEED,
    batches,
    build_models,
    check_losses,
    default_device,
    print_losses,
    print_speed,
    small_config,
    step_count,
    train,
)
from transformers.utils import logging

RANK = 8
# The head is trained whole, since the model is a random one. A model that knows its language has no need of that.
ADAPTERS = LoraConfig(
    task_type="CAUSAL_LM",
    r=RANK,
    lora_alpha=2 * RANK,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    modules_to_save=["lm_head"],
)


def with_adapters(model: torch.nn.Module) -> PeftModel:
    """The model with the same adapters each time. The script of a user has nothing more than this."""
    torch.manual_seed(SEED)
    return get_peft_model(model, copy.deepcopy(ADAPTERS)).train()


def saved_bytes(model: PeftModel, batch: torch.Tensor) -> int:
    """What a forward keeps for its backward, in bytes, without the model's own parameters; memory that several tensors
    share counts once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=batch, labels=batch).loss
    saved = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)
    del loss
    return saved


def peak_bytes(model: PeftModel, batch: torch.Tensor) -> int:
    """The most memory that a step takes on top of what is there before it, on a GPU."""
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    return torch.accelerator.max_memory_allocated() - before


def print_memory(models: dict[str, PeftModel], batch: torch.Tensor, device: str) -> None:
    print()
    for name, model in models.items():
        line = f"{name:>14}: {saved_bytes(model, batch) / 2**20:8.1f} MiB kept for the backward"
        print(line + ("" if device == "cpu" else f", peak of a step {peak_bytes(model, batch) / 2**20:.1f} MiB"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=step_count, default=15, help="training steps of each of the two models")
    parser.add_argument("--device", default=None, help="cpu, cuda or xpu; the machine's accelerator if it has one")
    arguments = parser.parse_args()
    device = arguments.device or default_device()
    logging.disable_progress_bar()
    ours = load_package().register_experts_implementation()

    text = python_reference()
    vocabulary = Vocabulary(text)
    ids = vocabulary.encode(text)
    models = build_models(small_config(len(vocabulary)), [ours, "eager"], device)
    models = {name: with_adapters(model) for name, model in models.items()}
    trained, total = models[ours].get_nb_trainable_parameters()
    print(f"\nLoRA of rank {RANK}: {trained / 1e6:.2f} of {total / 1e6:.1f} M parameters are trained on {device}")

    losses, seconds = train(models, ids, arguments.steps, device)
    print_losses(losses)
    print_speed(seconds)
    print_memory(models, next(batches(ids, 1, device)), device)
    check_losses(losses)


if __name__ == "__main__":
    main()
