"""A case as numbers: classes of equal pods, types of equal nodes, and what each class takes of each type.

Planning tries very many placements, and `evaluate` is too slow for that. Both read the same sizes; each
placement of the plan that is chosen is judged by `evaluate` at the end (`plan.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fenka.core.inventory import STRICT_EFFECTS, WHOLE_COMPUTE, needed_protection_s, tolerates
from fenka.core.nodes.case import (
    CaseNode,
    CaseRequest,
    Gang,
    NodeGroup,
    PlanningCase,
    whole_price,
)
from fenka.core.request import Request
from fenka.core.topology.domains import Domain

CLOSED = -1
"""The free memory of a card that admits nobody."""


class CardRoom(NamedTuple):
    """The free amounts of a card. idle: nobody holds anything of it."""

    free_mib: int
    free_compute: int
    idle: bool = True


class Need(NamedTuple):
    """The amounts that a pod takes of nodes of one shape.

    Attributes:
        host: amounts by dimension of the host, without zeros.
        cards: the number of cards.
        mib: memory by card of the node; None for cards that cannot serve it.
        least_mib: the least of these; 0 for pods without cards.
        compute: percent of each card.
        whole: wants idle cards.
        share: the largest part of the empty node that it takes of anything.
    """

    host: tuple[tuple[int, int], ...]
    cards: int
    mib: tuple[int | None, ...]
    least_mib: int
    compute: int
    whole: bool
    share: float


class NodeRoom:
    """The free amounts of one node while it is filled."""

    __slots__ = ("compute", "host", "idle", "mib")

    def __init__(self, host: Sequence[int], cards: Sequence[CardRoom]) -> None:
        self.host = list(host)
        self.mib = [card.free_mib for card in cards]
        self.compute = [card.free_compute for card in cards]
        self.idle = [card.idle for card in cards]

    def copy(self) -> "NodeRoom":
        """Return a room that is filled by itself."""
        twin = NodeRoom((), ())
        twin.host, twin.mib = self.host.copy(), self.mib.copy()
        twin.compute, twin.idle = self.compute.copy(), self.idle.copy()
        return twin

    def most_mib(self) -> int:
        """Return the free memory of the card that has the most; 0 without open cards."""
        return max([0, *self.mib])

    def take(self, need: Need) -> tuple[int, ...] | None:
        """Take what a pod needs, of the tightest cards. Return the cards, None if it does not fit."""
        host = self.host
        for dimension, amount in need.host:
            if amount > host[dimension]:
                return None
        cards = self._tightest(need) if need.cards else ()
        if cards is not None:
            self.put(need, cards)
        return cards

    def put(self, need: Need, cards: Sequence[int]) -> None:
        """Take what a pod needs, of these cards."""
        for card in cards:
            self.mib[card] -= need.mib[card] or 0
            self.compute[card] -= need.compute
            self.idle[card] = False
        for dimension, amount in need.host:
            self.host[dimension] -= amount

    def _tightest(self, need: Need) -> tuple[int, ...] | None:
        compute, whole, free = need.compute, need.whole, self.mib
        if need.cards == 1:
            best, least = -1, 0
            for card, mib in enumerate(need.mib):
                if mib is None or mib > free[card] or compute > self.compute[card]:
                    continue
                if (best < 0 or free[card] < least) and (not whole or self.idle[card]):
                    best, least = card, free[card]
            return None if best < 0 else (best,)
        fitting = [
            (free[card], self.compute[card], card)
            for card, mib in enumerate(need.mib)
            if mib is not None
            and mib <= free[card]
            and compute <= self.compute[card]
            and (not whole or self.idle[card])
        ]
        if len(fitting) < need.cards:
            return None
        return tuple(sorted(card for _, _, card in sorted(fitting)[: need.cards]))


ZONE_LABEL, CAPACITY_LABEL, GROUP_LABEL = (
    "topology.kubernetes.io/zone",
    "fenka.io/capacity",
    "fenka.io/group",
)

AnyMachine = NodeGroup | CaseNode


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Pods that are equal for planning.

    Attributes:
        requests: numbers of the requests that they are of.
        demand: how many pods.
        domain: the topology domain that they may use, None for any: a gang that must be in one has a class
            for each.
    """

    request: CaseRequest
    requests: tuple[int, ...]
    demand: int
    domain: Domain | None = None


@dataclass(frozen=True, slots=True)
class NodeType:
    """Nodes that are equal for planning: a group's new ones, or nodes there with equal room.

    Attributes:
        machine: the group, or the first of the nodes.
        group: the number of the group, None for nodes there.
        nodes: numbers of the nodes there.
        shape: types of equal shape have equal needs.
        price: of one, in ten-thousandths; 0 for nodes there.
        least: how many are bought in any case.
        most: how many there are, or may be bought.
        cards: cards by model, which limits count.
    """

    machine: AnyMachine
    group: int | None
    nodes: tuple[int, ...]
    shape: int
    price: int
    least: int
    most: int
    host: tuple[int, ...]
    rooms: tuple[CardRoom, ...]
    cards: Mapping[str, int] = field(default_factory=dict)

    def room(self) -> NodeRoom:
        """Return the room of one such node."""
        return NodeRoom(self.host, self.rooms)


class GangClasses(NamedTuple):
    """A gang. options: the classes that are served together; one option, or one for each domain."""

    name: str
    options: tuple[tuple[int, ...], ...]


class Problem:
    """The case as numbers. Build it of a case that `check_case` accepts."""

    def __init__(self, case: PlanningCase) -> None:
        self.case = case
        # A request for what no machine has is served nowhere: its names cost nothing.
        offered = {name for group in (*case.groups, *case.nodes) for name in group.resources}
        requested = {name for request in case.requests for name in request.resources}
        self._resources = sorted(offered & requested)
        self._selected = {key for request in case.requests for key in request.selector}
        self._selected.update(*(gang.same for gang in case.gangs.values()))
        self._shapes: dict[object, int] = {}
        self._machines: list[AnyMachine] = []
        self._rules: dict[object, int] = {}
        self._eligible: dict[tuple[int, int], bool] = {}
        self._zoned = any(gang.zone == "same" for gang in case.gangs.values())
        self.types = [*_undominated(case, [*self._groups()]), *self._nodes()]
        self.classes, self.gangs = self._classes()
        self._class_rules = [self._rule(class_) for class_ in self.classes]
        self._not_offered = [
            any(amount and name not in offered for name, amount in class_.request.resources.items())
            for class_ in self.classes
        ]
        self._requests = [class_.request.card_request() for class_ in self.classes]
        self._needs: list[list[Need | None]] = [[] for _ in self._shapes]
        self.servable = self._servable()

    @property
    def offers(self) -> list[int]:
        """Return the types that can be bought."""
        return [number for number, type_ in enumerate(self.types) if type_.group is not None]

    @property
    def in_gangs(self) -> set[int]:
        """Return the classes of gangs."""
        return {class_ for gang in self.gangs for option in gang.options for class_ in option}

    @property
    def levels(self) -> list[int]:
        """Return the priorities of what can be served, the highest first."""
        return sorted({self.classes[number].request.priority for number in self.servable})[::-1]

    @property
    def servable_pods(self) -> int:
        """Return how many pods fit somewhere by themselves, those of whole gangs only."""
        return sum(self.servable_pods_of(level) for level in self.levels)

    def servable_pods_of(self, level: int) -> int:
        """Return those of one priority."""
        classes = set(self.servable - self.in_gangs)
        for gang in self.gangs:
            classes.update(*self.servable_options(gang)[:1])
        return sum(
            self.classes[class_].demand for class_ in classes if self.level_of(class_) == level
        )

    def servable_options(self, gang: GangClasses) -> list[tuple[int, ...]]:
        """Return the options whose members all fit some node."""
        return [option for option in gang.options if self.servable.issuperset(option)]

    def level_of(self, number: int) -> int:
        """Return the priority of a class."""
        return self.classes[number].request.priority

    def needs(self, number: int) -> list[Need | None]:
        """Return by class what a pod takes of a node of this type, None if it never may or can."""
        shape = self.types[number].shape
        if not self._needs[shape]:
            machine = self._machines[shape]
            self._needs[shape] = [
                self._need(class_, shape, machine) for class_ in range(len(self.classes))
            ]
        return self._needs[shape]

    def without_nodes(self, served: Mapping[int, int]) -> "Problem":
        """Return the problem of new nodes alone, for the pods that nodes there do not serve.

        Args:
            served: the pods that nodes there serve, by class.
        """
        rest = copy(self)
        rest.types = [
            type_ if type_.group is not None else replace(type_, least=0, most=0)
            for type_ in self.types
        ]
        rest.classes = [
            replace(class_, demand=class_.demand - served.get(number, 0))
            for number, class_ in enumerate(self.classes)
        ]
        return rest

    # ---- types ----

    def _groups(self) -> Iterator[NodeType]:
        limits = self.case.limits
        for number, group in enumerate(self.case.groups):
            models: dict[str, int] = {}
            for card in group.cards:
                models[card.model] = models.get(card.model, 0) + 1
            most = max(group.max - group.size, 0)
            bounds = [most, group.stock, limits.nodes]
            if limits.price is not None and group.price:
                bounds.append(whole_price(limits.price) // whole_price(group.price))
            bounds += [
                limits.cards[model] // models[model] for model in models if model in limits.cards
            ]
            most = min(bound for bound in bounds if bound is not None)
            yield NodeType(
                machine=group,
                group=number,
                nodes=(),
                shape=self._shape(group),
                price=whole_price(group.price),
                least=min(max(group.min - group.size, 0), most),
                most=most,
                host=self._host(group),
                rooms=tuple(CardRoom(card.memory_mib, WHOLE_COMPUTE) for card in group.cards),
                cards=models,
            )

    def _nodes(self) -> Iterator[NodeType]:
        equal: dict[tuple[int, tuple[int, ...], tuple[CardRoom, ...]], list[int]] = {}
        for number, node in enumerate(self.case.nodes):
            held = node.held
            counted = (held.resources.get(name, 0) for name in self._resources)
            used = (held.cpu_milli, held.memory_mib, held.pods, *counted)
            host = tuple(a - b for a, b in zip(self._host(node), used, strict=True))
            rooms = tuple(
                CardRoom(
                    CLOSED
                    if card.closed or card.whole
                    else max(card.memory_mib - card.held_mib, 0),
                    max(WHOLE_COMPUTE - card.held_compute, 0),
                    not (card.held_mib or card.held_compute or card.whole),
                )
                for card in node.cards
            )
            equal.setdefault((self._shape(node), host, rooms), []).append(number)
        for (shape, host, rooms), numbers in equal.items():
            yield NodeType(
                machine=self.case.nodes[numbers[0]],
                group=None,
                nodes=tuple(numbers),
                shape=shape,
                price=0,
                least=len(numbers),
                most=len(numbers),
                host=host,
                rooms=rooms,
            )

    def _host(self, machine: AnyMachine) -> tuple[int, ...]:
        counted = (machine.resources.get(name, 0) for name in self._resources)
        return (machine.cpu_milli, machine.memory_mib, machine.pods, *counted)

    def _shape(self, machine: AnyMachine) -> int:
        labels = labels_of(machine)
        key = (
            machine.zone if self._zoned else "",
            machine.capacity,
            _protection(machine) if machine.capacity == "spot" else 0,
            tuple(sorted((key, labels[key]) for key in labels if key in self._selected)),
            tuple(taint for taint in machine.taints if taint.effect in STRICT_EFFECTS),
            self._host(machine),
            tuple((card.model, card.memory_mib) for card in machine.cards),
        )
        if key not in self._shapes:
            self._machines.append(machine)
        return self._shapes.setdefault(key, len(self._shapes))

    # ---- classes ----

    def _classes(self) -> tuple[list[RequestClass], list[GangClasses]]:
        equal: dict[object, list[int]] = {}
        for number, request in enumerate(self.case.requests):
            equal.setdefault(_class_key(request), []).append(number)
        classes: list[RequestClass] = []
        options: dict[str, dict[Domain | None, list[int]]] = {}
        for numbers in equal.values():
            request = self.case.requests[numbers[0]]
            demand = sum(self.case.requests[number].count for number in numbers)
            rule = self._gang_rule(request)
            for domain in self._domains(rule) if rule.in_one_domain else (None,):
                if request.gang is not None:
                    of_gang = options.setdefault(request.gang, {})
                    of_gang.setdefault(domain, []).append(len(classes))
                classes.append(RequestClass(request, tuple(numbers), demand, domain))
        gangs = [
            GangClasses(name, tuple(tuple(option) for option in by_domain.values()))
            for name, by_domain in options.items()
        ]
        return classes, gangs

    def _gang_rule(self, request: CaseRequest) -> Gang:
        return self.case.gangs.get(request.gang or "", _ANYWHERE)

    def _domains(self, rule: Gang) -> list[Domain]:
        """Return the domains of a gang's rule; one that no node is in if there are none."""
        domains = (domain_of(rule, type_.machine) for type_ in self.types)
        return list(dict.fromkeys(domain for domain in domains if domain is not None)) or [()]

    def _rule(self, class_: RequestClass) -> int:
        """Return the number of its rules about nodes as such."""
        request = class_.request
        selector = tuple(sorted(request.selector.items()))
        spot = request.interruptible, request.duration_s
        in_domain = None if class_.domain is None else (self._gang_rule(request), class_.domain)
        key = selector, request.tolerations, spot, in_domain
        return self._rules.setdefault(key, len(self._rules))

    def _servable(self) -> frozenset[int]:
        """Return the classes that fit some node by themselves, whole gangs only."""
        fitting = {
            number
            for number in range(len(self.classes))
            if not self.classes[number].demand
            or any(self._fits_alone(number, kind) for kind in range(len(self.types)))
        }
        for gang in self.gangs:
            for option in gang.options:
                if not fitting.issuperset(option):
                    fitting.difference_update(option)
        return frozenset(fitting)

    def _fits_alone(self, number: int, type_number: int) -> bool:
        node_type, need = self.types[type_number], self.needs(type_number)[number]
        return need is not None and node_type.most > 0 and node_type.room().take(need) is not None

    def _need(self, number: int, shape: int, machine: AnyMachine) -> Need | None:
        class_, rule = self.classes[number], self._class_rules[number]
        if (rule, shape) not in self._eligible:
            self._eligible[rule, shape] = not ineligible(class_.request, machine) and (
                class_.domain is None
                or class_.domain == domain_of(self._gang_rule(class_.request), machine)
            )
        if not self._eligible[rule, shape] or self._not_offered[number]:
            return None
        request = class_.request
        counted = (request.resources.get(name, 0) for name in self._resources)
        host = (request.cpu_milli, request.memory_mib, 1, *counted)
        total = self._host(machine)
        if any(amount > whole for amount, whole in zip(host, total, strict=True)):
            return None
        asked = self._requests[number]
        mib = card_needs(asked, machine) if asked else (None,) * len(machine.cards)
        usable = [amount for amount in mib if amount is not None]
        if len(usable) < request.cards:
            return None
        least = min(usable, default=0) if request.cards else 0
        shares = [amount / whole for amount, whole in zip(host, total, strict=True) if amount]
        compute = WHOLE_COMPUTE if request.whole else request.compute
        if request.cards:
            memory = sum(card.memory_mib for card in machine.cards)
            shares.append(request.cards * least / max(memory, 1))
            shares.append(request.cards * compute / (WHOLE_COMPUTE * len(machine.cards)))
        sparse = tuple((dimension, amount) for dimension, amount in enumerate(host) if amount)
        return Need(sparse, request.cards, mib, least, compute, request.whole, max(shares))


def _undominated(case: PlanningCase, offers: list[NodeType]) -> list[NodeType]:
    """Return the offers. Where an equal, cheaper one never runs out, none is bought beyond `least`."""
    pods = sum(request.count for request in case.requests)
    cheapest: dict[int, NodeType] = {}
    for offer in offers:
        best = cheapest.get(offer.shape)
        if offer.most - offer.least >= pods and (best is None or offer.price < best.price):
            cheapest[offer.shape] = offer
    return [
        offer
        if cheapest.get(offer.shape, offer) is offer or offer.price < cheapest[offer.shape].price
        else replace(offer, most=offer.least)
        for offer in offers
    ]


def card_needs(request: Request, machine: AnyMachine) -> tuple[int | None, ...]:
    """Return the MiB that a request takes of each card; None where it never fits."""
    needs: list[int | None] = []
    for card in machine.cards:
        if request.models and card.model not in request.models:
            needs.append(None)
        elif request.memory is None:
            needs.append(card.memory_mib if request.whole else 0)
        else:
            needs.append(request.memory.mib_on(card.memory_mib, 1))
    return tuple(needs)


def labels_of(machine: AnyMachine) -> dict[str, str]:
    """Return the labels of such a node, with the implied ones."""
    group = machine.name if isinstance(machine, NodeGroup) else machine.group
    implied = {ZONE_LABEL: machine.zone, CAPACITY_LABEL: machine.capacity, GROUP_LABEL: group}
    return {**machine.labels, **{key: value for key, value in implied.items() if value}}


_ANYWHERE = Gang()


def domain_of(gang: Gang, machine: AnyMachine) -> Domain | None:
    """Return the domain that such a node is in, by the rule of a gang; None if it lacks a label."""
    labels = labels_of(machine)
    zone = (machine.zone,) if gang.zone == "same" else ()
    values = tuple(labels.get(label, "") for label in gang.same)
    return (*zone, *values) if all(values) else None


def ineligible(request: CaseRequest, machine: AnyMachine) -> str:
    """Return why the node's labels, taints and capacity exclude the request, empty if they do not."""
    labels = labels_of(machine)
    for key, value in request.selector.items():
        if labels.get(key) != value:
            return f"without label {key}={value}"
    for taint in machine.taints:
        if taint.effect in STRICT_EFFECTS and not any(
            tolerates(toleration, taint) for toleration in request.tolerations
        ):
            value = f"={taint.value}" if taint.value else ""
            return f"with taint {taint.key}{value}:{taint.effect}, which is not tolerated"
    duration = request.duration_s
    needed = needed_protection_s(duration, interruptible=request.interruptible)
    if machine.capacity == "spot" and needed > _protection(machine):
        if duration is None:
            return "on spot, and it is not interruptible"
        return "on spot, protected for less than it runs"
    return ""


def _protection(machine: AnyMachine) -> float:
    return machine.protection_s if isinstance(machine, NodeGroup) else machine.protected_s


def _class_key(request: CaseRequest) -> object:
    return (
        request.priority,
        request.gang,
        request.card_request(),
        request.cards,
        request.cpu_milli,
        request.memory_mib,
        tuple(sorted(request.resources.items())),
        tuple(sorted(request.selector.items())),
        request.tolerations,
        (request.interruptible, request.duration_s),
    )
