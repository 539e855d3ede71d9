"""`nvidia.com/gpu`: whole cards, also of nodes whose other cards are shared."""

from collections.abc import Mapping, Sequence

from msgspec.json import Decoder
from msgspec.structs import replace

from fenka.core.request import Placement, Request, Slice
from fenka.dialects import base, card_records
from fenka.dialects.card_records import CardIndex, visible_devices, whole_slices
from fenka.dialects.parsing import COMMON_OPTIONS, per_container, whole_card_request, with_options

NAME = "whole-cards"
RESOURCES: tuple[str, ...] = (base.NVIDIA_GPU,)
LEASED = base.NVIDIA_GPU
ASSIGNED = ""
NODE_RESOURCES: tuple[base.NodeResource, ...] = (
    base.NodeResource(
        base.NVIDIA_GPU,
        "fenka-gpu-whole",
        lambda _node, card: 0 if card.divided else 1,
        lambda mode: mode.whole,
    ),
)
"""Which of the cards are shared now is in fenka's ledger, not in this number."""

HAMI_ONLY = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")
"""With one of these `nvidia.com/gpu` counts slices: such a pod uses HAMi's dialect."""

RECORD = "fenka.io/whole-cards"
"""Pod annotation: {"<name of the container>": [<card>, …]}."""
OPTIONS: tuple[str, ...] = COMMON_OPTIONS
PLACEMENT: tuple[str, ...] = (RECORD, base.CARDS)
RECORDS: tuple[str, ...] = PLACEMENT
_CARDS = Decoder(dict[str, list[CardIndex]])


def matches(pod: base.PodRequest) -> bool:
    """Return whether the pod requests whole cards. Raises InvalidRecord."""
    return bool(pod.requested_resources(RESOURCES)) and not pod.requested_resources(HAMI_ONLY)


def parse(pod: base.PodRequest) -> tuple[base.SliceRequest, ...]:
    """Return a slice request for each container. Raises InvalidRecord."""
    parts = with_options(pod, per_container(pod, _container_request))
    return tuple(replace(part, requires_opt_in=True) for part in parts)


def _container_request(container: base.ContainerRequest) -> Request | None:
    cards = container.amount(base.NVIDIA_GPU)
    return whole_card_request(cards) if cards else None


def encode(
    pod: base.PodRequest,
    shared: base.SharedNode,  # noqa: ARG001
    placements: Sequence[Placement],
    now_ns: int,  # noqa: ARG001
) -> dict[str, str]:
    """Return fenka's own annotations: NVIDIA's plugin has none, it chooses cards on the node."""
    parts = zip(parse(pod), placements, strict=True)
    return record({part.containers[0]: placement.slices for part, placement in parts})


def record(slices: Mapping[str, Sequence[Slice]]) -> dict[str, str]:
    """Return the annotations that say which whole cards each container has."""
    cards = {name: [piece.card for piece in pieces] for name, pieces in slices.items()}
    return {
        RECORD: card_records.encode(cards),
        base.CARDS: card_records.encode_card_uuids(slices.values()),
    }


def decode(
    pod: base.PodRequest, parts: Sequence[base.SliceRequest], shared: base.SharedNode
) -> tuple[Placement, ...] | None:
    """Return the placements on the recorded cards; None if there is no record. Raises InvalidRecord."""
    if RECORD not in pod.annotations:
        return None
    cards = card_records.decode(pod.annotations[RECORD], _CARDS, f"annotation {RECORD}")
    return card_records.placements_on(
        pod, shared, parts, lambda part: cards.get(part.containers[0], [])
    )


container_slices = whole_slices(parse)
environment = visible_devices
