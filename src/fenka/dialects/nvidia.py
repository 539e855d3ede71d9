"""`nvidia.com/gpu`: whole cards, of the same nodes whose other cards are shared."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fenka.core.request import Placement, Request, Slice
from fenka.dialects.base import (
    CARDS,
    NVIDIA_GPU,
    ContainerRequest,
    InvalidRecord,
    PodRequest,
    SharedNode,
    SliceRequest,
    check_card_uuids,
    counted,
    driver_uuid,
    per_container,
    placement_on,
    visible_only,
    whole_card_request,
    whole_slices,
)

NAME = "whole-cards"
RESOURCES: tuple[str, ...] = (NVIDIA_GPU,)
LEASED = NVIDIA_GPU

HAMI_ONLY = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")
"""Beside these `nvidia.com/gpu` counts slices: such a pod is HAMi's, or nobody's."""

RECORD = "fenka.io/whole-cards"
"""Pod annotation: {"<name of the container>": [<card>, …]}."""
RECORDS: tuple[str, ...] = (RECORD, CARDS)


def matches(pod: PodRequest) -> bool:
    """Raises InvalidRecord."""
    return bool(pod.requested_resources(RESOURCES)) and not pod.requested_resources(HAMI_ONLY)


def parse(pod: PodRequest) -> tuple[SliceRequest, ...]:
    """A part for each container. Raises InvalidRecord."""
    return tuple(replace(part, requires_opt_in=True) for part in per_container(pod, _want))


def _want(container: ContainerRequest) -> Request | None:
    cards = container.amount(NVIDIA_GPU)
    return whole_card_request(cards) if cards else None


def encode(
    pod: PodRequest,
    share: SharedNode,  # noqa: ARG001
    placements: Sequence[Placement],
    now_ns: int,  # noqa: ARG001 - nobody reads a time here
) -> dict[str, str]:
    """fenka's own: NVIDIA's plugin has none, it chooses cards on the node."""
    parts = parse(pod)
    return record(
        {
            part.containers[0]: placement.slices
            for part, placement in zip(parts, placements, strict=True)
        }
    )


def record(slices: Mapping[str, Sequence[Slice]]) -> dict[str, str]:
    """The annotations that say which whole cards each container has."""
    cards = {name: [piece.card for piece in pieces] for name, pieces in slices.items()}
    uuids = {str(it.card): driver_uuid(it.uuid) for pieces in slices.values() for it in pieces}
    return {
        RECORD: json.dumps(cards, separators=(",", ":")),
        CARDS: json.dumps(uuids, separators=(",", ":")),
    }


def decode(pod: PodRequest, share: SharedNode) -> tuple[Placement, ...] | None:
    """Raises InvalidRecord."""
    if RECORD not in pod.annotations:
        return None
    try:
        record = {
            str(name): [counted(card) for card in cards]
            for name, cards in json.loads(pod.annotations[RECORD]).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as why:
        raise InvalidRecord(f"annotation {RECORD} is not understood: {why}") from None
    placements = tuple(
        placement_on(share.node, part.request, record.get(part.containers[0], []))
        for part in parse(pod)
    )
    check_card_uuids(pod.annotations, placements)
    return placements


container_slices = whole_slices(parse)
environment = visible_only(parse)


def node_resources(share: SharedNode) -> dict[str, int]:
    """Its cards. Which of them are shared now is in fenka's ledger, not in this number."""
    return {NVIDIA_GPU: len(share.node.cards)}
