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


def compare(
    what: str, function: Callable, reference: Callable, inputs: Dict[str, Optional[Tensor]], device: str,
    training: bool = True,
) -> Dict[str, Tensor]:  # fmt: skip
    """Runs a function of tensors on the device and its reference in fp64 on the CPU, both directions, and checks.

    inputs: on the CPU; all floating ones but dout, the gradient of the output, get a gradient. Returns what is right.
    """
    found, dtype = [], inputs["dout"].dtype
    for run, place, wide in ((function, device, None), (reference, "cpu", torch.float64)):
        tensors = {name: None if t is None else to(t, place, wide) for name, t in inputs.items()}
        dout = tensors.pop("dout")
        leaves = {
            n: t.requires_grad_() for n, t in tensors.items() if t is not None and t.is_floating_point() and training
        }
        out = run(**tensors)
        grads = torch.autograd.grad(out, [*leaves.values()], dout, allow_unused=True) if out.requires_grad else ()
        found.append({"out": out, **{name: grad for name, grad in zip(leaves, grads) if grad is not None}})
    check(what, *found, dtype)
    return found[1]


def to(tensor: Tensor, device: str, dtype: Optional[torch.dtype]) -> Tensor:
    """A copy on a device, of floating numbers in dtype if that is given."""
    return tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)


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
    """In the dtype of the case. A third of the slots or more are sentinels, beyond E or negative."""
    p = 2 * case.I if case.gated else case.I
    up, down = (case.E, p, case.H), (case.E, case.H, case.I)
    if case.transposed:
        up, down = (case.E, case.H, p), (case.E, case.I, case.H)
    ids = torch.randint(case.idle, case.E + 1, (case.T, case.top_k))
    foreign = torch.tensor([case.E, case.E + 5, -1, 2**40])[torch.randint(0, 4, ids.shape)]
    tensors = {
        "hidden_states": torch.randn(case.T, case.H),
        "top_k_index": torch.where(torch.rand(ids.shape) < 1 / 3, foreign, ids),
        "top_k_weights": torch.rand(case.T, case.top_k),
        "gate_up_proj": torch.randn(up) / case.H**0.5,
        "down_proj": torch.randn(down) / case.I**0.5,
        "gate_up_proj_bias": torch.randn(case.E, p) if case.bias else None,
        "down_proj_bias": torch.randn(case.E, case.H) if case.bias else None,
        "dout": torch.randn(case.T, case.H),
    }
    return {name: t.to(case.dtype) if t is not None and t.is_floating_point() else t for name, t in tensors.items()}


def run_experts(kernel: ModuleType, case: Case, device: str) -> None:
    """The experts block."""
    kind = {"gated": case.gated, "interleaved": case.interleaved, "transposed": case.transposed}
    function = partial(kernel.grouped_mm_experts, **kind, recompute=case.recompute)
    reference = partial(kernel.reference.grouped_mm_experts, **kind)
    compare(case.name, function, reference, make_inputs(case), device, case.training)


def run_blocks(kernel: ModuleType, device: str, transposed: bool) -> None:
    """route, gather_rows, grouped_linear with bias, combine_rows."""
    case = Case("", T=600, I=48, bias=True, gated=False, transposed=transposed)
    inputs = {name: t for name, t in make_inputs(case).items() if not name.startswith("down")}
    inputs["dout"] = torch.randn(case.T, case.I).to(case.dtype)

    def function(hidden_states, top_k_index, top_k_weights, gate_up_proj, gate_up_proj_bias):
        routing = kernel.route(top_k_index, case.E)
        rows = kernel.gather_rows(hidden_states, routing)
        offsets = routing.expert_offsets
        rows = kernel.grouped_linear(rows, gate_up_proj, offsets, gate_up_proj_bias, transposed=transposed)
        return kernel.combine_rows(rows, top_k_weights, routing)

    def reference(hidden_states, top_k_index, top_k_weights, gate_up_proj, gate_up_proj_bias):
        out = hidden_states.new_zeros(case.T, case.I)
        for expert, (w, bias) in enumerate(zip(gate_up_proj, gate_up_proj_bias)):
            tokens, slots = (top_k_index == expert).nonzero(as_tuple=True)
            y = hidden_states[tokens] @ (w if transposed else w.t()) + bias
            out = out.index_add(0, tokens, y * top_k_weights[tokens, slots, None])
        return out

    compare(f"building blocks, transposed {transposed}", function, reference, inputs, device)


def run_layers(kernel: ModuleType, device: str, groups: int, rows: int, k: int, n: int) -> None:
    """grouped_linear with a scaled bias, its gradients alone and in main_grad, and grouped_mlp; with padding."""
    sizes = torch.full((groups,), 2 * rows // (3 * groups))
    sizes[0] = 0
    offsets, on_device = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), sizes.to(device)
    made = {"x": torch.randn(rows, k), "bias_scales": torch.rand(rows), "dout": torch.randn(rows, n)}
    made.update(weight=torch.randn(groups, n, k) / k**0.5, bias=torch.randn(groups, n))
    inputs = {name: t.to(torch.bfloat16) for name, t in made.items()}
    what = f"{groups} groups, {rows} rows"
    function = partial(kernel.grouped_linear, splits=on_device)
    reference = partial(kernel.reference.grouped_linear, group_offsets=offsets)
    want = compare(f"grouped_linear, {what}", function, reference, inputs, device)

    x, dout, bias, scales, weight = (inputs[n].to(device) for n in ("x", "dout", "bias", "bias_scales", "weight"))
    module = kernel.GroupedLinear(groups, k, n, device=device, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    module.load_state_dict({"weight": weight, "bias": bias})
    module.weight.main_grad = torch.zeros(module.weight.shape, device=device)
    module(x, on_device).backward(dout)
    got = {"weight": module.weight.main_grad}
    check(f"grouped_linear, {what}, main_grad", got, {"weight": want["weight"]}, torch.bfloat16)
    got = dict(zip(("bias", "bias_scales"), kernel.grouped_dbias_dscales(dout, scales, bias, on_device)))
    check(f"grouped_linear, {what}, bias alone", got, {name: want[name] for name in got}, torch.bfloat16)

    made = {"gate_up_proj": torch.randn(groups, 2 * n, k) / k**0.5, "down_proj": torch.randn(groups, k, n) / n**0.5}
    made.update(down_proj_bias=torch.randn(groups, k), dout=torch.randn(rows, k))
    mlp = {name: t.to(torch.bfloat16) for name, t in made.items()}
    mlp = {"x": inputs["x"], "scales": inputs["bias_scales"], **mlp}

    def scaled(mlp: Callable, splits: Tensor) -> Callable:
        return lambda x, scales, **rest: mlp(x, splits, scales, bias_scales=scales, **rest)

    function, reference = scaled(kernel.grouped_mlp, on_device), scaled(kernel.reference.grouped_mlp, offsets)
    compare(f"grouped_mlp, {what}", function, reference, mlp, device)


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
