"""How many leases a second the core decides, on 100 cards that are about 70 % full.

``python bench/core/run.py`` runs whole cycles as the broker does (is the request possible at all, serve
the queue, assume, leave the queue, confirm; before it, one release), once with the ledger's running totals
and once with the baseline: totals recomputed from all entries for each decision, as gpushare's extender
sums its pods' annotations. Both run the same requests in turn, and must decide the same. Prints a Markdown
table of medians; exits 1 when the ledger misses its target.
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

from fenka.core.backfill import Backfill
from fenka.core.evaluate import never_fits
from fenka.core.inventory import Card, Node
from fenka.core.ledger import Ledger
from fenka.core.queue import Allocation, PendingRequest
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import UsageTotals

TARGET = 1000
"""Leases a second."""

GIB = 1024
FULL = 0.7
CYCLES, ROUNDS = 400, 5
WAITERS = 20

REQUESTS = (
    Request(Memory(2, GIB)),
    Request(Memory(4, GIB)),
    Request(Memory(4, GIB), compute=25),
    Request(Memory(5000)),
    Request(Memory(3000), cards=2),
    Request(Memory(3, GIB), cards=2),
)
"""Units, exact sizes, with compute, and on two cards; drawn alike often."""


class Summing(Ledger):
    """The baseline: no running totals, every decision sums all entries."""

    def tally(self) -> UsageTotals:
        """Recomputed."""
        total = UsageTotals()
        for entry in self.entries.values():
            total.add(entry.placement)
        return total


@dataclass(frozen=True, slots=True)
class Case:
    """One arrangement of 100 cards, with so many requests that wait the whole time."""

    name: str
    nodes: tuple[Node, ...]
    waiters: int = 0


def fleet(nodes: int, cards: int) -> tuple[Node, ...]:
    """Cards of two sizes, as the drivers of a T4 and a V100 report them."""
    return tuple(
        Node(
            f"node-{number:02}",
            tuple(
                Card(
                    index,
                    f"GPU-{number}-{index}",
                    *(("Tesla T4", 15079), ("V100", 32480))[index % 2],
                )
                for index in range(cards)
            ),
        )
        for number in range(nodes)
    )


CASES = (
    Case("25 nodes of 4 cards", fleet(25, 4)),
    Case("1 node of 100 cards", fleet(1, 100)),
    Case(f"25 nodes of 4 cards, {WAITERS} more wait", fleet(25, 4), WAITERS),
)


class Desk:
    """Leases and releases, as the broker does, with a ledger of either kind."""

    def __init__(self, case: Case, kind: Callable[[tuple[Node, ...]], Ledger]) -> None:
        self.nodes, self.ledger = case.nodes, kind(case.nodes)
        self.backfill = Backfill(case.nodes, "binpack")
        self.waiting: dict[str, PendingRequest] = {}
        self.held: dict[str, Allocation] = {}
        self.leases: deque[str] = deque()
        self.decided: list[Placement] = []
        self.chance = random.Random(1)
        self.number = 0
        memory = sum(card.memory_mib for node in self.nodes for card in node.cards)
        held = 0
        while held < FULL * memory:
            held += sum(piece.memory_mib for piece in self.lease().slices)
        # Judged at every decision, like all who wait; never taken out, and behind everybody else, so
        # that each decision stays the same.
        for waiter in range(case.waiters):
            self._join(f"waiter-{waiter}", Request(cards=2, whole=True), 1e9 + waiter)

    def _join(self, name: str, request: Request, now: float) -> None:
        self.waiting[name] = PendingRequest(name, (request,), now, user=f"user-{len(name)}")

    def lease(self) -> Placement:
        """One request, from the question to the confirmation."""
        request = self.chance.choice(REQUESTS)
        self.number += 1
        name = f"job-{self.number}"
        if never_fits(request, self.nodes):
            raise AssertionError(request)
        self._join(name, request, float(self.number))
        step = self.backfill.serve(
            self.waiting.values(), self.held.values(), self.number, self.ledger.totals()
        )
        (placement,) = dict(step.placed)[name]
        self.ledger.assume(name, placement, self.number + 30.0)
        self.held[name] = Allocation(placement, user=self.waiting.pop(name).user)
        self.ledger.confirm(name)
        self.leases.append(name)
        return placement

    def cycle(self) -> None:
        """Somebody ends, the next one comes."""
        name = self.leases.popleft()
        self.ledger.release(name)
        del self.held[name]
        self.decided.append(self.lease())


def rate(desk: Desk, cycles: int) -> float:
    """Leases a second, over so many cycles."""
    start = time.perf_counter()
    for _ in range(cycles):
        desk.cycle()
    return cycles / (time.perf_counter() - start)


def rows() -> Iterator[tuple[Case, int, float, float]]:
    """For each case: how many leases are held, leases a second of the ledger and of the baseline."""
    for case in CASES:
        ledger, baseline = Desk(case, Ledger), Desk(case, Summing)
        cycles = CYCLES // (1 + case.waiters)
        pairs = [(rate(ledger, cycles), rate(baseline, cycles)) for _ in range(ROUNDS)]
        if ledger.decided != baseline.decided:
            raise AssertionError(f"{case.name}: the two decided differently")
        ours, theirs = zip(*pairs, strict=True)
        yield case, len(ledger.leases), statistics.median(ours), statistics.median(theirs)


def main() -> int:
    """Prints the table; 1 if the first two cases miss the target."""
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, 100 cards, about {FULL:.0%} full\n"
    )
    print(
        "| cards | leases held | leases/s | recomputed for each decision, leases/s | ratio | target |"
    )
    print("|---|---|---|---|---|---|")
    missed = False
    for case, held, ours, theirs in rows():
        met = "-" if case.waiters else "met" if ours >= TARGET else "missed"
        missed |= met == "missed"
        print(
            f"| {case.name} | {held} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.1f} | {met} |"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
