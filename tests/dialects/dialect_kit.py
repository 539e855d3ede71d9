"""Pods and nodes for the dialects' tests."""

from fenka.core.cards import Card, Node
from fenka.dialects.gpushare import Kind, Share
from fenka.dialects.requests import Limits, Manifest

T4_MIB, V100_MIB = 15079, 16130


def share(*sizes: int, unit_mib: int = 1024, name: str = "gpu-1") -> Share:
    """A node with cards of these sizes in MiB."""
    cards = tuple(Card(index, f"GPU-{index}", "model", size) for index, size in enumerate(sizes))
    return Share(Node(name, cards), unit_mib)


def pod(
    *containers: dict[str, int | str],
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    init: tuple[dict[str, int | str], ...] = (),
    sidecars: tuple[dict[str, int | str], ...] = (),
) -> Manifest:
    """Containers c0, c1, …, init containers i0, …, sidecars s0, …, with these limits."""
    made = [
        Limits(f"{letter}{number}", limits, kind)
        for letter, kind, some in (
            ("s", Kind.SIDECAR, sidecars),
            ("i", Kind.INIT, init),
            ("c", Kind.APP, containers),
        )
        for number, limits in enumerate(some)
    ]
    return Manifest(tuple(made), labels or {}, annotations or {})
