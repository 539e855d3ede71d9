"""When cards become free for a request, from the deadlines of the allocations that hold them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fenka.core.evaluate import Fit, evaluate, fits_card
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.queue import Allocation
from fenka.core.request import Request, Slice
from fenka.core.usage import NO_USAGE, CardUsage, EmptyUsage


@dataclass(frozen=True, slots=True)
class CardAvailability:
    """When a card is free for a request.

    Attributes:
        at: in the caller's time; infinite if unknown.
        uncertain: the number of allocations without a deadline that must end first.
        card: the card.
    """

    at: float
    uncertain: int
    card: Card

    def order(self) -> tuple[float, int, int]:
        """Return what sorts cards, the earliest first."""
        return self.at, self.uncertain, self.card.rank


@dataclass(frozen=True, slots=True)
class Start:
    """When a request can start on a node, and on which cards.

    Attributes:
        at: in the caller's time, not before now; infinite if unknown.
        uncertain: the number of allocations without a deadline that must end first.
        node: the node.
        cards: the cards that are free first.
    """

    at: float
    uncertain: int
    node: Node
    cards: tuple[Card, ...]

    def order(self) -> tuple[float, int, str]:
        """Return what sorts nodes, the earliest first."""
        return self.at, self.uncertain, self.node.name


class Timeline:
    """What is allocated on nodes, and until when, with what one scheduling pass adds to it."""

    def __init__(
        self, nodes: Iterable[Node], allocations: Mapping[str, Sequence[Allocation]], now: float
    ) -> None:
        """Args:
        nodes: all nodes.
        allocations: all that is allocated on them, by node.
        now: in the caller's time.
        """
        self.nodes = {node.name: node for node in nodes}
        self._allocations, self._now = allocations, now
        self._added: dict[str, list[Allocation]] = {}
        """What the pass has added on a node: placements, and what will be allocated on reserved cards."""
        self._reserved_until: dict[DeviceId, float] = {}
        """When the reservation of a card starts, for those who reserve later."""

    def add(self, allocation: Allocation) -> None:
        """Add an allocation."""
        self._added.setdefault(allocation.placement.node, []).append(allocation)

    def remove(self, allocation: Allocation) -> None:
        """Remove an allocation that was added."""
        self._added[allocation.placement.node].remove(allocation)

    def reserve(self, cards: Iterable[DeviceId], at: float) -> None:
        """Keep cards, also those that are free before, for a reservation that starts at this time."""
        for card in cards:
            self._reserved_until[card] = max(at, self._reserved_until.get(card, at))

    def earliest(self, request: Request, among: frozenset[str] | None = None) -> Start | None:
        """Return where the request can start first; None if it fits no node that is empty.

        among: names of the eligible nodes, None for all.
        """
        names = self.nodes.keys() if among is None else self.nodes.keys() & among
        starts = (self.start_on(request, self.nodes[name]) for name in names)
        return min((start for start in starts if start is not None), key=Start.order, default=None)

    def by_start(
        self, requests: Sequence[Request], among: frozenset[str] | None = None
    ) -> list[str]:
        """Return the nodes on which each request alone can start, by when the last of them can."""
        names = self.nodes.keys() if among is None else self.nodes.keys() & among
        return [name for _, name in sorted(self.starts_on(requests, names))]

    def starts_on(
        self, requests: Sequence[Request], names: Iterable[str]
    ) -> list[tuple[float, str]]:
        """Return the nodes on which each request alone can start, with the time of the last start."""
        starts = []
        for name in names:
            on_node = [self.start_on(request, self.nodes[name]) for request in requests]
            times = [start.at for start in on_node if start is not None]
            if len(times) == len(on_node):
                starts.append((max(times), name))
        return starts

    def start_on(self, request: Request, node: Node) -> Start | None:
        """Return when the request can start on this node; None if it does not fit even an empty one."""
        added = self._added.get(node.name, [])
        allocations = [*self._allocations.get(node.name, ()), *added]
        cards = availabilities(request, node, allocations)
        if added:
            cards = sorted(map(self._after_reservation, cards), key=CardAvailability.order)
        if len(cards) < request.cards:
            return None
        needed = cards[: request.cards]
        return Start(
            max(self._now, needed[-1].at),
            sum(each.uncertain for each in needed),
            node,
            tuple(each.card for each in needed),
        )

    def _after_reservation(self, card: CardAvailability) -> CardAvailability:
        """A card that is free now is kept for its reservation until that has started."""
        until = self._reserved_until.get(card.card.uuid, -inf)
        return CardAvailability(max(card.at, until), card.uncertain + (until == inf), card.card)


def availabilities(
    request: Request, node: Node, allocations: Sequence[Allocation]
) -> list[CardAvailability]:
    """Return when each card of the node is free for the request, the earliest first.

    Cards that are too small are left out. The list is empty if the node's host is too small.
    """
    on_host = needs_host(request, node)
    if on_host:
        (empty,) = evaluate(EmptyUsage(), request, "binpack", (node,))
        if not isinstance(empty, Fit):
            return []
    host = _when_host(request, node, _in_order(allocations)) if on_host else (-inf, 0)
    if host is None:
        return []
    host_at, host_uncertain = host
    available = []
    for card, states in zip(node.cards, card_states(node, allocations), strict=True):
        for at, uncertain, usage in states:
            if fits_card(request, node, card, usage):
                available.append(
                    CardAvailability(max(at, host_at), uncertain + host_uncertain, card)
                )
                break
    return sorted(available, key=CardAvailability.order)


CardState = tuple[float, int, CardUsage]
"""When a state begins, how many allocations without a deadline have ended by then, and what is allocated."""


def card_states(node: Node, allocations: Iterable[Allocation]) -> list[Iterator[CardState]]:
    """Return for each card of the node the states that it goes through as its allocations end."""
    on_card: dict[DeviceId, list[tuple[Allocation, Slice]]] = {card.uuid: [] for card in node.cards}
    for allocation in _in_order(allocations):
        for piece in allocation.placement.slices:
            if piece.uuid in on_card:
                on_card[piece.uuid].append((allocation, piece))
    return [_states(on_card[card.uuid]) for card in node.cards]


def _states(ending: Sequence[tuple[Allocation, Slice]]) -> Iterator[CardState]:
    # Loops take a third of the time of sum() and max(), and these functions run for each card of a cluster.
    memory = compute = whole = uncertain = 0
    for allocation, piece in ending:
        memory, compute = memory + piece.memory_mib, compute + piece.compute
        whole += allocation.placement.whole
    at, holders = -inf, len(ending)
    for allocation, piece in ending:
        yield at, uncertain, CardUsage(memory, compute, holders, whole)
        if allocation.deadline == inf:
            return
        memory, compute = memory - piece.memory_mib, compute - piece.compute
        holders, whole = holders - 1, whole - allocation.placement.whole
        at, uncertain = max(at, _end(allocation)), uncertain + (allocation.deadline is None)
    yield at, uncertain, NO_USAGE


def _in_order(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Return the allocations as they end, by their deadlines.

    Of those without a deadline the largest come first, so that few must end. Those that stay indefinitely (an
    infinite deadline) come last.
    """
    return sorted(allocations, key=_end_order)


def needs_host(request: Request, node: Node) -> bool:
    """Return whether the request needs CPU or memory that this node counts."""
    cpu = node.cpu_milli is not None and request.cpu_milli > 0
    return cpu or (node.memory_mib is not None and request.host_memory_mib > 0)


def _when_host(
    request: Request, node: Node, ending: Sequence[Allocation]
) -> tuple[float, int] | None:
    """Return when the host, which is large enough, has room; None if never."""
    cpu = sum(it.placement.cpu_milli for it in ending)
    memory = sum(it.placement.host_memory_mib for it in ending)
    at, uncertain = -inf, 0
    for allocation in ending:
        if _has_room(cpu, request.cpu_milli, node.cpu_milli) and _has_room(
            memory, request.host_memory_mib, node.memory_mib
        ):
            break
        if allocation.deadline == inf:
            return None
        placement = allocation.placement
        cpu, memory = cpu - placement.cpu_milli, memory - placement.host_memory_mib
        at, uncertain = max(at, _end(allocation)), uncertain + (allocation.deadline is None)
    return at, uncertain


def _has_room(used: int, needed: int, total: int | None) -> bool:
    return total is None or needed == 0 or used + needed <= total


def _end_order(allocation: Allocation) -> tuple[float, bool, int]:
    largest = 0
    for piece in allocation.placement.slices:
        largest = max(largest, piece.memory_mib)
    return _end(allocation), allocation.deadline == inf, -largest


def _end(allocation: Allocation) -> float:
    return inf if allocation.deadline is None else allocation.deadline
