"""What a pod asks for, in one shape for all dialects; and what a dialect is."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from typing import Protocol, TypeVar

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import InvalidRequest, Memory, Placement, Request, Slice
from fenka.core.units import card_units

CARDS = "fenka.io/cards"
"""Annotation. On a node: its inventory. On a pod: UUIDs of its cards, by index."""


NVIDIA_GPU = "nvidia.com/gpu"
"""Extended resource: whole cards."""


MIB, GIB_MIB = 1, 1024


def invented_id(node: str, index: int) -> DeviceId:
    """Return the id of a card whose plugin names no UUID. No UUID has a slash."""
    return DeviceId(f"{node}/{index}")


def driver_uuid(device: DeviceId) -> str:
    """Return the UUID by which the driver knows the card; empty for an invented id."""
    return "" if "/" in device else device


class InvalidRecord(FenkaError):
    """A record cannot be understood; the message says which and how."""


class ContainerKind(Enum):
    """Of a container: what it asks for counts differently."""

    APP = auto()
    INIT = auto()
    SIDECAR = auto()


@dataclass(frozen=True, slots=True)
class ContainerUnits:
    """What one container asks for, in units. Init containers come in their order."""

    name: str
    units: int
    kind: ContainerKind = ContainerKind.APP


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A sharing node: its cards, and how many MiB of them one unit of `aliyun.com/gpu-mem` is.

    recorded: False where no inventory was written and the cards are taken to be equal, as gpushare does.
    """

    node: Node
    has_inventory: bool = True

    @property
    def unit_mib(self) -> int:
        """Return the node's unit of card memory."""
        return self.node.unit_mib

    def card_units(self, index: int) -> int:
        """Of the card with this index; 0 for none."""
        return next(
            (card_units(c.memory_mib, self.unit_mib) for c in self.node.cards if c.index == index),
            0,
        )

    @property
    def total_units(self) -> int:
        """Units of all cards, the sick ones too."""
        return sum(card_units(card.memory_mib, self.unit_mib) for card in self.node.cards)

    @property
    def unit_name(self) -> str:
        """As people write it."""
        return {GIB_MIB: "GiB", MIB: "MiB"}.get(self.unit_mib, f"{self.unit_mib}MiB")


def parse_quantity(text: str | int) -> int:
    """A Kubernetes quantity as a whole number, rounded up: "4", "8k" (the API server writes 8000 so), "1Gi".

    Raises InvalidRecord.
    """
    text = str(text).strip()
    if text.isascii() and text.isdecimal() and len(text) <= 30:
        # As nearly all are: thousands of pods are read at once.
        return int(text)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidRecord(f"{text!r} is no quantity")
    number, suffix, exponent = match.groups()
    scale = _SCALES[suffix] if suffix else Fraction(10) ** int(exponent or 0)
    value = Fraction(number) * scale
    return -(-value.numerator // value.denominator)


_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30}))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?"
)


_SCALES: dict[str, Fraction] = {
    **{letter: Fraction(1000) ** (power - 3) for power, letter in enumerate("num")},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


VISIBLE = "NVIDIA_VISIBLE_DEVICES"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """A container and its limits, extended resources among them."""

    name: str
    resources: Mapping[str, str | int]
    kind: ContainerKind = ContainerKind.APP

    def amount(self, resource: str) -> int:
        """A whole number, 0 for none. Raises InvalidRecord."""
        if resource not in self.resources:
            return 0
        amount = parse_quantity(self.resources[resource])
        if amount < 0:
            raise InvalidRecord(f"container {self.name} asks for {amount} of {resource}")
        return amount


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What of a pod tells its wishes. Init containers come first and in their order, as they run."""

    containers: tuple[ContainerRequest, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def apps(self) -> list[ContainerRequest]:
        """Those of `spec.containers`: records number them so."""
        return [it for it in self.containers if it.kind is ContainerKind.APP]

    def requested_resources(self, resources: Iterable[str]) -> list[str]:
        """Those of these resources that some container asks for. Raises InvalidRecord."""
        return [name for name in resources if any(it.amount(name) for it in self.containers)]

    def container_units(self, resource: str) -> list[ContainerUnits]:
        """Container by container. Raises InvalidRecord."""
        return [ContainerUnits(it.name, it.amount(resource), it.kind) for it in self.containers]


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """What some of a pod's containers hold together: one request of the core.

    ceiling: percent of compute up to which it may use what is idle; None: never more than it asks for.
    by_label: its whole cards are another plugin's business on nodes that share, unless their labels say
    otherwise.
    """

    containers: tuple[str, ...]
    request: Request
    burst_percent: int | None = None
    requires_opt_in: bool = False


@dataclass(frozen=True, slots=True)
class NodeMode:
    """What pods may request of a node: whole cards, memory, memory with compute.

    isolated: False if programs see the whole card and limit themselves.
    """

    whole: bool = False
    memory: bool = False
    compute: bool = False
    isolated: bool = True


@dataclass(frozen=True, slots=True)
class NodeResource:
    """An extended resource as nodes advertise it.

    Attributes:
        name: the name by which pods request it.
        plugin: the prefix of its device plugin's socket.
        units_on: returns the number of units that a card of a node has.
        offered: returns whether a node in this mode gives it away.
    """

    name: str
    plugin: str
    units_on: Callable[[Node, Card], int]
    offered: Callable[[NodeMode], bool]


class Dialect(Protocol):
    """Names that users write, to requests and back. Pure; each dialect is a module with these functions.

    The parts of a pod all go to one node. Placements are one for each part, in its order. Functions that
    read raise InvalidRecord, with one sentence that says what to write instead.
    """

    NAME: str
    RESOURCES: tuple[str, ...]
    """The extended resources that are asked for in it."""
    RECORDS: tuple[str, ...]
    """The annotations that `write` makes of a pod, which nobody else is to write. One that ends in `-` stands
    for all that begin so."""
    ASSIGNED: str
    """The annotation that marks a pod as having its slices, as former plugins wrote it; empty for none."""
    NODE_RESOURCES: tuple[NodeResource, ...]
    """The resources that nodes advertise for it."""
    LEASED: str
    """The one whose allocation by the kubelet brings the lease; the others are only counted."""

    def matches(self, pod: PodRequest) -> bool:
        """Whether the pod asks for something by these names."""

    def parse(self, pod: PodRequest) -> tuple[SliceRequest, ...]:
        """Return what the pod requests, in units that the nodes resolve or in the dialect's own."""

    def encode(
        self, pod: PodRequest, share: SharedNode, placements: Sequence[Placement], now_ns: int
    ) -> dict[str, str]:
        """The annotations of a pod with these placements on that node. now_ns: since 1970."""

    def decode(self, pod: PodRequest, share: SharedNode) -> tuple[Placement, ...] | None:
        """Where its annotations say that it is; None if they say nothing."""

    def container_slices(
        self, pod: PodRequest, share: SharedNode, placements: Sequence[Placement], container: str, /
    ) -> tuple[Slice, ...]:
        """What of it is this container's own, by the pod's record; empty for one that has no card."""

    def environment(
        self, pod: PodRequest, share: SharedNode, placements: Sequence[Placement], container: str, /
    ) -> dict[str, str]:
        """What a container finds in its environment; nothing for one that has no card."""


# ---- what dialects have in common ----


def is_index(text: str) -> bool:
    """Of a card. Python refuses to read numbers of thousands of digits, which a user may have written."""
    return text.isdecimal() and len(text) <= 9


def valid_request(make: Callable[[], Request]) -> Request:
    """The core's own refusals are sentences too. Raises InvalidRecord."""
    try:
        return make()
    except InvalidRequest as why:
        raise InvalidRecord(str(why)) from None


def memory_request(amount: int, unit_mib: int | None, compute: int, cards: int = 1) -> Request:
    """So many units, and so many percent, on each of these cards. Raises InvalidRecord."""
    return valid_request(lambda: Request(Memory(amount, unit_mib), compute=compute, cards=cards))


def whole_card_request(cards: int) -> Request:
    """Raises InvalidRecord."""
    return valid_request(lambda: Request(whole=True, cards=cards))


def per_container(
    pod: PodRequest, want: Callable[[ContainerRequest], Request | None], ceiling: int | None = None
) -> tuple[SliceRequest, ...]:
    """A part for each container that wants something. Raises InvalidRecord.

    An init container has ended when the others start: it uses the cards of one of them, which must do.
    """
    found: dict[str, tuple[list[str], Request]] = {}
    for it in pod.containers:
        request = want(it) if it.kind is not ContainerKind.INIT else None
        if request is not None:
            found[it.name] = [it.name], request
    for it in pod.containers:
        request = want(it) if it.kind is ContainerKind.INIT else None
        if request is None:
            continue
        hosts = (names for names, larger in found.values() if _covers(larger, request))
        names = next(hosts, None)
        if names is None:
            raise InvalidRecord(
                f"its init container {it.name} asks for more than any container beside it: "
                "let it ask for no more than one of those"
            )
        names.append(it.name)
    return tuple(
        SliceRequest(tuple(names), request, None if request.whole else ceiling)
        for names, request in found.values()
    )


def require_plain_containers(pod: PodRequest, resources: Sequence[str]) -> None:
    """Raise InvalidRecord where an init container asks: some records have no place for it."""
    for it in pod.containers:
        if it.kind is not ContainerKind.APP and (
            names := [name for name in resources if it.amount(name)]
        ):
            raise InvalidRecord(
                f"its init container {it.name} asks for {names[0]}: only its containers can"
            )


def _covers(larger: Request, request: Request) -> bool:
    if larger.whole:
        return larger.cards >= request.cards
    return larger == request


def placement_on(node: Node, request: Request, indexes: Sequence[int]) -> Placement:
    """The request on these cards of the node. Raises InvalidRecord for cards that are not there."""
    cards = {card.index: card for card in node.cards}
    slices = []
    for index in sorted(set(indexes)):
        card = cards.get(index)
        if card is None:
            raise InvalidRecord(
                f"the pod's card {index} is not one of the {len(cards)} of its node"
            )
        if request.whole:
            slices.append(Slice(index, card.uuid, card.memory_mib, card.compute))
            continue
        # Another's record is counted as it stands, also on a card that has not so much.
        mib = nominal_mib(request, node, card)
        slices.append(Slice(index, card.uuid, mib, request.compute))
    if len(slices) != request.cards or len(slices) != len(indexes):
        raise InvalidRecord(
            f"the pod's record names the cards {','.join(map(str, indexes)) or 'none'}, "
            f"it asks for {request.cards} different ones"
        )
    return Placement(node.name, tuple(slices), whole=request.whole)


def fallback_placement(share: SharedNode, parts: Iterable[SliceRequest]) -> tuple[Placement, ...]:
    """What counts for a pod of which nobody knows the cards: what it asks for, once, on the first ones.

    Its owner can write its record. To count it on every card would let them keep the whole node from others.
    """
    placements, first = list[Placement](), 0
    for part in parts:
        request = part.request
        cards = share.node.cards[first : first + request.cards]
        if request.whole:
            first += len(cards)
        slices = (
            Slice(
                card.index,
                card.uuid,
                min(nominal_mib(request, share.node, card), card.memory_mib),
                card.compute if request.whole else request.compute,
            )
            for card in cards
        )
        placements.append(Placement(share.node.name, tuple(slices), whole=request.whole))
    return tuple(placements)


def nominal_mib(request: Request, node: Node, card: Card) -> int:
    """Return the MiB of the card that a request takes, also if the card has fewer."""
    if request.whole:
        return card.memory_mib
    if request.memory is None:
        return 0
    mib = request.memory.mib_on(card.memory_mib, node.unit_mib)
    return request.memory.nominal_mib(node.unit_mib) if mib is None else mib


def find_container(
    parts: Sequence[SliceRequest], placements: Sequence[Placement], container: str
) -> tuple[SliceRequest, Placement] | None:
    """What a container holds; None if it holds nothing."""
    pairs = zip(parts, placements, strict=True)
    return next((pair for pair in pairs if container in pair[0].containers), None)


Parse = Callable[[PodRequest], tuple[SliceRequest, ...]]
OfContainer = Callable[[PodRequest, SharedNode, Sequence[Placement], str], T]


def whole_slices(parse: Parse) -> OfContainer[tuple[Slice, ...]]:
    """`held` of a dialect in which a part's containers have it one after the other, each all of it."""

    def held(
        pod: PodRequest,
        share: SharedNode,  # noqa: ARG001
        placements: Sequence[Placement],
        container: str,
    ) -> tuple[Slice, ...]:
        found = find_container(parse(pod), placements, container)
        return found[1].slices if found else ()

    return held


def visible_only(parse: Parse) -> OfContainer[dict[str, str]]:
    """`environment` of a dialect that tells containers which cards they have and nothing else."""

    def environment(
        pod: PodRequest,
        share: SharedNode,  # noqa: ARG001
        placements: Sequence[Placement],
        container: str,
    ) -> dict[str, str]:
        found = find_container(parse(pod), placements, container)
        return visible_devices(found[1]) if found else {}

    return environment


def visible_devices(placement: Placement) -> dict[str, str]:
    """The environment that says which cards."""
    return {VISIBLE: ",".join(driver_uuid(piece.uuid) for piece in placement.slices)}
