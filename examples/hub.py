"""Loads this package the way its users do, through `kernels.get_kernel`, from the variants under build/."""

import os
import sys
from pathlib import Path
from types import ModuleType

import kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomlkit as tomllib

ROOT = Path(__file__).resolve().parent.parent


def load_package() -> ModuleType:
    """The package, under the repo id and version that build.toml publishes it as.

    LOCAL_KERNELS makes `get_kernel` take a repo id from a folder, by default build/. Without it the same call would
    download from the Hub.
    """
    general = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]
    repo_id = general["hub"]["repo-id"]
    os.environ.setdefault("LOCAL_KERNELS", f"{repo_id}={ROOT / 'build'}")
    return kernels.get_kernel(repo_id, version=general["version"], trust_remote_code=True)
