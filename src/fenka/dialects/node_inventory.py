"""Which cards a node shares: fenka's inventory on the Node, or what gpushare's own plugin advertises."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fenka.core.inventory import Card, DeviceId, Node
from fenka.dialects.base import (
    CARDS,
    GIB_MIB,
    MIB,
    InvalidRecord,
    SharedNode,
    invented_id,
    is_index,
    parse_quantity,
)
from fenka.dialects.gpushare import COUNT, MEMORY

CORDONED = "fenka.io/cordoned"
"""Node annotation, written by people: indexes of cards that shall admit nobody, such as "0,2"."""


def decode_node(
    name: str, annotations: Mapping[str, str], allocatable: Mapping[str, str]
) -> SharedNode | None:
    """The sharing node of that name; None if it has nothing to share.

    Its inventory counts where one is written. Else the cards are equal parts of the resource: such is a
    node on which gpushare's own plugin runs. Raises InvalidRecord.
    """
    total = parse_quantity(allocatable.get(MEMORY, 0))
    if total <= 0:
        return None
    if CARDS in annotations:
        share = _recorded(name, annotations[CARDS])
    else:
        share = _assumed_equal(name, total, parse_quantity(allocatable.get(COUNT, 0)))
    return _cordoned(share, parse_indexes(annotations.get(CORDONED, "")))


def encode_inventory(cards: Sequence[Card], unit_mib: int) -> str:
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


def with_unhealthy(share: SharedNode, sick: frozenset[int]) -> SharedNode:
    """The node with these cards unhealthy too."""
    if not sick:
        return share
    cards = tuple(
        replace(card, healthy=card.healthy and card.index not in sick) for card in share.node.cards
    )
    return replace(share, node=replace(share.node, cards=cards))


def _recorded(name: str, text: str) -> SharedNode:
    try:
        record = json.loads(text)
        cards = tuple(
            Card(
                int(it["index"]),
                DeviceId(str(it["uuid"])) or invented_id(name, int(it["index"])),
                str(it["model"]),
                int(it["memoryMiB"]),
                healthy=bool(it["healthy"]),
            )
            for it in record["cards"]
        )
        unit = int(record["unitMiB"])
    except (ValueError, TypeError, KeyError, RecursionError) as why:
        raise InvalidRecord(
            f"annotation {CARDS} of node {name} is not understood: {why!r}"
        ) from None
    if unit < 1 or any(card.memory_mib < 1 for card in cards):
        raise InvalidRecord(f"annotation {CARDS} of node {name} speaks of memory that cannot be")
    if min(len({card.index for card in cards}), len({card.uuid for card in cards})) < len(cards):
        raise InvalidRecord(f"annotation {CARDS} of node {name} names a card twice")
    return SharedNode(Node(name, tuple(sorted(cards, key=lambda card: card.index)), unit_mib=unit))


def _assumed_equal(name: str, total: int, count: int) -> SharedNode:
    units = total // max(count, 1)
    # As gpushare's own screens tell: no card has more than 100 GiB by its rule, none less MiB.
    unit = MIB if units > 100 else GIB_MIB
    cards = tuple(
        Card(index, invented_id(name, index), "", units * unit) for index in range(max(count, 1))
    )
    return SharedNode(Node(name, cards, unit_mib=unit), has_inventory=False)


def _cordoned(share: SharedNode, indexes: frozenset[int]) -> SharedNode:
    if not indexes:
        return share
    cards = tuple(
        replace(card, cordoned=True) if card.index in indexes else card for card in share.node.cards
    )
    return replace(share, node=replace(share.node, cards=cards))


def parse_indexes(text: str) -> frozenset[int]:
    """Card indexes as people list them, "0,2"; what is no index is passed over."""
    return frozenset(int(item) for item in re.split(r"[,\s]+", text) if is_index(item))
