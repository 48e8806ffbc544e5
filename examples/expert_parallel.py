"""Expert parallelism: every rank holds a part of the experts, and the model computes what one process computes.

    torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py CHECKPOINT

CHECKPOINT is a folder written by `save_pretrained`. Tokens reach the experts in one of three ways, and all are compared
with the whole model under `eager`, logits and gradients:

all_reduce  every rank runs its experts on all tokens, and slots routed to other ranks are sentinels. It is what
            transformers does at inference.
all_to_all  tokens travel to the ranks of their experts, once per expert, and there are no sentinels. It is what
            transformers does in training.
grouped_moe tokens travel once per rank, in buffers of a fixed size, whose unfilled places are sentinels. It is what
            register_experts_implementation adds.

quickstart.py starts this script on the model that it has trained.
"""

import argparse
import os

import torch
import torch.distributed as dist
from corpus import Vocabulary, python_reference
from hub import load_package
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

BATCH, CONTEXT = 4, 64

# The ranks add the outputs of a token's experts in another order than one process does, in fp32 (a unit in the last
# place is 2^-23 = 1.2e-7, relative). A few layers forward and back carry that to a few 1e-6 of a tensor's largest
# number; one expert's contribution left out or counted twice would show as 1e-2 and more.
BOUND = 1e-5


def load_sharded(checkpoint: str, experts: str, dispatch: str) -> PreTrainedModel:
    """The experts split between the ranks, and the rest of the model as its own tensor-parallel plan says.

    transformers opens the process group of the ranks that torchrun started: gloo on a CPU.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    layout = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation=dispatch)
    return AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=layout, experts_implementation=experts)


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def distance(ours: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Largest difference, relative to the largest number expected. What is split between ranks is put together."""
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    return (whole - expected).abs().max() / expected.abs().max()


def check(what: str, error: torch.Tensor) -> None:
    report(f"  {what}: {error:.1e} from those of one process (bound {BOUND:.0e})")
    if not error <= BOUND:
        raise SystemExit(f"{what} are not those of one process")


def compare(sharded: PreTrainedModel, reference: PreTrainedModel, batch: torch.Tensor) -> None:
    ours, expected = (model.train()(input_ids=batch, labels=batch) for model in (sharded, reference))
    check("logits", distance(ours.logits, expected.logits))
    ours.loss.backward()
    expected.loss.backward()
    pairs = zip(sharded.parameters(), reference.parameters(), strict=True)
    check("gradients", torch.stack([distance(mine.grad, whole.grad) for mine, whole in pairs]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder with a model of quickstart.py")
    checkpoint = parser.parse_args().checkpoint
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # hides a warning: the plan has rules for dense layers, and this model has none
    implementation = load_package().register_experts_implementation()

    text = python_reference()
    batch = Vocabulary(text).encode(text)[: BATCH * CONTEXT].view(BATCH, CONTEXT)
    for dispatch in ("all_reduce", "all_to_all", implementation):
        reference = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager")
        sharded = load_sharded(checkpoint, implementation, dispatch)
        here = sharded.model.layers[0].mlp.experts.num_experts
        report(f"{dispatch}: {here} of {reference.config.num_experts} experts on each of {dist.get_world_size()} ranks")
        compare(sharded, reference, batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
