"""Cards, MIG instances and nodes, and the rules of which work a node may run."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, NewType

__all__ = ["value_class"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """Make a data class that type checkers protect from changes. Nothing checks that at run time.

        Python sets each field of a frozen data class by a call, which triples the cost of making one.
        """
        assert frozen
        return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=True)


DeviceId = NewType("DeviceId", str)
"""Name of a device: the UUID of a card or a MIG instance, or an id that a dialect invents; never an index."""

_MAX_START_DIGITS = 2


@dataclass(frozen=True, slots=True)
class InstanceId:
    """A MIG instance by its place, whether or not it exists. Its text is `<card>/<start>/<profile>`.

    The driver's UUID of an instance is no identity: another one at the same place has the same.
    """

    card: DeviceId
    start: int
    profile: str

    @classmethod
    def parse(cls, device: DeviceId) -> "InstanceId | None":
        """Return the instance that a device's id names; None for a card or a device of the driver's."""
        if "/" not in device:
            # Nearly all.
            return None
        card, *place = device.rsplit("/", 2)
        # Older drivers name an instance MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
        if len(place) < 2 or card.startswith("MIG-"):
            return None
        start, profile = place
        if not (start.isascii() and start.isdecimal() and len(start) <= _MAX_START_DIGITS):
            return None
        return cls(DeviceId(card), int(start), profile)

    @property
    def device(self) -> DeviceId:
        """Return the text, by which slices and records name it."""
        return DeviceId(f"{self.card}/{self.start}/{self.profile}")

    def __str__(self) -> str:
        return self.device


def card_of(device: DeviceId) -> DeviceId:
    """Return the id of the card that an instance is on; of a card its own."""
    instance = InstanceId.parse(device)
    return instance.card if instance else device


WHOLE_COMPUTE = 100
"""The compute capacity of a card: percent of its time."""

MAX_STARTS = 16
"""No card's memory axis has more slices."""


@value_class(frozen=True, slots=True)
class Card:
    """One physical GPU, or a part of one that the driver shows as a device of its own.

    Attributes:
        index: its number on the node, for people; everything else goes by `uuid`.
        uuid: its id.
        model: as NVML names it ("Tesla T4").
        memory_mib: what the driver reports, in MiB.
        compute: in percent of the whole card, also for an instance.
        healthy: an unhealthy card takes no new slices.
        cordoned: a cordoned card takes no new slices.
        parent: the card that this one is an instance of. An instance has its card's index and model.
        profile: the MIG profile of an instance, `3g.20gb`; empty for a card.
        start: the first slice of an instance on its card's memory axis.
        divided: the card is in MIG mode. Only its instances admit requests.
        unleased_mib: memory that is in use by no lease, which no new slice can have.
        drawn_mib: the part of it that processes hold which only draw, as a desktop does.
    """

    index: int
    uuid: DeviceId
    model: str
    memory_mib: int
    compute: int = WHOLE_COMPUTE
    healthy: bool = True
    cordoned: bool = False
    parent: DeviceId | None = None
    profile: str = ""
    start: int = 0
    divided: bool = False
    unleased_mib: int = 0
    drawn_mib: int = 0

    @property
    def available_mib(self) -> int:
        """The memory that all leases together can have."""
        return max(self.memory_mib - self.unleased_mib, 0)

    @property
    def whole_mib(self) -> int:
        """The memory that a request for the whole card takes: all but that of a desktop."""
        return max(self.memory_mib - self.drawn_mib, 0)

    @property
    def rank(self) -> int:
        """Its place among the cards of its node: by index, instances of one card by their start."""
        return self.index * MAX_STARTS + self.start

    @property
    def open(self) -> bool:
        """Whether it takes new slices if it has room."""
        return self.healthy and not self.cordoned and not self.divided


class Distance(IntEnum):
    """How far two cards are from each other, by the best connection that they have.

    NVLINK is a direct link, or one through NVSwitch. The others are NVML's levels of PCIe.
    """

    SAME = 0
    NVLINK = 1
    PCIE_SWITCH = 2
    PCIE_SWITCHES = 3
    HOST_BRIDGE = 4
    NUMA_NODE = 5
    SOCKETS = 6


MAX_LINKED_CARDS = 62
"""A set of cards is a number of 64 bits in the columns. No node has as many cards."""

UNKNOWN = Distance.SOCKETS
"""The distance of cards of which none is known."""


@dataclass(frozen=True, slots=True)
class Links:
    """The distances of the cards of a node.

    Attributes:
        devices: the ids of the cards.
        distances: a row for each of them, with its `Distance` from each; symmetric.

    Raises:
        ValueError: if there are not as many rows as cards, or one is not as long.
    """

    devices: tuple[str, ...]
    distances: bytes

    def __post_init__(self) -> None:
        if len(self.distances) != len(self.devices) ** 2:
            raise ValueError("a row of distances is missing")

    def distance(self, one: str, other: str) -> Distance:
        """Return the distance of two cards; `UNKNOWN` of cards that are not in it."""
        if one == other:
            return Distance.SAME
        if one not in self.devices or other not in self.devices:
            return UNKNOWN
        row, column = self.devices.index(one), self.devices.index(other)
        return Distance(self.distances[row * len(self.devices) + column])


def matrix_of(links: Links | None, devices: tuple[str, ...]) -> bytes | None:
    """Return the distances of these cards, a row for each; None if they are not known."""
    if links is None or not 1 < len(devices) <= MAX_LINKED_CARDS:
        return None
    # Nearly always all cards of the node, in order.
    return links.distances if devices == links.devices else _part(links, devices)


@lru_cache(1024)
def _part(links: Links, devices: tuple[str, ...]) -> bytes:
    return bytes(links.distance(one, other) for one in devices for other in devices)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine.

    Attributes:
        cpu_milli: its CPU in thousandths of a core, None if that is not counted.
        memory_mib: its host memory, None if that is not counted.
        unit_mib: the unit in which its card memory is requested.
        card_policy: the policy that chooses among its cards, None for that of the request. Nodes are compared
            with each other by the policy of the request.
        links: how its cards are connected, None if that is not known.
    """

    name: str
    cards: tuple[Card, ...]
    cpu_milli: int | None = None
    memory_mib: int | None = None
    unit_mib: int = 1024
    card_policy: str | None = None
    links: Links | None = None

    @property
    def distances(self) -> bytes | None:
        """The `Distance` of its cards from each other, a row for each; None if they are not known.

        An instance is where its card is.
        """
        return matrix_of(self.links, tuple([card.parent or card.uuid for card in self.cards]))


def needed_protection_s(duration_s: float | None, *, interruptible: bool) -> float:
    """Return for how long a spot node must be protected to run this: 0 for interruptible work.

    duration_s: how long it runs at most, None if that is not limited.
    """
    if interruptible:
        return 0.0
    return inf if duration_s is None else duration_s


@value_class(frozen=True, slots=True, kw_only=True)
class Taint:
    """A node's taint, as Kubernetes has it. value: may be empty."""

    key: str
    value: str = ""
    effect: str


@value_class(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A pod's toleration, as Kubernetes has it. An empty key or effect covers all.

    operator: Equal or Exists; empty is Equal.
    """

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


STRICT_EFFECTS = ("NoSchedule", "NoExecute")
"""A taint of another effect, such as PreferNoSchedule, keeps no pod from a node."""


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Return whether a toleration covers a taint."""
    return (
        (not toleration.key or toleration.key == taint.key)
        and (not toleration.effect or toleration.effect == taint.effect)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
    )
