"""Trains a small Qwen3-MoE with FSDP2 and expert parallelism, saves it, and generates text with it.

    torchrun --standalone --nproc-per-node 2 examples/expert_parallel_training.py

Every rank has a batch of its own and a part of the experts. Tokens go once to each rank that has one of their experts:
`DistributedConfig(ep_implementation="grouped_moe")`. To generate, the ranks share one batch. While the model is saved,
PyTorch warns that it gathers the experts in two steps, since both FSDP2 and expert parallelism shard them.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import Vocabulary, python_reference
from hub import load_package
from quickstart import BATCH, CONTEXT, adamw, batches, default_device, sentence, small_config, step_count, train_step
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def load(folder: str, name: str, **sizes: int) -> PreTrainedModel:
    """The experts split between all ranks; sizes: of the mesh, such as fsdp_size."""
    layout = DistributedConfig(**sizes, ep_size=dist.get_world_size(), ep_implementation=name)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=layout, experts_implementation=name)


def train(model: PreTrainedModel, ids: torch.Tensor, steps: int, device: str) -> None:
    """Each rank takes its share of quickstart.py's batches."""
    rank, ranks, optimizer = dist.get_rank(), dist.get_world_size(), adamw(model)
    for step, batch in enumerate(batches(ids, steps, device)):
        total = torch.tensor(train_step(model, optimizer, batch.chunk(ranks)[rank]), device=device)
        dist.all_reduce(total)
        if step % 5 == 0 or step == steps - 1:
            report(f"step {step:3d}: loss {total.item() / ranks:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=step_count, default=30, help="training steps")
    steps = parser.parse_args().steps
    device = default_device()
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    ranks = dist.get_world_size()
    logging.disable_progress_bar()
    logging.set_verbosity_error()

    text = python_reference()
    vocabulary = Vocabulary(text)
    name = load_package().register_experts_implementation(ep_max_tokens=-(-BATCH // ranks) * CONTEXT)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    start, trained = (str(Path(folders[0]) / each) for each in ("start", "trained"))
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small_config(len(vocabulary))).save_pretrained(start)
    dist.barrier()

    model = load(start, name, fsdp_size=ranks).train()
    train(model, vocabulary.encode(text), steps, device)
    model.save_pretrained(trained)
    dist.barrier()
    report(f"it writes: {sentence(load(trained, name, tp_size=ranks), vocabulary, device)!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
