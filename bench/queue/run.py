"""Measure one pass over a queue of 1,000 requests of 1,000 sizes, for 1,000 nodes of 8 cards.

``python bench/queue/run.py`` fills the cards, then ends one lease at a time and serves the queue. The
baseline is the plain definition, which evaluates node by node; it serves the first requests of the same
queue only, and both decide the same about these. Prints a Markdown table of medians; exits 1 when the queue
misses its target.
"""

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fenka.core.backfill import Backfill, Timeline, complete, held_by_user
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columnar_timeline import CardStates, ColumnarTimeline
from fenka.core.columns import Columns
from fenka.core.gangs import PlainPlacer
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.queue import (
    Allocation,
    Fairness,
    PendingRequest,
    SchedulingResult,
    UsageHistory,
    history_lookup,
    queue_order,
)
from fenka.core.request import Memory, Placement, Request, Slice

TARGET_S = 0.05
"""For one pass after a release."""

NODES, CARDS, PENDING, BY_NODE = 1000, 8, 1000, 8
CARD_MIB, UNITS = 15079, 14
EVENTS, ROUNDS = 5, 3


@dataclass(frozen=True, slots=True)
class Case:
    """The units of each card that are allocated at the start, and the number of nodes."""

    name: str
    held_units: int
    nodes: int = NODES


CASES = (
    Case("all cards full", 14),
    Case("9 to 14 of 14 units held", 9),
    Case("one machine, all cards full", 14, nodes=1),
)


def make_nodes(nodes: int) -> tuple[Node, ...]:
    """Return nodes of T4s."""
    return tuple(
        Node(
            f"node-{number:04}",
            tuple(
                Card(i, DeviceId(f"GPU-{number}-{i}"), "Tesla T4", CARD_MIB) for i in range(CARDS)
            ),
        )
        for number in range(nodes)
    )


class Program:
    """Nodes with allocations and a queue, served by columns.

    Two or three allocations are on each card, half of them with a deadline.
    """

    def __init__(self, case: Case, rng: random.Random) -> None:
        self.nodes, self.rng = make_nodes(case.nodes), rng
        self.held: dict[str, list[Allocation]] = {}
        for node in self.nodes:
            self.held[node.name] = []
            for card in node.cards:
                units_held = 0
                while units_held < case.held_units:
                    units = min(rng.choice((2, 4, 7)), UNITS - units_held)
                    piece = Slice(card.index, card.uuid, CARD_MIB * units // UNITS, 0)
                    deadline = rng.choice((None, rng.uniform(100, 9000)))
                    self.held[node.name].append(
                        Allocation(Placement(node.name, (piece,)), deadline)
                    )
                    units_held += units
        self.columns = Columns(self.nodes)
        self.columns.add(*(it.placement for held in self.held.values() for it in held))
        self.states, self.backfill = CardStates(), Backfill("binpack")
        self.queue = [self._pending(number) for number in range(PENDING)]

    def _pending(self, number: int) -> PendingRequest:
        """Return a request of its own size; some have compute, two cards, or a time limit."""
        request = Request(
            Memory(CARD_MIB * 8 // UNITS + 6 * number),
            compute=self.rng.choice((0, 0, 25)),
            cards=self.rng.choice((1, 1, 1, 2)),
        )
        limit = self.rng.choice((None, 50.0))
        user = f"user-{number % 7}"
        return PendingRequest(f"w-{number}", (request,), float(number), 0, user, limit)

    def _ordered(self, requests: list[PendingRequest]) -> list[PendingRequest]:
        past = history_lookup(held_by_user(self.held), UsageHistory(Fairness()), 0)
        return queue_order(requests, past, Fairness(), 0)

    def serve(self) -> SchedulingResult:
        """Serve the queue by columns."""
        return complete(
            self.backfill.serve(
                self._ordered(self.queue),
                ColumnarPlacer(self.columns.copy()),
                ColumnarTimeline(self.nodes, self.held, 0, self.states),
                0,
            )
        )

    def serve_by_node(self) -> SchedulingResult:
        """Serve the first requests node by node."""
        return complete(
            Backfill("binpack").serve(
                self._ordered(self.queue[:BY_NODE]),
                PlainPlacer(self.nodes, self.columns),
                Timeline(self.nodes, self.held, 0),
                0,
            )
        )

    def release(self) -> None:
        """End an allocation."""
        name = self.rng.choice(sorted(self.held))
        ended, *others = self.held[name]
        self.held[name] = others
        self.columns.remove(ended.placement)

    def take(self, result: SchedulingResult) -> None:
        """Start what was placed."""
        placed = dict(result.placed)
        self.queue = [request for request in self.queue if request.id not in placed]
        for placements in placed.values():
            for placement in placements:
                node = placement.node
                self.held[node] = [*self.held[node], Allocation(placement)]
                self.columns.add(placement)


def measure(case: Case) -> tuple[float, float, float]:
    """Return the seconds of the first pass, of passes after a release, and by node for each request."""
    program, times, by_node = Program(case, random.Random(1)), list[float](), list[float]()
    for number in range(1 + EVENTS):
        if number % 3 == 1:
            start = time.perf_counter()
            expected = program.serve_by_node()
            by_node.append((time.perf_counter() - start) / BY_NODE)
        start = time.perf_counter()
        result = program.serve()
        times.append(time.perf_counter() - start)
        if number % 3 == 1:
            first = {request.id for request in program.queue[:BY_NODE]}
            same = [each for each in result.placed if each[0] in first]
            assert same == list(expected.placed), "they decided differently"
        program.take(result)
        program.release()
    return times[0], statistics.median(times[1:]), statistics.median(by_node)


def rows() -> Iterator[tuple[Case, float, float, float]]:
    """Yield for each case what `measure` returns, as medians of some rounds."""
    for case in CASES:
        results = zip(*(measure(case) for _ in range(ROUNDS)), strict=True)
        first, later, by_node = map(statistics.median, results)
        yield case, first, later, by_node


def main() -> int:
    """Print the table; return 1 if a pass takes longer than the target."""
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"{NODES} nodes of {CARDS} cards, {PENDING} pending requests of {PENDING} sizes\n"
    )
    print(
        "| cards | first pass, ms | after one release, ms | node by node, ms for each request "
        "| ratio for all | target |"
    )
    print("|---|---|---|---|---|---|")
    missed = False
    for case, first, later, by_node in rows():
        met = later <= TARGET_S
        missed |= not met
        print(
            f"| {case.name} | {first * 1000:,.1f} | {later * 1000:,.1f} | {by_node * 1000:,.1f} "
            f"| {by_node * PENDING / later:,.0f} | {'met' if met else 'missed'} |"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
