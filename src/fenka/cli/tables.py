"""How screens are printed: columns two blanks apart, or -o json|yaml of the same data."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

import msgspec


def shown(text: str) -> str:
    """The text with every character that is not printed as itself escaped, as `\\x1b`.

    Names, commands and messages come from other users, whose escape sequences a terminal would obey.
    """
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)


def put(lines: Iterable[str]) -> None:
    """Print a screen, with nothing in it that a terminal would obey."""
    print("\n".join(map(shown, lines)))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two blanks apart, no blanks at line ends."""
    rows = [tuple(map(shown, row)) for row in rows]
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
    yaml = output == "yaml"
    print(msgspec.yaml.encode(data).decode().rstrip("\n") if yaml else json_text(data, 2))
    return True


def json_text(data: object, indent: int) -> str:
    """The data exactly, with what a terminal would obey written as JSON escapes it."""
    text = msgspec.json.format(msgspec.json.encode(data), indent=indent).decode()
    return "".join(it if it.isprintable() or it == "\n" else json.dumps(it)[1:-1] for it in text)


def elastic(lines: Sequence[str]) -> list[str]:
    """Lines with tabs as Go's tabwriter aligns them (padding 2), which kubectl's and arena's screens show.

    A cell is what a tab ends; a column is a run of lines that have such a cell. What follows the last tab
    of a line belongs to no column.
    """
    cells = [[*map(shown, line.split("\t"))] for line in lines]
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
