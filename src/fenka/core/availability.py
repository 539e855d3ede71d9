"""When cards become free for a request, from the deadlines of the allocations that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fenka.core.evaluate import Fit, evaluate, fits_card
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.queue import Allocation
from fenka.core.request import Request, Slice
from fenka.core.shape_cache import ShapeCache
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
        return self.at, self.uncertain, self.card.index


class AvailabilityCache:
    """Remembers availabilities on nodes whose allocations have not changed."""

    def __init__(self) -> None:
        self._allocations: dict[str, list[Allocation]] = {}
        self._by_request: ShapeCache[Request, list[CardAvailability]] = ShapeCache()

    def refresh(self, allocations: Mapping[str, Sequence[Allocation]]) -> None:
        """Forget the nodes whose allocations, or deadlines, differ from the last call's."""
        known = self._allocations
        names = known.keys() | allocations
        for name in [it for it in names if known.get(it) != allocations.get(it)]:
            self.invalidate(name)
            if name in allocations:
                # A copy: the caller goes on to add to its own.
                known[name] = list(allocations[name])
            else:
                del known[name]

    def invalidate(self, node: str) -> None:
        """Forget a node, whose cards may have changed."""
        self._by_request.forget((node,))

    def of(self, request: Request) -> dict[str, list[CardAvailability]]:
        """Return what is known for a request, by node, the earliest card first. Callers add to it."""
        return self._by_request.by_node(request)


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
    # Allocations end by their deadlines. Of those without one the largest come first, so that few must end.
    # Those that stay indefinitely (an infinite deadline) come last.
    ending = sorted(allocations, key=lambda it: (_end(it), it.deadline == inf, -_largest(it)))
    on_card: dict[DeviceId, list[tuple[Allocation, Slice]]] = {it.uuid: [] for it in node.cards}
    for allocation in ending:
        for piece in allocation.placement.slices:
            if piece.uuid in on_card:
                on_card[piece.uuid].append((allocation, piece))
    host = _when_host(request, node, ending) if on_host else (-inf, 0)
    if host is None:
        return []
    host_at, host_uncertain = host
    found = []
    for card in node.cards:
        when = _when(request, node, card, on_card[card.uuid])
        if when is not None:
            at, uncertain = when
            found.append(CardAvailability(max(at, host_at), uncertain + host_uncertain, card))
    return sorted(found, key=CardAvailability.order)


def needs_host(request: Request, node: Node) -> bool:
    """Return whether the request needs CPU or memory that this node counts."""
    cpu = node.cpu_milli is not None and request.cpu_milli > 0
    return cpu or (node.memory_mib is not None and request.host_memory_mib > 0)


def _when(
    request: Request, node: Node, card: Card, ending: Sequence[tuple[Allocation, Slice]]
) -> tuple[float, int] | None:
    """Return when the card is free and after how many uncertain ends; None if never."""
    memory = sum(piece.memory_mib for _, piece in ending)
    compute = sum(piece.compute for _, piece in ending)
    holders, whole = len(ending), sum(it.placement.whole for it, _ in ending)
    at, uncertain = -inf, 0
    for allocation, piece in ending:
        if fits_card(request, node, card, CardUsage(memory, compute, holders, whole)):
            return at, uncertain
        if allocation.deadline == inf:
            return None
        memory, compute = memory - piece.memory_mib, compute - piece.compute
        holders, whole = holders - 1, whole - allocation.placement.whole
        at, uncertain = max(at, _end(allocation)), uncertain + (allocation.deadline is None)
    return (at, uncertain) if fits_card(request, node, card, NO_USAGE) else None


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


def _end(allocation: Allocation) -> float:
    return inf if allocation.deadline is None else allocation.deadline


def _largest(allocation: Allocation) -> int:
    return max((piece.memory_mib for piece in allocation.placement.slices), default=0)
