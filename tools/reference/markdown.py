"""Markdown of the generated pages."""

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fenka"
DOCS = ROOT / "docs"


class MissingEntry(Exception):
    """Something in the source has no description, or a description has nothing in the source."""


@cache
def parsed() -> dict[Path, list[ast.AST]]:
    """Return the nodes of each module of the source, which is parsed once for all pages."""
    return {
        file: list(ast.walk(ast.parse(file.read_text()))) for file in sorted(SOURCE.rglob("*.py"))
    }


def page(title: str, first: str, source: str, *parts: str) -> str:
    """Return a page: heading, first sentence, and how it was made.

    Args:
        title: The heading.
        first: One or two sentences that say what the page answers.
        source: The files that the page is generated from.
        parts: Its contents.
    """
    note = f"<!-- Generated from {source} by `make reference`. Do not edit. -->"
    return "\n\n".join([note, f"# {title}", first, *parts]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are Markdown; line breaks and bars are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def code(text: str) -> str:
    """Return a text as code. Empty if the text is."""
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """Return a text with a capital letter and one full stop."""
    stripped = " ".join(text.split()).rstrip(".;")
    return f"{stripped[:1].upper()}{stripped[1:]}." if stripped else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def compare(found: Iterable[str], described: Iterable[str], file: Path) -> None:
    """Raise MissingEntry unless the source and its descriptions have the same names."""
    source, known = set(found), set(described)
    where = file.relative_to(ROOT)
    faults = [f"{where}: add an entry for {name}" for name in sorted(source - known)]
    faults += [f"{where}: {name} is not in the source any more" for name in sorted(known - source)]
    if faults:
        raise MissingEntry("\n".join(faults))
