"""Measure how close together the members of gangs are placed.

``python bench/topology/racks.py`` replays random arrivals and departures of gangs on two zones with four
racks of four nodes, at three quarters of the load, with the same gangs for each rule. Baselines: random
nodes, first fit, and the least hops of any distribution on the free cards of that moment, by dynamic
programming over nodes, racks and zones. Hops of two members: 0 on one node, 1 in one rack, 2 in one zone,
else 3. Prints a Markdown table; exits 1 if a gang is in several racks that had room in one, or first fit is
better.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations

from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity, Topology
from fenka.core.usage import UsageTotals

ZONES, RACKS, NODES, CARDS, ARRIVALS, LOAD, SEEDS = 2, 4, 4, 8, 500, 0.75, 3
MEMBERS = {1: 0.3, 2: 0.2, 4: 0.2, 8: 0.15, 16: 0.1, 32: 0.05}
"""How many members a gang has, and how often. Each member requests as many cards as below."""
CARDS_EACH = {1: 0.6, 2: 0.2, 8: 0.2}
MOST = 64
"""Cards of a gang: half of a zone."""

LEVELS = ("zone", "rack", "kubernetes.io/hostname")
PLACES = {
    f"node-{number:02}": (
        f"z{number // (RACKS * NODES)}",
        f"r{number // NODES % RACKS}",
        f"node-{number:02}",
    )
    for number in range(ZONES * RACKS * NODES)
}
"""The zone, the rack and the name of each node."""


def make_nodes() -> tuple[Node, ...]:
    """Return the nodes."""
    return tuple(
        Node(
            name,
            tuple(
                Card(index, DeviceId(f"GPU-{name}-{index}"), "card", 81251)
                for index in range(CARDS)
            ),
        )
        for name in PLACES
    )


def hops(one: str, other: str) -> int:
    """Return how far two nodes are from each other."""
    return next(
        (
            len(LEVELS) - level
            for level, values in enumerate(zip(PLACES[one], PLACES[other], strict=True))
            if len(set(values)) > 1
        ),
        0,
    )


def mean_hops(names: Sequence[str]) -> float:
    """Return the mean over all pairs of members."""
    pairs = list(combinations(names, 2))
    return sum(hops(*pair) for pair in pairs) / len(pairs)


def free(name: str, cards: int, view: UsageTotals) -> int:
    """Return how many members with so many cards a node has room for."""
    held = (
        view.card_usage(name, DeviceId(f"GPU-{name}-{index}")).holders for index in range(CARDS)
    )
    return sum(not holders for holders in held) // cards


def least_hops(members: int, cards: int, view: UsageTotals) -> float:
    """Return the least mean of any distribution.

    The pairs on one node, in one rack and in one zone each save a hop: as many as possible are wanted.
    `best[k]` is that for k members on the nodes of a domain.
    """
    nothing = -(10**9)

    def joined(parts: list[list[int]]) -> list[int]:
        best = [0] + [nothing] * members
        for part in parts:
            best = [
                max(best[k - own] + part[own] for own in range(k + 1)) for k in range(members + 1)
            ]
        return best

    def with_pairs(best: list[int]) -> list[int]:
        return [saved + k * (k - 1) // 2 for k, saved in enumerate(best)]

    racks: dict[tuple[str, str], list[list[int]]] = {}
    for name, (zone, rack, _) in PLACES.items():
        room = free(name, cards, view)
        node = [0 if k <= room else nothing for k in range(members + 1)]
        racks.setdefault((zone, rack), []).append(with_pairs(node))
    zones: dict[str, list[list[int]]] = {}
    for (zone, _), nodes in racks.items():
        zones.setdefault(zone, []).append(with_pairs(joined(nodes)))
    everywhere = joined([with_pairs(joined(of_zone)) for of_zone in zones.values()])
    pairs = members * (members - 1) // 2
    return 3 - everywhere[members] / pairs


@dataclass
class Rule:
    """How gangs are placed. levels: of the topology, none if it does not count."""

    name: str
    levels: tuple[str, ...] = ()
    order: str = ""
    """first or random nodes, empty for fenka."""

    def __post_init__(self) -> None:
        labels = {name: dict(zip(LEVELS, values, strict=True)) for name, values in PLACES.items()}
        self.topology = Topology.of(self.levels, labels.items())

    def place(
        self, request: Request, members: int, nodes: Sequence[Node], view: UsageTotals, seed: int
    ) -> Sequence[Placement] | None:
        """Return the placements of all members; None if they do not fit."""
        if self.order:
            return self._one_by_one(request, members, nodes, view, random.Random(seed))
        proximity = Proximity.of(self.topology, ()) if self.levels else None
        placed = place_gang(view, [request] * members, "binpack", nodes, proximity=proximity)
        return None if isinstance(placed, Unschedulable) else placed

    def _one_by_one(
        self,
        request: Request,
        members: int,
        nodes: Sequence[Node],
        view: UsageTotals,
        rng: random.Random,
    ) -> Sequence[Placement] | None:
        placed: list[Placement] = []
        for _ in range(members):
            order = rng.sample(nodes, len(nodes)) if self.order == "random" else nodes
            node = next((node for node in order if free(node.name, request.cards, view)), None)
            if node is None:
                break
            found = place_gang(view, [request], "binpack", [node])
            assert not isinstance(found, Unschedulable)
            placed += found
            view.add(found[0])
        for placement in placed:
            view.remove(placement)
        return placed if len(placed) == members else None


RULES = (
    Rule("random nodes", order="random"),
    Rule("first fit", order="first"),
    Rule("fenka, no levels"),
    Rule("fenka, zones and racks", LEVELS[:2]),
    Rule("fenka, zones, racks and nodes", LEVELS),
)


@dataclass
class Outcome:
    """What a rule has reached."""

    hops: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    in_one_rack: int = 0
    could_be: int = 0
    asked: int = 0
    given: int = 0
    seconds: float = 0.0

    def row(self, name: str) -> str:
        """Return a row of the table."""
        gangs = len(self.hops)
        cells = (
            f"{sum(self.hops) / gangs:.3f}",
            f"{sum(self.least) / gangs:.3f}",
            f"{100 * self.in_one_rack / gangs:.1f} %",
            f"{100 * self.could_be / gangs:.1f} %",
            f"{100 * self.given / self.asked:.1f} %",
            f"{1000 * self.seconds / gangs:.1f} ms",
        )
        return f"| {name} | {' | '.join(cells)} |"


def replay(rule: Rule, seed: int, outcome: Outcome) -> None:
    """Place all arrivals by a rule, each for a random time."""
    rng, view, nodes = random.Random(seed), UsageTotals(), make_nodes()
    ends: list[tuple[float, int, Sequence[Placement]]] = []
    mean_cards = sum(n * p for n, p in MEMBERS.items()) * sum(n * p for n, p in CARDS_EACH.items())
    between = mean_cards / (LOAD * len(nodes) * CARDS)
    now = 0.0
    for number in range(ARRIVALS):
        now += rng.expovariate(1 / between)
        members = rng.choices([*MEMBERS], [*MEMBERS.values()])[0]
        cards = rng.choices([*CARDS_EACH], [*CARDS_EACH.values()])[0]
        members = min(members, MOST // cards)
        lasts = rng.expovariate(1.0)
        while ends and ends[0][0] <= now:
            for placement in heappop(ends)[2]:
                view.remove(placement)
        began = time.process_time()
        placed = rule.place(Request(whole=True, cards=cards), members, nodes, view, number)
        seconds = time.process_time() - began
        outcome.asked += members * cards
        if placed is None:
            continue
        outcome.given += members * cards
        if members > 1:
            outcome.seconds += seconds
            names = [placement.node for placement in placed]
            outcome.hops.append(mean_hops(names))
            outcome.least.append(least_hops(members, cards, view))
            room = Counter[tuple[str, ...]]()
            for name in PLACES:
                room[PLACES[name][:2]] += free(name, cards, view)
            outcome.could_be += max(room.values()) >= members
            outcome.in_one_rack += len({PLACES[name][:2] for name in names}) == 1
        for placement in placed:
            view.add(placement)
        heappush(ends, (now + lasts, number, placed))


def main() -> int:
    """Print a table."""
    print(
        f"{ZONES} zones of {RACKS} racks of {NODES} nodes of {CARDS} cards, {SEEDS} x {ARRIVALS} gangs\n"
    )
    print(
        "| rule | mean hops | least possible | in one rack | possible | cards given | CPU for each gang |"
    )
    print(f"|{'---|' * 7}")
    outcomes = {rule.name: Outcome() for rule in RULES}
    for rule in RULES:
        for seed in range(SEEDS):
            replay(rule, seed, outcomes[rule.name])
        print(outcomes[rule.name].row(rule.name), flush=True)
    close = [outcomes[rule.name] for rule in RULES if rule.levels]
    missed = any(outcome.in_one_rack < outcome.could_be for outcome in close)
    first = outcomes["first fit"]
    return int(missed or any(sum(outcome.hops) > sum(first.hops) for outcome in close))


if __name__ == "__main__":
    sys.exit(main())
