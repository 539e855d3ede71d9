"""gpushare's and cGPU's names: records on pods, and the environment of containers.

They are those of AliyunContainerService's gpushare-scheduler-extender and gpushare-device-plugin, with the
second generation of annotations that `kubectl inspect gpushare` and arena read. Three records say where a
pod's units are; the first that exists counts:

    scheduler.framework.gpushare.allocation   {"<container>": {"<card>": <units>}}, the authoritative one
    ALIYUN_COM_GPU_MEM_IDX and _POD           one card for the whole pod
    fenka.io/cards (on the pod)               the cards' UUIDs, by index: tells when a card was exchanged
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.json import Decoder

from fenka.core.inventory import Card
from fenka.core.mig.instances import usable_mib
from fenka.core.request import Placement, Request, Slice
from fenka.core.units import mib_to_units, units_to_mib
from fenka.dialects import base, card_records
from fenka.dialects.card_records import CardIndex, Count, card_at
from fenka.dialects.parsing import memory_request

MEMORY = "aliyun.com/gpu-mem"
"""Extended resource: units of card memory. The unit is the node's."""
COUNT = "aliyun.com/gpu-count"
"""Extended resource: cards of a node. Information only."""


IDX = "ALIYUN_COM_GPU_MEM_IDX"
POD = "ALIYUN_COM_GPU_MEM_POD"
DEV = "ALIYUN_COM_GPU_MEM_DEV"
CONTAINER = "ALIYUN_COM_GPU_MEM_CONTAINER"
ASSUME_TIME = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ALLOCATION = "scheduler.framework.gpushare.allocation"

RECORDS = (IDX, POD, DEV, ASSUME_TIME, ASSIGNED, ALLOCATION, base.CARDS)
"""All annotations that are written to a pod."""

UNHEALTHY_CONFIG_MAP = "unhealthy-gpu-"
"""Prefix of the ConfigMap, in kube-system, in which gpushare's health daemon names unhealthy cards."""


_APP, _INIT = base.ContainerKind.APP, base.ContainerKind.INIT
"""Reading a member of an enum takes ten times as long."""


def node_of_config_map(name: str) -> str:
    """Return the node whose unhealthy cards a ConfigMap of this name has; empty for another ConfigMap."""
    prefix, node = name[: len(UNHEALTHY_CONFIG_MAP)], name[len(UNHEALTHY_CONFIG_MAP) :]
    return node if prefix == UNHEALTHY_CONFIG_MAP else ""


def peak_units(asks: Iterable[base.ContainerUnits]) -> int:
    """Return the units that a pod needs at its peak, as the scheduler counts them.

    Containers and sidecars run together; an init container runs with the sidecars before it.
    """
    sidecars = apps = peak = 0
    for _, units, kind in asks:
        if kind is _APP:
            apps += units
        elif kind is _INIT:
            peak = max(peak, sidecars + units)
        else:
            sidecars += units
    running = sidecars + apps
    return running if running > peak else peak


def card_count(labels: Mapping[str, str]) -> int:
    """Return the number of cards for the pod's units, by its label `aliyun.com/gpu-count`; else 1.

    Raises InvalidRecord.
    """
    text = labels.get(COUNT, "1")
    if not base.is_index(text) or int(text) < 1:
        raise base.InvalidRecord(f"label {COUNT} is {text[:40]!r}, not a number of cards")
    return int(text)


def parse_request(
    asks: Sequence[base.ContainerUnits], labels: Mapping[str, str], compute: int = 0
) -> Request | None:
    """Return what a pod requests, in the nodes' units, with this percent of compute; None for no units.

    Raises InvalidRecord, also where units cannot be shared out over the cards evenly.
    """
    units = peak_units(asks)
    if units == 0:
        return None
    cards = card_count(labels)
    if cards > 1 and any(ask.units % cards for ask in asks):
        raise base.InvalidRecord(f"its units cannot be shared out evenly over {cards} cards")
    return memory_request(units // cards, None, compute, cards)


UnitsByContainer = dict[int, dict[int, int]]
"""Units by container (its number in the pod's spec) and card index."""

_ALLOCATION = Decoder(dict[Count, dict[CardIndex, Count]])
_ALLOCATION_NAME = f"annotation {ALLOCATION}"


def decode_allocation(
    annotations: Mapping[str, str], asks: Sequence[base.ContainerUnits]
) -> UnitsByContainer | None:
    """Return where the pod's units are; None if there is no record. Raises InvalidRecord.

    gpushare's first generation records one card for the whole pod: each container has what it requests there.
    The pod's owner can write the record, so one that gives a container more than it requests is invalid.
    """
    apps = [units for _, units, kind in asks if kind is _APP]
    text = annotations.get(ALLOCATION)
    if text is not None:
        allocation = card_records.decode(text, _ALLOCATION, _ALLOCATION_NAME)
        _check_asked(allocation, apps)
        return allocation
    if IDX not in annotations:
        return None
    index = annotations[IDX]
    if not base.is_index(index):
        raise base.InvalidRecord(f"annotation {IDX} is {index[:40]!r}, not the index of a card")
    return {number: {int(index): units} for number, units in enumerate(apps) if units}


def _check_asked(allocation: UnitsByContainer, apps: Sequence[int]) -> None:
    for number, by_card in allocation.items():
        units, asked = sum(by_card.values()), apps[number] if 0 <= number < len(apps) else 0
        if units > asked:
            raise base.InvalidRecord(
                f"annotation {ALLOCATION} gives container {number} {units} units, it asks for {asked}"
            )


def units_by_card(
    allocation: UnitsByContainer, asks: Sequence[base.ContainerUnits], cards: Iterable[int] = ()
) -> dict[int, int]:
    """Return the units that the pod has of each card at its peak, by index in ascending order.

    Init containers and sidecars are in no record: what they need in addition is distributed over the pod's
    cards. The sum is the pod's peak, never more.

    Args:
        allocation: the record.
        asks: what the containers request.
        cards: the pod's cards, if the record names none.

    Raises:
        InvalidRecord: if no card is known.
    """
    total: dict[int, int] = {}
    for by_card in allocation.values():
        for index, units in by_card.items():
            total[index] = total.get(index, 0) + units
    peak = peak_units(asks)
    if peak and len(total) == 1:
        # Nearly all pods of a cluster.
        return {index: max(units, peak) for index, units in total.items()}
    if not total and peak:
        total = dict.fromkeys(cards, 0)
        if not total:
            raise base.InvalidRecord(f"the record names no card, the pod needs {peak} units")
    if not total:
        return {}
    unrecorded = peak - sum(total.values())
    if unrecorded > 0:
        share, rest = divmod(unrecorded, len(total))
        total = {
            index: units + share + (number < rest)
            for number, (index, units) in enumerate(sorted(total.items()))
        }
    return {index: units for index, units in sorted(total.items()) if units}


def decode_placement(
    shared: base.SharedNode,
    annotations: Mapping[str, str],
    asks: Sequence[base.ContainerUnits],
    compute: int = 0,
) -> Placement | None:
    """Return what the pod has of the node, with this percent of each card; None if there is no record.

    Raises:
        InvalidRecord: also if a card has been exchanged since, by its UUID.
    """
    allocation = decode_allocation(annotations, asks)
    if allocation is None:
        return None
    uuids = card_records.decode_card_uuids(annotations)
    slices = []
    # Where only init containers request units, the record of units names no card.
    named = () if any(allocation.values()) else uuids or _first_card(annotations)
    for index, units in units_by_card(allocation, asks, named).items():
        card = card_at(shared.node, index)
        slices.append(Slice(index, card.uuid, _mib(units, card, shared.unit_mib), compute))
    card_records.check_cards(uuids, slices)
    return Placement(shared.node.name, tuple(slices))


def _first_card(annotations: Mapping[str, str]) -> Collection[int]:
    text = annotations.get(IDX, "")
    return (int(text),) if base.is_index(text) else ()


def _mib(units: int, card: Card, unit_mib: int) -> int:
    """Return the MiB of the units, also of a card that has fewer: a foreign record counts as it is."""
    try:
        return units_to_mib(units, card.memory_mib, unit_mib)
    except ValueError:
        return units * unit_mib


def encode_placement(
    shared: base.SharedNode,
    placement: Placement,
    asks: Sequence[base.ContainerUnits],
    assume_time_ns: int,
) -> dict[str, str]:
    """Return the annotations of a pod with this placement: both of gpushare's generations and fenka's own.

    With several cards each container has equal units on each of them, and IDX of the first generation is the
    first card.
    """
    apps = [ask.units for ask in asks if ask.kind is base.ContainerKind.APP]
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
        DEV: str(shared.card_units(first.card)),
        ASSUME_TIME: str(assume_time_ns),
        ASSIGNED: "false",
        ALLOCATION: card_records.encode(allocation),
        base.CARDS: card_records.encode_card_uuids([placement.slices]),
    }


def shown_units(shared: base.SharedNode, slices: Iterable[Slice]) -> dict[int, float]:
    """Return the slices in units, by card index."""
    if shared.division.geometries:
        return _units_on_devices(shared, [*slices])
    held: dict[int, int] = {}
    for piece in slices:
        held[piece.card] = held.get(piece.card, 0) + piece.memory_mib
    node = shared.node
    return {
        index: mib_to_units(mib, card_at(node, index).memory_mib, node.unit_mib)
        for index, mib in held.items()
    }


def _units_on_devices(shared: base.SharedNode, slices: Sequence[Slice]) -> dict[int, float]:
    """Return slices in units where instances have sizes and remainders of their own."""
    devices = {piece.uuid for piece in slices}
    sizes = {
        card.uuid: usable_mib(card, shared.division)
        for card in shared.node.cards
        if card.uuid in devices
    }
    units: dict[int, float] = {}
    for piece in slices:
        size = sizes.get(piece.uuid, piece.memory_mib)
        held = mib_to_units(piece.memory_mib, size, shared.unit_mib)
        units[piece.card] = units.get(piece.card, 0) + held
    return units
