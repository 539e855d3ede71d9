"""MIG instances below the screens of nodes: one row each, its slices below, and what else fits."""

from collections.abc import Iterable, Mapping, Sequence

from fenka.cli import tables
from fenka.dialects.base import GIB_MIB
from fenka.views.instances import InstanceRow

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
        for each in instances:
            if each.card == card:
                rows += _instance(each)
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
