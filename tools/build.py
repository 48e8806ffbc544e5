"""Build the noarch variants of the kernel without Nix: build/torch-<backend>/ for every backend of noarch/build.toml.

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
from typing import Any, Callable, NamedTuple

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
from source_rules import BuildError

ROOT = Path(__file__).resolve().parent.parent
# Said in the provenance of every variant, so that nobody takes it for a sandboxed build.
BUILDER_VERSION = "0.0.0+tools-build"
# The builder's own template, unchanged: its rendering has to agree byte for byte.
OPS_TEMPLATE = ROOT / "tools" / "_ops.py.in"


class Config(NamedTuple):
    """What is built, by noarch/build.toml. package: folder of the source. files: of it, those that are packed.

    unique_id, provenance: as `identify` finds them.
    """

    general: dict[str, Any]
    repo_id: str
    package: Path
    files: list[Path]
    unique_id: str
    provenance: dict[str, Any]

    def id_of(self, backend: str) -> str:
        """Of a variant, in which its ops are registered."""
        return f"_{self.package.name}_{backend}_{self.unique_id}"


def parse(folder: Path) -> Build:
    """The build.toml of a folder. Raises `BuildError` if the real parser rejects it."""
    try:
        return Build.open(folder)
    except (OSError, ValueError) as error:
        raise BuildError(one_line(error)) from None


def read_toml(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "build.toml").read_text(encoding="utf-8"))


def read_config(root: Path) -> Config:
    """Read and validate noarch/build.toml, and find what it packs.

    Raises `BuildError` if the real parser rejects it, or if it asks for what only kernel-builder can do.
    """
    build, data = parse(root / "noarch"), read_toml(root / "noarch")
    general, framework = data["general"], data.get("torch-noarch")
    if framework is None:
        raise BuildError("noarch/build.toml: expected [torch-noarch]")
    for archs in {"cuda_capabilities", "rocm_archs"} & set(framework):
        raise BuildError(f"noarch/build.toml: {archs} would make the loader refuse other GPUs, leave it out")
    if any(build.all_kernel_depends(Backend.from_str(backend)) for backend in general["backends"]):
        raise BuildError("noarch/build.toml: kernel-depends is not supported without kernel-builder")
    if "repo-id" not in general.get("hub", {}):
        raise BuildError("noarch/build.toml: repo-id is missing in [general.hub]")
    package = root / "torch-ext" / general["name"].replace("-", "_")
    suffixes = framework.get("pyext", ["py", "pyi"])
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.suffix[1:] in suffixes)
    files = [path for path in files if path != package / "_ops.py"]  # written by the build, never taken from the source
    return Config(general, general["hub"]["repo-id"], package, files, *identify(root, package, files))


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
    top, tree = git(root, "rev-parse", "--show-toplevel"), git(root, "rev-parse", "HEAD^{tree}")
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
    """Render a template with the settings of the builder. Raises `BuildError` if it is missing or wrong."""
    if not template.is_file():
        raise BuildError(f"{template.name} is missing")
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(template.read_text(encoding="utf-8")).render(context)
    except jinja2.TemplateError as error:
        raise BuildError(f"{template.name}: {one_line(error)}") from None


def render_card(root: Path, config: Config, names: list[str]) -> str:
    """The Hub's README, from CARD.md."""
    general = config.general
    return render(
        root / "CARD.md",
        repo_id=config.repo_id,
        version=general["version"],
        functions=[name for name in names if name != "layers"],
        layers=source_rules.layer_classes(config.package, root) if "layers" in names else None,
        has_benchmark=(root / "benchmarks" / "benchmark.py").is_file(),
        upstream=general.get("upstream"),
        source=general.get("source"),
        license=general["license"].lower(),
    )


def metadata(config: Config, backend: str, archs: list[str] | None) -> dict[str, Any]:
    """The content of metadata.json but for the digest, in the order in which the builder writes it."""
    general = config.general
    return {
        "name": general["name"],
        "id": config.id_of(backend),
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": [*general.get("python-depends", []), *general.get(backend, {}).get("python-depends", [])],
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {},
        "provenance": {"kernel-builder": {"version": BUILDER_VERSION}, **config.provenance},
    }


def write_metadata(variant: Path, content: dict[str, Any]) -> None:
    """Write metadata.json, with the variant's digest, and read it as the loader does, or raise `BuildError`."""
    content["digest"] = {"algorithm": "sha256", "files": Digest.hash_variant(DigestAlgorithm.SHA256, variant).files}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (variant / "metadata.json").write_text(text, encoding="utf-8", newline="\n")
    try:
        read = Metadata.read_from_file(variant / "metadata.json")
        read.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except (OSError, ValueError, RuntimeError, DigestValidationError) as error:
        raise BuildError(f"{variant.name}: {one_line(error)}") from None


def write_variant(
    config: Config, variant: Path, backend: str, ops: str, library: Path | None = None, archs: list[str] | None = None
) -> None:
    """The package, its `_ops.py` and metadata, and of a variant with native code the library for these GPUs."""
    for path in config.files:
        target = variant / path.relative_to(config.package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (variant / "_ops.py").write_text(ops, encoding="utf-8", newline="\n")
    if library:
        shutil.copyfile(library, variant / library.name)
    write_metadata(variant, metadata(config, backend, archs))


def build(root: Path, stage: Path) -> Config:
    """Build every variant, the card and the benchmarks into `stage`. Raises `BuildError`; it is incomplete then."""
    config = read_config(root)
    names = source_rules.check_package(config.package, root)
    # The builder scans the tests for names of ops together with the package.
    source_rules.check_files(root / "tests", root, source_rules.unprefixed_ops)
    ops = render(OPS_TEMPLATE, kernel_name=config.package.name, kernel_unique_id=config.unique_id)
    for backend in config.general["backends"]:
        write_variant(config, stage / f"torch-{backend}", backend, ops)
    (stage / "CARD.md").write_text(render_card(root, config, names), encoding="utf-8", newline="\n")
    if (root / "benchmarks").is_dir():
        bytecode = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(root / "benchmarks", stage / "benchmarks", ignore=bytecode)
    return config


def check_replaceable(output: Path) -> None:
    """Raise `BuildError` if `output` holds anything that a build does not write: it would be lost."""
    for entry in sorted(output.iterdir()) if output.exists() else []:
        if entry.name not in ("CARD.md", "benchmarks") and not entry.name.startswith("torch"):
            raise BuildError(f"{output} holds {entry.name}, which is not part of a build: not replaced")


def replace_output(output: Path, fill: Callable[[Path], str]) -> int:
    """Replaces the directory by what `fill` makes, and prints what that returns; 1 after an error, which is printed."""
    try:
        check_replaceable(output)
        # Next to the output: a rename is atomic only within one file system.
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as scratch:
            stage, old = Path(scratch) / "new", Path(scratch) / "old"
            stage.mkdir()
            said = fill(stage)
            if output.exists():
                output.rename(old)
            stage.rename(output)
    except (BuildError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    print(f"{said} in {output}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the noarch variants of the kernel without Nix.")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="directory to replace (default: build)")

    def fill(stage: Path) -> str:
        config = build(ROOT, stage)
        backends = ", ".join(config.general["backends"])
        return f"built {config.repo_id} version {config.general['version']} for {backends}"

    return replace_output(parser.parse_args().output.absolute(), fill)


if __name__ == "__main__":
    sys.exit(main())
