"""Measure one pass over a queue of 200 requests, for 1,000 nodes of 8 cards and for one machine.

``python bench/queue/run.py`` fills the cards, then ends one lease at a time and serves the queue. The
baseline is the first pass, without cached verdicts, which evaluates every node for each pending size. Both
decide the same. Prints a Markdown table of medians; exits 1 when the queue misses its target.
"""

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fenka.core.backfill import Backfill
from fenka.core.evaluate import place
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.ledger import Ledger
from fenka.core.queue import Allocation, PendingRequest
from fenka.core.request import Memory, Placement, Request, Slice
from fenka.core.usage import UsageTotals

TARGET_S = 0.5
"""For one pass after a change. The first pass has no cached verdicts."""

NODES, CARDS, PENDING = 1000, 8, 200
CARD_MIB, UNITS = 15079, 14
EVENTS, ROUNDS = 5, 3

SHAPES = tuple(
    Request(Memory(memory, 1024), compute=compute, cards=cards)
    for memory in (8, 10, 12, 14)
    for compute in (0, 25)
    for cards in (1, 2)
) + tuple(Request(whole=True, cards=cards) for cards in (1, 2, 4, 8))
"""Twenty sizes, most of which stay pending."""


@dataclass(frozen=True, slots=True)
class Case:
    """The units of each card that are allocated at the start."""

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


def make_allocations(
    nodes: tuple[Node, ...], case: Case, rng: random.Random
) -> dict[str, Allocation]:
    """Return two or three allocations for each card, half of them with a deadline."""
    made: dict[str, Allocation] = {}
    for node in nodes:
        for card in node.cards:
            held = 0
            while held < case.held_units:
                units = min(rng.choice((2, 4, 7)), UNITS - held)
                piece = Slice(card.index, card.uuid, CARD_MIB * units // UNITS, 0)
                ends = rng.choice((None, rng.uniform(100, 9000)))
                made[f"lease-{len(made)}"] = Allocation(Placement(node.name, (piece,)), ends)
                held += units
    return made


def make_requests(rng: random.Random) -> list[PendingRequest]:
    """Return the pending requests of seven users, some with a time limit."""
    return [
        PendingRequest(
            f"w-{number}",
            (rng.choice(SHAPES),),
            float(number),
            user=f"user-{number % 7}",
            time_limit_s=rng.choice((None, 50.0)),
        )
        for number in range(PENDING)
    ]


def backfill(nodes: tuple[Node, ...], case: Case) -> tuple[float, float]:
    """Return the seconds of the first pass, and the median of passes after the end of a lease."""
    rng = random.Random(1)
    held, queue = make_allocations(nodes, case, rng), make_requests(rng)
    scheduler, times = Backfill(nodes, "binpack"), list[float]()
    usage = UsageTotals()
    for allocation in held.values():
        usage.add(allocation.placement)
    for _ in range(1 + EVENTS):
        start = time.perf_counter()
        step = scheduler.serve(queue, held.values(), 0, usage)
        times.append(time.perf_counter() - start)
        placed = dict(step.placed)
        queue = [request for request in queue if request.id not in placed]
        for name, (placement,) in placed.items():
            held[f"{name}/0"] = Allocation(placement)
            usage.add(placement)
        usage.remove(held.pop(rng.choice(sorted(held))).placement)
    return times[0], statistics.median(times[1:])


def rows() -> Iterator[tuple[Case, float, float]]:
    """Yield for each case the seconds of the first and of later passes."""
    for case in CASES:
        nodes = make_nodes(case.nodes)
        assert isinstance(place(Ledger(nodes), SHAPES[0], "binpack", nodes), Placement)
        first, later = zip(*(backfill(nodes, case) for _ in range(ROUNDS)), strict=True)
        yield case, statistics.median(first), statistics.median(later)


def main() -> int:
    """Print the table; return 1 if a pass takes longer than the target."""
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {NODES} nodes of {CARDS} cards, "
        f"{PENDING} pending in {len(SHAPES)} sizes\n"
    )
    print("| cards | without cached verdicts, ms | after one lease ended, ms | ratio | target |")
    print("|---|---|---|---|---|")
    missed = False
    for case, first, later in rows():
        met = later <= TARGET_S
        missed |= not met
        print(
            f"| {case.name} | {first * 1000:,.1f} | {later * 1000:,.1f} | {first / later:.0f} "
            f"| {'met' if met else 'missed'} |"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
