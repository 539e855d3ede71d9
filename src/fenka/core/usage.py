"""What is held of cards and nodes: the views that `evaluate` reads, totals, and changes laid over a view."""

from dataclasses import dataclass
from typing import Protocol

from fenka.core.request import Placement


@dataclass(frozen=True, slots=True)
class CardUsage:
    """What is held of a card: memory in MiB, compute in percent, by so many slices, `whole` of them
    all of the card (more than one only where somebody else's record says so)."""

    memory_mib: int = 0
    compute: int = 0
    holders: int = 0
    whole: int = 0


NO_USAGE = CardUsage()


class UsageView(Protocol):
    """What is held now. Read-only, so that a snapshot and an index serve the same code."""

    def used(self, node: str, card: int) -> CardUsage:
        """What is held of this card; NOTHING for a card that nobody knows."""

    def host_used(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""


class EmptyUsage:
    """A view in which nothing is held."""

    def used(self, node: str, card: int) -> CardUsage:  # noqa: ARG002
        """Nothing."""
        return NO_USAGE

    def host_used(self, node: str) -> tuple[int, int]:  # noqa: ARG002
        """Nothing."""
        return 0, 0


class UsageTotals:
    """Totals of placements. A View for `evaluate`.

    It checks nothing: also a record that overcommits a card is counted as it stands.
    """

    def __init__(self) -> None:
        self._used: dict[tuple[str, int], CardUsage] = {}
        self._host: dict[str, tuple[int, int]] = {}

    def used(self, node: str, card: int) -> CardUsage:
        """What is held of this card."""
        return self._used.get((node, card), NO_USAGE)

    def host_used(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""
        return self._host.get(node, (0, 0))

    def add(self, placement: Placement) -> None:
        """Count a placement in."""
        self._count(placement, +1)

    def remove(self, placement: Placement) -> None:
        """Count out a placement that was counted in."""
        self._count(placement, -1)

    def copy(self) -> "UsageTotals":
        """A tally that goes its own way from here."""
        twin = UsageTotals()
        twin._used, twin._host = dict(self._used), dict(self._host)
        return twin

    def _count(self, placement: Placement, sign: int) -> None:
        for piece in placement.slices:
            used = self.used(placement.node, piece.card)
            self._used[placement.node, piece.card] = CardUsage(
                used.memory_mib + sign * piece.memory_mib,
                used.compute + sign * piece.compute,
                used.holders + sign,
                used.whole + sign * placement.whole,
            )
        cpu, memory = self.host_used(placement.node)
        self._host[placement.node] = (
            cpu + sign * placement.cpu_milli,
            memory + sign * placement.host_memory_mib,
        )


class UsageOverlay:
    """A view with placements added to it, or taken away, without a copy of what is under it."""

    def __init__(self, under: UsageView) -> None:
        self._under, self._change = under, UsageTotals()

    def used(self, node: str, card: int) -> CardUsage:
        """What is held of this card."""
        one, more = self._under.used(node, card), self._change.used(node, card)
        return CardUsage(
            one.memory_mib + more.memory_mib,
            one.compute + more.compute,
            one.holders + more.holders,
            one.whole + more.whole,
        )

    def host_used(self, node: str) -> tuple[int, int]:
        """CPU (thousandths of a core) and host memory (MiB) held on this node."""
        (cpu, memory), (more_cpu, more_memory) = (
            self._under.host_used(node),
            self._change.host_used(node),
        )
        return cpu + more_cpu, memory + more_memory

    def add(self, placement: Placement) -> None:
        """Count a placement in."""
        self._change.add(placement)

    def remove(self, placement: Placement) -> None:
        """Count a placement out, also one of the view under this one."""
        self._change.remove(placement)
