"""The layout of screens, by option, FENKA_LAYOUT or configuration file; the lines of MIG instances."""

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fenka.cli import tables
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.dialects.base import GIB_MIB
from fenka.views.mig_rows import InstanceRow

NodeInstances = tuple[str, Sequence[InstanceRow], Mapping[int, Mapping[str, int]]]
"""A node's name, its instances, and what else fits on its divided cards by index (`NodeRow.free`)."""


def instances_screen(nodes: Iterable[NodeInstances]) -> list[str]:
    """Return the lines of all nodes that have divided cards, after a blank one. Several nodes are named."""
    divided = [(name, instances, free) for name, instances, free in nodes if free]
    lines: list[str] = []
    for name, instances, free in divided:
        lines += ["", *([f"{name}:"] if len(divided) > 1 else ())]
        lines += instance_lines(instances, free)
    return lines


def instance_lines(
    instances: Sequence[InstanceRow], free: Mapping[int, Mapping[str, int]]
) -> list[str]:
    """Return a row for each instance of a node's divided cards, slices below, and what else fits."""
    rows: list[tuple[str, ...]] = []
    for card, counts in sorted(free.items()):
        for instance in instances:
            if instance.card == card:
                rows += _instance(instance)
        rows.append((str(card), f"free: {free_text(counts)}", "", ""))
    return tables.align(rows)


def _instance(row: InstanceRow) -> list[tuple[str, ...]]:
    used = sum(piece.memory_mib for piece in row.slices)
    share = sum(piece.compute for piece in row.slices)
    alone = len(row.slices) == 1 and used == row.memory_mib
    holder = row.slices[0].holder if alone else f"{len(row.slices)} slice(s)"
    if row.owner != "fenka":
        holder = row.owner
    memory = f"{used / GIB_MIB:.1f}/{row.memory_mib / GIB_MIB:.1f} GiB"
    name = f"{row.card}/{row.start} {row.profile}"
    slices = [
        ("", piece.holder, f"{piece.memory_mib / GIB_MIB:.1f} GiB", f"{piece.compute} %")
        for piece in row.slices
        if not alone
    ]
    return [(name, holder, memory, f"{share}/{row.compute} %"), *slices]


def free_text(free: Mapping[str, int]) -> str:
    """Return what fits beside the instances of a card, each for itself: `2×1g.5gb or 1×2g.10gb`."""
    return " or ".join(f"{count}×{name}" for name, count in free.items()) or "nothing"


Layout = Literal["fenka", "old", "arena"]
NAMES = ("fenka", "old", "arena")
CONFIGURATION = Path(".config/fenka/config.toml")
"""In the user's home directory."""

LayoutOption = Annotated[
    Layout | None,
    typer.Option("--layout", help="arena: as arena today; old: as before 0.2 (the default)"),
]


def uses_arena(option: Layout | None) -> bool:
    """Return whether screens look as today's arena; else they look as the articles show them.

    Raises UserError for a layout that does not exist.
    """
    return (option or _configured()) == "arena"


def _configured() -> str:
    if name := os.environ.get("FENKA_LAYOUT"):
        return _checked(name, "FENKA_LAYOUT")
    file = CONFIGURATION
    try:
        file = Path.home() / CONFIGURATION
        settings = tomllib.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        # RuntimeError: the user has no home directory, as in many containers.
        return "fenka"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise UserError(f"{file} cannot be read: {why}", INVALID_INPUT) from None
    unknown = settings.keys() - {"layout"}
    if unknown:
        raise UserError(
            f"unknown setting {min(unknown)!r} in {file}: the only setting is layout", INVALID_INPUT
        )
    return _checked(settings.get("layout", "fenka"), f"layout in {file}")


def _checked(name: object, source: str) -> str:
    if name not in NAMES:
        raise UserError(f"invalid {source}: {name!r} is none of {', '.join(NAMES)}", INVALID_INPUT)
    return str(name)
