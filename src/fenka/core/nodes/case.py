"""A case: groups that may grow, nodes there, pending requests. Its fields are those of `fenka.plan/1`.

`with_nodes` asks whether requests would start if certain nodes were there: its case has no other choice than
which requests these nodes serve. Docs: docs/do/plan-nodes.md.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from fenka.core.errors import InvalidCase, listed
from fenka.core.inventory import Taint, Toleration
from fenka.core.request import (
    MAX_CARDS,
    MAX_HOST,
    MAX_MEMORY_MIB,
    InvalidRequest,
    Memory,
    PercentOfCard,
    Request,
)

FORMAT: Literal["fenka.plan/1"] = "fenka.plan/1"

PRICE_DECIMALS = 4
PRICE_UNIT = 10**PRICE_DECIMALS
"""Prices are counted in whole ten-thousandths, so that sums are exact."""

MAX_COUNT = 100_000
"""Pods of a request, or nodes of a group: no cluster comes near it."""

MAX_PRICE = 10**7

Capacity = Literal["on-demand", "spot"]

OPERATORS = ("", "Equal", "Exists")
"""Of tolerations that a case may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCard:
    """A card of a node that does not exist yet, with the MiB that its driver will report."""

    model: str = ""
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCard(NewCard):
    """A card of a node there.

    Attributes:
        held_mib: memory that is allocated.
        held_compute: percent that is allocated.
        whole: whether one holder has all of it.
        closed: whether it admits nobody.
    """

    held_mib: int = 0
    held_compute: int = 0
    whole: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Amounts of a host that are allocated."""

    cpu_milli: int = 0
    memory_mib: int = 0
    pods: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The common fields of groups and nodes. Amounts are allocatable; labels are without the implied ones."""

    name: str
    zone: str = ""
    capacity: Capacity = "on-demand"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    cpu_milli: int
    memory_mib: int
    pods: int = 110
    resources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup(Machine):
    """Nodes of one shape, zone and capacity that may be bought.

    Attributes:
        price: of one node, per hour.
        min: the least number of nodes.
        size: the number now, also of those that are starting.
        max: the largest number.
        stock: how many can be bought, None if that is not known.
        protection_s: how long a spot node is certainly not taken back.
        cards: of one node.
    """

    price: float
    min: int = 0
    size: int = 0
    max: int = 1000
    stock: int | None = None
    protection_s: float = 0
    cards: tuple[NewCard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseNode(Machine):
    """A node there.

    Attributes:
        group: its group, empty for none.
        protected_s: for how long a spot node is certainly not taken back.
        held: what is allocated of its host.
        cards: with what is allocated of them.
    """

    group: str = ""
    protected_s: float = 0
    held: Held = field(default_factory=Held)
    cards: tuple[HeldCard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Card memory: units of `unit_mib`, exact MiB, or percent of the card."""

    units: int = 0
    unit_mib: int = 1024
    mib: int = 0
    percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRequest:
    """Equal pods that are pending.

    Attributes:
        count: how many.
        priority: a larger one is served first.
        gang: the gang that it belongs to, None for none.
        cards: different cards of one node for each pod, 0 for none.
        memory: on each card.
        compute: percent of each card.
        whole: wants idle cards, with all that they have.
        models: acceptable models, empty for any.
        selector: labels that the node must have.
        interruptible: may run on spot nodes for any time.
        duration_s: how long it runs, None if that is not known.
    """

    name: str
    count: int = 1
    priority: int = 0
    gang: str | None = None
    cards: int = 1
    memory: Amount | None = None
    compute: int = 0
    whole: bool = False
    models: tuple[str, ...] = ()
    cpu_milli: int = 0
    memory_mib: int = 0
    resources: Mapping[str, int] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    interruptible: bool = False
    duration_s: float | None = None

    def card_request(self) -> Request | None:
        """Return what one pod asks of cards and host, for `evaluate`; None without cards.

        A request that names no amount asks for 1 MiB, the smallest slice that exists.

        Raises:
            InvalidRequest: if no node could ever satisfy it.
        """
        if not self.cards:
            return None
        memory = None
        if self.memory is not None and self.memory.units:
            memory = Memory(self.memory.units, self.memory.unit_mib)
        elif self.memory is not None and self.memory.mib:
            memory = Memory(self.memory.mib)
        elif self.memory is not None and self.memory.percent:
            memory = PercentOfCard(self.memory.percent)
        elif not self.whole and not self.compute:
            memory = Memory(1)
        return Request(
            memory=memory,
            compute=self.compute,
            cards=self.cards,
            whole=self.whole,
            models=frozenset(self.models),
            cpu_milli=self.cpu_milli,
            host_memory_mib=self.memory_mib,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A rule for requests that start together or not at all.

    Attributes:
        zone: `same` keeps all of them in one zone.
        same: labels of nodes, of which all of them get one value each: those of a rack, for example.
    """

    zone: Literal["any", "same"] = "any"
    same: tuple[str, ...] = ()

    @property
    def in_one_domain(self) -> bool:
        """Return whether all must be in one topology domain."""
        return self.zone == "same" or bool(self.same)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuyLimits:
    """Limits of what is bought: nodes, the sum of prices, cards by model. None is no limit."""

    nodes: int | None = None
    price: float | None = None
    cards: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningCase:
    """The input of a plan. Call `check_case` before planning.

    Attributes:
        why: text for people, such as where the case comes from.
    """

    format: Literal["fenka.plan/1"]
    groups: tuple[NodeGroup, ...]
    requests: tuple[CaseRequest, ...]
    nodes: tuple[CaseNode, ...] = ()
    gangs: Mapping[str, Gang] = field(default_factory=dict)
    limits: BuyLimits = field(default_factory=BuyLimits)
    why: str = ""


def whole_price(price: float) -> int:
    """Return the price in ten-thousandths."""
    whole: int = round(price * PRICE_UNIT)
    return whole


def check_case(case: PlanningCase) -> None:
    """Raise InvalidCase for the first contradiction."""
    for title, names in (
        ("groups", [group.name for group in case.groups]),
        ("nodes", [node.name for node in case.nodes]),
        ("requests", [request.name for request in case.requests]),
    ):
        _check_names(title, names)
    for number, group in enumerate(case.groups):
        _check_group(f"groups[{number}] ({group.name})", group)
    for number, node in enumerate(case.nodes):
        _check_node(f"nodes[{number}] ({node.name})", node)
    for number, request in enumerate(case.requests):
        check_request(f"requests[{number}] ({request.name})", request)
    check_limits(case.limits, case.groups)


def _check_names(title: str, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if not name:
            raise InvalidCase(f"{title}[{number}].name is empty: name it")
        if title == "nodes" and name.startswith("new:"):
            raise InvalidCase(f"{title}[{number}].name is {name!r}: names of new nodes begin so")
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidCase(f"{title} has {name!r} {count} times: names must differ")


def check_limits(limits: BuyLimits, groups: Sequence[NodeGroup]) -> None:
    """Raise InvalidCase for a limit that nothing can have, or below what the groups' min requires."""
    required = [max(group.min - group.size, 0) for group in groups]
    if limits.nodes is not None:
        _check_range("limits.nodes", limits.nodes, MAX_COUNT)
        _check_required("limits.nodes", limits.nodes, sum(required), "nodes")
    if limits.price is not None:
        check_price("limits.price", limits.price)
        price = sum(
            count * whole_price(group.price) for count, group in zip(required, groups, strict=True)
        )
        _check_required("limits.price", limits.price, price / PRICE_UNIT, "an hour")
    for model, most in limits.cards.items():
        _check_range(f"limits.cards.{model}", most, MAX_COUNT * MAX_CARDS)
        cards = sum(
            count * sum(card.model == model for card in group.cards)
            for count, group in zip(required, groups, strict=True)
        )
        _check_required(f"limits.cards.{model}", most, cards, "cards")


def _check_required(title: str, limit: float, required: float, measure: str) -> None:
    if required > limit:
        raise InvalidCase(
            f"{title} is {limit:g}, but the groups' min requires {required:g} {measure}: raise the limit"
        )


def _check_group(title: str, group: NodeGroup) -> None:
    check_price(f"{title}.price", group.price)
    for name in ("min", "size", "max"):
        _check_range(f"{title}.{name}", getattr(group, name), MAX_COUNT)
    if group.stock is not None:
        _check_range(f"{title}.stock", group.stock, MAX_COUNT)
    if group.max < group.min:
        raise InvalidCase(f"{title}.max is {group.max}, less than its min of {group.min}")
    _check_machine(title, group, group.cards)


def _check_node(title: str, node: CaseNode) -> None:
    _check_machine(title, node, node.cards)
    for number, card in enumerate(node.cards):
        _check_range(f"{title}.cards[{number}].held_mib", card.held_mib, MAX_MEMORY_MIB)
        _check_range(f"{title}.cards[{number}].held_compute", card.held_compute, MAX_COUNT)
    _check_amounts(f"{title}.held", node.held, node.held.resources, ("pods",))


def _check_machine(title: str, machine: Machine, cards: Sequence[NewCard]) -> None:
    _check_amounts(title, machine, machine.resources, ("pods",))
    _check_range(f"{title}: the number of cards", len(cards), MAX_CARDS)
    for number, card in enumerate(cards):
        _check_range(f"{title}.cards[{number}].memory_mib", card.memory_mib, MAX_MEMORY_MIB)


def check_request(title: str, request: CaseRequest) -> None:
    """Raise InvalidCase if a case may not have the request. title: what the message calls it."""
    _check_range(f"{title}.count", request.count, MAX_COUNT)
    _check_range(f"{title}.cards", request.cards, MAX_CARDS)
    _check_amounts(title, request, request.resources, ())
    amount = request.memory
    if amount is not None:
        _check_range(f"{title}.memory.units", amount.units, MAX_MEMORY_MIB)
        _check_range(f"{title}.memory.mib", amount.mib, MAX_MEMORY_MIB)
        _check_range(f"{title}.memory.percent", amount.percent, 100)
        given = [name for name in ("units", "mib", "percent") if getattr(amount, name)]
        if len(given) > 1:
            raise InvalidCase(
                f"{title}.memory has both {' and '.join(given[:2])}: give one of them"
            )
    for number, toleration in enumerate(request.tolerations):
        if toleration.operator not in OPERATORS:
            raise InvalidCase(
                f"{title}.tolerations[{number}].operator must be Equal or Exists, "
                f"not {toleration.operator!r}"
            )
    try:
        request.card_request()
    except InvalidRequest as why:
        raise InvalidCase(f"{title}: {why}") from None


def _check_amounts(
    title: str, host: object, resources: Mapping[str, int], others: Iterable[str]
) -> None:
    for name in ("cpu_milli", "memory_mib", *others):
        _check_range(f"{title}.{name}", getattr(host, name), MAX_HOST)
    for name, amount in resources.items():
        _check_range(f"{title}.resources.{name}", amount, MAX_HOST)


def _check_range(title: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise InvalidCase(f"{title} is {value}: it must be 0 to {most}")


def check_price(title: str, price: float) -> None:
    """Raise InvalidCase if nothing can have this price an hour. title: what the message calls it."""
    if not 0 <= price <= MAX_PRICE:
        raise InvalidCase(f"{title} is {price:g}: it must be 0 to {MAX_PRICE}")
    if abs(price * PRICE_UNIT - whole_price(price)) > 1e-3:
        raise InvalidCase(f"{title} is {price!r}: it may have {PRICE_DECIMALS} decimals")


HOSTNAME_LABEL = "kubernetes.io/hostname"
MAX_NAMED = 5


def with_nodes(case: PlanningCase, added: Mapping[str, int]) -> PlanningCase:
    """Return the case whose plans have exactly these new nodes, whatever their price and stock.

    Args:
        case: what is there and what is pending.
        added: how many nodes, by the name of a group, or of a node there that the new ones are like.

    Raises:
        InvalidCase: if there is no such group or node, or two names are of one group.
    """
    groups: dict[str, NodeGroup] = {}
    for name, count in added.items():
        group = replace(_template(case, name), size=0, min=count, max=count, stock=None)
        if group.name in groups:
            raise InvalidCase(f"{name} is of group {group.name}, which is named too: name it once")
        groups[group.name] = group
    return replace(case, groups=tuple(groups.values()), limits=BuyLimits())


def _template(case: PlanningCase, name: str) -> NodeGroup:
    """Return a group of this name, or of nodes like that of this name."""
    for group in case.groups:
        if group.name == name:
            return group
    for node in case.nodes:
        if node.name == name:
            return _like(node)
    names = [group.name for group in (*case.groups, *case.nodes)]
    known = listed(names, MAX_NAMED)
    raise InvalidCase(
        f"no group and no node is called {name!r}: name one of {known}"
        if names
        else f"no group and no node is called {name!r}: there is none"
    )


def _like(node: CaseNode) -> NodeGroup:
    # Its group is the label that requests may select.
    given = {"name": node.group or node.name, "price": 0, "protection_s": node.protected_s}
    labels = {key: value for key, value in node.labels.items() if key != HOSTNAME_LABEL}
    cards = tuple(NewCard(model=card.model, memory_mib=card.memory_mib) for card in node.cards)
    return NodeGroup(**{**fields_of(node, Machine), **given, "labels": labels, "cards": cards})


def node_of(group: NodeGroup, name: str) -> CaseNode:
    """Return an idle node there, as the new nodes of a group are."""
    cards = tuple(HeldCard(model=card.model, memory_mib=card.memory_mib) for card in group.cards)
    given = {"name": name, "group": group.name, "protected_s": group.protection_s, "cards": cards}
    return CaseNode(**{**fields_of(group, Machine), **given})


def fields_of(record: object, kind: type[Any]) -> dict[str, Any]:
    """Return a record's values of the fields that a data class has, to make another record of them."""
    return {field.name: getattr(record, field.name) for field in fields(kind)}
