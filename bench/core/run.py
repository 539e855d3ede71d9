"""Measure how many leases per second the core decides, on 100 cards that are about 70 % full.

``python bench/core/run.py`` runs the broker's complete cycle: release a lease, check that the next request is
possible, serve the queue, assume, leave the queue, confirm. The baseline recomputes all totals from the
entries for each decision, as gpushare's extender sums its pods' annotations. Both run the same requests in
turn and must decide the same. Prints a Markdown table of medians; exits 1 when the ledger misses its target.
"""

import os
import platform
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fenka.core.backfill import Backfill, Timeline, complete, held_by_user
from fenka.core.evaluate import never_fits
from fenka.core.gangs import PlainPlacer
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.ledger import Ledger
from fenka.core.queue import (
    Allocation,
    Fairness,
    PendingRequest,
    UsageHistory,
    history_lookup,
    queue_order,
)
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import UsageTotals

TARGET = 1000
"""Leases per second."""

GIB = 1024
FULL = 0.7
CYCLES, ROUNDS = 400, 5
PENDING = 20
FAIRNESS = Fairness()

REQUESTS = (
    Request(Memory(2, GIB)),
    Request(Memory(4, GIB)),
    Request(Memory(4, GIB), compute=25),
    Request(Memory(5000)),
    Request(Memory(3000), cards=2),
    Request(Memory(3, GIB), cards=2),
)
"""Units, exact sizes, with compute, and on two cards; each is equally likely."""


class Summing(Ledger):
    """The baseline: every decision sums all entries."""

    def sum(self) -> UsageTotals:
        """Return totals computed from all entries."""
        total = UsageTotals()
        for entry in self.entries.values():
            total.add(entry.placement)
        return total


@dataclass(frozen=True, slots=True)
class Case:
    """An arrangement of 100 cards, with a number of requests that stay pending."""

    name: str
    nodes: tuple[Node, ...]
    pending: int = 0


def make_nodes(nodes: int, cards: int) -> tuple[Node, ...]:
    """Return nodes with cards of two sizes, as the drivers of a T4 and a V100 report them."""
    return tuple(
        Node(
            f"node-{number:02}",
            tuple(
                Card(
                    index,
                    DeviceId(f"GPU-{number}-{index}"),
                    *(("Tesla T4", 15079), ("V100", 32480))[index % 2],
                )
                for index in range(cards)
            ),
        )
        for number in range(nodes)
    )


CASES = (
    Case("25 nodes of 4 cards", make_nodes(25, 4)),
    Case("1 node of 100 cards", make_nodes(1, 100)),
    Case(f"25 nodes of 4 cards, {PENDING} more pending", make_nodes(25, 4), PENDING),
)


class Broker:
    """Leases and releases as the workstation's broker does, with either kind of ledger."""

    def __init__(self, case: Case, kind: Callable[[tuple[Node, ...]], Ledger]) -> None:
        self.nodes, self.ledger = case.nodes, kind(case.nodes)
        self.backfill, self.history = Backfill("binpack"), UsageHistory(FAIRNESS)
        self.waiting: dict[str, PendingRequest] = {}
        self.held: dict[str, Allocation] = {}
        self.leases: deque[str] = deque()
        self.placements: list[Placement] = []
        self.rng = random.Random(1)
        self.number = 0
        memory = sum(card.memory_mib for node in self.nodes for card in node.cards)
        held = 0
        while held < FULL * memory:
            held += sum(piece.memory_mib for piece in self.lease().slices)
        # Evaluated at every decision, as all pending requests. Their priority is lower and they are never
        # removed, so that the decisions stay the same.
        for number in range(case.pending):
            self._join(f"pending-{number}", Request(cards=2, whole=True), self.number, priority=-1)

    def _join(self, name: str, request: Request, now: float, priority: int = 0) -> None:
        user = f"user-{len(name)}"
        self.waiting[name] = PendingRequest(name, (request,), now, priority=priority, user=user)

    def lease(self) -> Placement:
        """Serve one request, from submission to confirmation."""
        request = self.rng.choice(REQUESTS)
        self.number += 1
        name = f"job-{self.number}"
        if never_fits(request, self.nodes):
            raise AssertionError(request)
        self._join(name, request, float(self.number))
        usage = self.ledger.sum() if isinstance(self.ledger, Summing) else self.ledger
        held: dict[str, list[Allocation]] = {}
        for allocation in self.held.values():
            held.setdefault(allocation.placement.node, []).append(allocation)
        ordered = queue_order(
            self.waiting.values(),
            history_lookup(held_by_user(held), self.history, self.number),
            FAIRNESS,
            self.number,
        )
        step = complete(
            self.backfill.serve(
                ordered,
                PlainPlacer(self.nodes, usage),
                Timeline(self.nodes, held, self.number),
                self.number,
            )
        )
        (placement,) = dict(step.placed)[name]
        self.ledger.assume(name, placement, self.number + 30.0)
        self.held[name] = Allocation(placement, user=self.waiting.pop(name).user)
        self.ledger.confirm(name)
        self.leases.append(name)
        return placement

    def cycle(self) -> None:
        """End the oldest lease and serve the next request."""
        name = self.leases.popleft()
        self.ledger.release(name)
        del self.held[name]
        self.placements.append(self.lease())


def rate(broker: Broker, cycles: int) -> float:
    """Return the leases per second over a number of cycles."""
    start = time.perf_counter()
    for _ in range(cycles):
        broker.cycle()
    return cycles / (time.perf_counter() - start)


def rows() -> Iterator[tuple[Case, int, float, float]]:
    """Yield for each case the number of leases, and the leases per second of ledger and baseline."""
    for case in CASES:
        ledger, baseline = Broker(case, Ledger), Broker(case, Summing)
        cycles = CYCLES // (1 + case.pending)
        pairs = [(rate(ledger, cycles), rate(baseline, cycles)) for _ in range(ROUNDS)]
        if ledger.placements != baseline.placements:
            raise AssertionError(f"{case.name}: the two decided differently")
        measured, base = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        yield case, len(ledger.leases), measured, base


def main() -> int:
    """Print the table; return 1 if one of the first two cases misses the target."""
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, 100 cards, about {FULL:.0%} full\n"
    )
    print(
        "| cards | leases held | leases/s | recomputed for each decision, leases/s | ratio | target |"
    )
    print("|---|---|---|---|---|---|")
    missed = False
    for case, leases, measured, base in rows():
        met = "-" if case.pending else "met" if measured >= TARGET else "missed"
        missed |= met == "missed"
        print(
            f"| {case.name} | {leases} | {measured:,.0f} | {base:,.0f} | {measured / base:.1f} | {met} |"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
