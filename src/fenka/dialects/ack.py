"""gpushare's names, with the share of compute that Alibaba Cloud's ACK adds to them.

`dialects.gpushare` encodes and decodes gpushare's part; `dialects.nodes` reads nodes' labels.
"""

from collections.abc import Sequence
from dataclasses import replace

from fenka.core.request import Placement, Slice
from fenka.core.units import card_units, units_to_mib
from fenka.dialects import base, card_records, gpushare, parsing
from fenka.dialects.card_records import visible_devices
from fenka.dialects.gpushare import COUNT, MEMORY

NAME = "gpushare"

CORE = "aliyun.com/gpu-core.percentage"
"""Extended resource: percent of one card's compute, in steps of 5, together with memory."""
RESOURCES: tuple[str, ...] = (MEMORY, CORE)
LEASED = MEMORY
ASSIGNED = gpushare.ASSIGNED
NODE_RESOURCES: tuple[base.NodeResource, ...] = (
    base.NodeResource(
        MEMORY,
        "fenka-gpu-mem",
        lambda node, card: card_units(card.memory_mib, node.unit_mib),
        lambda mode: mode.memory,
    ),
    base.NodeResource(
        CORE, "fenka-gpu-core", lambda _, card: card.compute, lambda mode: mode.compute
    ),
)
CORES = "gpushare.alibabacloud.com/core-percentage"
"""Annotation: {"<container>": {"<card>": <percent>}}. It is written for others and never read."""
OPTIONS: tuple[str, ...] = (COUNT, *parsing.COMMON_OPTIONS)
PLACEMENT: tuple[str, ...] = (gpushare.IDX, gpushare.ALLOCATION, base.CARDS)
RECORDS: tuple[str, ...] = (*gpushare.RECORDS, CORES)
STEP, MOST = 5, 100


def matches(pod: base.PodRequest) -> bool:
    """Return whether the pod requests memory or compute by these names. Raises InvalidRecord."""
    return bool(pod.requested_resources(RESOURCES))


def parse(pod: base.PodRequest) -> tuple[base.SliceRequest, ...]:
    """Return one slice request: the pod's peak, on each of as many cards as its label says.

    Raises InvalidRecord.
    """
    asks = pod.container_units(MEMORY)
    compute = _compute(pod, asks)
    request = gpushare.parse_request(asks, pod.labels, compute)
    if request is None:
        return ()
    if compute and request.cards > 1:
        raise base.InvalidRecord(
            f"it asks for {CORE} and, by its label {COUNT}, for {request.cards} cards: "
            "a share of compute is of one card, leave out one of the two"
        )
    containers = tuple(ask.name for ask in asks if ask.units)
    part = base.SliceRequest(containers, request, asks=asks)
    return parsing.with_options(pod, (part,))


def _compute(pod: base.PodRequest, asks: Sequence[base.ContainerUnits]) -> int:
    """Return the pod's percent of compute at its peak, 0 if it requests none. asks: its memory."""
    if not pod.requested_resources([CORE]):
        return 0
    cores = pod.container_units(CORE)
    for core, memory in zip(cores, asks, strict=True):
        if bool(core.units) != bool(memory.units):
            have, lack = (CORE, MEMORY) if core.units else (MEMORY, CORE)
            raise base.InvalidRecord(
                f"container {core.name} asks for {have} without {lack}: ask for both in each container"
            )
        if core.units % STEP or core.units > MOST:
            raise base.InvalidRecord(
                f"container {core.name} asks for {core.units} of {CORE}: "
                f"ask for {STEP} to {MOST}, in steps of {STEP}"
            )
    peak = gpushare.peak_units(cores)
    if peak > MOST:
        raise base.InvalidRecord(
            f"its containers ask for {peak} of {CORE} together: one card has {MOST}"
        )
    return peak


def encode(
    pod: base.PodRequest, shared: base.SharedNode, placements: Sequence[Placement], now_ns: int
) -> dict[str, str]:
    """Return gpushare's annotations, with ACK's if the pod has compute."""
    (placement,) = placements
    written = gpushare.encode_placement(shared, placement, pod.container_units(MEMORY), now_ns)
    if any(piece.compute for piece in placement.slices):
        cores = {
            str(number): {str(piece.card): container.amount(CORE) for piece in placement.slices}
            for number, container in enumerate(pod.apps)
            if container.amount(CORE)
        }
        written[CORES] = card_records.encode(cores)
    return written


def decode(
    pod: base.PodRequest, parts: Sequence[base.SliceRequest], shared: base.SharedNode
) -> tuple[Placement, ...] | None:
    """Return the placement by gpushare's annotations, with the requested compute. Raises InvalidRecord."""
    percent = parts[0].request.compute
    placement = gpushare.decode_placement(shared, pod.annotations, parts[0].asks, percent)
    if placement is None:
        return None
    if percent and len(placement.slices) > 1:
        percents = _by_card(pod)
        slices = (replace(piece, compute=percents.get(piece.card, 0)) for piece in placement.slices)
        placement = replace(placement, slices=tuple(slices))
    return (placement,)


def _by_card(pod: base.PodRequest) -> dict[int, int]:
    """Return percent by card for containers that are recorded on different cards. Raises InvalidRecord."""
    allocation = gpushare.decode_allocation(pod.annotations, pod.container_units(MEMORY)) or {}
    total: dict[int, int] = {}
    for number, container in enumerate(pod.apps):
        percent = container.amount(CORE)
        cards = [card for card, units in allocation.get(number, {}).items() if units]
        if percent and len(cards) > 1:
            raise base.InvalidRecord(
                f"annotation {gpushare.ALLOCATION} has container {container.name} on {len(cards)} cards, "
                f"a share of compute is of one"
            )
        for card in cards:
            total[card] = total.get(card, 0) + percent
    return total


def container_slices(
    pod: base.PodRequest, shared: base.SharedNode, placements: Sequence[Placement], container: str
) -> tuple[Slice, ...]:
    """Return the recorded slices, with the container's compute as requested, a weight too.

    Raises InvalidRecord if they are not what the container requests.
    """
    (placement,) = placements
    own = pod.container(container)
    units = own.amount(MEMORY) if own else 0
    if own is None or not units:
        return ()
    cards = [piece.card for piece in placement.slices]
    if own.kind is base.ContainerKind.APP:
        allocation = gpushare.decode_allocation(pod.annotations, pod.container_units(MEMORY)) or {}
        by_card = {
            index: part for index, part in allocation.get(pod.apps.index(own), {}).items() if part
        }
    elif units % len(cards):
        raise base.InvalidRecord(
            f"the {units} units of container {container} cannot be shared out evenly over the pod's "
            f"{len(cards)} cards"
        )
    else:
        # Init containers and sidecars are in no record: they use their pod's cards equally.
        by_card = {index: units // len(cards) for index in cards}
    if sum(by_card.values()) != units:
        raise base.InvalidRecord(
            f"the pod's record gives container {container} {sum(by_card.values())} units, "
            f"it asks for {units}"
        )
    sizes = {card.index: card.memory_mib for card in shared.physical_cards}
    try:
        return tuple(
            replace(
                piece,
                memory_mib=units_to_mib(by_card[piece.card], sizes[piece.card], shared.unit_mib),
                compute=own.amount(CORE),
            )
            for piece in placement.slices
            if piece.card in by_card
        )
    except ValueError as why:
        raise base.InvalidRecord(str(why)) from None


def environment(
    pod: base.PodRequest, shared: base.SharedNode, slices: Sequence[Slice], container: str
) -> dict[str, str]:
    """Return gpushare's variables."""
    own = pod.container(container)
    index = slices[0].card
    return {
        **visible_devices(pod, shared, slices, container),
        gpushare.IDX: str(index),
        gpushare.POD: str(sum(app.amount(MEMORY) for app in pod.apps)),
        gpushare.DEV: str(shared.card_units(index)),
        gpushare.CONTAINER: str(own.amount(MEMORY) if own else 0),
    }
