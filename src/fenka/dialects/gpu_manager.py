"""gpu-manager's names: a share of compute with its memory, or whole cards, for each container.

They are those of Tencent's gpu-manager, gpu-admission and vcuda-controller.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fenka.core.request import Placement, Request
from fenka.core.units import card_units
from fenka.dialects import base, card_records, parsing
from fenka.dialects.card_records import visible_devices, whole_slices

NAME = "gpu-manager"

CORE = "tencent.com/vcuda-core"
"""Extended resource: percent of a card's compute; multiples of 100 are whole cards."""
MEMORY = "tencent.com/vcuda-memory"
"""Extended resource: units of UNIT_MIB. Whole cards come with all their memory, whatever is requested."""
RESOURCES: tuple[str, ...] = (CORE, MEMORY)
LEASED = CORE

UNIT_MIB = 256
WHOLE = 100

NODE_RESOURCES: tuple[base.NodeResource, ...] = (
    base.NodeResource(
        CORE, "fenka-vcuda-core", lambda _, card: card.compute, lambda mode: mode.compute
    ),
    base.NodeResource(
        MEMORY,
        "fenka-vcuda-memory",
        lambda _, card: card_units(card.memory_mib, UNIT_MIB),
        lambda mode: mode.compute,
    ),
)

CEILING = "tencent.com/vcuda-core-limit"
"""Pod annotation: percent up to which its containers may use idle time. Without it their share is a limit."""

INDEXES = "tencent.com/predicate-gpu-idx-"
"""Annotation prefix, followed by the number of the container: its cards, such as "0,1"."""
TIME = "tencent.com/predicate-time"
NODE = "tencent.com/predicate-node"
ASSIGNED = "tencent.com/gpu-assigned"
OPTIONS: tuple[str, ...] = (CEILING, *parsing.COMMON_OPTIONS)
PLACEMENT: tuple[str, ...] = (INDEXES, base.CARDS)
RECORDS: tuple[str, ...] = (*PLACEMENT, TIME, NODE, ASSIGNED)


class Metric(NamedTuple):
    """A metric that dashboards for gpu-manager show. label: has the card or, for requests, the amount."""

    name: str
    label: str
    unit: str


METRICS = (
    Metric("container_gpu_utilization", "gpu", "percent"),
    Metric("container_request_gpu_utilization", "req_of_gpu", "cards"),
    Metric("container_gpu_memory_total", "gpu_memory", "MiB"),
    Metric("container_request_gpu_memory", "req_of_gpu_memory", "MiB"),
)
"""Each also has the labels in METRIC_LABELS."""
METRIC_LABELS = ("pod_name", "namespace", "node", "container_name")


def matches(pod: base.PodRequest) -> bool:
    """Return whether the pod requests compute or memory by these names. Raises InvalidRecord."""
    return bool(pod.requested_resources(RESOURCES))


def parse(pod: base.PodRequest) -> tuple[base.SliceRequest, ...]:
    """Return a slice request for each container. Raises InvalidRecord."""
    parsing.require_plain_containers(pod, RESOURCES)
    if CEILING not in pod.annotations:
        return parsing.with_options(pod, parsing.per_container(pod, _container_request))
    if base.CORE_MODE in pod.annotations:
        raise base.InvalidRecord(
            f"annotations {CEILING} and {base.CORE_MODE} both say what its compute means: "
            "leave one of them out"
        )
    return parsing.with_placement_options(pod, _elastic(pod))


def _container_request(container: base.ContainerRequest) -> Request | None:
    core, memory = container.amount(CORE), container.amount(MEMORY)
    if not core and not memory:
        return None
    if core >= WHOLE:
        if core % WHOLE:
            raise base.InvalidRecord(
                f"container {container.name} asks for {core} of {CORE}: "
                "ask for less than 100, or for whole cards by a multiple of 100"
            )
        return parsing.whole_card_request(core // WHOLE)
    if not core or not memory:
        missing = MEMORY if core else CORE
        raise base.InvalidRecord(
            f"container {container.name} asks for a part of a card without {missing}: ask for both"
        )
    return parsing.memory_request(memory, UNIT_MIB, core)


def _elastic(pod: base.PodRequest) -> tuple[base.SliceRequest, ...]:
    text = pod.annotations[CEILING]
    if not text.isdecimal() or not 1 <= int(text[:9]) <= WHOLE or len(text) > len(str(WHOLE)):
        raise base.InvalidRecord(
            f"annotation {CEILING} is {text[:40]!r}: it is a percentage, 1 to 100"
        )
    burst_percent = int(text)
    parts = parsing.per_container(pod, _container_request, burst_percent)
    for part in parts:
        if part.request.compute > burst_percent:
            raise base.InvalidRecord(
                f"annotation {CEILING} is {burst_percent}, less than the {part.request.compute} "
                f"that container {part.containers[0]} asks for: raise it or leave it out"
            )
    return parts


def encode(
    pod: base.PodRequest, shared: base.SharedNode, placements: Sequence[Placement], now_ns: int
) -> dict[str, str]:
    """Return gpu-admission's annotations, and the cards' UUIDs."""
    numbers = {app.name: number for number, app in enumerate(pod.apps)}
    cards = {
        f"{INDEXES}{numbers[part.containers[0]]}": ",".join(
            str(piece.card) for piece in placement.slices
        )
        for part, placement in zip(parse(pod), placements, strict=True)
    }
    return {
        **cards,
        TIME: str(now_ns),
        NODE: shared.node.name,
        ASSIGNED: "false",
        base.CARDS: card_records.encode_card_uuids(placement.slices for placement in placements),
    }


def decode(
    pod: base.PodRequest, parts: Sequence[base.SliceRequest], shared: base.SharedNode
) -> tuple[Placement, ...] | None:
    """Return the placements by the recorded cards of each container. Raises InvalidRecord."""
    if not any(name.startswith(INDEXES) for name in pod.annotations):
        return None
    numbers = {app.name: number for number, app in enumerate(pod.apps)}

    def recorded_cards(part: base.SliceRequest) -> list[int]:
        name = f"{INDEXES}{numbers[part.containers[0]]}"
        items = pod.annotations.get(name, "").split(",")
        if not all(item.isdecimal() and len(item) < 5 for item in items):
            raise base.InvalidRecord(f"annotation {name} names no cards: {','.join(items)[:40]!r}")
        return [int(item) for item in items]

    return card_records.placements_on(pod, shared, parts, recorded_cards)


container_slices = whole_slices(parse)
environment = visible_devices
