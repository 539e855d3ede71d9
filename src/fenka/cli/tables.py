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


def elastic(lines: Sequence[str]) -> list[str]:
    """Lines with tabs as Go's tabwriter aligns them (padding 2), which kubectl's and arena's screens show.

    A cell is what a tab ends; a column is a run of lines that have such a cell. What follows the last tab
    of a line belongs to no column.
    """
    cells = [line.split("\t") for line in lines]
    for column in range(max((len(row) - 1 for row in cells), default=0)):
        run: list[list[str]] = []
        for row in [*cells, [""]]:
            if len(row) > column + 1:
                run.append(row)
                continue
            width = max((len(it[column]) for it in run), default=0) + 2
            for it in run:
                it[column] = it[column].ljust(width)
            run = []
    return ["".join(row) for row in cells]
