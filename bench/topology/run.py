"""Measure how well connected the cards are that requests and gangs get.

``python bench/topology/run.py`` replays random arrivals and departures on 16 nodes of each kind, at three
quarters of the load, with the same requests for each rule. Baselines: first fit, which takes the first free
cards of the first node, and the best of all sets of cards of the node, and of all nodes, by trying them.
Requests for all cards of a node leave no choice and are not counted. Prints a Markdown table for each kind of
node; exits 1 if a request gets worse connected cards than the best of its node, or first fit is better.
"""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import combinations

from fenka.core.evaluate import Fit, evaluate
from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, DeviceId, Distance, Links, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import UsageTotals

NODES, CARDS, ARRIVALS, LOAD, SEEDS = 16, 8, 1000, 0.75, 3
SIZES = {1: 0.5, 2: 0.25, 4: 0.15, 8: 0.1}
"""How many cards, and how often."""
GANGS = 0.2
"""The part of arrivals that are gangs of two members."""

Rule = Callable[[Sequence[Request], Sequence[Node], UsageTotals], Sequence[Placement] | None]


def _bridges(one: int, other: int) -> Distance:
    if one // 4 != other // 4:
        return Distance.SOCKETS
    return Distance.NVLINK if one // 2 == other // 2 else Distance.HOST_BRIDGE


def _mesh(one: int, other: int) -> Distance:
    linked = one // 4 == other // 4 or one % 4 == other % 4
    return Distance.NVLINK if linked else Distance.SOCKETS


def _sockets(one: int, other: int) -> Distance:
    if one // 4 != other // 4:
        return Distance.SOCKETS
    return Distance.PCIE_SWITCH if one // 2 == other // 2 else Distance.NUMA_NODE


KINDS: dict[str, Callable[[int, int], Distance]] = {
    "pairs with an NVLink bridge, two sockets": _bridges,
    "NVLink mesh of a DGX-1": _mesh,
    "PCIe switches on two sockets, no NVLink": _sockets,
    "NVSwitch": lambda _one, _other: Distance.NVLINK,
}


def make_nodes(distance: Callable[[int, int], Distance]) -> tuple[Node, ...]:
    """Return nodes whose cards are that far from each other."""
    rows = bytes(
        0 if one == other else distance(one, other)
        for one in range(CARDS)
        for other in range(CARDS)
    )
    nodes = []
    for number in range(NODES):
        cards = tuple(
            Card(index, DeviceId(f"GPU-{number}-{index}"), "card", 81251) for index in range(CARDS)
        )
        links = Links(tuple(card.uuid for card in cards), rows)
        nodes.append(Node(f"node-{number:02}", cards, links=links))
    return tuple(nodes)


def distances(node: Node, devices: Iterable[str]) -> list[Distance]:
    """Return the distances of all pairs."""
    assert node.links
    return [node.links.distance(*pair) for pair in combinations(devices, 2)]


def cost(pairs: Sequence[Distance]) -> tuple[int, int]:
    """Return pairs without NVLink, and the sum of distances."""
    return sum(pair > Distance.NVLINK for pair in pairs), sum(pairs)


def first_fit(
    requests: Sequence[Request], nodes: Sequence[Node], view: UsageTotals
) -> Sequence[Placement] | None:
    """Take the first free cards of the first node with enough, for each member in turn."""
    placed: list[Placement] = []
    for request in requests:
        for node in nodes:
            plain = replace(node, links=None, card_policy="binpack")
            (verdict,) = evaluate(view, request, "binpack", (plain,))
            if isinstance(verdict, Fit):
                placed.append(verdict.placement)
                view.add(verdict.placement)
                break
    for placement in placed:
        view.remove(placement)
    return placed if len(placed) == len(requests) else None


def fenka(
    requests: Sequence[Request], nodes: Sequence[Node], view: UsageTotals
) -> Sequence[Placement] | None:
    """Place as fenka does: the policy chooses the node, and connections the cards on it."""
    placed = place_gang(view, requests, "binpack", nodes)
    return None if isinstance(placed, Unschedulable) else placed


def preferred(
    requests: Sequence[Request], nodes: Sequence[Node], view: UsageTotals
) -> Sequence[Placement] | None:
    """Place as with `fenka.io/topology: preferred`: connections choose the node, too."""
    return fenka([replace(request, near=True) for request in requests], nodes, view)


RULES: dict[str, Rule] = {
    "first fit": first_fit,
    "fenka": fenka,
    "fenka, preferred": preferred,
}


@dataclass
class Outcome:
    """What a rule has reached."""

    pairs: list[Distance] = field(default_factory=list)
    best_on_node: list[Distance] = field(default_factory=list)
    best_anywhere: list[Distance] = field(default_factory=list)
    asked: int = 0
    given: int = 0
    worse: int = 0
    """Requests whose cards are worse connected than the best of their node."""

    def row(self, name: str) -> str:
        """Return a row of the table."""
        shares = [
            100 * sum(pair == Distance.NVLINK for pair in pairs) / len(pairs)
            for pairs in (self.pairs, self.best_on_node, self.best_anywhere)
        ]
        means = [
            sum(pairs) / len(pairs) for pairs in (self.pairs, self.best_on_node, self.best_anywhere)
        ]
        cells = [f"{share:.1f} %" for share in shares] + [f"{mean:.2f}" for mean in means]
        return " | ".join(["", name, *cells, f"{100 * self.given / self.asked:.1f} %", ""]).strip()


def least(request: Request, nodes: Sequence[Node], view: UsageTotals) -> list[Distance]:
    """Return the distances of the best set of free cards on these nodes, by trying all."""
    sets = (
        distances(node, devices)
        for node in nodes
        for devices in combinations(
            [card.uuid for card in node.cards if not view.card_usage(node.name, card.uuid).holders],
            request.cards,
        )
    )
    return min(sets, key=cost)


def replay(rule: Rule, nodes: Sequence[Node], seed: int, outcome: Outcome) -> None:
    """Place all arrivals by a rule, each for a random time."""
    rng, view = random.Random(seed), UsageTotals()
    by_name = {node.name: node for node in nodes}
    ends: list[tuple[float, int, Sequence[Placement]]] = []
    mean_cards = sum(size * share for size, share in SIZES.items()) * (1 + GANGS)
    between = mean_cards / (LOAD * NODES * CARDS)
    now = 0.0
    for number in range(ARRIVALS):
        now += rng.expovariate(1 / between)
        size = rng.choices([*SIZES], [*SIZES.values()])[0]
        members = 2 if rng.random() < GANGS else 1
        lasts = rng.expovariate(1.0)
        while ends and ends[0][0] <= now:
            for placement in heappop(ends)[2]:
                view.remove(placement)
        requests = [Request(whole=True, cards=size)] * members
        placed = rule(requests, nodes, view)
        outcome.asked += size * members
        if placed is None:
            continue
        outcome.given += size * members
        for request, placement in zip(requests, placed, strict=True):
            if 1 < size < CARDS:
                node = by_name[placement.node]
                pairs = distances(node, [piece.uuid for piece in placement.slices])
                on_node = least(request, (node,), view)
                outcome.pairs += pairs
                outcome.best_on_node += on_node
                outcome.best_anywhere += least(request, nodes, view)
                outcome.worse += cost(pairs) > cost(on_node)
            view.add(placement)
        heappush(ends, (now + lasts, number, placed))


def main() -> int:
    """Print a table for each kind of node."""
    failed = False
    for kind, distance in KINDS.items():
        print(f"\n{kind}: {NODES} nodes of {CARDS} cards, {SEEDS * ARRIVALS} arrivals\n")
        print("| rule | pairs with NVLink | best of the node | best of all nodes |", end="")
        print(" mean distance | best of the node | best of all nodes | cards given |")
        print(f"|{'---|' * 8}")
        outcomes = {name: Outcome() for name in RULES}
        for name, rule in RULES.items():
            for seed in range(SEEDS):
                replay(rule, make_nodes(distance), seed, outcomes[name])
        for name, outcome in outcomes.items():
            print(outcome.row(name))
        first, ours = outcomes["first fit"], outcomes["fenka"]
        failed |= ours.worse > 0 or cost_share(ours) > cost_share(first)
    return int(failed)


def cost_share(outcome: Outcome) -> float:
    """Return the part of pairs without NVLink."""
    return cost(outcome.pairs)[0] / len(outcome.pairs)


if __name__ == "__main__":
    sys.exit(main())
