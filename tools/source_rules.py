"""Rules for the Python source of a Hub kernel, checked on the syntax tree without importing anything.

`unprefixed_ops` and `foreign_imports` are those of the builder's hooks. The others are written requirements of the Hub
format that no hook enforces and that otherwise show up on a user's machine.
"""

import ast
import sys
from functools import partial
from pathlib import Path
from typing import Callable, Iterator

# The Hub loads a package with the standard library, torch and triton around it, and nothing else.
ALLOWED_IMPORTS = sys.stdlib_module_names | {"torch", "triton"}
# Packages that a caller of one function may have. Importing them must not be needed to load the kernel.
IMPORTS_WITHIN_FUNCTIONS = {"peft", "tqdm", "transformers"}

OP_DECORATORS = {
    "custom_op", "triton_op", "register_fake", "register_kernel", "register_torch_dispatch", "register_vmap",
}  # fmt: skip
OP_CALLS = OP_DECORATORS | {"Library", "define", "impl", "register_autocast", "register_autograd"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class BuildError(Exception):
    """The kernel cannot be built. The message says why, in one line per reason; of a source file with its line."""


def check_package(package: Path, root: Path) -> list[str]:
    """Check every module below `package` and return the names in its `__all__`.

    Raises `BuildError` with every violation found. Files are named relative to `root`.
    """
    init, name = package / "__init__.py", package.relative_to(root)
    if not init.is_file():
        raise BuildError(f"{name}: __init__.py is missing")
    if (package / package.name).exists():
        raise BuildError(f"{name}: must not contain an entry named {package.name}")
    rules = unprefixed_ops, literal_namespaces, runtime_unions, partial(foreign_imports, package=package.name)
    check_files(package, root, *rules)
    return public_names(parse(init, root), name / init.name)


def check_files(folder: Path, root: Path, *rules: Callable[[ast.Module], Iterator[str]]) -> None:
    """Apply rules to every module below `folder`. Raises `BuildError` with every violation found."""
    violations = []
    for path in sorted(folder.rglob("*.py")):
        tree = parse(path, root)
        violations += [f"{path.relative_to(root)}:{message}" for rule in rules for message in rule(tree)]
    if violations:
        raise BuildError("\n".join(violations))


def parse(path: Path, root: Path) -> ast.Module:
    """Parse `path` as Python 3.9, the oldest version of the Hub format. Raises `BuildError` if that fails."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    except SyntaxError as error:
        raise BuildError(f"{path.relative_to(root)}:{error.lineno}: not valid Python 3.9: {error.msg}") from None
    except ValueError as error:
        raise BuildError(f"{path.relative_to(root)}: not readable as Python source: {error}") from None


def called_name(node: ast.AST) -> str:
    """The last part of the name that `node` calls: `custom_op` for `torch.library.custom_op(...)`, else empty."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", None) or getattr(function, "id", "")


def unprefixed_ops(tree: ast.Module) -> Iterator[str]:
    """Op decorators of module-level definitions whose first argument is not `add_op_namespace_prefix(...)`."""
    for node in tree.body:
        for decorator in getattr(node, "decorator_list", []):
            name, arguments = called_name(decorator), getattr(decorator, "args", [])
            if name in OP_DECORATORS and arguments and called_name(arguments[0]) != "add_op_namespace_prefix":
                yield f"{node.lineno}: {node.name}: {name} must get its name from add_op_namespace_prefix(...)"


def literal_namespaces(tree: ast.Module) -> Iterator[str]:
    """Other calls that name an op or a library by a literal: two versions of the kernel would share it."""
    covered = {decorator for node in tree.body for decorator in getattr(node, "decorator_list", [])}
    for node in set(ast.walk(tree)) - covered:
        name, arguments = called_name(node), getattr(node, "args", [])
        literal = getattr(arguments[0], "value", None) if name in OP_CALLS and arguments else None
        if isinstance(literal, str) and ("::" in literal or name == "Library"):
            yield f"{node.lineno}: {name}({literal!r}) has a fixed namespace, use add_op_namespace_prefix"


def runtime_unions(tree: ast.Module) -> Iterator[str]:
    """Annotations `X | Y` that Python 3.9 evaluates and fails on."""
    future = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__")
    if any(alias.name == "annotations" for node in future for alias in node.names):
        return
    for node in ast.walk(tree):
        annotation = node.returns if isinstance(node, FUNCTIONS) else getattr(node, "annotation", None)
        operators = ast.walk(annotation) if annotation else ()
        if any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr) for part in operators):
            yield f"{annotation.lineno}: X | Y in an annotation needs Python 3.10, write Optional or Union"


def foreign_imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Absolute imports of the package itself, and imports of what the Hub does not promise to a kernel."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    deferred = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for module in (name.split(".")[0] for name in names):
            if module == package:
                yield f"{node.lineno}: absolute import of {package}, the package itself: use a relative import"
            elif module in IMPORTS_WITHIN_FUNCTIONS and node not in deferred:
                yield f"{node.lineno}: import of {module} outside a function"
            elif module not in ALLOWED_IMPORTS | IMPORTS_WITHIN_FUNCTIONS:
                yield f"{node.lineno}: import of {module}: only the standard library, torch and triton are allowed"


def public_names(tree: ast.Module, name: Path) -> list[str]:
    """The names in `__all__`, which the Hub reads without importing. Raises `BuildError` if it can't."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            elements = node.value.elts if isinstance(node.value, ast.List) else []
            names = [getattr(element, "value", None) for element in elements]
            if names and all(isinstance(item, str) for item in names):
                return names
            raise BuildError(f"{name}:{node.lineno}: __all__ must be a literal, non-empty list of strings")
    raise BuildError(f"{name}: __all__ is missing")


def layer_classes(package: Path, root: Path) -> list[str]:
    """The top-level classes of the package's `layers` module."""
    return [node.name for node in parse(package / "layers.py", root).body if isinstance(node, ast.ClassDef)]
