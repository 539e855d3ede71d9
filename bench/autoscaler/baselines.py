"""Two autoscalers' algorithms, reimplemented from their documentation: cluster-autoscaler's and Karpenter's.

Both see a node's card memory as one sum and whole cards as a count apart. With `exact` they see cards as
fenka does; then only how they search differs. What they buy is then filled by fenka's own scheduler. Nodes
there are known by their sums alone.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fenka.core.evaluate import place
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.nodes.case import CaseRequest, NodeGroup, PlanningCase
from fenka.core.nodes.problem import Need, NodeRoom, Problem, ineligible
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement
from fenka.core.usage import UsageTotals


@dataclass(frozen=True, slots=True)
class Bought:
    """What a baseline buys: nodes by group."""

    nodes: Counter[int]

    def price(self, case: PlanningCase) -> float:
        """Return the sum of prices."""
        return sum(count * case.groups[number].price for number, count in self.nodes.items())


class Space:
    """A node that a baseline fills: by sums, or exactly. used: of a node there, in sum."""

    def __init__(self, world: "World", group: int, used: Counter[str] | None = None) -> None:
        self._world, self.group = world, group
        self.pods = 0
        shape = world.case.groups[group]
        self._sums = Counter(
            cpu=shape.cpu_milli,
            memory=shape.memory_mib,
            pods=shape.pods,
            units=sum(card.memory_mib // world.unit_mib for card in shape.cards),
            whole=len(shape.cards),
        )
        self._sums.subtract(used or {})
        self._room = world.problem.types[group].room() if world.exact else None

    def take(self, pod: int) -> bool:
        """Take the pod if it fits; return whether it did."""
        if not self._world.may(pod, self.group):
            return False
        if self._room is not None:
            taken = self._world.take(self._room, pod, self.group)
        else:
            wanted = self._world.sums[pod]
            taken = all(amount <= self._sums[name] for name, amount in wanted.items())
            if taken:
                self._sums.subtract(wanted)
        self.pods += taken
        return taken


class World:
    """A case without nodes there, for baselines. unit_mib: the unit in which they count card memory."""

    def __init__(self, case: PlanningCase, *, exact: bool, unit_mib: int = 1024) -> None:
        self.case, self.exact, self.unit_mib = case, exact, unit_mib
        self.problem = Problem(case)
        self._class_of = {
            number: position
            for position, each in enumerate(self.problem.classes)
            for number in each.requests
        }
        self.sums = [sums_of(request, unit_mib) for request in case.requests]

    def may(self, pod: int, group: int) -> bool:
        """Return whether labels and models admit the pod."""
        request, shape = self.case.requests[pod], self.case.groups[group]
        models = not request.models or any(card.model in request.models for card in shape.cards)
        return models and not ineligible(request, shape)

    def take(self, room: NodeRoom, pod: int, group: int) -> bool:
        """Take the pod exactly if it fits."""
        need: Need | None = self.problem.needs(group)[self._class_of[pod]]
        return need is not None and room.take(need) is not None


def sums_of(request: CaseRequest, unit_mib: int) -> Counter[str]:
    """Return what a pod takes of a node's sums."""
    amount, units = request.memory, 0
    if amount is not None and not request.whole:
        units = request.cards * (amount.units or -(-amount.mib // unit_mib))
    return +Counter(
        cpu=request.cpu_milli,
        memory=request.memory_mib,
        pods=1,
        units=units,
        whole=request.cards if request.whole else 0,
    )


def cluster_autoscaler(world: World, nodes: Sequence[Space] = ()) -> Bought:
    """Buy of one group at a time, the one that wastes least CPU and memory. nodes: there, or coming."""
    case, draw = world.case, random.Random(1)
    bought: Counter[int] = Counter()
    coming = list(nodes)
    pending = _without_room(range(len(case.requests)), coming)
    while pending:
        options = [
            (waste, draw.random(), group, spaces)
            for group in range(len(case.groups))
            for waste, spaces in _estimate(world, pending, group)
        ]
        if not options:
            break
        _, _, group, spaces = min(options, key=lambda option: option[:2])
        bought[group] += len(spaces)
        coming += [Space(world, group) for _ in spaces]
        pending = _without_room(pending, coming)
    return Bought(bought)


def _without_room(pending: Iterable[int], coming: Sequence[Space]) -> list[int]:
    """Return the pods that do not fit these nodes; the others are no longer seen."""
    return [pod for pod in pending if not any(space.take(pod) for space in coming)]


def _estimate(world: World, pending: list[int], group: int) -> Iterator[tuple[float, list[Space]]]:
    """Yield the waste and the nodes if the pending pods went to this group alone."""
    shape = world.case.groups[group]
    fitting = [pod for pod in pending if Space(world, group).take(pod)]
    fitting.sort(key=lambda pod: -_size(world.case.requests[pod], shape))
    spaces: list[Space] = []
    for pod in fitting:
        if not any(space.take(pod) for space in spaces):
            spaces.append(Space(world, group))
            spaces[-1].take(pod)
    if spaces:
        used = sum(_size(world.case.requests[pod], shape) for pod in fitting)
        yield 2 - used / len(spaces), spaces


def _size(request: CaseRequest, shape: NodeGroup) -> float:
    return request.cpu_milli / shape.cpu_milli + request.memory_mib / shape.memory_mib


def karpenter(world: World, nodes: Sequence[Space] = ()) -> Bought:
    """Keep for each planned node all types that could be; at the end the cheapest of them.

    nodes: there, or coming.
    """
    case = world.case
    claims: list[list[Space]] = []
    order = sorted(
        range(len(case.requests)),
        key=lambda pod: (-case.requests[pod].cpu_milli, -case.requests[pod].memory_mib),
    )
    for pod in _without_room(order, nodes):
        claims.sort(key=lambda claim: claim[0].pods)
        for claim in [*claims, None]:
            spaces = claim or [Space(world, group) for group in range(len(case.groups))]
            left = [space for space in spaces if space.take(pod)]
            if left:
                # A type that does not fit is out, as what was taken of it is.
                if claim is None:
                    claims.append(left)
                else:
                    claim[:] = left
                break
    cheapest = [
        min(claim, key=lambda space: case.groups[space.group].price).group for claim in claims
    ]
    return Bought(Counter(cheapest))


def served(case: PlanningCase, bought: Bought) -> int:
    """Return how many pods fenka's scheduler places on these nodes, in the order of their arrival."""
    nodes = [
        new_node(case.groups[group], f"{group}-{number}")
        for group, count in bought.nodes.items()
        for number in range(count)
    ]
    usage, placed = UsageTotals(), 0
    for request in case.requests:
        placement = _scheduled(usage, request, nodes)
        if placement is not None:
            usage.add(placement)
            placed += 1
    return placed


def _scheduled(usage: UsageTotals, request: CaseRequest, nodes: list[Node]) -> Placement | None:
    asked = request.card_request()
    if asked is not None:
        verdict = place(usage, asked, "binpack", nodes)
        return None if isinstance(verdict, Unschedulable) else verdict
    for node in nodes:
        cpu, memory = usage.host_usage(node.name)
        room = (node.cpu_milli or 0) - cpu, (node.memory_mib or 0) - memory
        if request.cpu_milli <= room[0] and request.memory_mib <= room[1]:
            return Placement(node.name, (), request.cpu_milli, request.memory_mib)
    return None


def new_node(group: NodeGroup, name: str) -> Node:
    """Return an empty node of the group."""
    cards = tuple(
        Card(index, DeviceId(f"{name}/{index}"), card.model, card.memory_mib)
        for index, card in enumerate(group.cards)
    )
    return Node(name, cards, group.cpu_milli, group.memory_mib)


class Baseline(Protocol):
    """An algorithm."""

    def __call__(self, world: World, nodes: Sequence[Space] = ()) -> Bought:
        """Return what is bought for the case's requests."""


BASELINES: dict[str, tuple[Baseline, bool]] = {
    "CA": (cluster_autoscaler, False),
    "CA +cards": (cluster_autoscaler, True),
    "Karpenter": (karpenter, False),
    "Karpenter +cards": (karpenter, True),
}
"""By name: the algorithm, and whether it sees cards."""
