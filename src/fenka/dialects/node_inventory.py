"""Which cards a node shares: fenka's inventory on the Node, or what gpushare's own plugin advertises."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from sys import intern
from typing import Annotated

import msgspec

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import MAX_CARDS, MAX_MEMORY_MIB
from fenka.dialects import records
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
from fenka.dialects.mig_records import INSTANCES, decode_instances, with_division
from fenka.dialects.records import CardIndex

CORDONED = "fenka.io/cordoned"
"""Node annotation, written by people: indexes of cards that take no new slices, such as "0,2"."""


def decode_node(
    name: str, annotations: Mapping[str, str], allocatable: Mapping[str, str]
) -> SharedNode | None:
    """Return the shared node of that name; None if it shares no card.

    Its cards are those of its inventory. Without one, as on nodes of gpushare's own plugin, the cards are
    equal parts of the resource.

    A node that advertises no slices shares its divided cards, if it has any, and no others. One that does
    advertises as many units of a divided card as of a whole one, for slices inside its instances.

    Raises:
        InvalidRecord: if the inventory cannot be read.
    """
    total = parse_quantity(allocatable.get(MEMORY, 0))
    if CARDS in annotations and (total > 0 or INSTANCES in annotations):
        shared = _recorded(name, annotations[CARDS])
    elif total > 0:
        shared = _assumed_equal(name, total, parse_quantity(allocatable.get(COUNT, 0)))
    else:
        return None
    cordoned = parse_indexes(annotations.get(CORDONED, ""))
    shared = _marked(shared, cordoned, lambda card: replace(card, cordoned=True))
    divided = decode_instances(annotations)
    if divided:
        shared = with_division(shared, divided)
    return shared if total > 0 else _divided_only(shared)


def _divided_only(shared: SharedNode) -> SharedNode | None:
    cards = tuple(card for card in shared.node.cards if card.divided or card.parent is not None)
    if not cards:
        return None
    return replace(shared, node=replace(shared.node, cards=cards), shares_cards=False)


_Mib = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_MIB)]


class _Card(msgspec.Struct, omit_defaults=True):
    index: CardIndex
    uuid: str
    model: str
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMORY_MIB)] = msgspec.field(
        name="memoryMiB"
    )
    healthy: bool
    unleased_mib: _Mib = msgspec.field(name="unleasedMiB", default=0)
    drawn_mib: _Mib = msgspec.field(name="drawnMiB", default=0)
    unleased: str = ""
    """Who uses that, in a sentence."""


class _Inventory(msgspec.Struct):
    unit_mib: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="unitMiB")
    cards: list[_Card]


_INVENTORY = msgspec.json.Decoder(_Inventory)


def encode_inventory(
    cards: Sequence[Card], unit_mib: int, unleased: Mapping[DeviceId, str] | None = None
) -> str:
    """Return the node's `fenka.io/cards`: everything that the extender must know of it.

    unleased: who uses cards without a lease, in a sentence for each, by UUID.
    """
    recorded = [
        _Card(
            *(card.index, card.uuid, card.model, card.memory_mib, card.healthy),
            *(card.unleased_mib, card.drawn_mib),
            (unleased or {}).get(card.uuid, ""),
        )
        for card in cards
    ]
    return records.encode(_Inventory(unit_mib, recorded))


def unleased_memory(annotations: Mapping[str, str]) -> dict[int, str]:
    """Return who uses cards of a node without a lease, in a sentence for each, by the card's index."""
    try:
        cards = records.decode(annotations.get(CARDS, ""), _INVENTORY, CARDS).cards
    except InvalidRecord:
        return {}
    return {card.index: card.unleased for card in cards if card.unleased}


def with_unhealthy(shared: SharedNode, sick: frozenset[int]) -> SharedNode:
    """Return the node with these cards unhealthy too."""
    return _marked(shared, sick, lambda card: replace(card, healthy=False))


def _recorded(name: str, text: str) -> SharedNode:
    inventory = records.decode(text, _INVENTORY, f"annotation {CARDS} of node {name}")
    cards = [
        Card(
            card.index,
            DeviceId(intern(card.uuid)) or invented_id(name, card.index),
            intern(card.model),
            card.memory_mib,
            healthy=card.healthy,
            unleased_mib=card.unleased_mib,
            drawn_mib=card.drawn_mib,
        )
        for card in sorted(inventory.cards, key=lambda card: card.index)
    ]
    if min(len({card.index for card in cards}), len({card.uuid for card in cards})) < len(cards):
        raise InvalidRecord(f"annotation {CARDS} of node {name} names a card twice")
    return SharedNode(Node(name, tuple(cards), unit_mib=inventory.unit_mib))


def _assumed_equal(name: str, total: int, count: int) -> SharedNode:
    units = total // max(count, 1)
    # gpushare's own rule: more than 100 units of a card are MiB.
    unit = MIB if units > 100 else GIB_MIB
    if count > MAX_CARDS or units * unit > MAX_MEMORY_MIB:
        raise InvalidRecord(
            f"node {name} offers {total} of {MEMORY} on {count} cards: no node has that"
        )
    cards = tuple(
        Card(index, invented_id(name, index), "", units * unit) for index in range(max(count, 1))
    )
    return SharedNode(Node(name, cards, unit_mib=unit), has_inventory=False)


def _marked(
    shared: SharedNode, indexes: frozenset[int], mark: Callable[[Card], Card]
) -> SharedNode:
    """Return the node with some of its cards replaced."""
    if not indexes:
        return shared
    cards = tuple(mark(card) if card.index in indexes else card for card in shared.node.cards)
    return replace(shared, node=replace(shared.node, cards=cards))


def parse_indexes(text: str) -> frozenset[int]:
    """Return card indexes as people list them, "0,2"; anything else in the list is ignored."""
    return frozenset(int(item) for item in re.split(r"[,\s]+", text) if is_index(item))
