"""HAMi's names: a number of slices, each with memory and compute.

They are those of Project-HAMi's scheduler and device plugin. Its other annotations (a card's type, UUID, NUMA
node or mode) are not served: pods that need them are rejected with a sentence that says so.
"""

from collections.abc import Sequence
from dataclasses import replace

from fenka.core.inventory import DeviceId
from fenka.core.request import PercentOfCard, Placement, Request, Slice
from fenka.dialects import base, card_records, parsing
from fenka.dialects.card_records import nominal_slice, visible_devices, whole_slices

NAME = "hami"

COUNT = base.NVIDIA_GPU
"""Extended resource: slices, each on another card."""
MEMORY = "nvidia.com/gpumem"
"""Extended resource: MiB of each slice."""
PERCENT = "nvidia.com/gpumem-percentage"
"""Extended resource: percent of its card's memory that each slice has; 100 by default."""
CORES = "nvidia.com/gpucores"
"""Extended resource: percent of its card's compute that each slice has; 100 is the whole card."""
RESOURCES: tuple[str, ...] = (COUNT, MEMORY, PERCENT, CORES)
LEASED = COUNT
ASSIGNED = ""

ALLOCATED = "hami.io/vgpu-devices-allocated"
"""Annotation: for each container its slices, `UUID,NVIDIA,MiB,percent:`, and `;`."""
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
NODE = "hami.io/vgpu-node"
TIME = "hami.io/vgpu-time"
PLACEMENT: tuple[str, ...] = (ALLOCATED,)
RECORDS: tuple[str, ...] = (*PLACEMENT, TO_ALLOCATE, NODE, TIME, base.CARDS)

NOT_SERVED: tuple[str, ...] = (
    "nvidia.com/use-gputype",
    "nvidia.com/nouse-gputype",
    "nvidia.com/use-gpuuuid",
    "nvidia.com/nouse-gpuuuid",
    "nvidia.com/numa-bind",
    "nvidia.com/vgpu-mode",
)
"""HAMi's choices of cards."""
OPTIONS: tuple[str, ...] = (*NOT_SERVED, *parsing.COMMON_OPTIONS)

SPLIT = 10
"""Slices that a node advertises for each card, as HAMi's plugin does; how many fit depends on their sizes."""
NODE_RESOURCES: tuple[base.NodeResource, ...] = (
    base.NodeResource(COUNT, "fenka-gpu-whole", lambda _node, _card: SPLIT, lambda _mode: True),
)
"""Memory and compute are for the extender alone (`ignoredByScheduler`)."""

FULL = 100


def matches(pod: base.PodRequest) -> bool:
    """Return whether the pod requests memory or compute by these names. Raises InvalidRecord."""
    return bool(pod.requested_resources(RESOURCES[1:]))


def parse(pod: base.PodRequest) -> tuple[base.SliceRequest, ...]:
    """Return a slice request for each container. Raises InvalidRecord."""
    parsing.require_plain_containers(pod, RESOURCES)
    for name in NOT_SERVED:
        if name in pod.annotations:
            raise base.InvalidRecord(
                f"annotation {name} is not served: choose nodes by a nodeSelector instead"
            )
    return parsing.with_options(pod, parsing.per_container(pod, _container_request))


def _container_request(container: base.ContainerRequest) -> Request | None:
    count, mib, percent, cores = (container.amount(name) for name in RESOURCES)
    if not any((count, mib, percent, cores)):
        return None
    if mib and percent:
        raise base.InvalidRecord(
            f"container {container.name} asks for {MEMORY} and {PERCENT}: ask for one of them"
        )
    for name, value in ((PERCENT, percent), (CORES, cores)):
        if value > FULL:
            raise base.InvalidRecord(
                f"container {container.name} asks for {value} of {name}: a card has 100"
            )
    if not count:
        # HAMi's own webhook would add it. The kubelet allocates no card without it.
        raise base.InvalidRecord(
            f"container {container.name} asks for memory or compute of a card without {COUNT}: "
            f"add {COUNT}: 1"
        )
    if cores == FULL:
        return parsing.whole_card_request(count)
    if mib:
        return parsing.memory_request(mib, 1, cores, count)
    return parsing.valid_request(
        lambda: Request(PercentOfCard(percent or FULL), compute=cores, cards=count)
    )


def encode(
    pod: base.PodRequest, shared: base.SharedNode, placements: Sequence[Placement], now_ns: int
) -> dict[str, str]:
    """Return HAMi's annotations as after binding. HAMi's time is in seconds."""
    record = ""
    for app in pod.apps:
        pieces = container_slices(pod, shared, placements, app.name)
        record += "".join(f"{s.uuid},NVIDIA,{s.memory_mib},{s.compute}:" for s in pieces) + ";"
    return {
        ALLOCATED: record,
        TO_ALLOCATE: record,
        NODE: shared.node.name,
        TIME: str(now_ns // 10**9),
        base.CARDS: card_records.encode_card_uuids(placement.slices for placement in placements),
    }


def decode(
    pod: base.PodRequest, parts: Sequence[base.SliceRequest], shared: base.SharedNode
) -> tuple[Placement, ...] | None:
    """Return the recorded placements, with smaller recorded sizes: HAMi may have had other defaults.

    Raises InvalidRecord.
    """
    if ALLOCATED not in pod.annotations:
        return None
    by_uuid = {card.uuid: card for card in shared.node.cards}
    records = pod.annotations[ALLOCATED].split(";")
    numbers = {app.name: number for number, app in enumerate(pod.apps)}
    placements = []
    for part in parts:
        number = numbers[part.containers[0]]
        slices = []
        for text in (records[number] if number < len(records) else "").split(":"):
            if not text:
                continue
            uuid, memory, compute = _piece(text)
            if uuid not in by_uuid:
                raise base.InvalidRecord(f"the pod's card {uuid[:60]!r} is not one of its node's")
            most = nominal_slice(part.request, shared.node, by_uuid[uuid])
            memory, compute = min(memory, most.memory_mib), min(compute, most.compute)
            slices.append(replace(most, memory_mib=memory, compute=compute))
        if not len({piece.card for piece in slices}) == len(slices) == part.request.cards:
            raise base.InvalidRecord(
                f"annotation {ALLOCATED} has {len(slices)} slices for container "
                f"{part.containers[0]}, it asks for {part.request.cards} on different cards"
            )
        slices.sort(key=lambda piece: piece.card)
        placements.append(Placement(shared.node.name, tuple(slices), whole=part.request.whole))
    return tuple(placements)


def _piece(text: str) -> tuple[DeviceId, int, int]:
    fields = text.split(",")
    if len(fields) != 4 or not all(
        number.isdecimal() and len(number) < 10 for number in fields[2:]
    ):
        raise base.InvalidRecord(f"annotation {ALLOCATED} is not understood: {text[:60]!r}")
    return DeviceId(fields[0]), int(fields[2]), int(fields[3])


container_slices = whole_slices(parse)


def environment(
    pod: base.PodRequest, shared: base.SharedNode, slices: Sequence[Slice], container: str
) -> dict[str, str]:
    """Return the cards, and the limits as HAMi's programs read them; the lease enforces the limits."""
    limits = {
        f"CUDA_DEVICE_MEMORY_LIMIT_{number}": f"{piece.memory_mib}m"
        for number, piece in enumerate(slices)
    }
    return {
        **visible_devices(pod, shared, slices, container),
        **limits,
        "CUDA_DEVICE_SM_LIMIT": str(slices[0].compute),
    }
