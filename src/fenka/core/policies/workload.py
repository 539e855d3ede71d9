"""The expected workload: which requests a cluster will see, and how often."""

from collections.abc import Iterable, Mapping
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


def typical(counts: Mapping[Request, int]) -> Workload:
    """Return the most frequent kinds of requests: as many as cover COVERED of all."""
    total, covered, kept = sum(counts.values()), 0, list[Typical]()
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


class LearnedWorkload:
    """The workload that a cluster has seen, in which past requests count less and less."""

    def __init__(self, half_life: int = 5000) -> None:
        """half_life: after this number of further requests a request counts half."""
        self._growth = 2.0 ** (1 / half_life)
        self._scale = 1.0
        self._counts: dict[Request, float] = {}

    def observe(self, requests: Iterable[Request]) -> None:
        """Count requests that came together."""
        for request in requests:
            self._scale *= self._growth
            known = kind(request)
            self._counts[known] = self._counts.get(known, 0.0) + self._scale
        if self._scale > 1e6:
            # Requests that came long ago are forgotten.
            self._counts = {
                request: count / self._scale
                for request, count in self._counts.items()
                if count > 1e-3 * self._scale
            }
            self._scale = 1.0

    def typical(self) -> Workload:
        """Return the typical requests."""
        total = sum(self._counts.values())
        scaled = {
            request: round(count / total * WEIGHTS) for request, count in self._counts.items()
        }
        return typical({request: weight for request, weight in scaled.items() if weight})[
            :MAX_KINDS
        ]
