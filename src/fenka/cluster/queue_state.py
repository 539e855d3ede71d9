"""The pods that are pending, and what is reserved for them: events in, answers out. Pure: no clock, no I/O.

kube-scheduler asks about one pod at a time. After a rejection it retries the pod only after its backoff;
other pods may be scheduled in between. Therefore each pod is answered under constraints: cards that entries
before it in the queue have reserved, or would get now, are not available to it.

All times are seconds since 1970.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from math import inf

from fenka.cluster.mappings import RecentDict
from fenka.cluster.objects import QUEUE_GATE, Pod, seconds
from fenka.cluster.pending_queue import (
    DEPTH,
    PendingQueue,
    gang_complete_by_label,
    is_open,
    is_unplaced,
)
from fenka.cluster.placement import HeldPlacement, QueueConstraints
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.pod_groups import group_key
from fenka.cluster.queue_snapshot import (
    PendingEntry,
    QueueEntry,
    QueueSnapshot,
    read_position,
    time_limit_s,
)
from fenka.cluster.refusals import RefusedEntries, RefusedEntry
from fenka.cluster.state import ClusterState, read_allocation
from fenka.core.backfill import Steps
from fenka.core.evaluate import Policy
from fenka.core.inventory import DeviceId
from fenka.core.queue import Fairness, SortKey, UsageHistory, cards_of
from fenka.core.request import Placement
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import with_instances

RESERVATION_TTL_S = 15.0
"""kube-scheduler retries a pod within 10 s after it could be placed, and binds it at once."""

REQUEUE_AFTER_S = 0.5
"""By then kube-scheduler has usually retried a pod by itself."""


class Phase(Enum):
    """Where an entry is in its life."""

    WAITING = "waiting"
    """Nothing fits now."""
    RESERVED = "reserved"
    """Nodes are reserved: it fits, and kube-scheduler has to bind it."""
    STALLED = "stalled"
    """kube-scheduler did not try it in time: it is out of the queue until it is tried again."""
    EXCLUDED = "excluded"
    """kube-scheduler tried it without the reserved nodes: it waits for others."""


class PhaseEvent(Enum):
    """The next step of an entry."""

    FITS = "fits"
    FITS_NO_MORE = "fits no more"
    EXPIRED_UNTRIED = "reservation expired, not tried since"
    EXPIRED_REJECTED = "reservation expired, tried and rejected since"
    REFUSED = "kube-scheduler finds no node for another reason"
    NODES_MISSING = "kube-scheduler offers other nodes than the reserved ones"
    REJECTED = "tried again and rejected"
    SHORTAGE_REPORTED = "kube-scheduler reports that a GPU resource is lacking"
    NODES_OFFERED = "kube-scheduler offers all excluded nodes again"


TRANSITIONS: dict[tuple[Phase, PhaseEvent], Phase] = {
    (Phase.WAITING, PhaseEvent.FITS): Phase.RESERVED,
    (Phase.EXCLUDED, PhaseEvent.FITS): Phase.RESERVED,
    (Phase.RESERVED, PhaseEvent.FITS_NO_MORE): Phase.WAITING,
    (Phase.RESERVED, PhaseEvent.EXPIRED_UNTRIED): Phase.STALLED,
    (Phase.RESERVED, PhaseEvent.EXPIRED_REJECTED): Phase.EXCLUDED,
    (Phase.RESERVED, PhaseEvent.REFUSED): Phase.STALLED,
    (Phase.RESERVED, PhaseEvent.NODES_MISSING): Phase.EXCLUDED,
    (Phase.STALLED, PhaseEvent.REJECTED): Phase.WAITING,
    (Phase.STALLED, PhaseEvent.SHORTAGE_REPORTED): Phase.WAITING,
    (Phase.EXCLUDED, PhaseEvent.NODES_OFFERED): Phase.WAITING,
}
"""All other events leave the phase as it is. An entry that would be WAITING while nodes are excluded for it
is EXCLUDED instead."""


@dataclass(slots=True)
class _EntryState:
    phase: Phase = Phase.WAITING
    reserved_at: float = 0.0
    rejected: bool = False
    """Since the reservation was made."""
    requeued: bool = False
    """Since the reservation was made."""
    excluded: frozenset[str] = frozenset()
    message: str = ""
    """kube-scheduler's, when the entry stalled."""

    def apply(self, event: PhaseEvent) -> bool:
        """Return whether the phase changes."""
        after = TRANSITIONS.get((self.phase, event), self.phase)
        if after is Phase.WAITING and self.excluded:
            after = Phase.EXCLUDED
        changed = after is not self.phase
        self.phase = after
        return changed


class EntryLifecycle:
    """Keeps the phase of each entry, by its ID. An entry that is not known is WAITING.

    kube-scheduler does not report what it does with a pod. An entry that fits but is not bound within
    RESERVATION_TTL_S is blocked by something that fenka does not see. Its reservation then ends, so that it
    does not block the entries behind it.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _EntryState] = {}
        self.version = 0
        """Changes whenever the queue has to be scheduled again."""

    # ---- queries ----

    def phase(self, entry_id: str) -> Phase:
        """Return the entry's phase."""
        entry = self._entries.get(entry_id)
        return entry.phase if entry else Phase.WAITING

    def is_stalled(self, entry_id: str) -> bool:
        """Return whether the entry is out of the queue."""
        return self.phase(entry_id) is Phase.STALLED

    def excluded_nodes(self) -> dict[str, frozenset[str]]:
        """Return the nodes that may not be reserved for an entry, by entry."""
        return {name: entry.excluded for name, entry in self._entries.items() if entry.excluded}

    def next_expiry(self) -> float:
        """Return when the first reservation expires; infinite if there is none."""
        reserved = (
            entry.reserved_at for entry in self._entries.values() if entry.phase is Phase.RESERVED
        )
        return min(reserved, default=inf) + RESERVATION_TTL_S

    def needs_requeue(self, entry_id: str, now: float) -> bool:
        """Return whether kube-scheduler has not tried the entry although it has fitted for long enough."""
        entry = self._entries.get(entry_id)
        return (
            entry is not None
            and entry.phase is Phase.RESERVED
            and not entry.requeued
            and now - entry.reserved_at >= REQUEUE_AFTER_S
        )

    # ---- events ----

    def fitting(self, entry_ids: Collection[str], now: float) -> dict[str, float]:
        """Record which entries fit now.

        Returns:
            Entries whose reservation has expired, with the time at which it was made. The caller ends each
            with `expire`.
        """
        for entry_id in [name for name in self._entries if name not in entry_ids]:
            self._apply(entry_id, PhaseEvent.FITS_NO_MORE)
        expired = {}
        for entry_id in entry_ids:
            entry = self._entries.setdefault(entry_id, _EntryState())
            if entry.apply(PhaseEvent.FITS):
                entry.reserved_at, entry.rejected, entry.requeued = now, False, False
            elif entry.phase is Phase.RESERVED and now - entry.reserved_at >= RESERVATION_TTL_S:
                expired[entry_id] = entry.reserved_at
        return expired

    def expire(self, entry_id: str, nodes: Iterable[str], message: str) -> None:
        """End a reservation.

        Args:
            entry_id: an entry that `fitting` has returned.
            nodes: the reserved nodes. They are excluded if kube-scheduler has tried the entry meanwhile: it
                did not offer them.
            message: what kube-scheduler says of the entry now.
        """
        entry = self._entries[entry_id]
        if entry.rejected:
            entry.excluded |= frozenset(nodes)
            self._apply(entry_id, PhaseEvent.EXPIRED_REJECTED)
        else:
            entry.message = message
            self._apply(entry_id, PhaseEvent.EXPIRED_UNTRIED)

    def refuse(self, entry_id: str, missing: Iterable[str], message: str) -> None:
        """End a reservation that kube-scheduler cannot use, whatever fenka says.

        Args:
            entry_id: an entry that is RESERVED.
            missing: the reserved nodes, if kube-scheduler asked about others; empty if it asked about none.
            message: what it says of the entry now.
        """
        entry, excluded = self._entries[entry_id], frozenset(missing)
        entry.excluded |= excluded
        entry.message = message
        self._apply(entry_id, PhaseEvent.NODES_MISSING if excluded else PhaseEvent.REFUSED)

    def reject(self, entry_id: str, nodes: Iterable[str]) -> bool:
        """Record that kube-scheduler tried the entry and that none of the offered nodes fits.

        Returns:
            Whether the entry was stalled and is in the queue again.
        """
        entry = self._entries.get(entry_id)
        if entry is None:
            return False
        entry.rejected = True
        excluded = entry.excluded.difference(nodes)
        if excluded != entry.excluded:
            entry.excluded = excluded
            self.version += 1
        readmitted = self._apply(entry_id, PhaseEvent.REJECTED)
        if not entry.excluded:
            self._apply(entry_id, PhaseEvent.NODES_OFFERED)
        return readmitted

    def report(self, entry_id: str, message: str, resources: Iterable[str]) -> bool:
        """Record what kube-scheduler says of the entry; the resources are those that fenka places.

        Returns:
            Whether the entry was stalled and is in the queue again.
        """
        entry = self._entries.get(entry_id)
        if entry is None or entry.phase is not Phase.STALLED or message == entry.message:
            return False
        shortage = any(f"Insufficient {name}" in message for name in resources)
        return shortage and self._apply(entry_id, PhaseEvent.SHORTAGE_REPORTED)

    def mark_requeued(self, entry_id: str) -> None:
        """Record that kube-scheduler was asked to try the entry."""
        self._entries[entry_id].requeued = True

    def forget(self, entry_id: str) -> None:
        """Remove an entry that is bound or deleted."""
        self._entries.pop(entry_id, None)

    def _apply(self, entry_id: str, event: PhaseEvent) -> bool:
        entry = self._entries.get(entry_id)
        if entry is None or not entry.apply(event):
            return False
        if entry.phase is Phase.WAITING:
            del self._entries[entry_id]
        self.version += 1
        return True


class UsageAccounting:
    """Keeps the history `uses` up to date, by allocations and the kubelet's times: no tenant can write these.

    Pods are recorded after the cluster's state knows them. After a restart these are all pods that the API
    server still shows, running and finished. The use of pods that were deleted before is lost.
    """

    def __init__(self, cluster: ClusterState, fairness: Fairness) -> None:
        self.uses = UsageHistory(fairness)
        self._cluster = cluster
        self._nodeless: dict[str, Pod] = {}
        """Pods on nodes whose cards are not known yet."""
        self._nodes_version = -1
        self._ended: set[str] = set()

    def set(self, pod: Pod, now: float) -> None:
        """Record the pod's use from its start to its end."""
        uid, node = pod.metadata.uid, pod.spec.node_name
        self._nodeless.pop(uid, None)
        if not node or uid in self._ended:
            return
        allocation = self._cluster.allocation(uid)
        if allocation is None and not pod.demand(self._cluster.dialects).requests_gpu:
            return
        shared, ended = self._cluster.shared_node(node), now
        if shared is None:
            self._nodeless[uid] = pod
            return
        created = seconds(pod.metadata.creation_timestamp) or now
        started = max(created, seconds(pod.status.start_time) or now)
        if pod.finished and not self.uses.holds(uid):
            # It ended before it was recorded for the first time.
            allocation = read_allocation(shared, pod, self._cluster.dialects)
            ended = seconds(pod.ended_at) or started
        if allocation is not None:
            cards = cards_held(shared, allocation.placements)
            self.uses.start(uid, pod.metadata.namespace, cards, created, started, now)
        if pod.finished or allocation is None:
            self.uses.stop(uid, max(started, ended), now)
            self._ended.add(uid)

    def charge(
        self,
        namespace: str,
        placements: Iterable[Placement],
        since: float,
        requested_at: float,
        now: float,
    ) -> None:
        """Count cards that were held for a pod since then as used by its namespace."""
        cards = sum(
            cards_held(shared, (placement,))
            for placement in placements
            if (shared := self._cluster.shared_node(placement.node)) is not None
        )
        self.uses.charge(namespace, cards * (now - since), requested_at, now)

    def forget(self, uid: str, now: float) -> None:
        """Record that the pod was deleted."""
        self._nodeless.pop(uid, None)
        self._ended.discard(uid)
        self.uses.stop(uid, now, now)

    def retain(self, uids: Iterable[str], now: float) -> None:
        """Forget all pods but these."""
        for uid in (self.uses.holders | self._ended | self._nodeless.keys()) - set(uids):
            self.forget(uid, now)

    def refresh(self, now: float) -> None:
        """Record pods whose nodes have become known."""
        if self._nodes_version != self._cluster.nodes_version:
            self._nodes_version = self._cluster.nodes_version
            for pod in list(self._nodeless.values()):
                self.set(pod, now)


def cards_held(shared: SharedNode, placements: Iterable[Placement]) -> float:
    """Return the placements' share of cards."""
    placements = tuple(placements)
    devices = (piece.uuid for placement in placements for piece in placement.slices)
    return cards_of(placements, with_instances(shared, devices).node.cards)


HEAD = QueueConstraints(position=1, total=1)
"""Of a pod that is alone in the queue."""


def queue_state(
    cluster: ClusterState,
    policy: Policy = "binpack",
    fairness: Fairness | None = None,
    complete: Callable[[Sequence[Pod]], bool] = gang_complete_by_label,
    live: LiveColumns | None = None,
) -> "QueueState":
    """Return the state of an empty queue.

    complete: whether enough pods of a gang exist to start it. live: see `PendingQueue`.
    """
    fairness = fairness or Fairness()
    accounting = UsageAccounting(cluster, fairness)
    queue = PendingQueue(cluster, policy, fairness, complete, accounting.uses, live)
    return QueueState(cluster, queue, accounting)


class QueueState:
    """Pods as the API server reports them, the phase of each entry, and the last snapshot of the queue."""

    def __init__(
        self, cluster: ClusterState, queue: PendingQueue, accounting: UsageAccounting
    ) -> None:
        self._cluster, self._queue, self._accounting = cluster, queue, accounting
        self.snapshot = QueueSnapshot()
        self.urgent = False
        """Whether the queue has to be scheduled before another pod is answered."""
        self._lifecycle = EntryLifecycle()
        self._open: dict[str, Pod] = {}
        self._rejected: RecentDict[str, None] = RecentDict()
        self._pending: set[str] = set()
        """UIDs of open pods for which no node was found."""
        self._gated: dict[str, Pod] = {}
        """Pods on which fenka's gate is the only one left."""
        self._nothing_to_ungate: tuple[QueueSnapshot, int] | None = None
        """The snapshot and the number of gated pods for which `pods_to_ungate` was empty."""
        self._positioned: QueueSnapshot | None = None
        """The snapshot of which all positions are published."""
        self._asked: RecentDict[str, bool] = RecentDict()
        """Pods about which kube-scheduler has asked since it last said why they wait, and whether it offered
        what was reserved for them, if anything was."""
        self._refused: RecentDict[str, bool] = RecentDict()
        """Pods that wait for something else by its words, and whether it asked about other nodes."""
        self._reserved_nodes: dict[str, frozenset[str]] = {}
        """By entry."""
        self._refusals = RefusedEntries()
        self._bypassed: dict[str, float] = {}
        self._changes = 0
        self._scheduled_version = (-1, -1, -1)
        self._gang_placements: Mapping[str, tuple[Placement, ...]] = {}
        self._expires_at = inf

    # ---- events ----

    def replace_pods(self, pods: Sequence[Pod], now: float) -> None:
        """Record that these are all pods of the cluster."""
        uids = {pod.metadata.uid for pod in pods}
        for uid in [uid for uid in self._open | self._gated if uid not in uids]:
            self.forget_pod(uid, now)
        self._accounting.retain(uids, now)
        for pod in pods:
            self.set_pod(pod, now)

    def set_pod(self, pod: Pod, now: float) -> None:
        """Record a new or changed pod. The cluster's state must know it already."""
        uid = pod.metadata.uid
        known = self._open.get(uid)
        self._accounting.set(pod, now)
        self._set_gated(pod)
        if not is_open(pod) or not self._queue.requests_cards(pod):
            if known is not None and pod.spec.node_name:
                self._count_bypassed(known, now)
            self._close(uid)
            return
        self._open[uid] = pod
        if self._is_pending(pod):
            self._changes += 1
            message = pod.unschedulable or ""
            resources = [name for dialect in self._cluster.dialects for name in dialect.RESOURCES]
            if self._lifecycle.report(entry_id(pod), message, resources):
                self.urgent = True
            if message and known is not None and message != known.unschedulable:
                self._read_message(pod, message, resources)
            if uid not in self._pending:
                self._pending.add(uid)
                self._mark_urgent(pod, now)
        elif self._pending and group_key(pod) is not None:
            self._changes += 1

    def forget_pod(self, uid: str, now: float) -> None:
        """Record that the pod was deleted."""
        self._gated.pop(uid, None)
        self._accounting.forget(uid, now)
        self._close(uid)
        self._queue.forget(uid)

    def reject(self, pod: Pod, nodes: Iterable[str], now: float) -> None:
        """Record that none of these nodes fits the pod: it is pending from now on, if it is known."""
        uid = pod.metadata.uid
        new = uid not in self._rejected
        self._rejected[uid] = None
        if uid not in self._open:
            return
        self._pending.add(uid)
        if self._lifecycle.reject(entry_id(pod), nodes) or new:
            self._changes += 1
            self._mark_urgent(pod, now)

    def refuse(self, pod: Pod, what: str, why: str, now: float) -> RefusedEntry:
        """Record that another program refuses a request for the pod, for no reason of a card.

        Args:
            pod: the pod; a refusal of one member counts for its gang.
            what: the request, such as `its binding`.
            why: the API server's message.
            now: the time.
        """
        return self._refusals.refuse(entry_id(pod), what, why, now)

    def ask(self, pod: Pod, nodes: Iterable[str]) -> None:
        """Record that kube-scheduler asks about the pod on these nodes."""
        uid, reserved = pod.metadata.uid, self._reserved_nodes.get(entry_id(pod))
        self._asked[uid] = reserved is None or not reserved.isdisjoint(nodes)
        self._refused.pop(uid, None)

    def _read_message(self, pod: Pod, message: str, resources: Iterable[str]) -> None:
        """Note whether the pod waits for something that fenka does not place, such as CPU."""
        uid = pod.metadata.uid
        offered = self._asked.pop(uid, None)
        if offered is None and any(f"Insufficient {name}" in message for name in resources):
            self._refused.pop(uid, None)
            return
        if not offered:
            self._refused[uid] = offered is not None
            self.urgent = self.urgent or entry_id(pod) in self._reserved_nodes

    # ---- scheduling the queue ----

    def is_stale(self, gangs: Mapping[str, tuple[Placement, ...]], now: float) -> bool:
        """Return whether the snapshot may differ from what `schedule` would make now."""
        return (
            self._scheduled_version != self._version
            or now >= self._expires_at
            or gangs != self._gang_placements
        )

    def schedule(self, gangs: Mapping[str, tuple[Placement, ...]], now: float) -> Steps[None]:
        """Schedule the queue and renew the snapshot. gangs: what is reserved for gangs, by gang.

        A call whose steps are not all taken changes nothing. Events may come in between: the snapshot is
        stale then, but not older than the first step.
        """
        self._accounting.refresh(now)
        version, gangs, own_changes, self.urgent = self._version, dict(gangs), 0, False
        # A reservation that expires leaves its cards to the next entry, whose own may have expired too.
        for _ in range(3):
            paused = self._refusals.paused(now)
            pods = [
                pod
                for pod in self._open.values()
                if not self._lifecycle.is_stalled(entry_id(pod)) and entry_id(pod) not in paused
            ]
            self.snapshot = yield from self._queue.schedule(
                pods,
                now,
                is_pending=self._is_pending,
                gangs=gangs,
                excluded_nodes=self._lifecycle.excluded_nodes(),
            )
            before = self._lifecycle.version
            expired = self._expire_reservations(now)
            own_changes += self._lifecycle.version - before
            if not expired:
                break
        cluster, pods_version, lifecycle = version
        self._scheduled_version = cluster, pods_version, lifecycle + own_changes
        self._gang_placements = gangs
        next_end = min(self._lifecycle.next_expiry(), self._refusals.next_end(now))
        self._expires_at = now if expired else next_end

    @property
    def _version(self) -> tuple[int, int, int]:
        changes = self._changes + self._refusals.version
        return self._cluster.version, changes, self._lifecycle.version

    def _expire_reservations(self, now: float) -> bool:
        """Return whether there were any that have expired."""
        fitting = {entry.pending.id: entry for entry in self.snapshot.entries if entry.placements}
        expired = self._lifecycle.fitting(fitting.keys(), now)
        for name, reserved_at in expired.items():
            entry = fitting[name]
            # Otherwise pods that can never start would block a card one after another.
            self._accounting.charge(
                entry.pending.namespace, entry.placements, reserved_at, entry.requested_at, now
            )
            nodes = (placement.node for placement in entry.placements)
            self._lifecycle.expire(name, nodes, entry.pending.pods[0].unschedulable or "")
        refused = self._refuse_reservations(fitting, expired)
        self._reserved_nodes = {
            name: frozenset(placement.node for placement in entry.placements)
            for name, entry in fitting.items()
            if name not in expired and name not in refused
        }
        return bool(expired or refused)

    def _refuse_reservations(
        self, fitting: Mapping[str, QueueEntry], expired: Mapping[str, float]
    ) -> set[str]:
        """End the reservations of entries that wait for something else, and return the entries."""
        refused = set[str]()
        if not self._refused:
            return refused
        for name, entry in fitting.items():
            uid = next(
                (
                    pod.metadata.uid
                    for pod in entry.pending.pods
                    if pod.metadata.uid in self._refused
                ),
                None,
            )
            if uid is None or name in expired:
                continue
            nodes = frozenset(placement.node for placement in entry.placements)
            missing = self._refused.pop(uid)
            if missing and nodes != self._reserved_nodes.get(name):
                # It was asked about without the nodes of an earlier reservation.
                continue
            message = self._open[uid].unschedulable or ""
            self._lifecycle.refuse(name, nodes if missing else (), message)
            refused.add(name)
        return refused

    # ---- queries ----

    @property
    def is_empty(self) -> bool:
        """Return whether no pod is pending."""
        return not self._pending

    def constraints(self, pod: Pod, now: float) -> QueueConstraints:
        """Return what is reserved for the entries before this pod, by the last snapshot."""
        snapshot, own_id, limit = self.snapshot, entry_id(pod), time_limit_s(pod)
        deadline = None if limit is None else now + limit
        rank, total = self._rank(pod, now)
        reserved: set[DeviceId] = set()
        held: dict[str, list[HeldPlacement]] = {}
        for other_rank, entry in snapshot.holders:
            if other_rank >= rank:
                break
            if entry.pending.id == own_id or not self._is_waiting(entry.pending.pods):
                continue
            if entry.reservation is not None and entry.reservation.blocks(deadline):
                reserved |= entry.reservation.cards
            for placement in entry.placements:
                held.setdefault(placement.node, []).append(
                    HeldPlacement(entry.pending.id, placement, entry.pending.namespace)
                )
        nodes = {snapshot.node_of_card[uuid] for uuid in reserved if uuid in snapshot.node_of_card}
        return QueueConstraints(
            frozenset(reserved),
            {node: tuple(placements) for node, placements in held.items()},
            frozenset(nodes.union(held)),
            rank + 1,
            total,
        )

    def without_served(self, constraints: QueueConstraints) -> QueueConstraints:
        """Return the constraints without what was held for entries that are bound or deleted now."""
        waiting = {entry_id(pod) for pod in self._open.values() if self._is_waiting((pod,))}
        held = {
            node: tuple(placement for placement in placements if placement.entry_id in waiting)
            for node, placements in constraints.held.items()
        }
        return replace(constraints, held=held)

    def position(self, pod: Pod, now: float) -> str:
        """Return the pod's position as the end of a sentence: `; position 3 of 5 in the queue`.

        It is empty for a pod that no node could hold: the queue is not what it waits for.
        """
        if not self._queue.has_nodes(pod):
            return ""
        rank, total = self._rank(pod, now)
        return f"; position {rank + 1} of {total} in the queue"

    def entries(self) -> Sequence[QueueEntry]:
        """Return the pending entries, in order."""
        return self.snapshot.entries if self._pending else ()

    def pause(self, pod: Pod, now: float) -> RefusedEntry | None:
        """Return the refusal because of which the pod neither reserves nor preempts now; None without one."""
        return self._refusals.pause(entry_id(pod), now) if self._refusals else None

    def has_nodes(self, pod: Pod) -> bool:
        """Return whether a node could hold the pod without any allocations."""
        return self._queue.has_nodes(pod)

    def paused_entries(self, now: float) -> list[tuple[PendingEntry, RefusedEntry]]:
        """Return the entries that neither reserve nor preempt because another program refuses them."""
        paused, members = self._refusals.paused(now), dict[str, list[Pod]]()
        for pod in self._open.values() if paused else ():
            if entry_id(pod) in paused:
                members.setdefault(entry_id(pod), []).append(pod)
        return [(PendingEntry(name, tuple(pods)), paused[name]) for name, pods in members.items()]

    def pods_to_requeue(self, limit: int, now: float) -> list[Pod]:
        """Return about this number of pods that have fitted for REQUEUE_AFTER_S, once per reservation.

        Pods whose pause after refusals has ended are among them, once per pause.
        """
        resumed = frozenset(self._refusals.resume(now))
        pods = [
            pod
            for uid, pod in (self._open.items() if resumed else ())
            if entry_id(pod) in resumed and uid not in self._gated
        ]
        for entry in self.entries():
            members = entry.pending.pods
            if (
                self._lifecycle.needs_requeue(entry.pending.id, now)
                and self._is_waiting(members)
                and not any(member.metadata.uid in self._gated for member in members)
            ):
                self._lifecycle.mark_requeued(entry.pending.id)
                pods += members
            if len(pods) >= limit:
                break
        return pods

    def pods_to_ungate(self, limit: int, now: float = inf) -> list[Pod]:
        """Return gated pods that kube-scheduler is to try now, in order.

        These are pods for which cards are reserved, and the first that do not fit, whether or not there is a
        card to reserve. kube-scheduler preempts for these, and reports why they wait. Pods that are not in
        this queue are kube-scheduler's alone. Of a gang that lacks pods one is ungated, so that its events
        say how many are missing.
        """
        state = self.snapshot, len(self._gated)
        known = self._nothing_to_ungate
        if not self._gated or (known is not None and known[0] is state[0] and known[1] == state[1]):
            return []
        uids = dict.fromkeys(self._uids_to_ungate())
        pods = [self._gated[uid] for uid in uids if uid in self._gated]
        if not pods:
            self._nothing_to_ungate = state
        paused = self._refusals.paused(now)
        return [pod for pod in pods if entry_id(pod) not in paused][:limit]

    def _uids_to_ungate(self) -> Iterator[str]:
        snapshot = self.snapshot
        unfit = (entry for entry in snapshot.entries if not entry.placements)
        for entry in (*(holder for _, holder in snapshot.holders), *islice(unfit, DEPTH)):
            yield from (pod.metadata.uid for pod in entry.pending.pods)
        for uid, pod in self._gated.items():
            queued = entry_id(pod) in snapshot or self._queue.decides(pod)
            if not queued or self._lifecycle.is_stalled(entry_id(pod)):
                yield uid
        tried = {entry_id(pod) for uid, pod in self._open.items() if uid not in self._gated}
        for uid, pod in self._gated.items():
            gang = group_key(pod)
            if gang is not None and gang not in snapshot and gang not in tried:
                tried.add(gang)
                yield uid

    def published_position(self, pod: Pod) -> int | None:
        """Return the position of the pod's entry in the last snapshot; None if it is not in the queue."""
        key = self.snapshot.key_of(entry_id(pod))
        return None if key is None else self.snapshot.rank(key) + 1

    def pods_to_position(self, limit: int) -> list[Pod]:
        """Return about this number of pods whose published position is not that of the queue, in order.

        kube-scheduler retries an ungated pod that changes. Of these only the first have a position, and those
        that had one before.
        """
        if self._positioned is self.snapshot:
            return []
        differing = list[tuple[int, Pod]]()
        for uid, pod in self._open.items():
            position, published = self.published_position(pod), read_position(pod)
            shown = uid in self._gated or published is not None or (position or inf) <= DEPTH
            if position != published and shown:
                differing.append((position or 0, pod))
        if not differing:
            self._positioned = self.snapshot
        differing.sort(key=lambda numbered: numbered[0])
        return [pod for _, pod in differing[:limit]]

    def usage(self, now: float) -> dict[str, float]:
        """Return the card-seconds of all namespaces that have used any recently."""
        return self._accounting.uses.used(now)

    @property
    def max_bypass_bound_s(self) -> float:
        """Return the upper bound of `max_bypass_s`."""
        return self._queue.fairness.max_penalty_s

    def max_bypass_s(self) -> float:
        """Return by how much later a request came, at most, that was served before one that still waits.

        Only requests of the same priority are compared. Requests behind it in the queue that use what it does
        not wait for are not counted.
        """
        bypassed = (self._bypassed.get(entry.pending.id, 0.0) for entry in self.entries())
        return max(bypassed, default=0.0)

    # ---- inside ----

    def _key(self, pod: Pod, now: float) -> SortKey:
        return self.snapshot.sort_key(PendingEntry(entry_id(pod), (pod,)).request(now))

    def _rank(self, pod: Pod, now: float) -> tuple[int, int]:
        """Return the number of entries before the pod, and that of all entries with its own."""
        snapshot = self.snapshot
        total = len(snapshot.entries) + (entry_id(pod) not in snapshot)
        return snapshot.rank(self._key(pod, now)), total

    def _is_pending(self, pod: Pod) -> bool:
        return pod.metadata.uid in self._rejected or is_unplaced(pod)

    def _is_waiting(self, pods: Iterable[Pod]) -> bool:
        """Return whether any of the pods is open, and is not being bound."""
        uids = (pod.metadata.uid for pod in pods)
        return any(uid in self._open and not self._cluster.is_assumed(uid) for uid in uids)

    def _set_gated(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        gates = {gate.name for gate in pod.spec.scheduling_gates}
        if gates == {QUEUE_GATE} and pod.metadata.deletion_timestamp is None and not pod.finished:
            self._gated[uid] = pod
            # It keeps its position until kube-scheduler has asked about it.
            self._rejected[uid] = None
        elif self._gated.pop(uid, None) is not None:
            self._nothing_to_ungate = None

    def _close(self, uid: str) -> None:
        pod = self._open.pop(uid, None)
        for known in (self._rejected, self._asked, self._refused):
            known.pop(uid, None)
        self._pending.discard(uid)
        if pod is not None:
            self._changes += 1
            self._lifecycle.forget(entry_id(pod))
            self._bypassed.pop(entry_id(pod), None)
            name = entry_id(pod)
            if name in self._refusals and not any(
                map(name.__eq__, map(entry_id, self._open.values()))
            ):
                self._refusals.forget(name)

    def _mark_urgent(self, pod: Pod, now: float) -> None:
        """Have the queue scheduled before the next answer, if cards would be reserved for this pod."""
        snapshot = self.snapshot
        if self.urgent or (snapshot.can_reserve and self._queue.has_nodes(pod)):
            self.urgent = True
        elif snapshot.holders:
            self.urgent = snapshot.rank(self._key(pod, now)) <= snapshot.holders[-1][0]

    def _count_bypassed(self, pod: Pod, now: float) -> None:
        """Count a pod that was bound against entries that came earlier, still wait and are not behind it."""
        snapshot = self.snapshot
        if not snapshot.entries or not self._pending:
            return
        key = self._key(pod, now)
        rank, requested_at = snapshot.rank(key), key[3]
        # Only the first entry of each namespace counts.
        seen = {
            entry.pending.namespace
            for entry in snapshot.entries[:rank]
            if entry.sort_key[0] == key[0]
        }
        seen.add(pod.metadata.namespace)
        for entry in snapshot.entries[rank:]:
            if entry.sort_key[0] != key[0]:
                break
            namespace = entry.pending.namespace
            if namespace in seen or not self._is_waiting(entry.pending.pods):
                continue
            seen.add(namespace)
            since = max(
                entry.requested_at, snapshot.history(namespace).served_at(entry.requested_at)
            )
            if since < requested_at:
                bypass = max(requested_at - since, self._bypassed.get(entry.pending.id, 0.0))
                self._bypassed[entry.pending.id] = bypass


def entry_id(pod: Pod) -> str:
    """Return the ID of the queue entry that a pod is in: its gang's key, or its own UID."""
    return group_key(pod) or pod.metadata.uid
