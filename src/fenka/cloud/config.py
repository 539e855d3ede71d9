"""The autoscaler's configuration as values. Durations are in seconds; `config_file.py` reads them.

Converts a document to the types of `config.py`. Errors name the path of the value in the document.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fenka.cloud.port import NoOffer, OfferKey
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Taint
from fenka.core.nodes import case
from fenka.core.request import MAX_CARDS, MAX_HOST
from fenka.dialects.base import InvalidRecord, parse_milli, parse_quantity
from fenka.formats.documents import MAX_SHOWN, shown
from fenka.formats.quantities import parse_duration

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
    cards: tuple[case.NewCard, ...] = ()


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
    capacity: case.Capacity = "on-demand"
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
class AutoscalerConfig:
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

    @property
    def offers(self) -> list[OfferKey]:
        """Return what may be bought."""
        return [key for group in self.groups for key in group.offers]

    def group(self, name: str) -> GroupConfig | None:
        """Return the group of this name, None if there is none."""
        return next((group for group in self.groups if group.name == name), None)

    def group_of(self, offer: OfferKey) -> GroupConfig:
        """Return the group of an offer. Raises Denied if it is no offer of any."""
        group = self.group(offer.group)
        if group is None or offer not in group.offers:
            raise NoOffer(offer)
        return group


MAX_DURATION_S = 365 * 86400
MAX_TEXT = 253
"""Characters of the longest names that Kubernetes and clouds have."""

Cpu = Annotated[int, "thousandths of a core"]
Memory = Annotated[int, "MiB"]

Settings = Mapping[type, Mapping[str, Any]]
"""Types of values by their keys, by the record that has them."""


class InvalidConfig(FenkaError):
    """The configuration is not understood, or contradicts itself."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cards:
    """Equal cards of a shape."""

    model: str = ""
    memory: Memory
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A shape as the file has it, in Kubernetes' quantities."""

    cpu: Cpu
    memory: Memory
    pods: int = 110
    resources: Mapping[str, int] = field(default_factory=dict)
    cards: tuple[_Cards, ...] = ()


def read_value(value: Any, kind: Any, path: str, settings: Settings | None = None) -> Any:
    """Return the value as this type.

    Args:
        value: of a document with JSON's types.
        kind: a type of `config.py`.
        path: where the value is in the document, empty for all of it.
        settings: further keys of records, with the types of their values. They become `settings`.

    Raises:
        InvalidConfig: with the path.
    """
    if kind in _READERS:
        return _READERS[kind](value, path)
    if is_dataclass(kind):
        return _record(value, kind, path, settings or {})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else read_value(value, arguments[0], path, settings)
    if origin is Literal:
        if value not in arguments:
            words = ", ".join(arguments[:-1])
            raise InvalidConfig(f"{path} must be {words} or {arguments[-1]}{_got(value)}")
        return value
    if origin is tuple:
        return tuple(
            read_value(each, arguments[0], f"{path}[{number}]", settings)
            for number, each in enumerate(_list(value, path))
        )
    return {
        _text(key, path): read_value(each, arguments[1], f"{path}.{_short(key)}", settings)
        for key, each in _mapping(value, path).items()
    }


def similar(text: str, known: Collection[str]) -> str:
    """Return the end of a sentence that asks for the known text that was meant; empty if none is near."""
    near = get_close_matches(text, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _record(value: Any, kind: Any, path: str, settings: Settings) -> Any:
    known, other = _known(kind), settings.get(kind, {})
    values: dict[str, Any] = {"settings": {}} if kind in settings else {}
    prefix = f"{path}." if path else ""
    for key, each in _mapping(value, path).items():
        if key in known:
            name, hint = known[key]
            values[name] = read_value(each, hint, f"{prefix}{key}", settings)
        elif key in other:
            values["settings"][key] = read_value(each, other[key], f"{prefix}{key}")
        else:
            meant = similar(key, [*known, *other]) or ": remove it"
            raise InvalidConfig(f"{prefix}{_short(key)} is not known{meant}")
    for each in fields(kind):
        required = each.default is MISSING and each.default_factory is MISSING
        if required and each.name not in values:
            raise InvalidConfig(f"{prefix}{_camel(each.name)} is missing: add it")
    return kind(**values)


@cache
def _known(kind: type) -> dict[str, tuple[str, Any]]:
    """Return the names and types of a record's fields by their keys in the file."""
    hints = get_type_hints(kind, include_extras=True)
    return {_camel(name): (name, hint) for name, hint in hints.items() if name != "settings"}


def _camel(name: str) -> str:
    return re.sub("_(.)", lambda letter: letter[1].upper(), name)


def _short(key: str) -> str:
    return key if len(key) <= MAX_SHOWN and key.isprintable() else shown(key)


def _got(value: Any) -> str:
    """Return the end of a sentence that quotes a scalar."""
    if isinstance(value, dict | list):
        return ""
    return f", not {shown(value) if isinstance(value, str) else value}"


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidConfig(f"{path or 'the configuration'} must be a mapping: write key: value")
    return value


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidConfig(
            f"{path} must be a list: write it in brackets, or each item after a dash"
        )
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidConfig(f"{path} must be a text: write it in quotes")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidConfig(
            f"{path} is {shown(value)}: write at most {MAX_TEXT} characters, all of them printable"
        )
    return value


def _count(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value <= case.MAX_COUNT:
        raise InvalidConfig(f"{path} must be a whole number of 0 to {case.MAX_COUNT}{_got(value)}")
    return value


def _duration(value: Any, path: str) -> float:
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        example = f"{value}s" if type(value) is int and value >= 0 else "30s or 10m"
        raise InvalidConfig(f"{path} must be a duration with its unit: write {example}")
    if seconds > MAX_DURATION_S:
        raise InvalidConfig(f"{path} is longer than a year: write at most 365d")
    return seconds


def _price(value: Any, path: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= case.MAX_PRICE:
        raise InvalidConfig(f"{path} must be a price of 0 to {case.MAX_PRICE}{_got(value)}")
    if abs(value * case.PRICE_UNIT - case.whole_price(value)) > 1e-3:
        rounded = f"{value:.{case.PRICE_DECIMALS}f}"
        raise InvalidConfig(f"{path} has more than {case.PRICE_DECIMALS} decimals: write {rounded}")
    return float(value)


def _cpu(value: Any, path: str) -> int:
    return _quantity(value, path, parse_milli, "a number of cores: write 4 or 3800m")


def _memory(value: Any, path: str) -> int:
    if not isinstance(value, str):
        raise InvalidConfig(f"{path} must be an amount of memory with its unit: write 15079MiB")
    return _quantity(value.removesuffix("B"), path, _mib, "an amount of memory: write 15079MiB")


def _mib(text: str) -> int:
    return parse_quantity(text) >> 20


def _quantity(value: Any, path: str, read: Callable[[str], int], expected: str) -> int:
    try:
        amount = read(str(value))
    except InvalidRecord:
        amount = 0
    if not 0 < amount <= MAX_HOST:
        raise InvalidConfig(f"{path} must be {expected}")
    return amount


def _shape(value: Any, path: str) -> ShapeConfig:
    shape: _Shape = _record(value, _Shape, path, {})
    if sum(cards.count for cards in shape.cards) > MAX_CARDS:
        raise InvalidConfig(f"{path}.cards are more than {MAX_CARDS}: count them again")
    for name in shape.resources:
        if name in NOT_COUNTED:
            raise InvalidConfig(f"{path}.resources.{name} is no counted resource: remove it")
    return ShapeConfig(
        cpu_milli=shape.cpu,
        memory_mib=shape.memory,
        pods=shape.pods,
        resources=shape.resources,
        cards=tuple(
            case.NewCard(model=cards.model, memory_mib=cards.memory)
            for cards in shape.cards
            for _ in range(cards.count)
        ),
    )


def _anything(value: Any, _: str) -> Any:
    return value


_READERS: Mapping[Any, Callable[[Any, str], Any]] = {
    Any: _anything,
    str: _text,
    int: _count,
    Seconds: _duration,
    Price: _price,
    Cpu: _cpu,
    Memory: _memory,
    ShapeConfig: _shape,
}
