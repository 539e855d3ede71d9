"""ARCHITECTURE.md names each module of src, in the table of its folder, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_module_stands_in_the_table_of_its_folder() -> None:
    """`__init__.py` need not be named. What protoc makes is a module, too."""
    sections = re.split(r"(?m)^###? (.*)$", (ROOT / "ARCHITECTURE.md").read_text())
    listed = {
        f"{folder}/{name}"
        for folder, text in zip(sections[1::2], sections[2::2], strict=True)
        if folder.startswith("src/")
        for row in re.findall(r"(?m)^\|(.*?)\|", text)
        for name in re.findall(r"`(\w+\.py)`", row)
    }
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "src/fenka").rglob("*.py")}
    initial = {name for name in modules | listed if name.endswith("/__init__.py")}
    assert listed - initial == modules - initial
