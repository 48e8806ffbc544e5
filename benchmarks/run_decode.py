"""Small batches: a layer's forward as a CUDA graph, eager and as host time, and `generate()` on a Qwen3-MoE.

    python benchmarks/run_decode.py --output benchmarks/results/decode.json [--commit SHA] [--budget SECONDS]
    python benchmarks/run_decode.py --only generate         # the cells that have all of these words in their name
    python benchmarks/run_decode.py --models                # layers of more models
    python benchmarks/run_decode.py --smoke                 # every code path at tiny sizes, also without a GPU

The method is in NOTES.md. The JSON is rewritten after every cell, so a run that is cut short leaves what it has.
"""

import argparse
import math
import statistics
import time
from types import ModuleType
from typing import Dict, List, NamedTuple, Optional

import report
import torch
from machine import Task, describe_machine, first_line, load_kernel, make_parser, run_tasks
from peers import Block, Function, Providers, check, expected, make_block, make_call
from report import BATCHED, CALLS, EAGER, GRAPH, HOST, OURS
from timing import Call, Plan, capture, issue, time_box, time_in_turn
from workload import (
    DEEPSEEK_V3,
    GPT_OSS,
    ITEM,
    MIXTRAL,
    MODELS,
    OLMOE,
    QWEN3_30B,
    QWEN3_NEXT,
    SMOKE,
    SMOKE_GPT_OSS,
    SMOKE_UNGATED,
    Cell,
    count,
    described,
    floors,
    make_inputs,
)

SETS = 4  # input sets that calls go through in turn: one set's weights could stay in the cache at T = 1
HOST_CALLS = 50  # issued in a row to an idle GPU; more could fill its queue
BATCHED_BYTES = 12e9  # of batched_mm's copies of weights, one per slot; past that it is not tried
PROVIDERS = (OURS, EAGER, BATCHED)
NAMES = {OURS: "grouped_moe", EAGER: "grouped_mm"}  # as experts_implementation; the latter is transformers' default
PROMPT = 32  # tokens
FIRST_GENERATE_SECONDS, GENERATE_SECONDS = 60.0, 6.0  # for a compile; for a case's rounds, past all orders once


class Generate(NamedTuple):
    """generate() of so many sequences. static: with the static cache, whose steps transformers compiles."""

    batch: int
    static: bool
    new_tokens: int

    def __str__(self) -> str:
        return f"generate batch={self.batch} {'static compiled' if self.static else 'eager'} cache"


def cells(smoke: bool, models: bool) -> List[Cell]:
    """In order of importance."""
    if smoke:
        tiny = (SMOKE_UNGATED,) if models else (SMOKE, SMOKE_GPT_OSS)
        return [Cell(layer, tokens) for layer in tiny for tokens in (1, 6)]
    if models:
        return [Cell(layer, tokens) for layer in MODELS for tokens in (1, 8, 64)]
    found = [Cell(QWEN3_30B, tokens) for tokens in (1, 8, 128, 32, 4, 16, 64, 2)]
    for layer in (MIXTRAL, QWEN3_NEXT, GPT_OSS, OLMOE, DEEPSEEK_V3):
        found += [Cell(layer, tokens) for tokens in (1, 16, 128)]
    return found


def generate_cells(smoke: bool) -> List[Generate]:
    """Eager first: compiling takes most of the time."""
    return [Generate(batch, static, 6 if smoke else 48) for static in (False, True) for batch in (1, 8)]


class Layers:
    """A layer's forward at small T; keeps the last layer's weights."""

    def __init__(self, kernel: ModuleType, device: str, arguments: argparse.Namespace) -> None:
        self.kernel, self.device, self.arguments = kernel, device, arguments
        self.cuda, self.providers = device == "cuda", Providers(kernel)
        self.block: Optional[Block] = None

    def functions(self, cell: Cell) -> Dict[str, Function]:
        layer = cell.layer
        copies = cell.tokens * layer.top_k * layer.weights_per_expert * ITEM
        names = [name for name in PROVIDERS if name != BATCHED or copies <= BATCHED_BYTES]
        return self.providers.make(self.block, cell, names)[0]

    def prepare(self, cell: Cell) -> None:
        """One call of every provider."""
        self.block = make_block(cell.layer, self.device)
        sets = [make_inputs(cell, self.device)]
        for function in self.functions(cell).values():
            make_call(function, self.block, sets, cell.backward)(0)

    def run(self, cell: Cell) -> dict:
        """Replays of a graph, eager calls in a row, and what the host takes to issue a call."""
        torch.manual_seed(0)
        if self.block is None or self.block.layer != cell.layer:
            self.block = make_block(cell.layer, self.device)
        sets = [make_inputs(cell, self.device) for _ in range(SETS)]
        counts = count(cell.layer, sets)
        wanted, entries, calls = expected(self.kernel, self.block, cell, sets[0]), {}, {}
        for name, function in self.functions(cell).items():
            calls[name] = make_call(function, self.block, sets, cell.backward)
            entries[name] = check(calls[name](0), wanted, sets[0])
        found = {**described(counts), **floors(cell, counts), "providers": entries}
        found[GRAPH] = {"providers": self.graphs(calls)}
        plan, seconds = Plan(self.arguments.warm_seconds, self.arguments.rounds), self.arguments.cell_seconds
        found[CALLS] = {"providers": time_in_turn(calls, plan, seconds, self.cuda)}
        fixed = plan._replace(sample_seconds=math.inf, most_calls=HOST_CALLS)
        found[HOST] = {"providers": time_in_turn(calls, fixed, seconds, self.cuda, issue)}
        return found

    def graphs(self, calls: Dict[str, Call]) -> Dict[str, dict]:
        """Times of replays; without a GPU nothing."""
        if not self.cuda:
            return {}
        found, skipped = {}, {}
        for name, call in calls.items():
            try:
                found[name] = capture(call, SETS)
            except Exception as error:  # of any library: the other providers go on
                skipped[name] = {"skipped": first_line(error)}
        plan = Plan(self.arguments.warm_seconds, self.arguments.rounds)
        return {**time_in_turn(found, plan, self.arguments.cell_seconds, self.cuda), **skipped}


def make_model(smoke: bool, device: str) -> torch.nn.Module:
    """A Qwen3-MoE of 4 layers, in size those of Qwen3-30B-A3B, with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    layer = SMOKE if smoke else QWEN3_30B
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if smoke else {
        "num_attention_heads": 32, "num_key_value_heads": 4
    }  # fmt: skip
    config = Qwen3MoeConfig(
        vocab_size=512 if smoke else 151936, hidden_size=layer.hidden, head_dim=32 if smoke else 128, **heads,
        num_hidden_layers=4, intermediate_size=3 * layer.hidden, moe_intermediate_size=layer.intermediate,
        num_experts=layer.experts, num_experts_per_tok=layer.top_k, norm_topk_prob=True, decoder_sparse_step=1,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


class Models:
    """generate() of one model under either implementation."""

    def __init__(self, kernel: ModuleType, device: str, arguments: argparse.Namespace) -> None:
        kernel.register_experts_implementation(NAMES[OURS])
        self.device, self.arguments, self.model = device, arguments, None

    def generate(self, name: str, case: Generate, prompt: torch.Tensor) -> torch.Tensor:
        self.model.set_experts_implementation(NAMES[name])
        options = {"cache_implementation": "static"} if case.static else {}
        return self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
            min_new_tokens=case.new_tokens, max_new_tokens=case.new_tokens, **options,
        )  # fmt: skip

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def prompt(self, case: Generate) -> torch.Tensor:
        if self.model is None:
            self.model = make_model(self.arguments.smoke, self.device)
        torch.manual_seed(1)
        return torch.randint(1, self.model.config.vocab_size, (case.batch, PROMPT), device=self.device)

    def prepare(self, case: Generate) -> None:
        """One call of each."""
        prompt = self.prompt(case)
        for name in NAMES:
            self.generate(name, case, prompt)

    def run(self, case: Generate) -> dict:
        """Tokens per second in turn, the prompt's forward included; and whether both give the same logits for it."""
        prompt = self.prompt(case)
        found: Dict[str, dict] = {}
        times: Dict[str, List[float]] = {}
        for name in NAMES:
            try:
                with time_box(FIRST_GENERATE_SECONDS):
                    start = time.monotonic()
                    self.generate(name, case, prompt)
                    self.generate(name, case, prompt)
                found[name], times[name] = {"first_seconds": time.monotonic() - start}, []
            except Exception as error:  # a compiler's, say
                found[name] = {"skipped": first_line(error)}
        deadline = time.monotonic() + GENERATE_SECONDS
        for turn in range(self.arguments.rounds):
            if turn >= 3 and time.monotonic() > deadline:
                break
            for name in sorted(times, reverse=bool(turn % 2)):
                self.synchronize()
                start = time.perf_counter()
                self.generate(name, case, prompt)
                self.synchronize()
                times[name].append(time.perf_counter() - start)
        for name, seconds in times.items():
            found[name]["tokens_per_s"] = case.batch * case.new_tokens / statistics.median(seconds)
            found[name]["median_ms"] = statistics.median(seconds) * 1e3
        return {"difference": self.difference(prompt), "providers": found}

    def difference(self, prompt: torch.Tensor) -> float:
        """Relative, in norm, of the logits of the prompt's first token, before routing can depend on rounding."""
        logits = []
        for name in NAMES.values():
            self.model.set_experts_implementation(name)
            with torch.no_grad():
                logits.append(self.model(prompt).logits.float())
        return ((logits[0] - logits[1]).norm() / logits[1].norm()).item()


def main(argv: Optional[List[str]] = None) -> dict:
    parser = make_parser(__doc__, budget=150, cell_seconds=0.7)
    parser.add_argument("--models", action="store_true", help="layers of more models instead")
    arguments = parser.parse_args(argv)
    kernel, device = load_kernel(), "cuda" if torch.cuda.is_available() else "cpu"
    layers, models = Layers(kernel, device, arguments), Models(kernel, device, arguments)
    results = {"benchmark": report.DECODE, **describe_machine(kernel, arguments.commit)}
    of_layers = [
        Task("cells", c.described(), str(c), lambda c=c: layers.run(c), lambda c=c: layers.prepare(c))
        for c in cells(arguments.smoke, arguments.models)
    ]
    of_models = [
        Task("generate", c._asdict(), str(c), lambda c=c: models.run(c), lambda c=c: models.prepare(c))
        for c in generate_cells(arguments.smoke)
    ]
    first = len([c for c in cells(arguments.smoke, arguments.models) if c.layer == QWEN3_30B])
    tasks = of_layers[:first] + of_models[:2] + of_layers[first:] + of_models[2:]
    tasks = of_layers if arguments.models else tasks  # it is only a Qwen3-MoE that generates
    run_tasks(results, tasks, arguments, report.progress)
    if not arguments.prepare:
        print(report.summary(results))
    return results


if __name__ == "__main__":
    main()
