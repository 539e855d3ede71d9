"""How screens are printed: columns two blanks apart, or -o json|yaml of the same data."""

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence

import msgspec


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two blanks apart, no blanks at line ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def fit(rows: Sequence[Sequence[str]]) -> list[str]:
    """As `columns`, but on a terminal the last column is cut where the line would wrap."""
    lines = columns(rows)
    if not sys.stdout.isatty():
        return lines
    width = shutil.get_terminal_size().columns
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner with these words while something takes its time; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def show(data: object, output: str) -> bool:
    """Print `data` as json or yaml; False if a table was asked for."""
    if output == "table":
        return False
    if output == "json":
        encoded = msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
    else:
        encoded = msgspec.yaml.encode(data).decode().rstrip("\n")
    print(encoded)
    return True
