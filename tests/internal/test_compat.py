"""Without any of the private names that `common/_compat.py` asks for, the package computes the same."""

import ast
import re
import sys

import layers
import pytest
import torch
from hub import ROOT
from layers import Form
from operations import RecordedLog, make_operation
from torch.utils.flop_counter import FlopCounterMode

pytest_plugins = ["driver_stub"]

PACKAGE = ROOT / "torch-ext" / "grouped_moe"


class Without:
    """A module as it would be without the last of the names, which lead there."""

    def __init__(self, module, *names):
        self.module, self.names = module, names

    def __getattr__(self, name):
        first, *rest = self.names
        found = getattr(self.module, name)
        if name != first:
            return found
        if not rest:
            raise AttributeError(name)
        return Without(found, *rest)


# The names that lead to a private one of torch, what of _compat asks for it, and what that says without it.
NAMES = (
    (("_C", "_autograd", "_get_current_graph_task_keep_graph"), "keeps_graph", True),
    (("_C", "_autograd"), "keeps_graph", True),
    (("_C", "_functorch"), "in_transform", True),
    (("_C", "_len_torch_dispatch_stack"), "is_watched", True),
    (("_C", "_len_torch_function_stack"), "is_recorded", True),
    (("autograd", "_profiler_enabled"), "is_recorded", True),
    (("autograd", "profiler", "_is_profiler_enabled"), "is_recorded", True),
    (("_C", "DispatchKey"), "is_below_autograd", True),
    (("_C", "_dispatch_tls_is_dispatch_key_excluded"), "is_below_autograd", True),
    (("_assert_async",), "has_device_assertions", False),
    (("autograd", "forward_ad", "_current_level"), "has_tangents", True),  # each tensor is asked then
)


def without(names, asked, answer):
    """A removal of the last of the names."""

    def remove(monkeypatch, compat):
        monkeypatch.setattr(compat, "torch", Without(torch, *names))
        assert getattr(compat, asked)() is answer

    remove.__name__ = ".".join(names)
    return remove


def without_current_modes(monkeypatch, compat):
    monkeypatch.delattr(torch.utils._python_dispatch, "_disable_current_modes")
    with compat.real_values():
        assert torch.ones(2).sum() == 2


def without_nodes(monkeypatch, compat):
    monkeypatch.setattr(compat, "torch", Without(torch, "_C", "_will_engine_execute_node"))
    assert compat.goes_on_to([None])


def without_versions(monkeypatch, compat):
    monkeypatch.setattr(compat, "versions_of", lambda tensors: [0 for _ in tensors])


def with_unknown_triton(monkeypatch, compat):
    monkeypatch.setattr(compat, "triton_version", lambda: (9, 0))
    assert not compat.keeps_variants.__wrapped__(True)


REMOVALS = (
    *(without(*each) for each in NAMES), without_current_modes, without_nodes, without_versions, with_unknown_triton,
)  # fmt: skip


def results(package):
    """Outputs and gradients of the experts block, with a capacity too, and of linear modules, with all that asks."""
    torch.manual_seed(0)
    steps = [make_operation(package, f"experts-silu-bias{way}", "cpu").step() for way in ("", "-recompute")]
    made = [layers.make(package, Form(single, single), "cpu", delay_wgrad=True) for single in (True, False)]
    made.append(layers.make_with_main_grads(package, "cpu", "single")[:2])
    steps += [layers.step(*each) for each in made]
    return [tensor.clone() for step in steps for tensor in step.values()]


@pytest.mark.parametrize("remove", REMOVALS, ids=lambda remove: remove.__name__)
def test_results_without_a_private_name(grouped_moe, module, monkeypatch, remove):
    expected = results(grouped_moe)
    remove(monkeypatch, module("common._compat"))
    found = results(grouped_moe)
    assert len(found) == len(expected) > 10
    assert all(map(torch.equal, found, expected))


def test_shared_memory_as_another_dtype(module, monkeypatch):
    """By the public name, else by the private one; `test_launch` has what runs without either."""
    gluon = pytest.importorskip("triton.experimental.gluon.language")
    compat, descriptor = module("common._compat"), gluon.shared_memory_descriptor
    assert compat.reinterpret_method() is not None
    for public, private in (("public", "private"), (None, "private"), (None, None)):
        monkeypatch.setattr(descriptor, "reinterpret", public, raising=False)
        monkeypatch.setattr(descriptor, "_reinterpret", private, raising=False)
        assert compat.reinterpret_method.__wrapped__() == (public or private)


def test_versions_are_0_where_there_are_none(module):
    assert module("common._compat").versions_of([object()]) == [0]


def test_known_names_are_asked(module):
    """Of this PyTorch, which has them all: what the fallbacks stand in for is really there."""
    compat, tensor = module("common._compat"), torch.ones(2)
    tensor.add_(1)
    assert compat.versions_of([tensor, None]) == [1, 0] and not compat.has_tangents()
    assert compat.has_device_assertions() == (torch.version.hip is None)
    asked = []
    torch.func.vmap(lambda x: asked.append(compat.in_transform()) or x)(tensor)
    assert asked == [True] and not compat.in_transform()
    with FlopCounterMode(display=False):
        assert compat.is_watched()
    assert not compat.is_watched() and not compat.is_recorded()
    for of_all_threads in (False, True):
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=of_all_threads)
        with torch.profiler.profile(experimental_config=config):
            assert compat.is_recorded()
    with RecordedLog():
        assert compat.is_recorded()
    traced = []
    torch.jit.trace(lambda x: traced.append(compat.is_recorded()) or x + 1, tensor, check_trace=False)
    assert traced == [True]
    x = torch.ones(2, requires_grad=True)
    kept = []
    x.register_hook(lambda grad: kept.append(compat.keeps_graph()))
    y = x.square().sum()
    y.backward(retain_graph=True)
    y.backward()
    assert kept == [True, False]


def test_without_gluon_triton_launches(grouped_moe, stub):
    """Also a product that has a Gluon kernel where Gluon is."""
    compat, device = stub.module("common._compat"), stub.module("common.device")

    def kernel():
        spec = device.DeviceSpec(132, 232448, hopper=compat.has_gluon())
        shape = {"num_groups": 4, "block_m": 128, "n": 512, "k": 256, "by_tma": True, "transposed": False}
        problem = stub.module("backends.problems").GemmProblem(
            spec, torch.bfloat16, "ieee", **shape, low_rank=stub.module("backends.triton.factors").factor_of(None),
            zero_rest=True, wide=False,
        )  # fmt: skip
        return stub.module("backends.table").launcher_of("gemm", problem).kernel.function.__name__

    if compat.has_gluon():
        assert kernel() == "hopper_gemm_kernel"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
        assert kernel() == "grouped_gemm_kernel"


# Names that torch or triton have for themselves, however they are reached.
PRIVATE = re.compile(
    r"""torch\._|_C\b|_dynamo|_inductor|_functorch|_subclasses|_guards|forward_ad\._|autograd\._|cuda\._|utils\._
    |_python_dispatch|library\._|_ops\.ops\b|\._version\b|["']_version["']|packed_metadata|_BASE_ARGS|_assert_async
    |_current_level|_current_modes|_graph_task|driver\._|triton\._|runtime\._|_do_compile|device_caches
    |launch_metadata|\bexec\(|\beval\(|__import__\(""",
    re.VERBOSE,
)
# Methods of torch.nn.Module with a leading underscore that a class overrides, and why there is no public way.
OVERRIDES = {
    "_apply": "no hook runs after `to`, `cuda` or `half`, which give discrete weights memory of their own",
    "_load_from_state_dict": "a pre-hook would change the caller's checkpoint where a loader hands over all of it",
}
_MODULE_NAMES = {name for name in dir(torch.nn.Module) if name.startswith("_") and not name.startswith("__")}


def test_private_names_are_in_one_file():
    """In the code, docstrings and comments apart."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix() == "common/_compat.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                if isinstance(getattr(body[0].value, "value", None), str):
                    body[0] = ast.Pass()
        lines = ast.unparse(tree).splitlines()
        found += [f"{path.relative_to(PACKAGE)}: {line.strip()}" for line in lines if PRIVATE.search(line)]
    assert not found


def test_private_methods_that_modules_override():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                found |= names & _MODULE_NAMES
    assert found == {*OVERRIDES}


@pytest.mark.parametrize("version, keeps", [((3, 6), True), ((3, 9), True), ((3, 5), False), ((4, 0), False)])
def test_versions_whose_variants_are_kept(module, monkeypatch, version, keeps):
    compat = module("common._compat")
    keeps_variants = compat.keeps_variants.__wrapped__
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert keeps_variants(True) is keeps and keeps_variants(False) is False
    monkeypatch.setattr(torch.version, "cuda", None)
    assert keeps_variants(True) is False


@pytest.mark.parametrize(
    "line",
    ["torch._C._x()", "from torch._dynamo import x", "tensor._version", "exec(source)", "forward_ad._current_level",
     "compiled.packed_metadata", "nvidia._BASE_ARGS_FORMAT", "torch.utils._python_dispatch", "torch.autograd._x",
     "getattr(tensor, '_version')"],
)  # fmt: skip
def test_the_pattern_finds(line):
    assert PRIVATE.search(line)
