"""The pending pods of a cluster in the order in which they are served, and what each gets or reserves. Pure.

The scheduler schedules the queue whenever it matters for a pod, `fenka queue` once. The core's `Backfill`
decides; here pods become pending requests.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from fenka.cluster.eligibility import ineligibility_reasons
from fenka.cluster.live_columns import LiveColumns
from fenka.cluster.node_admission import (
    admission_rule,
    admits,
    fits_when_empty,
    labels,
    mode_labels,
    node_kind,
)
from fenka.cluster.objects import QUEUE_GATE, Pod, seconds
from fenka.cluster.pod_groups import MINIMUM_LABEL, group_key
from fenka.cluster.state import ClusterState
from fenka.core.backfill import Backfill
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columnar_timeline import CardStates, ColumnarTimeline
from fenka.core.evaluate import Policy
from fenka.core.fairness import NO_HISTORY, Fairness, UsageHistory
from fenka.core.inventory import DeviceId, Node
from fenka.core.queue import (
    Allocation,
    HistoryLookup,
    PendingRequest,
    QueueStatus,
    Reservation,
    SortKey,
    history_lookup,
    sort_key,
    sort_keys,
)
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.steps import Steps
from fenka.dialects import node_modes, nvidia
from fenka.dialects.base import SliceRequest

GRACE_S = 30
"""Kubernetes' default for a pod that does not give its termination grace period."""

OVERDUE_TTL_S = 60.0
"""A pod that has not ended this long after it should have may end at any time, or never: its node is gone."""

DEPTH = 4
"""The number of pending entries that reserve cards."""

BY_TIME = Fairness(penalty_per_request_s=0)


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A pending pod, or the members of a gang that have no node. id: the pod's UID, or the gang's key."""

    id: str
    pods: tuple[Pod, ...]

    @property
    def name(self) -> str:
        """Return the name of the pod or of the gang."""
        meta = self.pods[0].metadata
        return meta.name if self.id == meta.uid else self.id.partition("/")[2]

    @property
    def namespace(self) -> str:
        """Return the namespace of all its pods."""
        return self.pods[0].metadata.namespace

    @property
    def priority(self) -> int:
        """Return the lowest priority of its pods."""
        return min(it.spec.priority or 0 for it in self.pods)

    @property
    def time_limit_s(self) -> float | None:
        """Return the seconds after which all its pods have ended, grace included; None for no limit."""
        limits = [time_limit_s(it) for it in self.pods]
        return None if None in limits else max(it for it in limits if it is not None)

    def request(self, now: float) -> PendingRequest:
        """Return the request by which the core orders it, without what it requests of the nodes."""
        created = (seconds(it.metadata.creation_timestamp) for it in self.pods)
        at = min(now if it is None else it for it in created)
        return PendingRequest(self.id, (), at, self.priority, self.namespace, self.time_limit_s)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An entry of a snapshot.

    Attributes:
        pending: the pods.
        sort_key: orders the entries.
        unschedulable: why it does not fit on what the entries before it leave; None if it fits.
        reservation: cards that are reserved for an entry that does not fit; only the first few have one.
        placements: where it fits.
    """

    pending: PendingEntry
    sort_key: SortKey
    unschedulable: Unschedulable | None = None
    reservation: Reservation | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def why(self) -> str:
        """Return why it does not fit; empty if it fits. The sentence is long to make: over all cards."""
        return self.unschedulable.sentence() if self.unschedulable else ""

    @property
    def requested_at(self) -> float:
        """Return when it was requested, in seconds since 1970."""
        return self.sort_key[3]


@dataclass(slots=True)
class QueueSnapshot:
    """The result of scheduling the queue.

    Attributes:
        entries: the pending entries, in order.
        can_reserve: whether another entry could reserve cards, at any position.
        node_of_card: the node of each card.
        history: returns what a namespace has and has used, as of `now`.
        fairness: how entries of one priority are ordered.
        now: when the queue was scheduled.
        holders: the entries for which anything is held or reserved, with their rank.
    """

    entries: tuple[QueueEntry, ...] = ()
    can_reserve: bool = True
    node_of_card: Mapping[DeviceId, str] = field(default_factory=dict)
    history: HistoryLookup = lambda _: NO_HISTORY
    fairness: Fairness = BY_TIME
    now: float = 0.0
    holders: tuple[tuple[int, QueueEntry], ...] = field(init=False)
    _sort_keys: dict[str, SortKey] = field(init=False)
    _ranks: list[SortKey] = field(init=False)
    _arrivals: dict[str, list[tuple[float, float, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._sort_keys = {it.pending.id: it.sort_key for it in self.entries}
        self._ranks = [it.sort_key for it in self.entries]
        self._arrivals = {}
        for it in self.entries:
            insort(self._arrivals.setdefault(it.pending.namespace, []), _arrival(it.sort_key))
        self.holders = tuple(
            (rank, it)
            for rank, it in enumerate(self.entries)
            if it.placements or it.reservation is not None
        )

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._sort_keys

    def sort_key(self, request: PendingRequest) -> SortKey:
        """Return the key of an entry, or the one that it would have if it became pending now."""
        known = self._sort_keys.get(request.id)
        if known is not None:
            return known
        history = self.history(request.user)
        arrival = _arrival(sort_key(request, 0, history, BY_TIME, self.now, first=False))
        arrivals = self._arrivals.get(request.user, [])
        before = bisect_left(arrivals, arrival)
        first = not before or arrivals[before - 1][0] != arrival[0]
        return sort_key(request, before, history, self.fairness, self.now, first=first)

    def rank(self, key: SortKey) -> int:
        """Return how many entries are before this key."""
        return bisect_left(self._ranks, key)


def _arrival(key: SortKey) -> tuple[float, float, str]:
    """Return priority, time and ID of a key."""
    return key[0], key[3], key[4]


def gang_complete_by_label(pods: Sequence[Pod]) -> bool:
    """Return whether as many pods are pending as their label requires; True without a label."""
    text = pods[0].metadata.labels.get(MINIMUM_LABEL, "")
    return len(pods) >= (int(text) if text.isdecimal() and len(text) < 7 else 0)


class PendingQueue:
    """Schedules the pending pods. Between two calls it caches only what has not changed."""

    def __init__(
        self,
        cluster: ClusterState,
        policy: Policy,
        fairness: Fairness | None = None,
        complete: Callable[[Sequence[Pod]], bool] = gang_complete_by_label,
        uses: UsageHistory | None = None,
        live: LiveColumns | None = None,
    ) -> None:
        """Args:
        cluster: the nodes, and what is allocated of them.
        policy: the placement policy.
        fairness: how entries of one priority are ordered.
        complete: whether enough pods of a gang exist; gets those that are pending.
        uses: what namespaces have used.
        live: the cluster's nodes, on which also counts what is reserved for gangs; by default own columns.
        """
        self._cluster, self._fairness = cluster, fairness or Fairness()
        self._uses = uses or UsageHistory(self._fairness)
        self._complete = complete
        self._backfill = Backfill(policy, BY_TIME, DEPTH)
        self._live, self._live_has_gangs = live or LiveColumns(cluster), live is not None
        self._states = CardStates()
        self._nodes: dict[str, Node] = {}
        self._node_of_card: dict[DeviceId, str] = {}
        self._nodes_version = -1
        self._kinds: dict[tuple[object, ...], list[str]] = {}
        """Nodes that could hold the same requests when empty, and whose modes admit the same."""
        self._eligible: dict[bytes, frozenset[str]] = {}
        """Nodes by the rules of a pod."""
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        """One object for each set of nodes, so that its hash is computed once."""
        self._nodes_of: dict[str, tuple[Pod, frozenset[str]]] = {}
        """The nodes that each pending pod is eligible for and that could hold it when empty, by UID."""
        self._with_mode: frozenset[str] = frozenset()
        """Nodes whose mode may exclude a pod because of the pods that are there."""
        self._changed: set[str] = set()
        """Nodes whose allocations have changed."""
        cluster.watch(self._changed)
        self._allocations: dict[str, tuple[float, list[Allocation]]] = {}
        """By node: until when they are valid, and the allocations."""
        self._allocations_of: Mapping[str, Node] = {}
        """The nodes of which the allocations were read."""
        self._valid_until = inf
        """Until when all of them are valid, at least."""
        self._held: Counter[str] = Counter()
        """The number of allocations of each namespace."""
        self._seen_at: dict[str, float] = {}
        """When pods were seen first whose node has not reported their start."""

    @property
    def fairness(self) -> Fairness:
        """Return how entries of one priority are ordered."""
        return self._fairness

    def schedule(
        self,
        pods: Iterable[Pod],
        now: float,
        *,
        is_pending: Callable[[Pod], bool] | None = None,
        gangs: Mapping[str, tuple[Placement, ...]] | None = None,
        excluded_nodes: Mapping[str, frozenset[str]] | None = None,
    ) -> Steps[QueueSnapshot]:
        """Schedule those of the pods that are pending. Steps of only one call may be taken at a time.

        The cluster may change in between; the result then belongs to some state since the first step.

        Args:
            pods: any pods.
            now: seconds since 1970.
            is_pending: whether an open pod is pending; by default its own status decides.
            gangs: what is reserved for gangs that are starting, by gang. These are not pending.
            excluded_nodes: nodes that an entry must not get, by entry.
        """
        gangs, excluded_nodes = gangs or {}, excluded_nodes or {}
        self._refresh_nodes()
        entries: dict[str, PendingEntry] = {}
        requests: list[PendingRequest] = []
        for entry in self._pending_entries(pods, is_pending or is_unplaced, gangs):
            yield
            request = self._request(entry, excluded_nodes.get(entry.id, frozenset()), now)
            if request is not None:
                entries[entry.id] = entry
                requests.append(request)
        yield
        # Up to the next step, all is read of one state of the cluster.
        self._refresh_nodes()
        nodes = self._nodes.values()
        allocations, held = self._all_allocations(gangs, now)
        columns = self._live.read().copy()
        if not self._live_has_gangs:
            columns.add(*(it for placements in gangs.values() for it in placements))
        history = history_lookup(held, self._uses, now)
        yield
        order = sort_keys(requests, history, self._fairness, now)
        # The order is settled: the core sees the rank as the time of the request.
        ranked = [
            replace(request, requested_at=float(rank), priority=0, user="")
            for rank, (_, request) in enumerate(order)
        ]
        yield
        placer = ColumnarPlacer(columns)
        timeline = ColumnarTimeline(nodes, allocations, now, self._states)
        yield
        result = yield from self._backfill.serve(ranked, placer, timeline, {}, now)
        placed, pending = dict(result.placed), {it.id: it for it in result.pending}
        queue_entries = tuple(
            _queue_entry(
                entries[request.id], key, placed.get(request.id, ()), pending.get(request.id)
            )
            for key, request in order
        )
        can_reserve = sum(it.reservation is not None for it in result.pending) < DEPTH
        return QueueSnapshot(
            queue_entries, can_reserve, self._node_of_card, history, self._fairness, now
        )

    def requests_cards(self, pod: Pod) -> bool:
        """Return whether the pod requests something that fenka places, and can be read."""
        return pod.demand(self._cluster.dialects).dialect is not None

    def decides(self, pod: Pod) -> bool:
        """Return whether this queue decides when the pod is scheduled.

        It does not for whole cards, which kube-scheduler also places on nodes that do not share. Nor does it
        for a pod that no sharing node could hold.
        """
        dialect = pod.demand(self._cluster.dialects).dialect
        return dialect is not None and dialect is not nvidia and self.has_nodes(pod)

    def has_nodes(self, pod: Pod) -> bool:
        """Return whether the pod is eligible for a node that could hold it without any allocations."""
        self._refresh_nodes()
        entry = PendingEntry(pod.metadata.uid, (pod,))
        return self._request(entry, frozenset(), 0.0) is not None

    def forget(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self._nodes_of.pop(uid, None)
        self._seen_at.pop(uid, None)

    # ---- pending entries ----

    def _pending_entries(
        self,
        pods: Iterable[Pod],
        is_pending: Callable[[Pod], bool],
        starting: Collection[str],
    ) -> Iterable[PendingEntry]:
        gangs: dict[str, list[Pod]] = {}
        for pod in pods:
            if not is_open(pod) or self._cluster.is_assumed(pod.metadata.uid):
                continue
            gang = group_key(pod)
            if gang is None:
                if is_pending(pod):
                    yield PendingEntry(pod.metadata.uid, (pod,))
            elif self.requests_cards(pod):
                gangs.setdefault(gang, []).append(pod)
        for gang, members in gangs.items():
            if gang not in starting and any(map(is_pending, members)) and self._complete(members):
                yield PendingEntry(gang, tuple(sorted(members, key=lambda it: it.metadata.name)))

    def _request(
        self, entry: PendingEntry, excluded: frozenset[str], now: float
    ) -> PendingRequest | None:
        """Return what it requests of which nodes; None if no node could hold it, or one of its pods."""
        requests: list[Request] = []
        nodes: frozenset[str] = frozenset()
        for pod in entry.pods:
            demand = pod.demand(self._cluster.dialects)
            if demand.invalid is not None or not demand.parts:
                return None
            parts = demand.parts
            requests += [part.request for part in parts]
            eligible = self._eligible_nodes(pod, parts)
            if not eligible:
                return None
            # Mostly the same set for all: its hash is computed once.
            nodes = eligible if not nodes or nodes is eligible else nodes | eligible
        nodes = nodes - excluded if excluded else nodes
        if not nodes:
            return None
        same_node = len(entry.pods) == 1
        return replace(
            entry.request(now), requests=tuple(requests), nodes=nodes, same_node=same_node
        )

    # ---- eligible nodes ----

    def _refresh_nodes(self) -> None:
        if self._nodes_version == self._cluster.nodes_version:
            return
        self._nodes_version = self._cluster.nodes_version
        self._eligible.clear()
        self._sets.clear()
        self._nodes_of.clear()
        self._backfill.forget_impossible()
        self._nodes = {
            shared.node.name: shared.node
            for shared in self._cluster.shared_nodes()
            if self._cluster.node(shared.node.name) is not None
            and self._cluster.node_error(shared.node.name) is None
        }
        self._node_of_card = {
            card.uuid: name for name, node in self._nodes.items() for card in node.cards
        }
        self._with_mode = frozenset(
            name for name in self._nodes if node_modes.MODE_LABEL in labels(self._cluster, name)
        )
        self._kinds.clear()
        for name, node in self._nodes.items():
            kind = (
                node_kind(node, repaired=True),
                node.unit_mib,
                mode_labels(labels(self._cluster, name)),
            )
            self._kinds.setdefault(kind, []).append(name)

    def _eligible_nodes(self, pod: Pod, parts: tuple[SliceRequest, ...]) -> frozenset[str]:
        """Return the nodes for which the pod is eligible and that could hold it when empty."""
        uid = pod.metadata.uid
        known = self._nodes_of.get(uid)
        if known is None or known[0] is not pod:
            names = self._by_rules(pod) & self._could_hold(parts)
            known = self._nodes_of[uid] = pod, self._sets.setdefault(names, names)
        names = known[1]
        for name in names & self._with_mode if self._with_mode else ():
            if not admits(self._cluster, name, parts):
                # Its present pods exclude this one. If there is no other node, it waits for their end.
                names = names - {name} or names
        return names

    def _by_rules(self, pod: Pod) -> frozenset[str]:
        """Return the nodes for which the pod is eligible whatever they have."""
        spec = pod.spec
        rules = msgspec.json.encode((spec.node_selector, spec.tolerations, spec.affinity))
        if rules not in self._eligible:
            nodes = ((name, self._cluster.node(name)) for name in self._nodes)
            self._eligible[rules] = frozenset(
                name
                for name, node in nodes
                if node is not None and not ineligibility_reasons(pod, node)
            )
        return self._eligible[rules]

    def _could_hold(self, parts: tuple[SliceRequest, ...]) -> set[str]:
        requests, names = tuple(part.request for part in parts), set[str]()
        for alike in self._kinds.values():
            rule = admission_rule(self._cluster, alike[0])
            if rule.rejection_by_mode(parts) is None and fits_when_empty(
                requests, self._nodes[alike[0]], repaired=True
            ):
                names.update(alike)
        return names

    # ---- allocations ----

    def _all_allocations(
        self, gangs: Mapping[str, tuple[Placement, ...]], now: float
    ) -> tuple[dict[str, list[Allocation]], Counter[str]]:
        """Return all allocations on shared nodes, and how many each namespace has.

        They are by node, the same list as long as it is the same.
        """
        stale = self._changed.copy()
        self._changed.clear()
        if self._allocations_of is not self._nodes:
            self._allocations_of = self._nodes
            stale |= self._allocations.keys() ^ self._nodes.keys()
        if now >= self._valid_until:
            stale |= {name for name, (until, _) in self._allocations.items() if now >= until}
            self._valid_until = min((until for until, _ in self._allocations.values()), default=inf)
        for name in stale:
            _, forgotten = self._allocations.pop(name, (inf, []))
            self._held.subtract(it.user for it in forgotten)
            if name in self._nodes:
                self._read_allocations(name, now)
        allocations = {name: on_node for name, (_, on_node) in self._allocations.items()}
        held = self._held
        for gang, placements in gangs.items():
            user = gang.partition("/")[0]
            for it in placements:
                if it.node in allocations:
                    reserved = Allocation(it, None, user)
                    allocations[it.node] = [*allocations[it.node], reserved]
                    held = held + Counter((user,))
        return allocations, held

    def _read_allocations(self, name: str, now: float) -> None:
        allocations, valid_until = list[Allocation](), inf
        for allocation in self._cluster.allocations(name):
            deadline = self._deadline(allocation.pod, now)
            if deadline is not None:
                valid_until = min(valid_until, deadline + OVERDUE_TTL_S)
            user = allocation.pod.metadata.namespace
            allocations += [Allocation(it, deadline, user) for it in allocation.placements]
        self._allocations[name] = valid_until, allocations
        self._valid_until = min(self._valid_until, valid_until)
        self._held.update(it.user for it in allocations)

    def _deadline(self, pod: Pod, now: float) -> float | None:
        """Return when the pod has ended whatever it does; None without a limit, or long after it."""
        uid, limit = pod.metadata.uid, time_limit_s(pod)
        deadlines = []
        if limit is not None:
            started = seconds(pod.status.start_time)
            if started is None:
                started = self._seen_at.setdefault(uid, now)
            else:
                self._seen_at.pop(uid, None)
            deadlines.append(started + limit)
        # The API server computes this one, with the pod's grace period.
        deleted = seconds(pod.metadata.deletion_timestamp or "")
        deadlines += [deleted] if deleted is not None else []
        deadline = min(deadlines, default=None)
        return deadline if deadline is not None and deadline + OVERDUE_TTL_S > now else None


def is_open(pod: Pod) -> bool:
    """Return whether a scheduler may find a node for the pod, once fenka's own gate is removed."""
    return not (
        pod.spec.node_name
        or pod.finished
        or pod.metadata.deletion_timestamp is not None
        or any(it.name != QUEUE_GATE for it in pod.spec.scheduling_gates)
    )


def is_unplaced(pod: Pod) -> bool:
    """Return whether an open pod is pending by its own status: gated, or without a node that fits."""
    return pod.unschedulable is not None or pod.gated_by(QUEUE_GATE)


def time_limit_s(pod: Pod) -> float | None:
    """Return the seconds after its start at which the kubelet has ended the pod; None if it never does."""
    deadline, grace = pod.spec.active_deadline_seconds, pod.spec.termination_grace_period_seconds
    return None if deadline is None else float(deadline + (GRACE_S if grace is None else grace))


def _queue_entry(
    entry: PendingEntry,
    key: SortKey,
    placements: tuple[Placement, ...],
    status: QueueStatus | None,
) -> QueueEntry:
    if placements or status is None:
        return QueueEntry(entry, key, placements=placements)
    return QueueEntry(entry, key, status.unschedulable, status.reservation)
