"""Every kernel but the exchange's, small, both directions, against the fp64 reference: for compute-sanitizer.

    python tools/sanitize_case.py [--device cuda] [--share I N]

Random numbers and the reference are made on the CPU, so that next to nothing but the package runs on the device.
"""

import argparse
import re
import sys
from types import ModuleType
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from fuzz import DEVICE, OPS, Case, Draw, Trial, load_kernel
from fuzz_cases import BIASES, Layer


class Block(NamedTuple):
    """An experts block. idle: experts without a slot, the first ones.

    More than 2048 slots take the routing of three launches, fewer that of one.
    """

    name: str
    tokens: int
    layer: Layer = Layer()
    biases: Sequence[str] = ()
    idle: int = 0
    options: dict = {}


NO_GRAD = {"mode": "no_grad"}
FP8 = {"scaled": ("gate_up_proj", "down_proj"), "block": (128, 128), "products": "w8a16"}
PAIRS = {"adapted": ("gate_up_proj", "down_proj"), "rank": 20}
GPT_OSS, TRANSPOSED = {"interleaved": True, "transposed": True}, {"H": 136, "I": 72, "transposed": True}
FEW_RANKS = {**PAIRS, "rank": 6}
AS_PEFT = {**FEW_RANKS, "as_peft": True}  # where b lies as (N, r E)
BLOCKS = (
    Block("gated", 9),
    Block("gated, LoRA", 700, Layer(H=136, I=72), options=PAIRS),
    Block("LoRA, many experts of many rows", 1000, Layer(top_k=4, E=60, H=520, I=72), options=AS_PEFT),
    Block("LoRA, all rows for three of many", 1000, Layer(top_k=4, E=60, H=520, I=72), idle=57, options=FEW_RANKS),
    Block("gated, many slots, whole tiles", 1100, Layer(H=128, I=64)),
    Block("gated, part of a step", 700, Layer(H=136, I=136), BIASES),
    Block("gated, more steps than the ring has", 700, Layer(H=328, I=136)),
    Block("gated, several tiles for each program", 2200, Layer(H=72, I=1040)),
    Block("gated, nothing for the first expert", 700, Layer(H=72, I=136), idle=1),
    Block("gated, sentinels alone", 700, Layer(H=72, I=136), idle=3),
    Block("gated, interleaved, tiles of Hopper", 700, Layer(H=136, I=136, interleaved=True)),
    Block("gpt-oss, tiles of Hopper", 700, Layer(H=72, I=264, **GPT_OSS), BIASES),
    Block("not gated, tiles of Hopper", 700, Layer(H=328, I=264, gated=False), BIASES),
    Block("not gated, several tiles for each program", 2200, Layer(H=72, I=1040, gated=False, transposed=True)),
    Block("all options", 600, Layer(**GPT_OSS), BIASES, options={"recompute": True}),
    Block("not gated, bias, fp16", 33, Layer(torch.float16, gated=False), BIASES),
    Block("gated, bias, interleaved, fp32", 37, Layer(torch.float32, interleaved=True), BIASES),
    Block("no token", 0),
    Block("one token, no gradient", 1, Layer(top_k=8, E=40), options=NO_GRAD),  # experts hardly shared
    Block("one token, several steps", 1, Layer(top_k=9, E=40, H=2120, I=1048), BIASES, options=NO_GRAD),
    Block("one token, not gated, fp16", 1, Layer(torch.float16, E=8, H=72, I=264, gated=False), options=NO_GRAD),
    Block("few tokens", 9, Layer(top_k=4, E=40, H=136, I=72), options=NO_GRAD),  # fewer slots than experts
    Block("few tokens, steps", 16, Layer(top_k=8, E=40, H=1048, I=264, interleaved=True), BIASES, options=NO_GRAD),
    Block("few tokens, long rows", 9, Layer(top_k=4, E=40, H=136, I=1064), options=NO_GRAD),
    Block("few tokens, not gated, fp16", 64, Layer(torch.float16, E=40, gated=False), BIASES, options=NO_GRAD),
    Block("one token, transposed", 1, Layer(E=8, H=512, I=392, gated=False, transposed=True), options=NO_GRAD),
    Block("one token, transposed, LoRA", 1, Layer(top_k=4, E=40, **TRANSPOSED), options={**NO_GRAD, **PAIRS}),
    Block("few tokens, gpt-oss", 16, Layer(top_k=4, E=40, H=1048, I=264, **GPT_OSS), BIASES, options=NO_GRAD),
    Block("few tokens, transposed, LoRA", 9, Layer(top_k=4, E=40, **TRANSPOSED), options={**NO_GRAD, **PAIRS}),
    Block("one token, LoRA", 1, Layer(top_k=8, E=40, H=392, I=264), BIASES, options={**NO_GRAD, **PAIRS}),
    Block("few tokens, LoRA", 9, Layer(top_k=4, E=40, H=136, I=72), options={**NO_GRAD, **FEW_RANKS}),
    Block("one token, FP8", 1, Layer(top_k=8, E=40, H=392, I=264), BIASES, options={**NO_GRAD, **FP8}),
    Block("few tokens, FP8", 16, Layer(top_k=8, E=40, H=1040, I=272), BIASES, options={**NO_GRAD, **FP8}),
    Block("few tokens, FP8, LoRA", 16, Layer(top_k=8, E=40, H=144, I=272), options={**NO_GRAD, **FP8, **PAIRS}),
    Block("few tokens, not gated, FP8", 64, Layer(E=40, H=136, I=144, gated=False), options={**NO_GRAD, **FP8}),
    Block("FP8, whole blocks", 700, Layer(H=384, I=256), options={**FP8, "products": "auto"}),
    Block("FP8, LoRA", 700, Layer(H=384, I=256), options={**FP8, **PAIRS, "products": "auto"}),
    Block("FP8, codes copied for many rows", 1100, Layer(H=256, I=128), options={**FP8, "products": "auto"}),
    Block("FP8, part of a block", 700, Layer(H=264, I=136), BIASES, options=FP8),
    Block("more slots than a cluster routes", 2800, Layer(top_k=7, E=130, H=8, I=8), options=NO_GRAD),
)
# Groups, rows, H, I: by pointer, by descriptor, several tiles for each program; of tiles that two warp groups share.
LINEAR = ((3, 60, 40, 72), (4, 900, 128, 264), (40, 5120, 64, 1024))
SHARED_TILES = (16, 2048, 4104, 1272)
PLAIN = {
    "mode": "grad", "some_wanted": False, "plain": True, "recompute": False, "capacity": None, "adapted": (),
    "scaled": (),
}  # fmt: skip
MAIN_GRAD = {
    "single_grouped_weight": True, "single_grouped_bias": True, "accumulate_into_main_grad": True, "delay_wgrad": False,
    "zero_out_wgrad": False, "marked": False, "overwrite_main_grad": False, "microbatches": 1,
    "main_grad_dtype": torch.float32,
}  # fmt: skip


def draw_ids(layer: Layer, tokens: int, idle: int) -> torch.Tensor:
    """A third of the slots or more are sentinels, beyond E or negative."""
    ids = torch.randint(idle, layer.E + 1, (tokens, layer.top_k))
    foreign = torch.tensor([layer.E, layer.E + 5, -1, 2**40])[torch.randint(0, 4, ids.shape)]
    return torch.where(torch.rand(ids.shape) < 1 / 3, foreign, ids)


def make_cases(device: str) -> Iterator[Tuple[str, Case]]:
    """All cases by name."""

    def make(name: str, op: str, layer: Layer, routing: torch.Tensor, rows: int, **options) -> Tuple[str, Case]:
        layer, draw = layer._replace(scales_dtype=layer.dtype), Draw(name)
        return name, Case(OPS[op][0], layer, draw, device, [routing], op=op, rows=rows, **{**PLAIN, **options})

    torch.manual_seed(0)
    for name, tokens, layer, biases, idle, options in BLOCKS:
        yield make(name, "grouped_mm_experts", layer, draw_ids(layer, tokens, idle), tokens, biases=biases, **options)
    for transposed in (False, True):
        layer = Layer(I=48, transposed=transposed)
        name = f"building blocks, transposed {transposed}"
        yield make(name, "route, gather_rows, combine_rows", layer, draw_ids(layer, 600, 0), 600, bias=True)
    for groups, rows, h, i in LINEAR if device == "cpu" else (*LINEAR, SHARED_TILES):
        layer, sizes = Layer(E=groups, H=h, I=i), torch.full((groups,), 2 * rows // (3 * groups))
        sizes[0] = 0
        what = f"{groups} groups, {rows} rows"
        given = {"splits": "tensor", "bias": "scaled", "biases": BIASES[1:], "scales": "same", **MAIN_GRAD}
        for op in ("grouped_linear", "GroupedLinear", "grouped_dbias_dscales", "grouped_mlp"):
            yield make(f"{op}, {what}", op, layer, sizes, rows, **given)


STORE = re.compile(
    r"^ *store (\w+) [^,]*, ptr addrspace\(3\) (?:getelementptr \(i8, .*@global_smem, i\d+ (\d+)\)|@global_smem)", re.M
)
BYTES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i64": 8, "double": 8, "ptr": 8}  # others: 4


def print_dispatch(kernel: ModuleType) -> None:
    """Where in shared memory the warps of each Gluon kernel are told their work: the constant addresses stored to."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{kernel.__name__}.") and "hopper" in name:
            for function in vars(module).values():
                for caches in dict(getattr(function, "device_caches", {})).values():
                    for compiled in caches[0].values():
                        stores = STORE.findall(compiled.asm["llir"])
                        found |= {(compiled.name, int(at or 0), BYTES.get(kind, 4)) for kind, at in stores}
    for line in sorted(found):
        print("dispatch", *line)


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=DEVICE)
    add = parser.add_argument
    add("--share", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="each N-th from the I-th")
    arguments = parser.parse_args(argv)
    kernel, (first, step) = load_kernel(), arguments.share
    for name, case in list(make_cases(arguments.device))[first::step]:
        trial = Trial(kernel, case, arguments.device, reference_on="cpu")
        # Copies alone, without memory around them that a stray access could land in unnoticed.
        tensors = {name: value.to(arguments.device, copy=True) for name, value in trial.values.items()}
        if "as_peft" in case.options:
            for factor in (f"{weight}_b" for weight in case.pairs):
                tensors[factor] = tensors[factor].movedim(0, -1).contiguous().movedim(-1, 0)
        routings = [routing.to(arguments.device) for routing in case.routings]
        trial.compare(case.run(trial.call, tensors, routings), case.routings)
        print(f"{name}: right", flush=True)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    print_dispatch(kernel)
    print(f"all right on {arguments.device}")


if __name__ == "__main__":
    main()
