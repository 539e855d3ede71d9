"""ARCHITECTURE.md has the layers of pyproject.toml and is short, and each module says what it is."""

import re
import tomllib
from pathlib import Path

import pytest

from tools.modules import SOURCE, lines, modules, sentence

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
LONGEST = 130


def test_architecture_has_the_layers_of_the_import_contract() -> None:
    """One row a layer, in the same order, with the same folders."""
    table = TEXT.partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`.*?) \|", table)
    shown = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    assert shown == [set(re.split(r" \| ", layer)) for layer in layers]


def test_architecture_is_read_in_one_sitting() -> None:
    """An index of files would grow with the source."""
    assert len(TEXT.splitlines()) <= LONGEST


def test_architecture_names_only_files_that_exist() -> None:
    """A path is one of the repository or of src/fenka. `*` stands for several."""
    for name in set(re.findall(r"`([\w*-]+/[\w./*-]+)`", TEXT)):
        assert [*SOURCE.glob(name.rstrip("/")), *ROOT.glob(name.rstrip("/"))], name


@pytest.mark.parametrize("file", modules(SOURCE), ids=lambda file: str(file.relative_to(SOURCE)))
def test_module_says_what_it_is(file: Path) -> None:
    """`make modules` prints the sentence. An empty package needs none."""
    text = sentence(file)
    assert text or not file.read_text().strip()
    assert len(text.split()) <= 40


def test_modules_are_printed_by_folder_and_word() -> None:
    """The folder's name stands above its modules."""
    printed = "\n".join(lines(SOURCE / "core", ["queue"]))
    assert "\ncore/\n" in printed
    assert "  queue.py " in printed
    assert "inventory.py" not in printed
