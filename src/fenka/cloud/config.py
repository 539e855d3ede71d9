"""The autoscaler's configuration, as people write it (docs/do/autoscale-configuration.md).

Durations are in seconds.
Each provider has subclasses with the settings that it alone understands.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from fenka.cloud.port import NoOffer, OfferKey
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Taint
from fenka.core.nodes.case import MAX_COUNT, BuyLimits, Capacity
from fenka.core.request import MAX_CARDS, MAX_HOST
from fenka.core.units import MIB
from fenka.dialects.base import InvalidRecord, parse_milli, parse_quantity
from fenka.formats.documents import InvalidDocument, Written, shown
from fenka.formats.durations import parse_duration

MAX_DURATION_S = 365 * 86400
MAX_TEXT = 253
"""Characters of the longest names that Kubernetes and clouds have."""

NOT_COUNTED = ("cpu", "memory", "pods", "ephemeral-storage")
"""Amounts of a host that are no counted resources: almost any pod has limits of them."""


class InvalidConfig(FenkaError):
    """The configuration is not understood, or contradicts itself."""

    exit_code = INVALID_INPUT


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidDocument("must be a text: write it in quotes")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidDocument(
            f"is {shown(value)}: write at most {MAX_TEXT} characters, all of them printable"
        )
    return value


def _duration(value: Any) -> float:
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        example = f"{value}s" if type(value) is int and value >= 0 else "30s or 10m"
        raise InvalidDocument(f"must be a duration with its unit: write {example}")
    if seconds > MAX_DURATION_S:
        raise InvalidDocument("is longer than a year: write at most 365d")
    return seconds


def _cpu(value: Any) -> int:
    return _quantity(value, parse_milli, "a number of cores: write 4 or 3800m")


def _memory(value: Any) -> int:
    if not isinstance(value, str):
        raise InvalidDocument("must be an amount of memory with its unit: write 15079MiB")
    return _quantity(value.removesuffix("B"), _mib, "an amount of memory: write 15079MiB")


def _mib(text: str) -> int:
    return parse_quantity(text) // MIB


def _quantity(value: Any, read: Callable[[str], int], expected: str) -> int:
    try:
        amount = read(str(value))
    except InvalidRecord:
        amount = 0
    if not 0 < amount <= MAX_HOST:
        raise InvalidDocument(f"must be {expected}")
    return amount


Text = Annotated[str, Written(_text)]
Seconds = Annotated[float, Written(_duration)]
MilliCpu = Annotated[int, Written(_cpu)]
Mib = Annotated[int, Written(_memory)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class Section(msgspec.Struct, frozen=True, rename="camel"):
    """A mapping in the file."""


class ScaleOut(Section, frozen=True, kw_only=True):
    """When new nodes are planned, and for how long they are kept for whom they were bought.

    Attributes:
        window: after the last new pending pod, so that pods that come together are planned together.
        window_most: after the first one, whatever comes.
        delay: how long a pod is pending before it is planned for.
        time_limit: of a plan.
        pin: how long a new node that offers its cards admits its planned pods only.
    """

    window: Seconds = 1
    window_most: Seconds = 10
    delay: Seconds = 0
    time_limit: Seconds = 2
    pin: Seconds = 60


class ScaleIn(Section, frozen=True, kw_only=True):
    """When nodes end.

    Attributes:
        delay: how long a node is idle before it ends.
        cooldown: time after the last scale-out in which no node ends.
        mode: `repack` also empties nodes whose pods fit elsewhere.
        repack_saves: per hour; what emptying a node has to save.
    """

    delay: Seconds = 600
    cooldown: Seconds = 600
    mode: Literal["idle", "repack"] = "idle"
    repack_saves: float = 0


class StartTimes(Section, frozen=True, kw_only=True):
    """How long nodes may take to offer their cards, and pauses after an offer that failed.

    Attributes:
        timeout: time after which a node that does not offer its cards has failed, and is ended.
        backoff: pause of an offer after its first failure. Each further failure doubles it.
        backoff_most: longest pause.
    """

    timeout: Seconds = 900
    backoff: Seconds = 180
    backoff_most: Seconds = 1800


class SpotRules(Section, frozen=True, kw_only=True):
    """Rules of a spot group.

    Attributes:
        cap: the highest market price per hour, None for any.
        admit: `marked` admits interruptible and short pods only, `all` admits all.
        protection: how long a new node is certainly not taken back.
    """

    cap: float | None = None
    admit: Literal["marked", "all"] = "marked"
    protection: Seconds = 0


class CardConfig(Section, frozen=True, kw_only=True):
    """Equal cards of a shape.

    Attributes:
        model: name of the card's model, as the driver reports it.
        memory_mib: memory of each card, for example 15079MiB.
        count: number of these cards.
    """

    model: Text = ""
    memory_mib: Mib = msgspec.field(name="memory")
    count: Annotated[int, Meta(ge=0, le=MAX_CARDS)] = 1


class ShapeConfig(Section, frozen=True, kw_only=True):
    """The allocatable amounts of a node of each type of the group, where nothing else is known.

    Attributes:
        cpu_milli: cores, for example 4 or 3800m.
        memory_mib: host memory, for example 15000MiB.
        pods: number of pods.
        resources: amounts of further resources by name.
        cards: the node's cards.
    """

    cpu_milli: MilliCpu = msgspec.field(name="cpu")
    memory_mib: Mib = msgspec.field(name="memory")
    pods: Count = 110
    resources: Mapping[Text, Count] = {}
    cards: tuple[CardConfig, ...] = ()


class GroupConfig(Section, frozen=True, kw_only=True):
    """Nodes that may be bought: each of its types in each of its zones is an offer.

    Attributes:
        name: name of the group, which its nodes get as label `fenka.io/group`.
        id: the cloud's name of the group, such as a scaling group's; empty if it has none.
        types: machine types, in the cloud's words.
        zones: the cloud's zones.
        min: number of nodes that the group always has.
        max: largest number of nodes.
        capacity: on-demand or spot.
        spot: rules of a spot group.
        labels: of its nodes, besides `fenka.io/group`, `fenka.io/capacity` and the zone.
        taints: taints of its nodes, each with key, value and effect.
        startup: from an order until the node offers its cards, for what cannot be known before the first.
        price: of a node per hour where the cloud does not tell one.
        shape: what a node of the group has, until the first one has joined.
    """

    name: Text
    id: Text = ""
    types: tuple[Text, ...]
    zones: tuple[Text, ...]
    min: Count = 0
    max: Count = 1000
    capacity: Capacity = "on-demand"
    spot: SpotRules = SpotRules()
    labels: Mapping[Text, Text] = {}
    taints: tuple[Taint, ...] = ()
    startup: Seconds = 180
    price: float | None = None
    shape: ShapeConfig | None = None

    @property
    def offers(self) -> list[OfferKey]:
        """Return what may be bought."""
        return [
            OfferKey(self.name, kind, zone, self.capacity)
            for kind in self.types
            for zone in self.zones
        ]


class ProviderConfig(Section, frozen=True, kw_only=True):
    """The cloud.

    Attributes:
        kind: the provider.
        region: the cloud's region.
    """

    kind: Literal["ess", "aws", "karpenter", "simulated"]
    region: Text = ""


class AutoscalerConfig(Section, frozen=True, kw_only=True):
    """The autoscaler's configuration.

    Attributes:
        cluster: what this cluster's instances are tagged with.
        provider: the cloud, and how to reach it.
        groups: nodes that may be bought.
        scale_out: when nodes are bought.
        scale_in: when nodes end.
        start: how long nodes may take to start.
        limits: limits of all groups together: `nodes`, `price` per hour, and `cards` by model.
        protection_s: how long the cloud certainly does not take a new spot node back.
    """

    protection_s: ClassVar[float] = 0

    cluster: Text
    provider: ProviderConfig
    groups: tuple[GroupConfig, ...]
    scale_out: ScaleOut = ScaleOut()
    scale_in: ScaleIn = ScaleIn()
    start: StartTimes = StartTimes()
    limits: BuyLimits = msgspec.field(default_factory=BuyLimits)

    @property
    def offers(self) -> list[OfferKey]:
        """Return what may be bought."""
        return [key for group in self.groups for key in group.offers]

    def group(self, name: str) -> GroupConfig | None:
        """Return the group of this name, None if there is none."""
        return next((group for group in self.groups if group.name == name), None)

    def check_settings(self) -> None:
        """Raise InvalidConfig for the first setting that this provider requires and does not have."""


G = TypeVar("G", bound=GroupConfig)


def group_of(groups: Sequence[G], offer: OfferKey) -> G:
    """Return the group of an offer. Raises NoOffer if it is no offer of any."""
    for group in groups:
        if offer in group.offers:
            return group
    raise NoOffer(offer)
