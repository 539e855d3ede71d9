"""The autoscaler's configuration as values. Durations are in seconds; `config_file.py` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fenka.cloud.port import OfferKey
from fenka.core.planning.case import Capacity, NewCard, Taint

Seconds = Annotated[float, "a duration with its unit in the file"]
Price = Annotated[float, "per hour, with at most 4 decimals"]

NOT_COUNTED = ("cpu", "memory", "pods", "ephemeral-storage")
"""Amounts of a host that are no counted resources: almost any pod has limits of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOut:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleIn:
    """When nodes end.

    Attributes:
        delay: how long a node is idle before it ends.
        cooldown: after the last scale-out, no node ends for so long.
        mode: `repack` also empties nodes whose pods fit elsewhere.
        repack_saves: per hour; what emptying a node has to save.
    """

    delay: Seconds = 600
    cooldown: Seconds = 600
    mode: Literal["idle", "repack"] = "idle"
    repack_saves: Price = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How long nodes may take to offer their cards, and pauses after an offer that failed."""

    timeout: Seconds = 900
    backoff: Seconds = 180
    backoff_most: Seconds = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of all groups' nodes together, None for none. price: per hour."""

    nodes: int | None = None
    price: Price | None = None
    cards: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotRules:
    """Rules of a spot group.

    Attributes:
        cap: the highest market price per hour, None for any.
        admit: `marked` admits interruptible and short pods only, `all` admits all.
        protection: how long a new node is certainly not taken back.
    """

    cap: Price | None = None
    admit: Literal["marked", "all"] = "marked"
    protection: Seconds = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """What a node of each type of the group will be, where nothing else is known: allocatable amounts."""

    cpu_milli: int
    memory_mib: int
    pods: int = 110
    resources: Mapping[str, int] = field(default_factory=dict)
    cards: tuple[NewCard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Nodes that may be bought: each of its types in each of its zones is an offer.

    Attributes:
        id: the cloud's name of the group, such as a scaling group's; empty if it has none.
        price: of a node per hour where the cloud does not tell one.
        labels: of its nodes, besides `fenka.io/group`, `fenka.io/capacity` and the zone.
        startup: from an order until the node offers its cards, for what cannot be known before the first.
        settings: what the provider alone understands, such as launch templates and subnets.
    """

    name: str
    id: str = ""
    types: tuple[str, ...]
    zones: tuple[str, ...]
    min: int = 0
    max: int = 1000
    capacity: Capacity = "on-demand"
    spot: SpotRules = field(default_factory=SpotRules)
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    startup: Seconds = 180
    price: Price | None = None
    shape: ShapeConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def offers(self) -> list[OfferKey]:
        """Return what may be bought."""
        return [
            OfferKey(self.name, kind, zone, self.capacity)
            for kind in self.types
            for zone in self.zones
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderConfig:
    """Which cloud. settings: what the provider alone understands, such as an endpoint."""

    kind: Literal["ess", "aws", "karpenter", "simulated"]
    region: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The autoscaler's configuration.

    Attributes:
        cluster: what this cluster's instances are tagged with.
    """

    cluster: str
    provider: ProviderConfig
    groups: tuple[GroupConfig, ...]
    scale_out: ScaleOut = field(default_factory=ScaleOut)
    scale_in: ScaleIn = field(default_factory=ScaleIn)
    start: Start = field(default_factory=Start)
    limits: Limits = field(default_factory=Limits)
