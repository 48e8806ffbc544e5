"""Every kernel once, small, both directions, against the fp64 reference: what compute-sanitizer is run on.

    python tools/sanitize_case.py [--device cuda] [--share I N]

Random numbers and the reference are made on the CPU, so that next to nothing but the package runs on the device.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from machine import load_kernel  # noqa: E402


class Case(NamedTuple):
    """One experts block. T top_k above 2048 slots takes the routing of three launches, else that of one."""

    name: str
    T: int
    top_k: int = 2
    E: int = 3
    H: int = 40
    I: int = 24  # noqa: E741
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    recompute: bool = False
    idle: int = 0  # experts without a slot, the first ones
    training: bool = True


CASES = [
    Case("gated", T=9),
    Case("gated, many slots, whole tiles", T=1100, H=128, I=64),
    Case("gated, part of a step", T=700, H=136, I=136, bias=True),
    Case("gated, more steps than the ring has", T=700, H=328, I=136),
    Case("gated, several tiles for each program", T=2200, H=72, I=1040),
    Case("gated, nothing for the first expert", T=700, H=72, I=136, idle=1),
    Case("gated, sentinels alone", T=700, H=72, I=136, idle=3),
    Case("gated, interleaved, tiles of Hopper", T=700, H=136, I=136, interleaved=True),
    Case("gpt-oss, tiles of Hopper", T=700, H=72, I=264, bias=True, interleaved=True, transposed=True),
    Case("not gated, tiles of Hopper", T=700, H=328, I=264, gated=False, bias=True),
    Case("not gated, several tiles for each program", T=2200, H=72, I=1040, gated=False, transposed=True),
    Case("all options", T=600, bias=True, interleaved=True, transposed=True, recompute=True),
    Case("not gated, bias, fp16", T=33, gated=False, bias=True, dtype=torch.float16),
    Case("gated, bias, interleaved, fp32", T=37, bias=True, interleaved=True, dtype=torch.float32),
    Case("no token", T=0),
    Case("one token, whose slots hardly share an expert, no gradient", T=1, top_k=8, E=40, training=False),
]
# Relative error in norm: eight roundings of 2^-8, 2^-11 or 2^-24, and room for sums in another order.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def check(what: str, got: Dict[str, Tensor], want: Dict[str, Tensor], dtype: torch.dtype) -> None:
    """Fails with what is wrong; prints the largest error otherwise."""
    worst = 0.0
    for name, expected in want.items():
        actual, expected = got[name].detach().cpu().double(), expected.detach()
        error = float((actual - expected).norm() / expected.norm().clamp_min(1e-30)) if expected.numel() else 0.0
        if not error < TOLERANCE[dtype]:
            sys.exit(f"{what}: {name} is off by {error:.2e}")
        worst = max(worst, error)
    print(f"{what}: error {worst:.1e}", flush=True)


def make_inputs(case: Case) -> Dict[str, Optional[Tensor]]:
    """On the CPU, in the dtype of the case. A third of the slots or more are sentinels, beyond E or negative."""
    p = 2 * case.I if case.gated else case.I
    up, down = (case.E, p, case.H), (case.E, case.H, case.I)
    if case.transposed:
        up, down = (case.E, case.H, p), (case.E, case.I, case.H)
    tensors = {
        "hidden_states": torch.randn(case.T, case.H),
        "top_k_weights": torch.rand(case.T, case.top_k),
        "gate_up_proj": torch.randn(up) / case.H**0.5,
        "down_proj": torch.randn(down) / case.I**0.5,
        "gate_up_proj_bias": torch.randn(case.E, p) if case.bias else None,
        "down_proj_bias": torch.randn(case.E, case.H) if case.bias else None,
        "dout": torch.randn(case.T, case.H),
    }
    inputs = {name: t if t is None else t.to(case.dtype) for name, t in tensors.items()}
    ids = torch.randint(case.idle, case.E + 1, (case.T, case.top_k))
    foreign = torch.tensor([case.E, case.E + 5, -1, 2**40])[torch.randint(0, 4, ids.shape)]
    inputs["top_k_index"] = torch.where(torch.rand(ids.shape) < 1 / 3, foreign, ids)
    return inputs


def gradients(out: Tensor, inputs: Dict[str, Optional[Tensor]]) -> Dict[str, Tensor]:
    """The output and the gradient of every differentiable input."""
    names = [name for name, t in inputs.items() if t is not None and t.requires_grad]
    grads = torch.autograd.grad(out, [inputs[name] for name in names], inputs["dout"], allow_unused=True)
    return {"out": out, **{name: g for name, g in zip(names, grads) if g is not None}}


def leaves(inputs: Dict[str, Optional[Tensor]], device: str, dtype: Optional[torch.dtype] = None) -> dict:
    """Copies on the device, in dtype where given; all but dout and indices require grad."""
    copies: Dict[str, Optional[Tensor]] = {}
    for name, tensor in inputs.items():
        if tensor is None or name == "top_k_index":
            copies[name] = None if tensor is None else tensor.to(device)
        else:
            copies[name] = tensor.to(device, dtype or tensor.dtype).requires_grad_(name != "dout")
    return copies


def run_experts(kernel: ModuleType, case: Case, device: str) -> None:
    """The experts block."""
    inputs = make_inputs(case)
    order = ("hidden_states", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj")
    biases = ("gate_up_proj_bias", "down_proj_bias")
    kind = {"gated": case.gated, "interleaved": case.interleaved, "transposed": case.transposed}

    ours, true = leaves(inputs, device), leaves(inputs, "cpu", torch.float64)
    options = {**kind, **{name: ours[name] for name in biases}, "recompute": case.recompute}
    with torch.set_grad_enabled(case.training):
        out = kernel.grouped_mm_experts(*(ours[name] for name in order), **options)
    got = gradients(out, ours) if case.training else {"out": out}
    options = {**kind, **{name: true[name] for name in biases}}
    out = kernel.reference.grouped_mm_experts(*(true[name] for name in order), **options)
    want = gradients(out, true) if case.training and out.requires_grad else {"out": out}
    check(case.name, got, want, case.dtype)


def run_blocks(kernel: ModuleType, device: str, transposed: bool) -> None:
    """route, gather_rows, grouped_linear with bias, combine_rows."""
    case = Case("", T=600, I=48)
    inputs = make_inputs(case._replace(bias=True, gated=False, transposed=transposed))
    inputs = {name: t for name, t in inputs.items() if not name.startswith("down")}
    inputs["dout"] = torch.randn(case.T, case.I).to(case.dtype)
    ours = leaves(inputs, device)
    routing = kernel.route(ours["top_k_index"], case.E)
    rows = kernel.gather_rows(ours["hidden_states"], routing)
    weight, bias = ours["gate_up_proj"], ours["gate_up_proj_bias"]
    rows = kernel.grouped_linear(rows, weight, routing.expert_offsets, bias, transposed=transposed)
    got = gradients(kernel.combine_rows(rows, ours["top_k_weights"], routing), ours)

    true = leaves(inputs, "cpu", torch.float64)
    ids, w = true["top_k_index"], true["gate_up_proj"]
    out = torch.zeros(case.T, case.I, dtype=torch.float64)
    for expert in range(case.E):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        y = true["hidden_states"][tokens] @ (w[expert] if transposed else w[expert].t())
        y = (y + true["gate_up_proj_bias"][expert]) * true["top_k_weights"][tokens, slots, None]
        out = out.index_add(0, tokens, y)
    check(f"building blocks, transposed {transposed}", got, gradients(out, true), case.dtype)


def run_layers(kernel: ModuleType, device: str, groups: int, rows: int, k: int, n: int) -> None:
    """grouped_linear with a scaled bias, its gradients alone and in main_grad, and grouped_mlp; with padding."""
    sizes = torch.full((groups,), 2 * rows // (3 * groups))
    sizes[0] = 0
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    inputs = {"x": torch.randn(rows, k), "weight": torch.randn(groups, n, k) / k**0.5, "bias": torch.randn(groups, n)}
    inputs = {name: t.to(torch.bfloat16) for name, t in {**inputs, "dout": torch.randn(rows, n)}.items()}
    inputs["scales"] = torch.rand(rows).to(torch.bfloat16)
    ours, true = leaves(inputs, device), leaves(inputs, "cpu", torch.float64)
    on_device = sizes.to(device)
    out = kernel.grouped_linear(ours["x"], ours["weight"], on_device, ours["bias"], ours["scales"])
    y = kernel.reference.grouped_linear(true["x"], true["weight"], offsets, true["bias"], true["scales"])
    want = gradients(y, true)
    what = f"grouped_linear, {groups} groups, {rows} rows"
    check(what, gradients(out, ours), want, torch.bfloat16)

    module = kernel.GroupedLinear(groups, k, n, device=device, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    module.load_state_dict({name: ours[name].detach() for name in ("weight", "bias")})
    module.weight.main_grad = torch.zeros(module.weight.shape, device=device)
    module(ours["x"], on_device).backward(ours["dout"])
    check(f"{what}, main_grad", {"weight": module.weight.main_grad}, {"weight": want["weight"]}, torch.bfloat16)

    scales, bias = ours["scales"].detach(), ours["bias"].detach()
    dbias, dscales = kernel.grouped_dbias_dscales(ours["dout"], scales, bias, on_device)
    alone = {"bias": want["bias"], "scales": want["scales"]}
    check(f"{what}, bias alone", {"bias": dbias, "scales": dscales}, alone, torch.bfloat16)

    up, down = torch.randn(groups, 2 * n, k) / k**0.5, torch.randn(groups, k, n) / n**0.5
    inputs = {"x": inputs["x"], "scales": inputs["scales"], "dout": torch.randn(rows, k), "up": up, "down": down}
    inputs["bias"] = torch.randn(groups, k)
    inputs = {name: t.to(torch.bfloat16) for name, t in inputs.items()}
    ours, true = leaves(inputs, device), leaves(inputs, "cpu", torch.float64)
    got, y = (
        function(t["x"], splits, t["scales"], t["up"], t["down"], bias_scales=t["scales"], down_proj_bias=t["bias"])
        for function, t, splits in (
            (kernel.grouped_mlp, ours, on_device),
            (kernel.reference.grouped_mlp, true, offsets),
        )
    )
    check(f"grouped_mlp, {groups} groups, {rows} rows", gradients(got, ours), gradients(y, true), torch.bfloat16)


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


def runs(kernel: ModuleType, device: str) -> List[Callable[[], None]]:
    """Every case, as a call that checks it."""
    found = [partial(run_experts, kernel, case, device) for case in CASES]
    found += [partial(run_blocks, kernel, device, transposed) for transposed in (False, True)]
    # By pointer, by descriptor, several tiles for each program.
    layers = [(3, 60, 40, 72), (4, 900, 128, 264), (40, 5120, 64, 1024)]
    if device == "cuda":
        layers.append((16, 2048, 4104, 1272))  # tiles that two warp groups share
    return found + [partial(run_layers, kernel, device, *sizes) for sizes in layers]


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--share", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="each N-th from the I-th"
    )
    arguments = parser.parse_args(argv)
    kernel, (first, step) = load_kernel(), arguments.share
    for run in runs(kernel, arguments.device)[first::step]:
        torch.manual_seed(0)
        run()
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    print_dispatch(kernel)
    print(f"all right on {arguments.device}")


if __name__ == "__main__":
    main()
