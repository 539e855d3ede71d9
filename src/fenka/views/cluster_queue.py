"""The queue of a cluster as rows of the screens.

It is computed from a plain reading of the API server, so the scheduler need not run. Two things that only the
scheduler knows are missing: reservations that have expired, and the use of pods that were deleted since
(docs/understand/cluster-queue.md).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import PendingQueue
from fenka.cluster.pod_groups import group_key
from fenka.cluster.queue_snapshot import QueueEntry, QueueSnapshot, SchedulerOptions
from fenka.cluster.queue_state import UsageAccounting, entry_id
from fenka.cluster.state import ClusterSnapshot, ClusterState
from fenka.core.backfill import complete
from fenka.core.columnar_placer import count_reasons
from fenka.core.inventory import card_of
from fenka.core.reasons import Unschedulable
from fenka.views.unqueued_rows import is_complete, is_present, requested, unqueued_steps
from fenka.views.workloads import QueueRow


def cluster_queue(
    snapshot: ClusterSnapshot,
    options: SchedulerOptions,
    now: float,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> list[QueueRow]:
    """Return the pending requests of a cluster in order, and below them pods that wait for something else.

    Args:
        snapshot: the cluster.
        options: the scheduler's.
        now: Unix seconds.
        refused: sentences about pods that neither reserve nor preempt, by UID.
    """
    pods = snapshot.pods
    paused = {
        entry_id(pod): refused[pod.metadata.uid] for pod in pods if pod.metadata.uid in refused
    }
    queue, scheduled = schedule_queue(snapshot, options, now, paused)
    for _ in count_reasons(unschedulable(scheduled, len(scheduled.entries))):
        pass
    below = unqueued_steps(
        pods, scheduled, snapshot.state, queue.has_nodes, paused, now, groups=snapshot.groups
    )
    return [*queue_rows(scheduled, snapshot.state), *filter(None, below)]


def schedule_queue(
    snapshot: ClusterSnapshot,
    options: SchedulerOptions,
    now: float,
    paused: Collection[str] = (),
) -> tuple[PendingQueue, QueueSnapshot]:
    """Return a cluster's queue, and the result of scheduling it once.

    Args:
        snapshot: the cluster.
        options: the scheduler's.
        now: Unix seconds.
        paused: IDs of entries that are out of the queue.
    """
    snapshot.state.topology_levels = options.topology_levels
    usage = UsageAccounting(snapshot.state, options.fairness)
    gangs: dict[str | None, list[Pod]] = {}
    for pod in snapshot.pods:
        usage.set(pod, now)
        # The scheduler counts members in the same way (`GangMembers.status`).
        gang = group_key(pod)
        if gang is None:
            continue
        if is_present(pod):
            gangs.setdefault(gang, []).append(pod)

    def may_start(members: Sequence[Pod]) -> bool:
        # A member that requests no card, such as a launcher, counts too.
        return is_complete(gangs[group_key(members[0])], snapshot.groups)

    queue = PendingQueue(
        snapshot.state, options.policy, options.fairness, may_start, uses=usage.uses
    )
    pods = [pod for pod in snapshot.pods if entry_id(pod) not in paused]
    return queue, complete(queue.schedule(pods, now))


def unschedulable(scheduled: QueueSnapshot, most: int) -> list[Unschedulable]:
    """Return why the first entries of a queue do not fit, for those that do not."""
    reasons = (entry.unschedulable for entry in scheduled.entries[:most])
    return [reason for reason in reasons if reason is not None]


def queue_rows(scheduled: QueueSnapshot, state: ClusterState) -> Iterator[QueueRow]:
    """Yield the entries of a queue that has been scheduled, in order."""
    cards, used = _cards(state), dict[str, float]()
    for position, entry in enumerate(scheduled.entries, start=1):
        namespace = entry.pending.namespace
        if namespace not in used:
            used[namespace] = scheduled.history(namespace).used_s
        yield _row(position, entry, cards, used)


def _row(
    position: int,
    entry: QueueEntry,
    cards: Mapping[str, tuple[str, int]],
    used: Mapping[str, float],
) -> QueueRow:
    """Args: cards: node and index by UUID; used: card-seconds by namespace."""
    pending, reservation = entry.pending, entry.reservation
    uuids = {piece.uuid for placement in entry.placements for piece in placement.slices}
    why = entry.why
    if entry.placements:
        why = "there is room now: it is placed when kube-scheduler tries it again, in seconds"
    elif reservation is not None:
        uuids |= reservation.cards
    # An instance need not exist yet, its card does.
    known = (cards.get(card_of(uuid)) for uuid in uuids)
    # A card may be gone since the queue was scheduled.
    on_cards = {place for place in known if place is not None}
    return QueueRow(
        position,
        pending.name,
        pending.namespace,
        pending.priority,
        requested(pending.pods),
        entry.requested_at,
        [f"{node}/{index}" for node, index in sorted(on_cards)],
        reservation.starts_by if reservation is not None else None,
        why,
        round(used[pending.namespace], 1),
    )


def _cards(state: ClusterState) -> dict[str, tuple[str, int]]:
    return {
        card.uuid: (shared.node.name, card.index)
        for shared in state.shared_nodes()
        for card in shared.physical_cards
    }
