"""The MIG instances among a node's cards: those that exist, and those that are only planned for jobs."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.instances import is_planned
from fenka.core.request import Placement


def with_instances(node: Node, instances: Iterable[Card], held: Collection[str]) -> Node:
    """Return the node with these instances in place of the former ones. Planned ones stay while held.

    Args:
        node: the cards, with their former instances.
        instances: all that exist.
        held: devices that jobs hold.
    """
    former = {card.uuid: card for card in node.cards}
    existing = (
        replace(card, unleased_mib=former.get(card.uuid, card).unleased_mib) for card in instances
    )
    cards = (card for card in node.cards if card.parent is None)
    planned = (card for card in node.cards if is_planned(card.uuid) and card.uuid in held)
    return replace(node, cards=(*cards, *existing, *planned))


def without_plans(node: Node, held: Collection[str]) -> Node:
    """Return the node without planned instances that no job holds."""
    existing = (card for card in node.cards if card.parent and not is_planned(card.uuid))
    return with_instances(node, existing, held)


def with_uuids(node: Node, uuids: Mapping[DeviceId, DeviceId]) -> Node:
    """Return the node with planned instances as the devices that have been created for them."""
    cards = (replace(card, uuid=uuids.get(card.uuid, card.uuid)) for card in node.cards)
    return replace(node, cards=tuple(cards))


def placed_on_uuids(placement: Placement, uuids: Mapping[DeviceId, DeviceId]) -> Placement:
    """Return the placement on the same devices."""
    slices = (replace(each, uuid=uuids.get(each.uuid, each.uuid)) for each in placement.slices)
    return replace(placement, slices=tuple(slices))
