"""A cluster's queue, from a plain reading of the API server: the scheduler need not be asked, or be there.

Who waits is served here once, as the scheduler does for each pod that it is asked about, by its defaults.
What only the scheduler knows is not in it: which pods it no longer keeps cards for, and the use of pods that
were deleted since (docs/scheduler.md, Order).
"""

import asyncio
import time
from collections.abc import Mapping

from fenka.cli import cluster
from fenka.cli.cluster import PAGE, Cluster, Target
from fenka.cli.pending import amounts
from fenka.cli.rows import QueueRow
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pending_queue import PendingQueue, QueueEntry
from fenka.cluster.pod_placement import with_card_ids
from fenka.cluster.state import ClusterState
from fenka.cluster.usage_accounting import UsageAccounting
from fenka.core.fairness import Fairness
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.client import Api

POLICY = "binpack"


def cluster_rows(target: Target) -> list[QueueRow]:
    """Who waits, in order. Raises UserError."""
    return rows(cluster.ask(target, _read), time.time())


async def _read(api: Api) -> Cluster:
    (nodes, _), (pods, _), sick = await asyncio.gather(
        api.list("/api/v1/nodes", Node, limit=PAGE),
        # Those that have finished count for what their namespaces have had.
        api.list("/api/v1/pods", Pod, limit=PAGE),
        cluster.sick(api),
    )
    return cluster.gathered(nodes, pods, sick)


def rows(around: Cluster, now: float) -> list[QueueRow]:
    """From what the API server says. now: Unix seconds."""
    fairness = Fairness()
    uses = UsageAccounting(around.world, fairness)
    for pod in around.pods:
        uses.set(pod, now)
    turn = PendingQueue(around.world, POLICY, fairness, uses=uses.uses).serve(around.pods, now)
    cards, used = _cards(around.world), uses.uses.used(now)
    return [_row(number, place, cards, used) for number, place in enumerate(turn.places, start=1)]


def _row(
    position: int,
    place: QueueEntry,
    cards: Mapping[str, tuple[str, int]],
    used: Mapping[str, float],
) -> QueueRow:
    """cards: node and index of each, by UUID; used: card-seconds by namespace."""
    waiter, reservation = place.waiter, place.reservation
    uuids = {piece.uuid for it in place.placements for piece in it.slices}
    why = place.why
    if place.placements:
        why = "there is room now: it is placed when kube-scheduler tries it again, in seconds"
    elif reservation is not None:
        uuids |= reservation.cards
    return QueueRow(
        position,
        waiter.name,
        waiter.namespace,
        waiter.priority,
        _asks(waiter.pods),
        place.requested_at,
        [f"{node}/{index}" for node, index in sorted(cards[uuid] for uuid in uuids)],
        reservation.starts_by if reservation is not None else None,
        why,
        round(used.get(waiter.namespace, 0.0), 1),
    )


def _asks(pods: tuple[Pod, ...]) -> str:
    """`8 aliyun.com/gpu-mem`; of a gang `2 pods: 16 aliyun.com/gpu-mem`, all of them together."""
    total: dict[str, int] = {}
    for pod in pods:
        try:
            asked = amounts(pod)
        except InvalidRecord:
            continue
        for name, amount in asked.items():
            total[name] = total.get(name, 0) + amount
    said = ", ".join(f"{amount} {name}" for name, amount in total.items())
    return said if len(pods) == 1 else f"{len(pods)} pods: {said}"


def _cards(world: ClusterState) -> dict[str, tuple[str, int]]:
    return {
        card.uuid: (share.node.name, card.index)
        for share in world.shared_nodes()
        for card in with_card_ids(share.node).cards
    }
