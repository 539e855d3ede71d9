"""The interface of a dialect, and the types that all dialects share: pods, shared nodes, quantities."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card, DeviceId, Node, card_of
from fenka.core.mig.instances import NO_DIVISION, Division
from fenka.core.request import ComputeMode, Placement, Request, Slice
from fenka.core.units import card_units

CARDS = "fenka.io/cards"
"""Annotation. On a node: its inventory. On a pod: UUIDs of its cards, by index."""


CORE_MODE = "fenka.io/core-mode"
"""Annotation of a pod: what the compute that it requests means, one of `core.request.COMPUTE_MODES`."""

TOPOLOGY = "fenka.io/topology"
"""Annotation of a pod: `required` if NVLink must connect each two cards of a container, `preferred` if the
node is chosen by connections, too. Without it they choose only the cards on the node of the policy."""

TOPOLOGIES = ("preferred", "required")

NVIDIA_GPU = "nvidia.com/gpu"
"""Extended resource: whole cards."""


GIB_MIB = 1024


def invented_id(node: str, index: int) -> DeviceId:
    """Return the id of a card whose plugin names no UUID. No UUID has a slash."""
    return DeviceId(f"{node}/{index}")


def driver_uuid(device: DeviceId) -> str:
    """Return the UUID by which the driver knows the card, or an instance's card; empty for an invented id."""
    card = card_of(device)
    return "" if "/" in card else card


class InvalidRecord(FenkaError):
    """A record, or a request, cannot be read; the message says why and what to write instead."""


class ContainerKind(Enum):
    """The kind of a container: requests of the kinds add up differently."""

    APP = auto()
    INIT = auto()
    SIDECAR = auto()


class ContainerUnits(NamedTuple):
    """The request of one container, in units. Init containers are in their order."""

    name: str
    units: int
    kind: ContainerKind = ContainerKind.APP


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A node that shares its cards.

    has_inventory: False if the node has none: its cards are taken to be equal, as gpushare does.
    division: what is known of its divided cards; their instances are cards of the node.
    shares_cards: False if the node shares divided cards alone. Its other cards are not in it: the kubelet
        gives them away whole, as on a node that does not share.
    """

    node: Node
    has_inventory: bool = True
    division: Division = NO_DIVISION
    shares_cards: bool = True

    @property
    def unit_mib(self) -> int:
        """Return the node's unit of card memory."""
        return self.node.unit_mib

    def card_units(self, index: int) -> int:
        """Return the units of the card with this index; 0 if there is none."""
        return next(
            (
                card_units(card.memory_mib, self.unit_mib)
                for card in self.physical_cards
                if card.index == index
            ),
            0,
        )

    @property
    def total_units(self) -> int:
        """Return the units of all cards, unhealthy and divided ones included.

        A divided card has the units that it has undivided. Slices in its instances use them, and what
        the kubelet counts stays the same when a card is divided. Its instances together never have more.
        """
        return sum(card_units(card.memory_mib, self.unit_mib) for card in self.physical_cards)

    @property
    def physical_cards(self) -> Iterable[Card]:
        """Return the cards without instances."""
        return (card for card in self.node.cards if card.parent is None)


def unit_name(unit_mib: int) -> str:
    """Return a unit of memory as people write it."""
    return {GIB_MIB: "GiB", 1: "MiB"}.get(unit_mib, f"{unit_mib}MiB")


@lru_cache(maxsize=4096)
def parse_quantity(text: str | int) -> int:
    """Return a Kubernetes quantity as a whole number, rounded up: "4", "8k" (for 8000), "1Gi".

    Raises:
        InvalidRecord: if it is none.
    """
    text = str(text).strip()
    if text.isascii() and text.isdecimal() and len(text) <= 30:
        # Nearly all quantities, of thousands of pods.
        return int(text)
    return math.ceil(_quantity(text))


def parse_milli(text: str | int) -> int:
    """Return a Kubernetes quantity in thousandths, rounded up: 3800 for "3800m" or "3.8".

    Raises:
        InvalidRecord: if it is none.
    """
    return math.ceil(_quantity(str(text).strip()) * 1000)


def _quantity(text: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidRecord(f"{text!r} is no quantity")
    number, suffix, exponent = match.groups()
    scale = _SCALES[suffix] if suffix else Fraction(10) ** int(exponent or 0)
    return Fraction(number) * scale


def readable_quantity(resources: Mapping[str, str], resource: str) -> int:
    """Return the amount of a resource; 0 if there is none, or it cannot be read."""
    try:
        return parse_quantity(resources.get(resource, 0))
    except InvalidRecord:
        return 0


_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30}))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?"
)


_SCALES: dict[str, Fraction] = {
    **{letter: Fraction(1000) ** (power - 3) for power, letter in enumerate("num")},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


class ContainerRequest(msgspec.Struct, frozen=True, gc=False):
    """A container and its limits, extended resources among them."""

    name: str
    resources: Mapping[str, str | int]
    kind: ContainerKind = ContainerKind.APP

    def amount(self, resource: str) -> int:
        """Return the limit as a whole number, 0 for none. Raises InvalidRecord."""
        quantity = self.resources.get(resource)
        if quantity is None:
            return 0
        amount = parse_quantity(quantity)
        if amount < 0:
            raise InvalidRecord(f"container {self.name} asks for {amount} of {resource}")
        return amount


class PodRequest(msgspec.Struct, frozen=True, gc=False):
    """The parts of a pod that say what it requests. Init containers come first, in their order."""

    containers: tuple[ContainerRequest, ...]
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}

    @property
    def apps(self) -> list[ContainerRequest]:
        """Return the containers of `spec.containers`, in the order by which records number them."""
        return [container for container in self.containers if container.kind is ContainerKind.APP]

    def container(self, name: str) -> ContainerRequest | None:
        """Return the container of that name."""
        return next((container for container in self.containers if container.name == name), None)

    def requested_resources(self, resources: Iterable[str]) -> list[str]:
        """Return those of the resources that some container requests. Raises InvalidRecord.

        resources: a name that ends in `-` is a prefix.
        """
        # These loops take half of the time of any(), and run several times for each pod of a cluster.
        requested = []
        for name in resources:
            if name[-1] == "-":
                requested += self.requested_resources(self._named(name))
                continue
            for container in self.containers:
                if name in container.resources and container.amount(name):
                    requested.append(name)
                    break
        return requested

    def _named(self, prefix: str) -> Iterable[str]:
        """Return the resources that begin so, in the order in which containers name them."""
        names = (name for container in self.containers for name in container.resources)
        return dict.fromkeys(name for name in names if name.startswith(prefix) and name[-1] != "-")

    def container_units(self, resource: str) -> tuple[ContainerUnits, ...]:
        """Return the amounts of all containers. Raises InvalidRecord."""
        return tuple(
            [
                ContainerUnits(container.name, container.amount(resource), container.kind)
                for container in self.containers
            ]
        )


class SliceRequest(msgspec.Struct, frozen=True, gc=False):
    """The common request of some containers of a pod: one request of the core.

    Attributes:
        containers: their names.
        request: what they request.
        asks: what each container of the pod requests of its sum, for dialects that have such a sum.
        weight: weight of their compute on each card; 0 without one. No compute is reserved for it.
        burst_percent: percent of compute up to which they may use idle time; None for no more than requested.
        requires_opt_in: whether a shared node gives its whole cards only if its labels allow that.
    """

    containers: tuple[str, ...]
    request: Request
    burst_percent: int | None = None
    requires_opt_in: bool = False
    asks: tuple[ContainerUnits, ...] = ()
    weight: int = 0

    @property
    def has_compute(self) -> bool:
        """Whether they request compute, guaranteed or not."""
        return self.request.compute > 0 or self.weight > 0

    @property
    def core_mode(self) -> ComputeMode:
        """The meaning of the compute that they request."""
        if self.weight:
            return "weight"
        return "hard" if self.burst_percent is None else "soft"


@dataclass(frozen=True, slots=True)
class NodeMode:
    """The requests that a node admits: whole cards, memory, memory with compute.

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
    """The names that users of one product write. Each dialect is a module with these members.

    `parse` turns a pod into slice requests, `encode` a placement into annotations, and `decode` annotations
    into a placement. All slice requests of a pod go to one node; placements are in their order. Functions
    that read raise InvalidRecord with one sentence that says what to write instead. Only `pod_records` calls
    what writes and reads placements, since slices may be inside MIG instances.
    """

    NAME: str
    RESOURCES: tuple[str, ...]
    """The extended resources that pods request by it. A name that ends in `-` is a prefix."""
    OPTIONS: tuple[str, ...]
    """The labels and annotations by which users change what a pod requests; `parse` is given no others."""
    RECORDS: tuple[str, ...]
    """The annotations that `encode` writes, and nobody else should. A name that ends in `-` is a prefix."""
    PLACEMENT: tuple[str, ...]
    """Those of RECORDS that `decode` reads."""
    ASSIGNED: str
    """The annotation that marks a pod as having its slices, as former plugins wrote it; empty for none."""
    NODE_RESOURCES: tuple[NodeResource, ...]
    """The resources that every node advertises for it."""
    LEASED: str
    """The resource whose allocation by the kubelet brings the lease; the others are only counted. It may be a
    prefix, too."""

    def matches(self, pod: PodRequest) -> bool:
        """Return whether the pod requests something by these names."""

    def parse(self, pod: PodRequest) -> tuple[SliceRequest, ...]:
        """Return what the pod requests, in units that the nodes resolve or in the dialect's own."""

    def encode(
        self, pod: PodRequest, shared: SharedNode, placements: Sequence[Placement], now_ns: int
    ) -> dict[str, str]:
        """Return the annotations of a pod with these placements. now_ns: since 1970."""

    def decode(
        self, pod: PodRequest, parts: Sequence[SliceRequest], shared: SharedNode
    ) -> tuple[Placement, ...] | None:
        """Return the recorded placements; None if there is no record. parts: those of `parse`."""

    def container_slices(
        self,
        pod: PodRequest,
        shared: SharedNode,
        placements: Sequence[Placement],
        container: str,
        /,
    ) -> tuple[Slice, ...]:
        """Return the slices of one container, by the pod's record; empty if it has no card."""

    def environment(
        self, pod: PodRequest, shared: SharedNode, slices: Sequence[Slice], container: str, /
    ) -> dict[str, str]:
        """Return the environment variables of a container that has these slices, at least one."""


def is_index(text: str) -> bool:
    """Return whether the text is the index of a card, of at most nine digits."""
    return text.isdecimal() and len(text) <= 9
