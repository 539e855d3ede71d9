"""gpushare's and cGPU's names, and what is written under them on pods, on nodes and in containers.

Wire facts: AliyunContainerService's gpushare-scheduler-extender and gpushare-device-plugin, and the second
generation of annotations that `kubectl inspect gpushare` and arena read. Three records say where a pod's
units are, the first that is there counts:

    scheduler.framework.gpushare.allocation   {"<container>": {"<card>": <units>}}, the authoritative one
    ALIYUN_COM_GPU_MEM_IDX and _POD           one card for the whole pod
    fenka.io/cards (on the pod)               the cards' UUIDs, by index: tells when a card was exchanged
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from fractions import Fraction

from fenka.core.cards import Card, Node
from fenka.core.requests import BadRequest, Memory, Placement, Request, Slice
from fenka.core.units import card_units, mib_to_units, units_to_mib

MEMORY = "aliyun.com/gpu-mem"
"""Extended resource: units of card memory. The unit is the node's."""
COUNT = "aliyun.com/gpu-count"
"""Extended resource: cards of a node. Information only."""
WHOLE = "nvidia.com/gpu"
"""Extended resource: whole cards."""

PLACEMENT_LABEL = "ack.node.gpu.placement"
"""Node label: binpack or spread, over the cards of that node."""

IDX = "ALIYUN_COM_GPU_MEM_IDX"
POD = "ALIYUN_COM_GPU_MEM_POD"
DEV = "ALIYUN_COM_GPU_MEM_DEV"
CONTAINER = "ALIYUN_COM_GPU_MEM_CONTAINER"
ASSUME_TIME = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ALLOCATION = "scheduler.framework.gpushare.allocation"

CARDS = "fenka.io/cards"
"""Annotation. On a node: its inventory. On a pod: UUIDs of its cards, by index."""
RECORDS = (IDX, POD, DEV, ASSUME_TIME, ASSIGNED, ALLOCATION, CARDS)
"""All annotations that are written on a pod."""
CORDONED = "fenka.io/cordoned"
"""Node annotation, written by people: indexes of cards that shall admit nobody, such as "0,2"."""

UNHEALTHY_CONFIG_MAP = "unhealthy-gpu-"
"""Prefix of the ConfigMap, in kube-system, in which gpushare's health daemon names sick cards."""

MIB, GIB_MIB = 1, 1024


class Unreadable(Exception):
    """A record cannot be understood; the message says which and how."""


class Kind(Enum):
    """Of a container: what it asks for counts differently."""

    APP = auto()
    INIT = auto()
    SIDECAR = auto()


@dataclass(frozen=True, slots=True)
class Ask:
    """What one container asks for, in units. Init containers come in their order."""

    name: str
    units: int
    kind: Kind = Kind.APP


def quantity(text: str | int) -> int:
    """A Kubernetes quantity as a whole number, rounded up: "4", "8k" (the API server writes 8000 so), "1Gi".

    Raises Unreadable.
    """
    text = str(text).strip()
    if text.isascii() and text.isdecimal() and len(text) <= 30:
        # As nearly all are: thousands of pods are read at once.
        return int(text)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise Unreadable(f"{text!r} is no quantity")
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


def demand(asks: Iterable[Ask]) -> int:
    """Units that a pod needs at its peak, as the scheduler counts them.

    Containers and sidecars run together; an init container runs with the sidecars before it.
    """
    sidecars = apps = peak = 0
    for ask in asks:
        if ask.kind is Kind.SIDECAR:
            sidecars += ask.units
        elif ask.kind is Kind.INIT:
            peak = max(peak, sidecars + ask.units)
        else:
            apps += ask.units
    return max(peak, sidecars + apps)


def card_count(labels: Mapping[str, str]) -> int:
    """Cards that a pod wants its units shared out over, by its label `aliyun.com/gpu-count`; else 1.

    Raises Unreadable.
    """
    text = labels.get(COUNT, "1")
    if not text.isdecimal() or int(text) < 1:
        raise Unreadable(f"label {COUNT} is {text!r}, not a number of cards")
    return int(text)


def read_request(asks: Sequence[Ask], labels: Mapping[str, str], unit_mib: int) -> Request | None:
    """What a pod asks for on nodes whose unit this is; None if it asks for nothing.

    Raises Unreadable, also where units cannot be shared out over the cards evenly.
    """
    units = demand(asks)
    if units == 0:
        return None
    cards = card_count(labels)
    if any(ask.units % cards for ask in asks):
        raise Unreadable(f"its units cannot be shared out evenly over {cards} cards")
    try:
        return Request(Memory(units // cards, unit_mib), cards=cards)
    except BadRequest as why:
        raise Unreadable(str(why)) from None


# ---- nodes ----


@dataclass(frozen=True, slots=True)
class Share:
    """A sharing node: its cards, and how many MiB of them one unit of `aliyun.com/gpu-mem` is.

    recorded: False where no inventory was written and the cards are taken to be equal, as gpushare does.
    """

    node: Node
    unit_mib: int
    recorded: bool = True

    def units(self, index: int) -> int:
        """Of the card with this index; 0 for none."""
        return next(
            (card_units(c.memory_mib, self.unit_mib) for c in self.node.cards if c.index == index),
            0,
        )

    @property
    def total(self) -> int:
        """Units of all cards, the sick ones too."""
        return sum(card_units(card.memory_mib, self.unit_mib) for card in self.node.cards)

    @property
    def unit(self) -> str:
        """As people write it."""
        return {GIB_MIB: "GiB", MIB: "MiB"}.get(self.unit_mib, f"{self.unit_mib}MiB")


def write_inventory(cards: Sequence[Card], unit_mib: int) -> str:
    """The node's `fenka.io/cards`: everything that the extender must know of it."""
    return json.dumps(
        {
            "unitMiB": unit_mib,
            "cards": [
                {
                    "index": card.index,
                    "uuid": card.uuid,
                    "model": card.model,
                    "memoryMiB": card.memory_mib,
                    "healthy": card.healthy,
                }
                for card in cards
            ],
        },
        separators=(",", ":"),
    )


def read_node(
    name: str, annotations: Mapping[str, str], allocatable: Mapping[str, str]
) -> Share | None:
    """The sharing node of that name; None if it has nothing to share.

    Its inventory counts where one is written. Else the cards are equal parts of the resource: such is a
    node on which gpushare's own plugin runs. Raises Unreadable.
    """
    total = quantity(allocatable.get(MEMORY, 0))
    if total <= 0:
        return None
    if CARDS in annotations:
        share = _recorded(name, annotations[CARDS])
    else:
        share = _assumed_equal(name, total, quantity(allocatable.get(COUNT, 0)))
    return _cordoned(share, read_indexes(annotations.get(CORDONED, "")))


def read_indexes(text: str) -> frozenset[int]:
    """Card indexes as people list them, "0,2"; what is no index is passed over."""
    return frozenset(int(item) for item in re.split(r"[,\s]+", text) if _is_index(item))


def without(share: Share, sick: frozenset[int]) -> Share:
    """The node with these cards unhealthy too."""
    if not sick:
        return share
    cards = tuple(
        replace(card, healthy=card.healthy and card.index not in sick) for card in share.node.cards
    )
    return replace(share, node=replace(share.node, cards=cards))


def _recorded(name: str, text: str) -> Share:
    try:
        record = json.loads(text)
        cards = tuple(
            Card(
                int(it["index"]),
                str(it["uuid"]),
                str(it["model"]),
                int(it["memoryMiB"]),
                healthy=bool(it["healthy"]),
            )
            for it in record["cards"]
        )
        unit = int(record["unitMiB"])
    except (ValueError, TypeError, KeyError, RecursionError) as why:
        raise Unreadable(f"annotation {CARDS} of node {name} is not understood: {why!r}") from None
    if unit < 1 or any(card.memory_mib < 1 for card in cards):
        raise Unreadable(f"annotation {CARDS} of node {name} speaks of memory that cannot be")
    if len({card.index for card in cards}) < len(cards):
        raise Unreadable(f"annotation {CARDS} of node {name} names a card twice")
    return Share(Node(name, tuple(sorted(cards, key=lambda card: card.index))), unit)


def _assumed_equal(name: str, total: int, count: int) -> Share:
    units = total // max(count, 1)
    # As gpushare's own screens tell: no card has more than 100 GiB by its rule, none less MiB.
    unit = MIB if units > 100 else GIB_MIB
    cards = tuple(Card(index, "", "", units * unit) for index in range(max(count, 1)))
    return Share(Node(name, cards), unit, recorded=False)


def _cordoned(share: Share, indexes: frozenset[int]) -> Share:
    if not indexes:
        return share
    cards = tuple(
        replace(card, cordoned=True) if card.index in indexes else card for card in share.node.cards
    )
    return replace(share, node=replace(share.node, cards=cards))


# ---- pods ----


Allocation = dict[int, dict[int, int]]
"""Units by container (its number in the pod's spec) and card index."""


def read_allocation(annotations: Mapping[str, str], asks: Sequence[Ask]) -> Allocation | None:
    """Where the pod's units are; None if nothing says so. Raises Unreadable.

    gpushare's first generation knows one card for the whole pod; its units are given to the containers
    as they asked for them. The pod's owner can write the record: one that gives a container more than it
    asks for is Unreadable.
    """
    if ALLOCATION in annotations:
        allocation = _read_v2(annotations[ALLOCATION])
        _check_asked(allocation, [ask.units for ask in asks if ask.kind is Kind.APP])
        return allocation
    if IDX not in annotations:
        return None
    index = annotations[IDX]
    if not _is_index(index):
        raise Unreadable(f"annotation {IDX} is {index[:40]!r}, not the index of a card")
    apps = [ask.units for ask in asks if ask.kind is Kind.APP]
    return {number: {int(index): units} for number, units in enumerate(apps) if units}


def _is_index(text: str) -> bool:
    """Of a card. Python refuses to read numbers of thousands of digits, which a user may have written."""
    return text.isdecimal() and len(text) <= 9


def _read_v2(text: str) -> Allocation:
    try:
        record = json.loads(text)
        allocation = {
            int(container): {int(card): _units(units) for card, units in cards.items()}
            for container, cards in record.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as why:
        raise Unreadable(f"annotation {ALLOCATION} is not understood: {why}") from None
    if any(index < 0 for cards in allocation.values() for index in cards):
        raise Unreadable(f"annotation {ALLOCATION} names a card below 0")
    return allocation


def _check_asked(allocation: Allocation, apps: Sequence[int]) -> None:
    for number, by_card in allocation.items():
        units, asked = sum(by_card.values()), apps[number] if 0 <= number < len(apps) else 0
        if units > asked:
            raise Unreadable(
                f"annotation {ALLOCATION} gives container {number} {units} units, it asks for {asked}"
            )


def _units(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of units")
    return value


def units_by_card(
    allocation: Allocation, asks: Sequence[Ask], cards: Iterable[int] = ()
) -> dict[int, int]:
    """Units that the pod holds of each card, at its peak.

    Init containers and sidecars are in no record: what they need beyond it is shared out over the pod's
    cards. `cards` are the pod's where its record names none. The sum is the pod's peak, never more.
    Raises Unreadable.
    """
    total: dict[int, int] = {}
    for by_card in allocation.values():
        for index, units in by_card.items():
            total[index] = total.get(index, 0) + units
    peak = demand(asks)
    if not total and peak:
        total = dict.fromkeys(cards, 0)
        if not total:
            raise Unreadable(f"the record names no card, the pod needs {peak} units")
    if not total:
        return {}
    each, rest = divmod(max(peak - sum(total.values()), 0), len(total))
    held = {
        index: units + each + (number < rest)
        for number, (index, units) in enumerate(sorted(total.items()))
    }
    return {index: units for index, units in held.items() if units}


def read_placement(
    share: Share, annotations: Mapping[str, str], asks: Sequence[Ask]
) -> Placement | None:
    """What the pod holds of the node; None if nothing says where. Raises Unreadable.

    A card that was exchanged for another since (its UUID tells) is not the card that was meant.
    """
    allocation = read_allocation(annotations, asks)
    if allocation is None:
        return None
    cards = {card.index: card for card in share.node.cards}
    uuids = _read_uuids(annotations.get(CARDS, "{}"))
    slices = []
    named = uuids or ([int(annotations[IDX])] if _is_index(annotations.get(IDX, "")) else [])
    for index, units in sorted(units_by_card(allocation, asks, named).items()):
        card = cards.get(index)
        if card is None:
            raise Unreadable(f"the pod's card {index} is not one of the {len(cards)} of its node")
        if card.uuid and uuids.get(index, card.uuid) != card.uuid:
            raise Unreadable(f"the pod's card {index} was {uuids[index]} and is now {card.uuid}")
        slices.append(Slice(index, card.uuid, _mib(units, card, share.unit_mib), 0))
    return Placement(share.node.name, tuple(slices))


def _mib(units: int, card: Card, unit_mib: int) -> int:
    """Also of a card that has not so many: another's record is counted as it stands."""
    try:
        return units_to_mib(units, card.memory_mib, unit_mib)
    except ValueError:
        return units * unit_mib


def _read_uuids(text: str) -> dict[int, str]:
    try:
        return {int(index): str(uuid) for index, uuid in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as why:
        raise Unreadable(f"annotation {CARDS} of the pod is not understood: {why}") from None


def write_placement(
    share: Share, placement: Placement, asks: Sequence[Ask], assume_time_ns: int
) -> dict[str, str]:
    """The annotations of a pod with this placement: both of gpushare's generations and fenka's own.

    With several cards each container's units are the same on each of them, and of the first generation
    IDX is the first card.
    """
    apps = [ask.units for ask in asks if ask.kind is Kind.APP]
    cards = len(placement.slices)
    first = placement.slices[0]
    allocation = {
        str(number): {str(piece.card): units // cards for piece in placement.slices}
        for number, units in enumerate(apps)
        if units
    }
    return {
        IDX: str(first.card),
        POD: str(sum(apps)),
        DEV: str(share.units(first.card)),
        ASSUME_TIME: str(assume_time_ns),
        ASSIGNED: "false",
        ALLOCATION: json.dumps(allocation, separators=(",", ":")),
        CARDS: json.dumps(
            {str(it.card): it.uuid for it in placement.slices}, separators=(",", ":")
        ),
    }


def environment(share: Share, placement: Placement, pod_units: int, units: int) -> dict[str, str]:
    """What a container of the pod finds in its environment: `units` are its own."""
    first = placement.slices[0]
    return {
        "NVIDIA_VISIBLE_DEVICES": ",".join(piece.uuid for piece in placement.slices),
        IDX: str(first.card),
        POD: str(pod_units),
        DEV: str(share.units(first.card)),
        CONTAINER: str(units),
    }


def shown_units(share: Share, slices: Iterable[Slice]) -> dict[int, float]:
    """The slices in units, by card index."""
    sizes = {card.index: card.memory_mib for card in share.node.cards}
    held: dict[int, int] = {}
    for piece in slices:
        held[piece.card] = held.get(piece.card, 0) + piece.memory_mib
    return {index: mib_to_units(mib, sizes[index], share.unit_mib) for index, mib in held.items()}
