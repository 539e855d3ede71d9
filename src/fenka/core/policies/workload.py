"""The expected workload: which requests a cluster will see, and how often."""

from collections.abc import Generator, Iterable, Mapping
from heapq import nlargest
from typing import NamedTuple

from fenka.core.request import Request

COVERED = 0.95
"""The part of all requests that the typical ones cover."""
MAX_KINDS = 64
"""Kinds of requests in a learned workload, at most: the time to price them grows with their number."""
WEIGHTS = 1_000_000
"""The sum of a learned workload's weights, about."""


class Typical(NamedTuple):
    """A kind of request, and how often it comes compared with others."""

    request: Request
    weight: int


Workload = tuple[Typical, ...]


def kind(request: Request) -> Request:
    """Return the request without its host memory and connections, which no policy values."""
    if not (request.host_memory_mib or request.linked or request.near):
        return request
    return Request(
        *(request.memory, request.compute, request.cards, request.whole, request.models),
        cpu_milli=request.cpu_milli,
        instance=request.instance,
    )


def typical(counts: Mapping[Request, int], total: int = 0) -> Workload:
    """Return the most frequent kinds of requests: as many as cover COVERED of all.

    total: how many there are, 0 for those of these counts.
    """
    total, covered, kept = total or sum(counts.values()), 0, list[Typical]()
    for request, count in sorted(counts.items(), key=_frequency, reverse=True):
        if covered >= COVERED * total:
            break
        kept.append(Typical(request, count))
        covered += count
    return tuple(kept)


def _frequency(row: tuple[Request, int]) -> tuple[object, ...]:
    """Return the order in which FGD's authors choose: frequency, CPU, share, cards, models."""
    request, count = row
    amount = request.memory.nominal_mib(1) if request.memory else MAX_SHARE * request.whole
    share = amount or request.compute
    return count, request.cpu_milli, share, request.cards, "|".join(sorted(request.models))


MAX_SHARE = 1 << 40
"""Counts as the share of a whole card, in order to sort."""


MAX_NAMESPACES = 256
"""Namespaces whose requests are counted, at most. The one with the fewest makes room."""
SMALLEST = 0.05
"""Requests that take less of a card are not expected. They fit nearly everywhere, and with few of them
among the expected ones `bid-price` fell below binpack (docs/measurements/placement.md)."""
OF_SMALL = 4.0
"""A namespace counts as many requests as it has had cards, times this, if it has had more requests."""
ALWAYS_COUNTED = 100
"""A namespace counts as many requests as all others together, or this many if the others have fewer."""
SLOWER = 16
"""A namespace that has at least as many requests as all others makes those older by this factor more slowly.
Otherwise the others would be forgotten before the bound above could count them."""
KINDS_A_STEP = 2000
"""Kinds of requests that are summed in one step: about 2 ms."""


class _Share:
    """The requests of one namespace: how often each kind came, and how many cards all took."""

    __slots__ = ("cards", "counts", "total")

    def __init__(self) -> None:
        self.counts: dict[Request, float] = {}
        self.total = self.cards = 0.0

    def add(self, request: Request, weight: float, cards: float) -> None:
        self.counts[request] = self.counts.get(request, 0.0) + weight
        self.total, self.cards = self.total + weight, self.cards + weight * cards
        if len(self.counts) > 2 * MAX_KINDS:
            # Tenants choose how many kinds there are.
            kept = sorted(self.counts.items(), key=_count, reverse=True)[:MAX_KINDS]
            self.counts = dict(kept)
            self.total = sum(self.counts.values())

    def scale(self, factor: float) -> None:
        self.counts = {request: count * factor for request, count in self.counts.items()}
        self.total, self.cards = self.total * factor, self.cards * factor

    @property
    def weight(self) -> float:
        """Return for how many requests it counts."""
        return min(self.total, OF_SMALL * self.cards)


def _count(row: tuple[Request, float]) -> float:
    return row[1]


class LearnedWorkload:
    """The workload that a cluster has seen, in which past requests count less and less.

    A namespace's requests make its earlier ones older. They make those of others older at the same rate, as
    long as the namespace does not outweigh them.

    A namespace counts for as many requests as came from it, for fewer if these were small, and for no more
    than all others together. Otherwise pods of one tenant would decide where other tenants' pods are placed.
    """

    def __init__(self, half_life: int = 5000) -> None:
        """half_life: after this number of further requests a request counts half."""
        self._growth = 2.0 ** (1 / half_life)
        self._scale = 1.0
        self._shares: dict[str, _Share] = {}
        self._weight = 0.0
        """The sum of the weights of all shares."""

    def observe(self, requests: Iterable[Request], namespace: str = "", cards: float = 1.0) -> None:
        """Count requests that came together, unless they took less than SMALLEST.

        Args:
            requests: the requests.
            namespace: whose they are.
            cards: how many cards each of them has taken.
        """
        if cards < SMALLEST:
            return
        share = self._shares.get(namespace)
        if share is None:
            if len(self._shares) >= MAX_NAMESPACES:
                least = min(self._shares, key=lambda name: self._shares[name].weight)
                self._weight -= self._shares.pop(least).weight
            share = self._shares[namespace] = _Share()
        # A request makes others older by what it counts, or many small ones would have them forgotten.
        growth = self._growth ** min(1.0, OF_SMALL * cards)
        slow = growth ** (1 / SLOWER)
        others = self._weight - share.weight
        for request in requests:
            if share.weight <= self._bound(others):
                self._scale *= growth
            else:
                self._scale *= slow
                share.scale(slow / growth)
            share.add(kind(request), self._scale, cards)
        self._weight = others + share.weight
        if self._scale > 1e6:
            # Requests that came long ago are forgotten.
            for share in self._shares.values():
                share.scale(1 / self._scale)
            self._shares = {
                name: share for name, share in self._shares.items() if share.total > 1e-3
            }
            self._scale = 1.0
            # Summed anew, so that no error of rounding stays.
            self._weight = sum(share.weight for share in self._shares.values())

    @property
    def kinds(self) -> int:
        """Return the number of kinds that are kept, of all namespaces."""
        return sum(len(share.counts) for share in self._shares.values())

    def typical(self) -> Workload:
        """Return the typical requests. Its cost depends on the kinds that are kept, not on what came."""
        steps = self.typical_in_steps()
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                workload: Workload = ended.value
                return workload

    def typical_in_steps(self) -> Generator[None, None, Workload]:
        """Do the same in steps of some milliseconds. No request may be counted meanwhile."""
        counts: dict[Request, float] = {}
        step = 0
        for share, weight in self._weights():
            part = weight / share.total if share.total else 0.0
            for request, count in share.counts.items():
                counts[request] = counts.get(request, 0.0) + part * count
            step += len(share.counts)
            if step >= KINDS_A_STEP:
                step = 0
                yield
        total = sum(counts.values())
        if not total:
            return ()
        # Only the frequent ones are compared in detail.
        frequent = nlargest(2 * MAX_KINDS, counts.items(), key=_count)
        yield
        scaled = {request: round(count / total * WEIGHTS) for request, count in frequent}
        positive = {request: weight for request, weight in scaled.items() if weight}
        return typical(positive, WEIGHTS)[:MAX_KINDS]

    def _weights(self) -> list[tuple[_Share, float]]:
        """Return for how many requests each namespace counts: no more than all others, or ALWAYS_COUNTED.

        Thus one tenant never decides alone for others, whatever it runs.
        """
        return [
            (share, min(share.weight, self._bound(self._weight - share.weight)))
            for share in self._shares.values()
        ]

    def _bound(self, others: float) -> float:
        """Return for how many requests a namespace counts at most, others: the weight of all others."""
        return max(others, ALWAYS_COUNTED * self._scale)
