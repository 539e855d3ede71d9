"""Who waits in a cluster, in which order, and what that comes to: cards named, cards kept. No I/O, no clock.

The extender serves the line whenever it matters for a pod, `fenka queue` once. The core's `Backfill` decides;
here pods become pending requests.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from fenka.cluster.eligibility import ineligibility_reasons
from fenka.cluster.objects import QUEUE_GATE, Pod, seconds
from fenka.cluster.pod_groups import MINIMUM_LABEL, group_key
from fenka.cluster.pod_placement import (
    fits_when_empty,
    resident_compute,
)
from fenka.cluster.state import ClusterState, PodAllocation
from fenka.core.backfill import Backfill
from fenka.core.evaluate import Policy
from fenka.core.fairness import NO_HISTORY, Fairness, UsageHistory
from fenka.core.inventory import DeviceId
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
from fenka.core.usage import UsageOverlay
from fenka.dialects import node_modes, nvidia
from fenka.dialects.base import InvalidRecord, SharedNode, SliceRequest

GRACE_S = 30
"""Kubernetes' own, for a pod that does not say how long it may take to end."""

OVERDUE_TTL_S = 60.0
"""Who has not ended so long after it had to (its node is gone) may end at any time, or never."""

DEPTH = 4
"""The number of pending requests that reserve cards."""

PLAIN = Fairness(penalty_per_request_s=0)


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A pod that waits, or those of a gang that are on no node yet. id: the pod's UID, or the gang's name."""

    id: str
    pods: tuple[Pod, ...]

    @property
    def name(self) -> str:
        """Its pod's, or its gang's."""
        meta = self.pods[0].metadata
        return meta.name if self.id == meta.uid else self.id.partition("/")[2]

    @property
    def namespace(self) -> str:
        """Of all its pods: whose turn it is."""
        return self.pods[0].metadata.namespace

    @property
    def priority(self) -> int:
        """A gang is as important as the least of it."""
        return min(it.spec.priority or 0 for it in self.pods)

    @property
    def time_limit_s(self) -> float | None:
        """Seconds after which all of it has ended, grace included; None if nothing ends it."""
        found = [time_limit_s(it) for it in self.pods]
        return None if None in found else max(it for it in found if it is not None)

    def waiting(self, now: float) -> PendingRequest:
        """As the core orders it: what it asks for depends on the nodes."""
        created = (seconds(it.metadata.creation_timestamp) for it in self.pods)
        at = min(now if it is None else it for it in created)
        return PendingRequest(self.id, (), at, self.priority, self.namespace, self.time_limit_s)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """How somebody stands in line: by `key`.

    placements: what fits for it now, on what those before it leave; none where it waits, and `unschedulable`
    has why. reservation: the cards that are reserved for it then; only the first few have one.
    """

    waiter: PendingEntry
    key: SortKey
    unschedulable: Unschedulable | None = None
    reservation: Reservation | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def why(self) -> str:
        """One sentence, empty for one that fits. It is over all cards: made only where it is read."""
        return self.unschedulable.sentence() if self.unschedulable else ""

    @property
    def requested_at(self) -> float:
        """Seconds since 1970."""
        return self.key[3]


@dataclass(slots=True)
class QueueSnapshot:
    """What serving the line once came to. places: in order.

    room: whether another request that came to wait might reserve cards, wherever it stands.
    """

    places: tuple[QueueEntry, ...] = ()
    room: bool = True
    home: Mapping[DeviceId, str] = field(default_factory=dict)
    """The node of each card."""
    past: HistoryLookup = lambda _: NO_HISTORY
    """What namespaces have and had, as of `now`."""
    fairness: Fairness = PLAIN
    now: float = 0.0
    _keys: dict[str, SortKey] = field(init=False)
    _ranks: list[SortKey] = field(init=False)
    _users: dict[str, list[tuple[float, float, str]]] = field(init=False)
    marks: tuple[tuple[int, QueueEntry], ...] = field(init=False)
    """Those for whom anything is kept, with their rank."""

    def __post_init__(self) -> None:
        self._keys = {it.waiter.id: it.key for it in self.places}
        self._ranks = [it.key for it in self.places]
        self._users = {}
        for it in self.places:
            insort(self._users.setdefault(it.waiter.namespace, []), _arrival(it.key))
        self.marks = tuple(
            (rank, it)
            for rank, it in enumerate(self.places)
            if it.placements or it.reservation is not None
        )

    def __contains__(self, waiter_id: object) -> bool:
        return waiter_id in self._keys

    def key(self, waiting: PendingRequest) -> SortKey:
        """Of one that waits, or would come to wait now."""
        known = self._keys.get(waiting.id)
        if known is not None:
            return known
        past = self.past(waiting.user)
        mine = _arrival(sort_key(waiting, 0, past, PLAIN, self.now, first=False))
        others = self._users.get(waiting.user, [])
        before = bisect_left(others, mine)
        first = not before or others[before - 1][0] != mine[0]
        return sort_key(waiting, before, past, self.fairness, self.now, first=first)

    def rank(self, found: SortKey) -> int:
        """How many are served before it."""
        return bisect_left(self._ranks, found)


def _arrival(found: SortKey) -> tuple[float, float, str]:
    return found[0], found[3], found[4]


def gang_complete_by_label(pods: Sequence[Pod]) -> bool:
    """By their own label alone: as many wait as start together. True where it says nothing."""
    text = pods[0].metadata.labels.get(MINIMUM_LABEL, "")
    return len(pods) >= (int(text) if text.isdecimal() and len(text) < 7 else 0)


class PendingQueue:
    """Serves those who wait. What it remembers between two servings are answers that still hold."""

    def __init__(
        self,
        world: ClusterState,
        policy: Policy,
        fairness: Fairness | None = None,
        complete: Callable[[Sequence[Pod]], bool] = gang_complete_by_label,
        uses: UsageHistory | None = None,
    ) -> None:
        """complete: whether of a gang, of which these wait, enough are there. uses: by namespace."""
        self._world, self._policy, self._fairness = world, policy, fairness or Fairness()
        self._uses = uses or UsageHistory(self._fairness)
        self._complete = complete
        self._backfill = Backfill((), policy, PLAIN, DEPTH)
        self._shared: list[SharedNode] = []
        self._home: dict[DeviceId, str] = {}
        self._nodes_version = -1
        self._may_go: dict[tuple[bytes, tuple[SliceRequest, ...]], frozenset[str]] = {}
        self._mixed: frozenset[str] = frozenset()
        """Nodes that admit by what is held there."""
        self._node_rules: dict[str, tuple[Pod, bytes]] = {}
        self._held: dict[str, tuple[int, float, list[Allocation]]] = {}
        """By node: as of which generation, from when on no more, and what."""
        self._seen: dict[str, float] = {}
        """Since when pods hold whose node has not said so yet."""

    @property
    def fairness(self) -> Fairness:
        """What orders those of one priority."""
        return self._fairness

    def serve(
        self,
        pods: Iterable[Pod],
        now: float,
        *,
        refused: Callable[[Pod], bool] | None = None,
        planned: Mapping[str, tuple[Placement, ...]] | None = None,
        struck: Mapping[str, frozenset[str]] | None = None,
    ) -> QueueSnapshot:
        """Once, for the pods of these that wait. now: seconds since 1970.

        refused: whether a pod waits; by default what its own status says. planned: what is held for gangs
        besides what the world knows; these do not wait. struck: nodes to which a waiter may not go, whatever
        it looks like.
        """
        planned, struck, refused = planned or {}, struck or {}, refused or waits
        self._renew_nodes()
        held, users = self._all_held(planned, now)
        entries: dict[str, PendingEntry] = {}
        requests: list[PendingRequest] = []
        for entry in self._waiters(pods, refused, planned):
            request = self._request(entry, struck.get(entry.id, frozenset()), now)
            if request is not None:
                entries[entry.id] = entry
                requests.append(request)
        past = history_lookup(users, self._uses, now)
        order = sort_keys(requests, past, self._fairness, now)
        usage = UsageOverlay(self._world)
        for placements in planned.values():
            for placement in placements:
                usage.add(placement)
        # The order is settled: the core sees the rank as the time of the request.
        ranked = [
            replace(request, requested_at=float(rank), priority=0, user="")
            for rank, (_, request) in enumerate(order)
        ]
        result = self._backfill.serve(ranked, held, now, usage)
        placed, pending = dict(result.placed), {it.id: it for it in result.pending}
        places = [
            _place(entries[request.id], key, placed.get(request.id, ()), pending.get(request.id))
            for key, request in order
        ]
        room = sum(it.reservation is not None for it in result.pending) < DEPTH
        return QueueSnapshot(tuple(places), room, self._home, past, self._fairness, now)

    def wants(self, pod: Pod) -> bool:
        """Whether it asks for something that is fenka's to give, and can be read."""
        return pod.demand(self._world.dialects).dialect is not None

    def orders(self, pod: Pod) -> bool:
        """Return whether this line decides when the pod is served.

        kube-scheduler also places pods with whole cards on nodes that do not share: those pods are not in
        this line. Nor is a pod that could not be on any sharing node.
        """
        wanted = pod.demand(self._world.dialects)
        return wanted.dialect is not None and wanted.dialect is not nvidia and self.has_nodes(pod)

    def has_nodes(self, pod: Pod) -> bool:
        """Return whether the pod may go to a node where it could be if nothing were allocated."""
        self._renew_nodes()
        entry = PendingEntry(pod.metadata.uid, (pod,))
        return self._request(entry, frozenset(), 0.0) is not None

    # ---- who waits ----

    def _waiters(
        self,
        pods: Iterable[Pod],
        refused: Callable[[Pod], bool],
        planned: Mapping[str, tuple[Placement, ...]],
    ) -> Iterable[PendingEntry]:
        gangs: dict[str, list[Pod]] = {}
        for pod in pods:
            if not is_open(pod) or self._world.is_assumed(pod.metadata.uid):
                continue
            gang = group_key(pod)
            if gang is None:
                if refused(pod):
                    yield PendingEntry(pod.metadata.uid, (pod,))
            elif self.wants(pod):
                gangs.setdefault(gang, []).append(pod)
        for gang, members in gangs.items():
            if gang not in planned and any(map(refused, members)) and self._complete(members):
                yield PendingEntry(gang, tuple(sorted(members, key=lambda it: it.metadata.name)))

    def _request(
        self, entry: PendingEntry, struck: frozenset[str], now: float
    ) -> PendingRequest | None:
        """Return what it requests and of which nodes; None if it has nowhere to go."""
        requests: list[Request] = []
        nodes: frozenset[str] = frozenset()
        for pod in entry.pods:
            parts = self._parts(pod)
            if not parts:
                return None
            requests += [part.request for part in parts]
            eligible = self._nodes(pod, parts)
            # Mostly the same set for all: its hash is computed once.
            nodes = eligible if not nodes or nodes is eligible else nodes | eligible
        nodes = nodes - struck if struck else nodes
        if not nodes:
            return None
        same_node = len(entry.pods) == 1
        return replace(
            entry.waiting(now), requests=tuple(requests), nodes=nodes, same_node=same_node
        )

    def _parts(self, pod: Pod) -> tuple[SliceRequest, ...]:
        try:
            return pod.demand(self._world.dialects).parts
        except InvalidRecord:
            return ()

    def _rules(self, pod: Pod) -> bytes:
        """Return what of the pod decides to which nodes it may go."""
        known = self._node_rules.get(pod.metadata.uid)
        if known is None or known[0] is not pod:
            spec = pod.spec
            rules = msgspec.json.encode((spec.node_selector, spec.tolerations, spec.affinity))
            known = self._node_rules[pod.metadata.uid] = pod, rules
        return known[1]

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._node_rules.pop(uid, None)
        self._seen.pop(uid, None)

    # ---- where to ----

    def _renew_nodes(self) -> None:
        if self._nodes_version == self._world.nodes_version:
            return
        self._nodes_version = self._world.nodes_version
        self._may_go.clear()
        self._shared = []
        mixed = set()
        for share in self._world.shared_nodes():
            node = self._world.node(share.node.name)
            if node is None or self._world.node_error(share.node.name) is not None:
                continue
            self._shared.append(share)
            if node_modes.MODE_LABEL in node.metadata.labels:
                mixed.add(share.node.name)
        nodes = [share.node for share in self._shared]
        self._mixed = frozenset(mixed)
        self._home = {card.uuid: node.name for node in nodes for card in node.cards}
        self._backfill.set_nodes(nodes)

    def _nodes(self, pod: Pod, parts: tuple[SliceRequest, ...]) -> frozenset[str]:
        """Return the nodes to which the pod may go, and where it could be if nothing were allocated."""
        shape = self._rules(pod), parts
        found = self._may_go.get(shape)
        if found is None:
            found = frozenset(
                share.node.name for share in self._shared if self._admitted(pod, parts, share)
            )
            self._may_go[shape] = found
        for name in found & self._mixed if self._mixed else ():
            labels = self._labels(name)
            try:
                node_modes.check_admission(labels, parts, resident_compute(self._world, name))
            except InvalidRecord:
                # Only as long as they are there; where there is no other, it waits for that.
                found = found - {name} or found
        return found

    def _admitted(self, pod: Pod, parts: tuple[SliceRequest, ...], share: SharedNode) -> bool:
        node = self._world.node(share.node.name)
        if node is None or ineligibility_reasons(pod, node):
            return False
        if not fits_when_empty(tuple(part.request for part in parts), share.node):
            return False
        try:
            node_modes.check_admission(node.metadata.labels, parts)
        except InvalidRecord:
            return False
        return True

    def _labels(self, name: str) -> Mapping[str, str]:
        node = self._world.node(name)
        return node.metadata.labels if node else {}

    # ---- what is held ----

    def _all_held(
        self, planned: Mapping[str, tuple[Placement, ...]], now: float
    ) -> tuple[list[Allocation], dict[str, int]]:
        """Return all allocations on shared nodes, and how many each namespace has."""
        names = {share.node.name for share in self._shared}
        held = [it for share in self._shared for it in self._held_on(share.node.name, now)]
        for gang, placements in planned.items():
            user = gang.partition("/")[0]
            held += [Allocation(it, None, user) for it in placements if it.node in names]
        return held, Counter(it.user for it in held)

    def _held_on(self, name: str, now: float) -> list[Allocation]:
        generation = self._world.generation(name)
        known = self._held.get(name)
        if known is not None and known[0] == generation and now < known[1]:
            return known[2]
        found = []
        until = inf
        for holding in self._world.allocations(name):
            deadline = self._ends_by(holding, now)
            if deadline is not None:
                until = min(until, deadline + OVERDUE_TTL_S)
            user = holding.pod.metadata.namespace
            found += [Allocation(it, deadline, user) for it in holding.placements]
        self._held[name] = generation, until, found
        return found

    def _ends_by(self, holding: PodAllocation, now: float) -> float | None:
        """When the pod has ended whatever it does; None if nothing ends it, or if that time is long over."""
        pod = holding.pod
        uid, runs = pod.metadata.uid, time_limit_s(pod)
        ends = []
        if runs is not None:
            started = seconds(pod.status.start_time)
            if started is None:
                started = self._seen.setdefault(uid, now)
            else:
                self._seen.pop(uid, None)
            ends.append(started + runs)
        # The API server's own reckoning, the pod's grace included.
        deleted = seconds(pod.metadata.deletion_timestamp or "")
        ends += [deleted] if deleted is not None else []
        deadline = min(ends, default=None)
        return deadline if deadline is not None and deadline + OVERDUE_TTL_S > now else None


def is_open(pod: Pod) -> bool:
    """Return whether a scheduler may find a node for it, once fenka's own gate is removed."""
    return not (
        pod.spec.node_name
        or pod.finished
        or pod.metadata.deletion_timestamp is not None
        or any(it.name != QUEUE_GATE for it in pod.spec.scheduling_gates)
    )


def waits(pod: Pod) -> bool:
    """Return whether an open pod waits for certain: it is gated, or kube-scheduler has found no node."""
    return pod.unschedulable is not None or pod.gated_by(QUEUE_GATE)


def time_limit_s(pod: Pod) -> float | None:
    """Seconds after its start at which the kubelet has ended it; None if it never does."""
    deadline, grace = pod.spec.active_deadline_seconds, pod.spec.termination_grace_period_seconds
    return None if deadline is None else float(deadline + (GRACE_S if grace is None else grace))


def _place(
    entry: PendingEntry,
    key: SortKey,
    placements: tuple[Placement, ...],
    status: QueueStatus | None,
) -> QueueEntry:
    if placements or status is None:
        return QueueEntry(entry, key, placements=placements)
    return QueueEntry(entry, key, status.unschedulable, status.reservation)
