"""README, docs and the card: their code runs, their links lead to files, and README says what is so."""

import json
import logging
import math
import re
import shutil
from pathlib import Path
from typing import List, NamedTuple, Set

import pytest
import torch
from hub import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "build" / "CARD.md", *sorted((ROOT / "docs").glob("*.md"))]
by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)

# What a block may need, said behind its "```python": a C++ compiler, a download, a GPU, several processes, more time
# than a test should take, or write access to the Hub. Where the test lacks it, the block is only compiled.
NEEDS = {"compiler", "download", "gpu", "processes", "slow", "upload"}
MAX_WORDS = 1200


class Block(NamedTuple):
    """A block of Python code, its first line in the file, and what it needs."""

    code: str
    line: int
    needs: Set[str]


def read(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def python_blocks(text: str) -> List[Block]:
    found = re.finditer(r"^```python([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(match[2], text[: match.start(2)].count("\n"), set(match[1].split())) for match in found]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> List[List[str]]:
    """The cells of a section's only table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def log_level(hub):
    """Sets the package's log level back, which a block may change."""
    logger = logging.getLogger(hub.package)
    level = logger.level
    yield
    logger.setLevel(level)


@by_document
def test_code_runs(document, tmp_path, monkeypatch, log_level):
    """The blocks of a file in order and in one namespace, in a folder where `build` is the build."""
    (tmp_path / "build").symlink_to(ROOT / "build")
    monkeypatch.chdir(tmp_path)
    found = {"compiler": shutil.which("c++"), "gpu": torch.cuda.is_available()}
    available = {need for need, there in found.items() if there}
    namespace, text = {}, read(document)
    blocks = python_blocks(text)
    assert len(blocks) == text.count("```python")
    for code, line, needs in blocks:
        assert needs <= NEEDS, f"{document.name}:{line}: unknown words after ```python"
        compiled = compile("\n" * line + code, str(document), "exec")
        if needs <= available:
            exec(compiled, namespace)


@by_document
def test_documents_load_the_kernel_by_its_name(document, hub):
    for repo_id, version in re.findall(r'get_kernel\("([^"]+)", version=(\d+)', read(document)):
        assert (repo_id, int(version)) == (hub.repo_id, hub.version)


@by_document
def test_links_lead_to_files(document):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", read(document))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_readme_is_short():
    assert len(read(ROOT / "README.md").split()) <= MAX_WORDS


def test_readme_has_the_hubs_front_matter():
    front_matter = read(ROOT / "README.md").split("---\n")[1]
    assert "library_name: kernels\nlicense: apache-2.0\n" in front_matter and "\n- kernels\n" in front_matter


def test_table_of_names_is_all_of_the_package(grouped_moe):
    rows = table(section(read(ROOT / "README.md"), "Public names"))
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[0])) == sorted(grouped_moe.__all__)


def test_speed_table_is_what_was_recorded():
    """Rounded down; our memory up."""
    results = json.loads((ROOT / "benchmarks" / "results" / "layers_h200.json").read_text(encoding="utf-8"))
    cells = {(cell["layer"], cell["tokens"], cell["local"], cell["backward"]): cell for cell in results["cells"]}
    rows = table(section(read(ROOT / "README.md"), "Speed"))
    assert 0 < len(rows) <= 10
    for layer, *figures in rows:
        keys = [(16384, 1.0, False), (16384, 0.125, False), (8192, 1.0, True), (8192, 0.125, True)]
        times = [cells[(layer, *key)]["times"]["step" if key[2] else "forward"] for key in keys]
        ratios = [entries["grouped_mm"]["median_ms"] / entries["ours"]["median_ms"] for entries in times]
        ours, theirs = (cells[(layer, *keys[2])]["peak_mib"][name] for name in ("ours", "grouped_mm"))
        want = [f"{math.floor(100 * ratio) / 100:.2f}" for ratio in ratios]
        assert figures == [*want, f"{math.ceil(ours)} ({math.floor(theirs)})"], layer
