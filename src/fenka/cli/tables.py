"""Prints screens: columns two blanks apart, or the same data as JSON or YAML."""

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TextIO, TypeVar

import msgspec

from fenka.formats import printable

T = TypeVar("T")

escape = printable.escape


def print_lines(lines: Iterable[str]) -> None:
    """Print a screen, with unprintable characters escaped."""
    print("\n".join(map(escape, lines)))


def write_bytes(data: bytes, stream: TextIO | None = None) -> None:
    """Write a program's output to a stream as it is; default: stdout."""
    stream = sys.stdout if stream is None else stream
    stream.flush()
    binary = getattr(stream, "buffer", None)
    if binary is None:
        stream.write(data.decode(errors="replace"))
    else:
        binary.write(data)
        binary.flush()


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of left-aligned columns, two blanks apart, without blanks at line ends."""
    rows = [tuple(map(escape, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def tabulate(items: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> list[list[str]]:
    """Return the titles of the columns, and a row for each item."""
    return [[*columns], *([cell(item) for cell in columns.values()] for item in items)]


def align_to_terminal(
    rows: Sequence[Sequence[str]], less_important: Sequence[str] = ()
) -> list[str]:
    """Return the lines of `align`, on a terminal truncated to its width.

    less_important: titles of columns that only wide terminals show, the least important first.
    """
    lines = align(rows)
    if not sys.stdout.isatty():
        return lines
    width = shutil.get_terminal_size().columns
    for title in less_important:
        if all(len(line) <= width for line in lines):
            break
        column = rows[0].index(title)
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
        lines = align(rows)
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def align_wrapped(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of `align`; what a terminal has no room for of the last column gets lines of its own.

    The last column is a sentence. If the rest leaves it no room, it stands indented below its row.
    """
    lines = align(rows)
    if not sys.stdout.isatty():
        return lines
    width = shutil.get_terminal_size().columns
    if all(len(line) <= width for line in lines):
        return lines
    rest = align([row[:-1] for row in rows])
    wrapped = list[str]()
    for line, row in zip(rest, rows, strict=True):
        wrapped.append(line if len(line) <= width else line[: width - 1] + "…")
        if row is not rows[0]:
            wrapped += textwrap.wrap(
                escape(row[-1]), max(width, 20), initial_indent="    ", subsequent_indent="    "
            )
    return wrapped


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner with this text on a terminal while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def print_data(data: object, output: str, *, arena: bool = False) -> bool:
    """Print the data as JSON or YAML; return False if the output is a table.

    arena: JSON as arena prints it: four blanks, no newline at the end.
    """
    if output == "yaml":
        print(msgspec.yaml.encode(data).decode().rstrip("\n"))
    elif output == "json":
        print(json_text(data, 4 if arena else 2), end="" if arena else "\n")
    return output in ("yaml", "json")


def json_text(data: object, indent: int) -> str:
    """Return the data as JSON, with unprintable characters escaped."""
    text = msgspec.json.format(msgspec.json.encode(data), indent=indent).decode()
    return "".join(
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
        for character in text
    )


def align_tabs(lines: Sequence[str]) -> list[str]:
    """Align lines with tabs as Go's tabwriter does (padding 2), as in kubectl's and arena's screens.

    A tab ends a cell. A column is a run of lines that have such a cell. The text after the last tab of a
    line belongs to no column.
    """
    cells = [[*map(escape, line.split("\t"))] for line in lines]
    for column in range(max((len(row) - 1 for row in cells), default=0)):
        run: list[list[str]] = []
        for row in [*cells, [""]]:
            if len(row) > column + 1:
                run.append(row)
                continue
            width = max((len(aligned[column]) for aligned in run), default=0) + 2
            for aligned in run:
                aligned[column] = aligned[column].ljust(width)
            run = []
    return ["".join(row) for row in cells]


def hours_text(hours: float) -> str:
    """Return hours of a card or of a GiB with three digits after the point, on all screens."""
    return "<0.001" if 0 < hours < 0.0005 else f"{hours:.3f}"
