"""Allocated amounts of cards and hosts: the view that `evaluate` reads, totals, changes on top of a view."""

from typing import NamedTuple, Protocol

from fenka.core.inventory import DeviceId
from fenka.core.request import Placement


class CardUsage(NamedTuple):
    """The allocated amounts of a card.

    Attributes:
        memory_mib: in MiB.
        compute: in percent.
        holders: the number of slices.
        whole: how many of them are the whole card. Only a foreign record makes this more than one.
    """

    memory_mib: int = 0
    compute: int = 0
    holders: int = 0
    whole: int = 0


NO_USAGE = CardUsage()
_NO_CARDS: dict[DeviceId, CardUsage] = {}


class UsageView(Protocol):
    """The amounts that are allocated now. Read-only, so that a snapshot and an index serve the same code."""

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card; NO_USAGE for an unknown one."""

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated on this node."""


class EmptyUsage:
    """A view in which nothing is allocated."""

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:  # noqa: ARG002
        """Return NO_USAGE."""
        return NO_USAGE

    def host_usage(self, node: str) -> tuple[int, int]:  # noqa: ARG002
        """Return no CPU and no memory."""
        return 0, 0


class UsageTotals:
    """A view that adds up placements. It does not check that they fit their cards."""

    def __init__(self) -> None:
        self._cards: dict[str, dict[DeviceId, CardUsage]] = {}
        self._hosts: dict[str, tuple[int, int]] = {}
        self._watching: list[set[str]] = []

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card."""
        return self._cards.get(node, _NO_CARDS).get(device, NO_USAGE)

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated on this node."""
        return self._hosts.get(node, (0, 0))

    def watch(self, changed: set[str]) -> None:
        """Add to this set, from now on, the name of each node whose usage changes."""
        self._watching.append(changed)

    def add(self, placement: Placement) -> None:
        """Add a placement."""
        self._count(placement, +1)

    def remove(self, placement: Placement) -> None:
        """Remove a placement that was added."""
        self._count(placement, -1)

    def _count(self, placement: Placement, sign: int) -> None:
        cards = self._cards.setdefault(placement.node, {})
        for piece in placement.slices:
            usage = cards.get(piece.uuid, NO_USAGE)
            usage = CardUsage(
                usage.memory_mib + sign * piece.memory_mib,
                usage.compute + sign * piece.compute,
                usage.holders + sign,
                usage.whole + sign * placement.whole,
            )
            if usage == NO_USAGE:
                del cards[piece.uuid]
            else:
                cards[piece.uuid] = usage
        # Nodes come and go: nothing is kept of those that nobody uses.
        if not cards:
            del self._cards[placement.node]
        if placement.cpu_milli or placement.host_memory_mib:
            cpu, memory = self.host_usage(placement.node)
            of_host = cpu + sign * placement.cpu_milli, memory + sign * placement.host_memory_mib
            self._hosts[placement.node] = of_host
            if of_host == (0, 0):
                del self._hosts[placement.node]
        for changed in self._watching:
            changed.add(placement.node)


class UsageOverlay:
    """A view with placements added or removed, without a copy of the view under it."""

    def __init__(self, under: UsageView) -> None:
        self._under, self._change = under, UsageTotals()

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is allocated of this card."""
        usage = self._under.card_usage(node, device)
        change = self._change.card_usage(node, device)
        if change is NO_USAGE:
            return usage
        return CardUsage(
            usage.memory_mib + change.memory_mib,
            usage.compute + change.compute,
            usage.holders + change.holders,
            usage.whole + change.whole,
        )

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return the CPU (thousandths of a core) and host memory (MiB) allocated on this node."""
        cpu, memory = self._under.host_usage(node)
        cpu_change, memory_change = self._change.host_usage(node)
        return cpu + cpu_change, memory + memory_change

    def watch(self, changed: set[str]) -> None:
        """Add to this set, from now on, each node for which anything is added or removed here."""
        self._change.watch(changed)

    def add(self, placement: Placement) -> None:
        """Add a placement."""
        self._change.add(placement)

    def remove(self, placement: Placement) -> None:
        """Remove a placement, also one of the view under this one."""
        self._change.remove(placement)
