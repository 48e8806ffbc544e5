"""The package as the Hub distributes it: builds, loads in every way that users load it, and stays as it was hashed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub import ROOT
from kernels._rust import Digest, DigestAlgorithm, Metadata

BACKENDS = ("cpu", "cuda", "rocm", "xpu")


def run_python(code: str, *arguments: object, **environment: str) -> list[str]:
    """Run `code` in a fresh interpreter without redirections and return the JSON that its last line prints."""
    redirections = ("LOCAL_KERNELS", "KERNELS_CACHE")
    clean = {name: value for name, value in os.environ.items() if name not in redirections}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def run_build(tree: Path, *options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, tree / "tools" / "build.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built() -> Path:
    """The build under test if it has all variants, else the one of `make build`."""
    build = Path(os.environ["LOCAL_KERNELS"].split(":")[0].split("=", 1)[1]).resolve()
    build = build if (build / "torch-cpu").is_dir() else ROOT / "build"
    assert build.is_dir(), "run make build"
    return build


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the build reads, outside of any git repository."""
    ignore = shutil.ignore_patterns("__pycache__", "_ops.py")
    for name in ("torch-ext", "tools", "noarch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("CARD.md", ".gitignore"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.kernels_ci
def test_loads_by_name_with_every_public_name(grouped_moe):
    missing = [name for name in grouped_moe.__all__ if not hasattr(grouped_moe, name)]
    assert grouped_moe.__all__ and not missing


@pytest.mark.kernels_ci
def test_loaded_from_local_kernels(grouped_moe, hub):
    entries = dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))
    assert Path(grouped_moe.__file__).resolve().is_relative_to(Path(entries[hub.repo_id]).resolve())


def test_cheap_tests_as_the_hub_runs_them(tmp_path):
    """`nix run .#ci-test` has the sources and tests alone: no pytest.ini, tools or benchmarks."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "build.toml", tmp_path / "build.toml")
    command = [sys.executable, "-m", "pytest", tmp_path / "tests", "-m", "kernels_ci", "-p", "no:cacheprovider", "-q"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout


def test_loads_by_path(built, grouped_moe):
    """From the folder that has the build, from its build directory, and from the variant itself."""
    variant, around = built / Path(grouped_moe.__file__).parent.name, built.parent if built.name == "build" else built
    code = """
import json, pathlib, sys, kernels
print(json.dumps([kernels.get_local_kernel(pathlib.Path(path)).__file__ for path in sys.argv[1:]]))
"""
    assert run_python(code, around, built, variant) == [str(variant / "__init__.py")] * 3


def test_loads_from_a_hub_cache_offline(built, hub, tmp_path):
    commit = "0123456789abcdef" * 2 + "01234567"
    repository = tmp_path / f"kernels--{hub.repo_id.replace('/', '--')}"
    shutil.copytree(built, repository / "snapshots" / commit / "build")
    (repository / "refs").mkdir()
    (repository / "refs" / f"v{hub.version}").write_text(commit)
    code = """
import json, sys, kernels
kernel = kernels.get_kernel(sys.argv[1], version=int(sys.argv[2]), trust_remote_code=True)
print(json.dumps([kernel.__file__]))
"""
    (file,) = run_python(code, hub.repo_id, hub.version, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert Path(file).is_relative_to(repository / "snapshots" / commit)


def test_a_build_loads_again_from_another_commit(grouped_moe, tmp_path):
    """Which changed another file: PyTorch and Python know the build already."""
    variant = Path(grouped_moe.__file__).parent
    copy = shutil.copytree(variant, tmp_path / variant.name)
    code = """
import json, pathlib, sys, kernels, torch
first, second = (kernels.get_local_kernel(pathlib.Path(path)) for path in sys.argv[1:])
x, w, splits = torch.randn(3, 8), torch.randn(2, 4, 8), torch.tensor([1, 2])
assert torch.equal(*(kernel.grouped_linear(x, w, splits) for kernel in (first, second)))
print(json.dumps([first.__file__, second.__file__]))
"""
    assert run_python(code, variant, copy) == [str(variant / "__init__.py"), str(copy / "__init__.py")]


def test_cpu_variant_loads_and_runs_without_triton(built):
    code = """
import importlib.abc, json, pathlib, sys, torch, kernels

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError("triton is blocked")

for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.meta_path.insert(0, NoTriton())
kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
for name in kernel.__all__:
    getattr(kernel, name)
x, w1, w2 = torch.randn(3, 8), torch.randn(2, 12, 8), torch.randn(2, 8, 6)
ids, weights = torch.tensor([[0], [1], [2]]), torch.rand(3, 1)
tensors = x, ids, weights, w1, w2
torch.testing.assert_close(kernel.grouped_mm_experts(*tensors), kernel.reference.grouped_mm_experts(*tensors))
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "triton"]))
"""
    assert run_python(code, built / "torch-cpu") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_describes_the_variant(built, hub, backend):
    variant = built / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    unique_id = re.search(r'unique_id = "(\w+)"', (variant / "_ops.py").read_text(encoding="utf-8")).group(1)
    assert metadata.id == f"_{hub.package}_{backend}_{unique_id}"
    assert metadata.version == hub.version
    assert metadata.source == f"https://github.com/{hub.repo_id}"
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.backend.archs is None


def test_there_is_a_variant_for_every_backend_and_no_other(built):
    """But that with native ops, in a build of `make build-cuda`."""
    names = sorted(path.name for path in built.glob("torch*") if "stable-abi" not in path.name)
    assert names == [f"torch-{backend}" for backend in BACKENDS]


@pytest.mark.parametrize("backend", BACKENDS)
def test_build_is_of_this_source(built, hub, backend):
    """A stale build would let every other test pass on code that is no longer there."""

    def files(directory: Path) -> dict[str, bytes]:
        kept = (item for item in content(directory).items() if item[0] not in ("_ops.py", "metadata.json"))
        return {name: data for name, data in kept if name.endswith((".py", ".json"))}

    assert files(built / f"torch-{backend}") == files(ROOT / "torch-ext" / hub.package), "run make build"


def test_workflows_pin_actions_by_commit():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
    used = {action for path in workflows for action in re.findall(r"uses: *(\S+)", path.read_text(encoding="utf-8"))}
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_card_is_rendered_with_every_public_name(built, hub, grouped_moe):
    card = (built / "CARD.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert f"https://github.com/{hub.repo_id}" in card
    assert f'get_kernel("{hub.repo_id}", version={hub.version}' in card
    assert not re.search(r"{[{%]", card)
    names = grouped_moe.__all__
    assert [name for name in names if name != "layers" and f"- `{name}`" not in card] == []
    assert [name for name in re.findall(r"grouped_moe\.(\w+)", card) if name not in names] == []


# As they are at the commit of huggingface/kernels that flake.lock pins.
BUILDERS_FILES = {
    "_ops.py.in": "dce5b28dbdbde0ab81055939f5b89b413a4e48804206d4dde8080417bae18b27",
    "_ops_cuda.py.in": "933e544bcbad82151547591748831765cc21b6d55564055989859ccbe905a0d7",
    "registration.h": "4de6806c3d18b3b6421ed8a4b3e50e1308e9963721a4b93ea30a8419a84c0e79",
    "shim_function_versions.txt": "35e17ac8bc4dc6c09a12fdd823499529156960238036bf76d7964c2ce80013f0",
}


@pytest.mark.parametrize("name", BUILDERS_FILES)
def test_files_of_the_builder_are_unchanged(name):
    assert hashlib.sha256((ROOT / "tools" / name).read_bytes()).hexdigest() == BUILDERS_FILES[name]


def test_both_projects_pin_one_builder():
    locks = [(ROOT / folder / "flake.lock").read_bytes() for folder in ("", "noarch")]
    assert locks[0] == locks[1]


def test_build_is_reproducible_and_takes_only_declared_files(tree, hub):
    package = tree / "torch-ext" / hub.package
    assert run_build(tree).returncode == 0
    first = content(tree / "build")
    (package / "NOTES.txt").write_text("not declared in pyext")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "stale.cpython-39.pyc").touch()
    (package / "_ops.py").write_text("raise RuntimeError('left by create-pyproject')")
    assert run_build(tree).returncode == 0
    assert content(tree / "build") == first
    assert {Path(name).suffix for name in first} <= {".py", ".json", ".md"}


def test_build_is_identified_by_content_or_by_git(tree, hub):
    def identify() -> tuple[str, dict]:
        assert run_build(tree).returncode == 0
        metadata = json.loads((tree / "build" / "torch-cpu" / "metadata.json").read_text())
        return metadata["id"].removeprefix(f"_{hub.package}_cpu_"), metadata["provenance"]

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
        command = ["git", "-C", tree, *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    plain, provenance = identify()
    assert re.fullmatch("[0-9a-f]{7}", plain) and "kernel" not in provenance
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "test")
    unique_id = git("rev-parse", "HEAD^{tree}")[:7]
    commit = git("rev-parse", "HEAD")
    assert identify() == (unique_id, {**provenance, "kernel": {"commit": commit, "dirty": False}})
    (tree / "torch-ext" / hub.package / "untracked.py").touch()
    assert identify() == (f"{unique_id}_dirty", {**provenance, "kernel": {"commit": commit, "dirty": True}})


ACCEPTED_MODULE = """
from __future__ import annotations

import json
import torch
from . import _ops

@torch.library.custom_op(_ops.add_op_namespace_prefix("op"), mutates_args=())
def op(x: torch.Tensor | None) -> None:
    from transformers import AutoModel

@op.register_fake
def fake(x): pass

torch.library.register_autograd(_ops.add_op_namespace_prefix("op"), fake)
"""


def test_build_accepts_what_the_rules_ask_for(tree, hub):
    (tree / "torch-ext" / hub.package / "accepted.py").write_text(ACCEPTED_MODULE)
    result = run_build(tree)
    assert result.returncode == 0, result.stderr


def add(file: str, text: str):
    """A function that adds a file to a tree."""

    def change(tree: Path) -> None:
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text(text, encoding="utf-8")

    return change


def edit(file: str, pattern: str, new: str):
    """A function that replaces what matches in a file of a tree."""

    def change(tree: Path) -> None:
        text = (tree / file).read_text(encoding="utf-8")
        (tree / file).write_text(re.sub(pattern, new, text), encoding="utf-8")

    return change


PACKAGE, MODULE = "torch-ext/grouped_moe", "torch-ext/grouped_moe/rejected.py"
INIT = f"{PACKAGE}/__init__.py"
OP = '@torch.library.custom_op("ns::op", mutates_args=())\ndef op(): pass'
REJECTED = [
    ("op: custom_op", add(MODULE, OP)),
    ("tests/test_op.py:2: op: custom_op", add("tests/test_op.py", OP)),
    ("op: register_fake", add(MODULE, '@torch.library.register_fake("ns::op")\ndef op(): pass')),
    ("cpu: register_kernel", add(MODULE, '@op.register_kernel("cpu")\ndef cpu(): pass')),
    ("has a fixed namespace", add(MODULE, 'torch.library.register_autograd("ns::op", f)')),
    ("has a fixed namespace", add(MODULE, 'torch.library.Library("ns", "FRAGMENT")')),
    ("absolute import of grouped_moe", add(MODULE, "import grouped_moe.routing")),
    ("absolute import of grouped_moe", add(MODULE, "from grouped_moe import route")),
    ("import of numpy", add(MODULE, "def f():\n    import numpy")),
    ("import of transformers outside a function", add(MODULE, "import transformers")),
    ("not valid Python 3.9", add(MODULE, "match x:\n    case 1:\n        pass")),
    ("not valid Python 3.9", add(MODULE, "def f(:")),
    ("needs Python 3.10", add(MODULE, "def f(x: int | None): pass")),
    ("__init__.py is missing", lambda tree: (tree / INIT).unlink()),
    ("must not contain an entry named grouped_moe", lambda tree: (tree / PACKAGE / "grouped_moe").mkdir()),
    ("__all__ must be a literal", add(INIT, '__all__ = ["a"] + ["b"]')),
    ("__all__ is missing", add(INIT, "")),
    ("Unknown field unknown", edit("noarch/build.toml", "edition = 5", "edition = 5\nunknown = 1")),
    ("repo-id", edit("noarch/build.toml", "repo-id.*", "")),
    ("'repo' is undefined", edit("CARD.md", r"\Z", "{{ repo }}")),
    ("CARD.md is missing", lambda tree: (tree / "CARD.md").unlink()),
]


@pytest.mark.parametrize("message, change", REJECTED, ids=[message for message, _ in REJECTED])
def test_build_rejects(tree, message, change):
    """With one line that says why, and what was built before is still there."""
    change(tree)
    old = tree / "build" / "torch-cpu" / "old.py"
    old.parent.mkdir(parents=True)
    old.touch()
    result = run_build(tree)
    assert result.returncode == 1
    assert re.fullmatch("error: [^\n]+\n", result.stderr) and message in result.stderr
    assert content(tree / "build") == {"torch-cpu/old.py": b""}
    assert not list(tree.glob(".build-*"))


def test_build_does_not_replace_what_is_not_a_build(tree):
    result = run_build(tree, "--output", tree)
    assert result.returncode == 1 and "which is not part of a build: not replaced" in result.stderr
    assert (tree / "noarch" / "build.toml").is_file()
