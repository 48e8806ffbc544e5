"""What a native library needs and holds, read from the file: the checks of the builder's hooks, and its architectures.

Raises `BuildError` where the library would not load on a machine that the loader takes it for.
"""

import re
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple

from source_rules import BuildError

Version = Tuple[int, ...]

# Added to the stable ABI's shim by which PyTorch; those without a line are older than 2.10. The builder's own table.
SHIM_VERSIONS = Path(__file__).resolve().parent / "shim_function_versions.txt"
PYTHON_SYMBOLS = {"PyModule_Create2"}  # of Python's stable ABI: all that the registration of a module needs
UNSTABLE = re.compile(r"_ZNK?(2at|3c10|5torch)(?!6stable)")  # C++ names of PyTorch's that no ABI promises
# What manylinux_2_28 has at most.
MANYLINUX: Dict[str, Version] = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
FAT_BINARY = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2


class Needs(NamedTuple):
    """symbols: undefined ones by name. versions: the newest that is needed of each library of MANYLINUX."""

    symbols: List[str]
    versions: Dict[str, Version]


def version_of(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def needs_of(library: Path) -> Needs:
    """What the dynamic loader will look for, as `nm` lists it."""
    command = ["nm", "--dynamic", "--undefined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols, versions = [], {}
    for name in (line.split()[-1] for line in listed.splitlines()):
        symbol, _, wanted = name.partition("@")
        symbols.append(symbol)
        family, _, number = wanted.strip("@").partition("_")
        if family in MANYLINUX:
            versions[family] = max(versions.get(family, ()), version_of(number))
    return Needs(symbols, versions)


def check_symbols(needs: Needs, torch_version: str) -> None:
    """That all that it needs of PyTorch and of Python is in their stable ABIs, PyTorch's of this version."""
    lines = re.findall(r"^(\w+): TORCH_VERSION_(\w+)$", SHIM_VERSIONS.read_text(encoding="utf-8"), re.MULTILINE)
    added, target, wrong = {name: version_of(text) for name, text in lines}, version_of(torch_version), []
    for symbol in needs.symbols:
        if added.get(symbol, ())[:2] > target:
            wrong.append(f"{symbol} came with PyTorch {'.'.join(map(str, added[symbol]))}")
        elif UNSTABLE.match(symbol):
            wrong.append(f"{symbol} is not in PyTorch's stable ABI")
        elif re.match("_?Py", symbol) and symbol not in PYTHON_SYMBOLS:
            wrong.append(f"{symbol} is not known to be in Python's stable ABI")
    if wrong:
        raise BuildError("\n".join(wrong))


def beyond_manylinux(needs: Needs) -> List[str]:
    """What it needs that manylinux_2_28 has not, as "GLIBC 2.34"."""
    return [
        f"{family} {'.'.join(map(str, version))}"
        for family, version in sorted(needs.versions.items())
        if version > MANYLINUX[family]
    ]


def device_code(library: Path) -> Iterator[Tuple[int, int]]:
    """(kind, architecture) of each piece of device code, as (CUBIN, 90): the headers of its fat binaries."""
    content = library.read_bytes()
    for match in re.finditer(re.escape(FAT_BINARY), content):
        version, header_size, size = struct.unpack_from("<HHQ", content, match.start() + 4)
        if version != 1 or header_size != 16:
            continue
        place, end = match.start() + header_size, match.start() + header_size + size
        while place < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", content, place)
            yield kind, struct.unpack_from("<I", content, place + 28)[0]
            place += entry_header + entry_size


def check_architectures(library: Path, capabilities: List[str]) -> None:
    """That every source was compiled for each capability, such as "9.0" or, with code to translate, "12.0+PTX"."""
    wanted = []
    for capability in capabilities:
        number = int(capability.split("+")[0].replace(".", ""))
        wanted += [(CUBIN, number), *([(PTX, number)] if capability.endswith("+PTX") else [])]
    counts = Counter(device_code(library))
    if counts.keys() != set(wanted) or len(set(counts.values())) != 1:
        raise BuildError(f"{library.name}: device code for {dict(counts)}, but build.toml declares {sorted(wanted)}")
