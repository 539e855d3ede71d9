"""All nodes in one line each: cards, what is free, and what an autoscaler knows of those that it bought."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from fenka.cluster import autoscaling
from fenka.cluster.objects import Node, Pod, seconds
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.cluster.unoffered_nodes import offers_nothing
from fenka.core.mig.instances import usable_mib
from fenka.core.units import mib_to_units
from fenka.views.mig_rows import usable_units
from fenka.views.node_rows import NodeRow, exclusive_node, pods_of_exclusive_nodes

WITHOUT_NODE: Mapping[autoscaling.OrderState, str] = {
    "written": "starting",
    "asked": "starting",
    "known": "starting",
    "joined": "starting",
    "ending": "ending",
}
"""States of slots without a Node, by the slot's state."""

OFFERS_NOTHING = "offers no cards"
"""State of a node that is labelled to share cards, beside its readiness."""

UNREPORTED = autoscaling.ElasticNodeStatus(group="", state="not reported yet", since=0)
"""Of a node that the leader has not seen yet."""


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A node. Times are Unix times, None where they are not known.

    Attributes:
        name: empty for a node that has not joined.
        group: its group of elastic nodes; empty for any other node.
        capacity: spot or on-demand; empty for a node of no group.
        order: empty if it was not bought.
        created_at: of the node; before it has joined, when its order was written.
        cards: None if that is not known.
        free: units that are not allocated, of all cards; whole cards if it does not share them. None before
            it offers its cards.
        total: in the same measure.
        state: of a group's node in the words of `NodeStatus`; else whether it is ready and not cordoned.
            OFFERS_NOTHING follows for a node that is labelled to share cards and offers none.
        since: of the state.
    """

    name: str = ""
    group: str = ""
    capacity: str = ""
    order: str = ""
    created_at: float | None = None
    cards: int | None = None
    free: float | None = None
    total: int | None = None
    state: str
    since: float | None = None
    until: float | None = None
    protected_until: float | None = None


def summarize_nodes(
    snapshot: ClusterSnapshot,
    status: autoscaling.AutoscalerStatus,
    orders: Mapping[str, autoscaling.OrderRecord],
) -> list[NodeSummary]:
    """Return the nodes of a cluster by name, then those that have not joined, by order."""
    pods, planned = pods_of_exclusive_nodes(snapshot), _planned_cards(status, orders)
    rows = []
    for node in snapshot.nodes:
        name = node.metadata.name
        elastic = autoscaling.GROUP in node.metadata.labels or name in status.nodes
        known = status.nodes.get(name, UNREPORTED) if elastic else _own_status(node, snapshot.state)
        row = _node(node, _cards(snapshot, node, pods.get(name, [])), known)
        rows.append(row if row.cards else replace(row, cards=planned.get(row.order)))
    names = {node.metadata.name for node in snapshot.nodes}
    return [*rows, *_coming(names, orders, planned)]


def summarize_row(row: NodeRow) -> NodeSummary:
    """Return a node of which only its row is known, such as this machine."""
    free: float = row.total - row.allocated if row.total else row.exclusive - row.whole
    total = row.total or row.exclusive
    return NodeSummary(
        name=row.name,
        cards=row.count or None,
        free=max(free, 0) if total else None,
        total=total or None,
        state=_readiness(ready=row.status == "ready", schedulable=row.schedulable),
    )


def _own_status(node: Node, cluster: ClusterState) -> autoscaling.ElasticNodeStatus:
    """Return the state of a node that no group has."""
    state = _readiness(ready=node.ready, schedulable=not node.spec.unschedulable)
    if offers_nothing(node, cluster):
        state += f", {OFFERS_NOTHING}"
    return autoscaling.ElasticNodeStatus(group="", state=state, since=0)


def _readiness(*, ready: bool, schedulable: bool) -> str:
    return ("ready" if ready else "not ready") + ("" if schedulable else ", cordoned")


def _planned_cards(
    status: autoscaling.AutoscalerStatus, orders: Mapping[str, autoscaling.OrderRecord]
) -> dict[str, int | None]:
    """Return how many cards each node of an order will have, by the order's name."""
    cards = {
        (offer.group, offer.type, offer.zone, offer.capacity): offer.cards
        for offer in status.offers
    }
    return {
        name: cards.get((order.group, order.type, order.zone, order.capacity))
        for name, order in orders.items()
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
    node: Node, cards: tuple[int, float, int], status: autoscaling.ElasticNodeStatus
) -> NodeSummary:
    labels, (count, free, total) = node.metadata.labels, cards
    return NodeSummary(
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
) -> Iterator[NodeSummary]:
    for name, order in sorted(orders.items()):
        for slot in order.slots:
            if slot.state not in WITHOUT_NODE or slot.node in names:
                continue
            yield NodeSummary(
                group=order.group,
                capacity=order.capacity,
                order=name,
                created_at=order.written_at,
                cards=planned[name],
                state=WITHOUT_NODE[slot.state],
                since=order.asked_at,
            )
