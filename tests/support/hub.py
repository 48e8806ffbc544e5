"""The repository of the kernel, and where the Hub has it."""

import sys
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomlkit as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent


class Hub(NamedTuple):
    """Where build.toml says that the kernel is published, and under which name."""

    repo_id: str
    version: int
    package: str


def read_hub() -> Hub:
    general = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]
    return Hub(general["hub"]["repo-id"], general["version"], general["name"].replace("-", "_"))
