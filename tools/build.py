"""Build the noarch variants of the kernel without Nix: build/torch-<backend>/ for every backend of build.toml.

    python tools/build.py [--output build]

The result has the layout, `_ops.py`, `metadata.json` and card of a kernel-builder build and is validated with the
parsers that the `kernels` package loads it with. It replaces the output directory only when everything is valid.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

try:
    import jinja2
    from kernels._rust import Backend, Build, Digest, DigestAlgorithm, DigestValidationError, Metadata
except ImportError as error:
    sys.exit(f"error: {error}; the build needs: pip install 'kernels>=0.17' jinja2")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomlkit as tomllib

import source_rules

ROOT = Path(__file__).resolve().parent.parent
# Said in the provenance of every variant, so that nobody takes it for a sandboxed build.
BUILDER_VERSION = "0.0.0+tools-build"
# The builder's own template, unchanged: its rendering has to agree byte for byte.
OPS_TEMPLATE = ROOT / "tools" / "_ops.py.in"


class BuildError(Exception):
    """The kernel cannot be built. The message says why, in one line per reason."""


class Config(NamedTuple):
    """What the build reads from build.toml."""

    general: dict[str, Any]
    pyext: list[str]
    repo_id: str

    @property
    def module(self) -> str:
        return self.general["name"].replace("-", "_")

    @property
    def backends(self) -> list[str]:
        return self.general["backends"]


def read_config(root: Path) -> Config:
    """Read and validate build.toml.

    Raises `BuildError` if the real parser rejects it, or if it asks for what only kernel-builder can do.
    """
    try:
        build = Build.open(root)
    except (OSError, ValueError) as error:
        raise BuildError(one_line(error)) from None
    data = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
    framework = data.get("torch-noarch")
    if framework is None:
        raise BuildError("build.toml: only [torch-noarch] kernels can be built without kernel-builder")
    archs = {"cuda_capabilities", "rocm_archs"} & set(framework)
    if archs:
        raise BuildError(f"build.toml: {archs.pop()} would make the loader refuse other GPUs, leave it out")
    general = data["general"]
    if any(build.all_kernel_depends(Backend.from_str(backend)) for backend in general["backends"]):
        raise BuildError("build.toml: kernel-depends is not supported without kernel-builder")
    repo_id = general.get("hub", {}).get("repo-id")
    if repo_id is None:
        raise BuildError("build.toml: repo-id is missing in [general.hub]")
    return Config(general, framework.get("pyext", ["py", "pyi"]), repo_id)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def package_files(package: Path, pyext: list[str]) -> list[Path]:
    """The files of the package that go into a variant. `_ops.py` is written by the build, never taken from it."""
    suffixes = {f".{extension}" for extension in pyext}
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix in suffixes]
    return sorted(path for path in files if path != package / "_ops.py")


def git(root: Path, *arguments: str) -> str | None:
    """The output of a git command, or None if it fails or there is no git."""
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def identify(root: Path, package: Path, files: list[Path]) -> tuple[str, dict[str, Any]]:
    """(unique id, provenance) of the source: the tree of HEAD, or outside a git repository of its own its content.

    Untracked files count as changes, as in a Nix build: they may be part of what is built.
    """
    top = git(root, "rev-parse", "--show-toplevel")
    tree = git(root, "rev-parse", "HEAD^{tree}")
    if top is None or tree is None or Path(top).resolve() != root:
        digest = hashlib.sha256()
        for path in files:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:7], {}
    dirty = git(root, "status", "--porcelain") != ""
    kernel = {"commit": git(root, "rev-parse", "HEAD"), "dirty": dirty}
    return tree[:7] + ("_dirty" if dirty else ""), {"kernel": kernel}


def render(template: Path, **context: Any) -> str:
    """Render a template with the settings of the builder. Raises `BuildError` if the template is wrong."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(template.read_text(encoding="utf-8")).render(context)
    except jinja2.TemplateError as error:
        raise BuildError(f"{template.name}: {one_line(error)}") from None


def render_card(root: Path, config: Config, names: list[str]) -> str:
    """The Hub's README. Raises `BuildError` if CARD.md is missing or wrong."""
    if not (root / "CARD.md").is_file():
        raise BuildError("CARD.md is missing")
    package = root / "torch-ext" / config.module
    return render(
        root / "CARD.md",
        repo_id=config.repo_id,
        version=config.general["version"],
        functions=[name for name in names if name != "layers"],
        layers=source_rules.layer_classes(package, root) if "layers" in names else None,
        has_benchmark=(root / "benchmarks" / "benchmark.py").is_file(),
        upstream=config.general.get("upstream"),
        source=config.general.get("source"),
        license=config.general["license"].lower(),
    )


def metadata(
    config: Config, unique_id: str, provenance: dict[str, Any], backend: str, digest: Digest
) -> dict[str, Any]:  # fmt: skip
    """The content of metadata.json, in the order in which the builder writes it."""
    general = config.general
    return {
        "name": general["name"],
        "id": f"_{config.module}_{backend}_{unique_id}",
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": [*general.get("python-depends", []), *general.get(backend, {}).get("python-depends", [])],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digest.files},
        "provenance": {"kernel-builder": {"version": BUILDER_VERSION}, **provenance},
    }


def validate_variant(variant: Path, expected: dict[str, Any]) -> None:
    """Read a variant back as the loader does. Raises `BuildError` if that gives anything but `expected`."""
    try:
        read = Metadata.read_from_file(variant / "metadata.json")
        read.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except (OSError, ValueError, RuntimeError, DigestValidationError) as error:
        raise BuildError(f"{variant.name}: {one_line(error)}") from None
    if (str(read.name), read.id, read.version) != (expected["name"], expected["id"], expected["version"]):
        raise BuildError(f"{variant.name}: metadata.json does not read back as it was written")


def build(root: Path, stage: Path) -> Config:
    """Build every variant, the card and the benchmarks into `stage`.

    Raises `BuildError` or `source_rules.SourceError`, and leaves `stage` incomplete then.
    """
    config = read_config(root)
    package = root / "torch-ext" / config.module
    names = source_rules.check_package(package, root)
    # The builder scans the tests for names of ops together with the package.
    source_rules.check_files(root / "tests", root, source_rules.unprefixed_ops)
    files = package_files(package, config.pyext)
    unique_id, provenance = identify(root, package, files)
    ops = render(OPS_TEMPLATE, kernel_name=config.module, kernel_unique_id=unique_id)
    for backend in config.backends:
        variant = stage / f"torch-{backend}"
        for path in files:
            target = variant / path.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        (variant / "_ops.py").write_text(ops, encoding="utf-8", newline="\n")
        digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
        content = metadata(config, unique_id, provenance, backend, digest)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (variant / "metadata.json").write_text(text, encoding="utf-8", newline="\n")
        validate_variant(variant, content)
    (stage / "CARD.md").write_text(render_card(root, config, names), encoding="utf-8", newline="\n")
    if (root / "benchmarks").is_dir():
        bytecode = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(root / "benchmarks", stage / "benchmarks", ignore=bytecode)
    return config


def check_replaceable(output: Path) -> None:
    """Raise `BuildError` if `output` holds anything that a build does not write: it would be lost."""
    if output.exists() and not output.is_dir():
        raise BuildError(f"{output} is not a directory")
    for entry in sorted(output.iterdir()) if output.exists() else []:
        if entry.name not in ("CARD.md", "benchmarks") and not entry.name.startswith("torch"):
            raise BuildError(f"{output} holds {entry.name}, which is not part of a build: not replaced")


def replace(stage: Path, output: Path, aside: Path) -> None:
    """Put `stage` in the place of `output`, whose old content moves to `aside`, or back if that fails."""
    if output.exists():
        output.rename(aside)
    try:
        stage.rename(output)
    except OSError:
        if aside.exists():
            aside.rename(output)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the noarch variants of the kernel without Nix.")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="directory to replace (default: build)")
    output = parser.parse_args().output.absolute()
    try:
        check_replaceable(output)
        # Next to the output: a rename is atomic only within one file system.
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as scratch:
            stage = Path(scratch) / "new"
            stage.mkdir()
            config = build(ROOT, stage)
            replace(stage, output, Path(scratch) / "old")
    except (BuildError, source_rules.SourceError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    print(f"built {config.repo_id} version {config.general['version']} for {', '.join(config.backends)} in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
