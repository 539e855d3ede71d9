"""Prints the first sentence of each module, folder by folder: `make modules`.

    python tools/modules.py [FOLDER] [WORD ...]

FOLDER is one below src/fenka, for example `node/lease`. With WORDs only modules whose path or sentence has
all of them are printed.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fenka"


def modules(folder: Path) -> list[Path]:
    """Return a folder's modules. What protoc makes has no sentence."""
    return sorted(file for file in folder.rglob("*.py") if not file.stem.endswith("_pb2"))


def sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring. Empty if it has none."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split())
    end = first.find(". ")
    return first if end < 0 else first[: end + 1]


def lines(folder: Path, words: list[str]) -> Iterator[str]:
    """Yield the folders and modules that have all words, as `make modules` prints them."""
    before = None
    for file in modules(folder):
        text = sentence(file)
        if file.stem == "__init__" and not text:
            continue
        place = str(file.parent.relative_to(SOURCE))
        if not all(word.lower() in f"{place}/{file.name} {text}".lower() for word in words):
            continue
        if place != before:
            yield f"\n{place}/" if place != "." else "\n"
            before = place
        yield f"  {file.name:<26} {text}"


def main(arguments: list[str]) -> int:
    """Print the modules. Returns 1 if there are none."""
    folder = SOURCE
    if arguments and (SOURCE / arguments[0]).is_dir():
        folder, arguments = SOURCE / arguments[0], arguments[1:]
    found = list(lines(folder, arguments))
    print(*found, sep="\n")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
