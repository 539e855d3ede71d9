"""`nvidia.com/gpu`: whole cards, of the same nodes whose other cards are shared."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fenka.core.requests import Placement, Request, Slice
from fenka.dialects.gpushare import CARDS, WHOLE, Share, Unreadable
from fenka.dialects.requests import (
    Limits,
    Manifest,
    Part,
    check_uuids,
    counted,
    each_container,
    own_slices,
    placed_on,
    which_cards,
    whole_cards,
)

NAME = "whole-cards"
RESOURCES: tuple[str, ...] = (WHOLE,)
LEASED = WHOLE

HAMI_ONLY = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")
"""Beside these `nvidia.com/gpu` counts slices: such a pod is HAMi's, or nobody's."""

RECORD = "fenka.io/whole-cards"
"""Pod annotation: {"<name of the container>": [<card>, …]}."""
RECORDS: tuple[str, ...] = (RECORD, CARDS)


def speaks(pod: Manifest) -> bool:
    """Raises Unreadable."""
    return bool(pod.names(RESOURCES)) and not pod.names(HAMI_ONLY)


def demand(pod: Manifest, unit_mib: int) -> tuple[Part, ...]:  # noqa: ARG001 - cards have no unit
    """A part for each container. Raises Unreadable."""
    return tuple(replace(part, by_label=True) for part in each_container(pod, _want))


def _want(container: Limits) -> Request | None:
    cards = container.of(WHOLE)
    return whole_cards(cards) if cards else None


def write(
    pod: Manifest,
    share: Share,
    placements: Sequence[Placement],
    now_ns: int,  # noqa: ARG001 - nobody reads a time here
) -> dict[str, str]:
    """fenka's own: NVIDIA's plugin has none, it chooses cards on the node."""
    parts = demand(pod, share.unit_mib)
    return record(
        {
            part.containers[0]: placement.slices
            for part, placement in zip(parts, placements, strict=True)
        }
    )


def record(slices: Mapping[str, Sequence[Slice]]) -> dict[str, str]:
    """The annotations that say which whole cards each container has."""
    cards = {name: [piece.card for piece in pieces] for name, pieces in slices.items()}
    uuids = {str(it.card): it.uuid for pieces in slices.values() for it in pieces}
    return {
        RECORD: json.dumps(cards, separators=(",", ":")),
        CARDS: json.dumps(uuids, separators=(",", ":")),
    }


def read(pod: Manifest, share: Share) -> tuple[Placement, ...] | None:
    """Raises Unreadable."""
    if RECORD not in pod.annotations:
        return None
    try:
        record = {
            str(name): [counted(card) for card in cards]
            for name, cards in json.loads(pod.annotations[RECORD]).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as why:
        raise Unreadable(f"annotation {RECORD} is not understood: {why}") from None
    placements = tuple(
        placed_on(share.node, part.request, record.get(part.containers[0], []))
        for part in demand(pod, share.unit_mib)
    )
    check_uuids(pod.annotations, placements)
    return placements


held = own_slices(demand)
environment = which_cards(demand)


def advertised(share: Share) -> dict[str, int]:
    """Its cards. Which of them are shared now is in fenka's ledger, not in this number."""
    return {WHOLE: len(share.node.cards)}
