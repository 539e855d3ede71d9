"""Nodes that an autoscaler bought, and those that it has asked for, as rows of the screens."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from fenka.cluster import autoscaling
from fenka.cluster.objects import Node, Pod, seconds
from fenka.cluster.state import ClusterSnapshot
from fenka.core.mig.instances import usable_mib
from fenka.core.units import mib_to_units
from fenka.views.instances import usable_units
from fenka.views.nodes import exclusive_node, pods_of_exclusive_nodes

WITHOUT_NODE: Mapping[autoscaling.OrderState, str] = {
    "written": "starting",
    "asked": "starting",
    "known": "starting",
    "joined": "starting",
    "ending": "ending",
}
"""What a slot is while there is no Node of it, by the slot's state."""

UNREPORTED = autoscaling.NodeStatus(group="", state="not reported yet", since=0)
"""Of a node that the leader has not seen yet."""


class ElasticNodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a group. Times are Unix times, None where they are not known.

    Attributes:
        name: empty for a node that has not joined.
        order: empty if it was not bought.
        created_at: of the node; before it has joined, when its order was written.
        cards: None if that is not known.
        free: units that are not allocated, of all cards; whole cards if it does not share them. None before
            it offers its cards.
        total: in the same measure.
        state: in the words of `NodeStatus`.
        since: of the state.
    """

    name: str = ""
    group: str
    capacity: str
    order: str = ""
    created_at: float | None = None
    cards: int | None = None
    free: float | None = None
    total: int | None = None
    state: str
    since: float | None = None
    until: float | None = None
    protected_until: float | None = None


def elastic_nodes(
    snapshot: ClusterSnapshot,
    status: autoscaling.Status,
    orders: Mapping[str, autoscaling.OrderRecord],
) -> list[ElasticNodeRow]:
    """Return the nodes of groups by name, then those that have not joined, by order."""
    pods, planned = pods_of_exclusive_nodes(snapshot), _planned_cards(status, orders)
    rows = []
    for node in snapshot.nodes:
        name = node.metadata.name
        if autoscaling.GROUP in node.metadata.labels or name in status.nodes:
            cards = _cards(snapshot, node, pods.get(name, []))
            row = _node(node, cards, status.nodes.get(name, UNREPORTED))
            rows.append(row if row.cards else replace(row, cards=planned.get(row.order)))
    names = {node.metadata.name for node in snapshot.nodes}
    return [*rows, *_coming(names, orders, planned)]


def _planned_cards(
    status: autoscaling.Status, orders: Mapping[str, autoscaling.OrderRecord]
) -> dict[str, int | None]:
    """Return how many cards each node of an order will have, by the order's name."""
    cards = {
        (offer.group, offer.type, offer.zone, offer.capacity): offer.cards
        for offer in status.offers
    }
    return {
        name: cards.get((each.group, each.type, each.zone, each.capacity))
        for name, each in orders.items()
    }


def _cards(snapshot: ClusterSnapshot, node: Node, pods: list[Pod]) -> tuple[int, float, int]:
    """Return how many cards a node has, and how much of them is free of how much."""
    shared = snapshot.state.shared_node(node.metadata.name)
    if shared is None:
        row = exclusive_node(snapshot, node, pods)
        return row.exclusive, row.exclusive - row.whole, row.exclusive
    free, total = defaultdict[int, float](float), 0
    for card in shared.node.cards:
        if card.parent is None:
            units = usable_units(shared, card)
            free[card.index], total = free[card.index] + units, total + units
        usage = snapshot.state.card_usage(shared.node.name, card.uuid)
        size = usable_mib(card, shared.division)
        taken_mib = usage.memory_mib + card.unleased_mib
        free[card.index] -= mib_to_units(taken_mib, size, shared.unit_mib)
    return len(free), sum(max(units, 0) for units in free.values()), total


def _node(
    node: Node, cards: tuple[int, float, int], status: autoscaling.NodeStatus
) -> ElasticNodeRow:
    labels, (count, free, total) = node.metadata.labels, cards
    return ElasticNodeRow(
        name=node.metadata.name,
        group=labels.get(autoscaling.GROUP, status.group),
        capacity=labels.get(autoscaling.CAPACITY, ""),
        order=labels.get(autoscaling.ORDER, ""),
        created_at=seconds(node.metadata.creation_timestamp),
        cards=count or None,
        free=free if total else None,
        total=total or None,
        state=status.state,
        since=status.since or None,
        until=status.until,
        protected_until=status.protected_until,
    )


def _coming(
    names: Collection[str],
    orders: Mapping[str, autoscaling.OrderRecord],
    planned: Mapping[str, int | None],
) -> Iterator[ElasticNodeRow]:
    for name, order in sorted(orders.items()):
        for slot in order.slots:
            if slot.state not in WITHOUT_NODE or slot.node in names:
                continue
            yield ElasticNodeRow(
                group=order.group,
                capacity=order.capacity,
                order=name,
                created_at=order.written_at,
                cards=planned[name],
                state=WITHOUT_NODE[slot.state],
                since=order.asked_at,
            )
