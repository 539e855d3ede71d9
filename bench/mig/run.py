"""Measure plans for 8 cards: how long one takes, and how much of the requested value it serves.

``python bench/mig/run.py`` makes random cases of eight A100 with used and idle instances and a queue of
requests. Four baselines place the same requests one after the other: the leftmost place that is free,
NVIDIA's own choice, a fixed preference by profile, and the place that leaves the largest flexibility, which
the scheduler and the workstation's broker take. A plan serves the requests in any order; "plan, first come"
serves an earlier request before all later ones, as queues do. The bound is the value that memory and
compute allow if requests could be cut. A second table is of requests that arrive and end over time
(arrivals.py), a third of requests of any size (slices.py). Exits 1 when the median plan misses its target,
or when less than half of what rules lose against the bound is won by moving notebooks.
"""

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.mig.arrivals import ARRIVALS, Preference, arrivals, by_bound, by_rule
from bench.mig.slices import SIZES, share, ways
from fenka.core.mig.case import MigCase, PlannedCard, PlannedInstance, ProfileRequest, State
from fenka.core.mig.geometry import TABLES, Geometry, Place
from fenka.core.mig.layouts import Layout, all_layouts, best_place
from fenka.core.mig.options import Demands
from fenka.core.mig.plan import Bound, plan

TARGET_S = 0.05
TARGET_GAP = 0.5
"""Of the requests that first fit loses against the bound."""
CARDS, REQUESTS, CASES = 8, 24, 40
WIDTH = 100
"""States that a plan within the target compares; the command line compares more."""

A100 = TABLES["A100-40G"]
MIXES = {
    "uniform": {"1g.5gb": 1, "2g.10gb": 1, "3g.20gb": 1, "4g.20gb": 1, "7g.40gb": 1},
    "small": {"1g.5gb": 5, "2g.10gb": 3, "3g.20gb": 1, "4g.20gb": 1},
}
DRIVER = {"1g.5gb": (6, 4, 5, 0, 1, 2, 3), "2g.10gb": (4, 0, 2), "3g.20gb": (4, 0)}
"""Where the driver puts an instance without a place, as recorded on hardware."""
FIXED = {"1g.5gb": (6, 5, 4, 3, 2, 1, 0), "2g.10gb": (4, 2, 0), "3g.20gb": (4, 0)}
"""One order for each profile: small ones from the right."""


def by_starts(starts: dict[str, tuple[int, ...]]) -> Preference:
    """Return the rule: the first card with room, there the first start of its list."""

    def choose(cards: list[tuple[Geometry, Layout]], name: str) -> tuple[int, int] | None:
        for number, (geometry, layout) in enumerate(cards):
            profile = geometry.by_name[name]
            for start in starts.get(name, profile.starts):
                if not geometry.conflict(layout, Place(profile, start)):
                    return number, start
        return None

    return choose


def by_flexibility(cards: list[tuple[Geometry, Layout]], name: str) -> tuple[int, int] | None:
    """Choose the place that leaves most possible."""
    choice = best_place(cards, name)
    return None if choice is None else (choice.card, choice.start)


BASELINES: dict[str, Preference] = {
    "first fit": by_starts({}),
    "driver's choice": by_starts(DRIVER),
    "fixed rule": by_starts(FIXED),
    "flexibility alone": by_flexibility,
}


def make_case(rng: random.Random, weights: dict[str, int]) -> MigCase:
    """Return eight cards with some instances, and a queue."""
    rows = all_layouts(A100)
    cards = []
    for number in range(CARDS):
        layout = sorted(rng.choice(rows), key=lambda place: place.start)[: rng.randrange(3)]
        held = tuple(
            PlannedInstance(place, rng.choice((State.USED, State.IDLE))) for place in layout
        )
        cards.append(PlannedCard(f"g{number}", A100, instances=held))
    names = rng.choices(list(weights), list(weights.values()), k=REQUESTS)
    requests = (
        ProfileRequest(f"r{n}", name, A100.by_name[name].size) for n, name in enumerate(names)
    )
    return MigCase(tuple(cards), tuple(requests))


def one_by_one(case: MigCase, choose: Preference) -> int:
    """Return the value that a rule serves. Idle instances count as free."""
    cards = [
        (
            card.geometry,
            frozenset(each.place for each in card.instances if each.state is State.USED),
        )
        for card in case.cards
    ]
    value = 0
    for request in case.requests:
        assert isinstance(request, ProfileRequest)
        chosen = choose(cards, request.profile)
        if chosen is not None:
            number, start = chosen
            geometry, layout = cards[number]
            place = Place(geometry.by_name[request.profile], start)
            cards[number] = (geometry, layout | {place})
            value += request.value
    return value


def in_order(case: MigCase) -> MigCase:
    """Return the case with an earlier request worth more than all later ones together, as in a queue."""
    last = len(case.requests)
    ranked = (replace(request, value=2 ** (last - n)) for n, request in enumerate(case.requests))
    return MigCase(case.cards, tuple(ranked))


def bound(case: MigCase) -> float:
    """Return what memory and compute allow at most."""
    demands = Demands(case)
    nothing = np.zeros((1, len(demands.caps)), dtype=np.int16)
    return float(Bound(demands, case.cards).value(nothing, -1)[0])


def served(case: MigCase, names: Iterable[str]) -> int:
    """Return the value of the requests with these names."""
    values = {request.name: request.value for request in case.requests}
    return sum(values[name] for name in names)


def measure(mix: str) -> tuple[list[str], float]:
    """Return a row of the table, and the median time of a plan."""
    rng = random.Random(mix)
    cases = [make_case(rng, MIXES[mix]) for _ in range(CASES)]
    plan(cases[0], WIDTH)  # computes the model's layouts once
    total = sum(request.value for case in cases for request in case.requests)
    values = [sum(one_by_one(case, rule) for case in cases) for rule in BASELINES.values()]
    times, value = [], 0
    for case in cases:
        begin = time.perf_counter()
        result = plan(case, WIDTH)
        times.append(time.perf_counter() - begin)
        value += served(case, result.served)
    values += [sum(served(case, plan(in_order(case), WIDTH).served) for case in cases), value]
    values += [sum(served(case, plan(case).served) for case in cases)]
    shares = [*values, sum(map(bound, cases))]
    median, longest = statistics.median(times), max(times)
    row = [mix, *(f"{100 * each / total:.1f}" for each in shares)]
    return [*row, f"{median * 1000:.0f}", f"{longest * 1000:.0f}"], median


def measure_arrivals(mix: str) -> tuple[list[str], float]:
    """Return a row of the second table, and the part of the gap in requests that moving notebooks takes."""
    requests = list(arrivals(A100, MIXES[mix], mix))
    tallies = [by_rule(A100, requests, rule) for rule in BASELINES.values()]
    moving = by_rule(A100, requests, by_flexibility, moves=True)
    best = by_bound(A100, requests, list(MIXES[mix]))
    first = tallies[0]
    won = (moving.served - first.served) / (best.served - first.served)
    row = [mix, *(each.shares() for each in (*tallies, moving, best))]
    return [*row, f"{100 * won:.0f} %", f"{moving.moves / moving.served:.3f}"], won


def main() -> int:
    """Print the tables."""
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {CASES} cases a mix\n")
    head = [
        "requests",
        *BASELINES,
        "plan, first come",
        f"plan, width {WIDTH}",
        "plan",
        "bound",
        "ms, median",
        "ms, most",
    ]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    medians = []
    for mix in MIXES:
        row, median = measure(mix)
        medians.append(median)
        print("| " + " | ".join(row) + " |")
    print(f"\nArriving and ending, {ARRIVALS} requests a mix; percent of requests/of memory\n")
    head = ["mix", *BASELINES, "notebooks moved", "bound", "gap won, requests", "moves a request"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    gaps = []
    for mix in MIXES:
        row, won = measure_arrivals(mix)
        gaps.append(won)
        print("| " + " | ".join(row) + " |")
    print("\nRequests of any size; percent of requests/of memory\n")
    names = [name for name, _ in ways(A100)]
    print("| " + " | ".join(["sizes", *names]) + " |\n|" + "---|" * (len(names) + 1))
    for name, sizes in SIZES.items():
        print("| " + " | ".join([name, *(share(sizes, way) for _, way in ways(A100))]) + " |")
    return int(max(medians) > TARGET_S or min(gaps) < TARGET_GAP)


if __name__ == "__main__":
    sys.exit(main())
