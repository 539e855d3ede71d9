"""The pending pods of a cluster in the order in which they are served, and what each gets or reserves. Pure.

The scheduler schedules the queue whenever it matters for a pod, `fenka queue` once. The core's `Backfill`
decides; here pods become pending requests.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

import msgspec

from fenka.cluster import node_admission, queue_snapshot
from fenka.cluster.objects import QUEUE_GATE, Pod, seconds
from fenka.cluster.placement import (
    Feasible,
    HeldPlacement,
    PodEvaluator,
    QueueConstraints,
    Verdict,
    never_fits_instances,
    reserve_instances,
)
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.pod_groups import MINIMUM_LABEL, gang_proximity, group_key
from fenka.cluster.state import ClusterState
from fenka.core import queue
from fenka.core.backfill import Backfill, Steps
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columnar_timeline import CardStates, ColumnarTimeline
from fenka.core.evaluate import Policy
from fenka.core.gangs import place_gang
from fenka.core.inventory import DeviceId, Node
from fenka.core.mig.geometry import Geometry
from fenka.core.mig.instances import RESERVING, NoInstance
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity
from fenka.dialects import nodes
from fenka.dialects.base import InvalidRecord, SharedNode


class InstanceQueue:
    """One pass over the queue. Each pod is placed on what those before it leave.

    Instances are created where pods need them, so there are no cards to reserve. A placement that fits is
    held for its pod. An entry that starves keeps the place free of which the least is taken.

    Attributes:
        reserved: the node of each instance whose place is kept free.
    """

    def __init__(self, cluster: ClusterState, policy: Policy) -> None:
        self._cluster = cluster
        self._evaluator = PodEvaluator(cluster, policy)
        self.reserved: dict[DeviceId, str] = {}
        self._reservations = 0
        self._held: dict[str, tuple[HeldPlacement, ...]] = {}
        self._verdicts: dict[object, dict[str, Verdict | None]] = {}
        """By what decides them, then by node, of which only a placement or reservation changes them."""
        self._positions = 0

    def serve(
        self, pod: Pod, entry: str, nodes: frozenset[str], *, starves: bool
    ) -> tuple[Placement, ...] | queue.QueueStatus:
        """Return where the pod fits now; else why it waits, and what is reserved for it.

        Args:
            pod: the only one of its entry.
            entry: its ID.
            nodes: the eligible ones, on which the pod requests instances or slices inside them.
            starves: whether places are reserved for a pod that does not fit.
        """
        names, namespace = sorted(nodes), pod.metadata.namespace
        parts = pod.demand(self._cluster.dialects).parts
        key = tuple(part.request for part in parts), nodes, namespace
        verdicts = self._verdicts.setdefault(key, {})
        unknown = [name for name in names if name not in verdicts]
        verdicts.update(self._evaluator.evaluate(pod, unknown, self._constraints()))
        fits = [
            (verdict.score, name, verdict.placements)
            for name, verdict in verdicts.items()
            if isinstance(verdict, Feasible)
        ]
        if fits:
            _, name, placements = min(fits, key=lambda fit: fit[:2])
            held = (HeldPlacement(entry, placement, namespace) for placement in placements)
            self._held[name] = (*self._held.get(name, ()), *held)
            self._changed(name)
            return placements
        rejected = _reason(
            [
                verdict
                for verdict in verdicts.values()
                if isinstance(verdict, node_admission.Infeasible)
            ]
        )
        self._positions += 1
        kept = self._reserve(pod, names) if starves else frozenset()
        reservation = queue.Reservation(kept, None) if kept else None
        return queue.QueueStatus(entry, self._positions, rejected, reservation)

    def _reserve(self, pod: Pod, names: Sequence[str]) -> frozenset[DeviceId]:
        if self._reservations >= RESERVING:
            return frozenset()
        options = [
            (*option, name)
            for name in names
            if (shared := self._cluster.shared_node(name)) is not None
            and (option := self._option(shared, pod)) is not None
        ]
        if not options:
            return frozenset()
        _, kept, name = min(options, key=lambda option: (option[0], option[2]))
        self._reservations += 1
        self.reserved |= dict.fromkeys(kept, name)
        self._changed(name)
        return kept

    def _option(
        self, shared: SharedNode, pod: Pod
    ) -> tuple[tuple[int, ...], frozenset[DeviceId]] | None:
        demand = self._cluster.demand_on(shared.node.name, pod)
        requests = [part.request for part in demand.parts]
        return reserve_instances(shared, self._cluster, requests, self.reserved)

    def _changed(self, name: str) -> None:
        for verdicts in self._verdicts.values():
            verdicts.pop(name, None)

    def _constraints(self) -> QueueConstraints:
        nodes = frozenset(self._held).union(self.reserved.values())
        return QueueConstraints(frozenset(self.reserved), self._held, nodes)


def _reason(verdicts: Sequence[node_admission.Infeasible]) -> NoInstance:
    """Return one that the pod waits for, rather than one that will not change."""
    first = min(verdicts, key=lambda verdict: verdict.unresolvable, default=None)
    return NoInstance((), first.sentence if first else "no node has such an instance")


OVERDUE_TTL_S = 60.0
"""A pod that has not ended this long after it should have may end at any time, or never: its node is gone."""


class QueueAllocations:
    """The allocations of all nodes. They are the same lists as long as they are equal.

    They are what the queue counts as allocated, and until when. Between two passes over the queue only
    nodes whose allocations have changed are read again.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._changed: set[str] = set()
        """Nodes whose allocations have changed."""
        cluster.watch(self._changed)
        self._by_node: dict[str, list[queue.Allocation]] = {}
        self._until: dict[str, float] = {}
        """Until when those of a node are valid, where they are not valid indefinitely."""
        self._valid_until = inf
        """Until when all of them are valid, at least."""
        self._of: Mapping[str, Node] = {}
        """The nodes of which the allocations were read."""
        self._held: Counter[str] = Counter()
        """The number of allocations of each namespace."""
        self._seen_at: dict[str, float] = {}
        """When pods were seen first whose node has not reported their start."""

    def forget(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self._seen_at.pop(uid, None)

    def read(
        self,
        nodes: Mapping[str, Node],
        gangs: Mapping[str, tuple[Placement, ...]],
        now: float,
    ) -> tuple[Mapping[str, list[queue.Allocation]], Counter[str]]:
        """Return all allocations on shared nodes, and how many each namespace has.

        They are by node, and valid until the next call.
        """
        stale = self._changed.copy()
        self._changed.clear()
        if self._of is not nodes:
            self._of = nodes
            stale |= self._by_node.keys() ^ nodes.keys()
        if now >= self._valid_until:
            stale |= {name for name, until in self._until.items() if now >= until}
        for name in stale:
            self._held.subtract(allocation.user for allocation in self._by_node.pop(name, []))
            self._until.pop(name, None)
            if name in nodes:
                self._read_node(name, now)
        if now >= self._valid_until:
            self._valid_until = min(self._until.values(), default=inf)
        if not gangs:
            return self._by_node, self._held
        allocations, held = self._by_node.copy(), self._held.copy()
        for gang, placements in gangs.items():
            user = gang.partition("/")[0]
            for placement in placements:
                if placement.node in allocations:
                    reserved = queue.Allocation(placement, None, user)
                    allocations[placement.node] = [*allocations[placement.node], reserved]
                    held[user] += 1
        return allocations, held

    def _read_node(self, name: str, now: float) -> None:
        allocations = list[queue.Allocation]()
        for allocation in self._cluster.allocations(name):
            deadline = self._deadline(allocation.pod, now)
            if deadline is not None:
                until = min(deadline + OVERDUE_TTL_S, self._until.get(name, inf))
                self._until[name] = until
                self._valid_until = min(self._valid_until, until)
            user = allocation.pod.metadata.namespace
            for placement in allocation.placements:
                allocations.append(queue.Allocation(placement, deadline, user))
        self._by_node[name] = allocations
        self._held.update(allocation.user for allocation in allocations)

    def _deadline(self, pod: Pod, now: float) -> float | None:
        """Return when the pod has ended whatever it does; None without a limit, or long after it."""
        uid, limit = pod.metadata.uid, queue_snapshot.time_limit_s(pod)
        if limit is None and pod.metadata.deletion_timestamp is None:
            return None
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


DEPTH = 4
"""The number of pending entries that reserve cards."""

GANGS_IN_ORDER, GANGS_IN_TURN = 32, 16
"""Gangs that one pass tries to place: the first by order, of all namespaces in turns, then others in turn.

Each takes milliseconds, and tenants choose how many there are.
"""


class NotTried(Unschedulable):
    """A gang that the last pass has not tried to place. others: those before it that have their turn."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self._others = others

    def sentence(self) -> str:
        """Return why it waits."""
        return (
            f"{self._others} other gangs are tried first; it is tried in turn, within some seconds"
        )


class GangTurns:
    """Chooses the gangs that a pass tries to place, so that its cost does not grow with their number."""

    def __init__(self) -> None:
        self._last = ""
        """The last gang that was tried in turn."""
        self._kept = frozenset[str]()

    def keep(self, gangs: Iterable[str]) -> None:
        """Try these again in the next pass: they have cards, and lose none of them for want of a turn."""
        self._kept = frozenset(gangs)

    def choose(self, gangs: Sequence[tuple[str, str]]) -> frozenset[str]:
        """Return the gangs to try. gangs: their namespaces and keys, in order."""
        if len(gangs) <= GANGS_IN_ORDER + GANGS_IN_TURN:
            return frozenset(key for _, key in gangs)
        before = Counter[str]()
        ranked = []
        for place, (namespace, key) in enumerate(gangs):
            ranked.append((before[namespace], place, key))
            before[namespace] += 1
        in_order = [key for _, _, key in sorted(ranked)]
        chosen = set(in_order[:GANGS_IN_ORDER])
        chosen |= {key for key in in_order if key in self._kept}
        waiting = sorted(key for key in in_order if key not in chosen)
        start = bisect_right(waiting, self._last)
        in_turn = (waiting[start:] + waiting[:start])[:GANGS_IN_TURN]
        if in_turn:
            self._last = in_turn[-1]
        return frozenset(chosen.union(in_turn))


def gang_complete_by_label(pods: Sequence[Pod]) -> bool:
    """Return whether as many pods are pending as their label requires.

    It is True without a label, and False if the label is no number: no gang starts then.
    """
    text = pods[0].metadata.labels.get(MINIMUM_LABEL, "0")
    return text.isdecimal() and len(text) < 7 and len(pods) >= int(text)


class PendingQueue:
    """Schedules the pending pods. Between two calls it caches only what has not changed."""

    def __init__(
        self,
        cluster: ClusterState,
        policy: Policy,
        fairness: queue.Fairness | None = None,
        complete: Callable[[Sequence[Pod]], bool] = gang_complete_by_label,
        uses: queue.UsageHistory | None = None,
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
        self._cluster, self._fairness = cluster, fairness or queue.Fairness()
        self._uses = uses or queue.UsageHistory(self._fairness)
        self._complete = complete
        self._backfill = Backfill(policy, DEPTH)
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
        self._allocations = QueueAllocations(cluster)
        self._turns = GangTurns()

    @property
    def fairness(self) -> queue.Fairness:
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
    ) -> Steps[queue_snapshot.QueueSnapshot]:
        """Schedule those of the pods that are pending. Steps of only one call may be taken at a time.

        The cluster may change in between; the result then belongs to some state since the first step.

        Args:
            pods: any pods.
            now: seconds since 1970.
            is_pending: whether an open pod is pending; by default its own status decides.
            gangs: what is reserved for gangs that are starting, by gang. These are not pending.
            excluded_nodes: nodes that an entry must not get, by entry.
        """
        gangs = gangs or {}
        entries, requests = yield from self._read_requests(
            self._pending_entries(pods, is_pending or is_unplaced, gangs), excluded_nodes or {}, now
        )
        yield
        # Up to the next step, all is read of one state of the cluster.
        self._refresh_nodes()
        nodes, node_of_card = self._nodes.values(), self._node_of_card
        allocations, held = self._allocations.read(self._nodes, gangs, now)
        columns = self._live.read().copy()
        if not self._live_has_gangs:
            columns.add(*(placement for placements in gangs.values() for placement in placements))
        history = queue.history_lookup(held, self._uses, now)
        yield
        order = queue.sort_keys(requests, history, self._fairness, now)
        yield
        placer = ColumnarPlacer(columns)
        timeline = ColumnarTimeline(nodes, allocations, now, self._states)
        yield
        # Whole cards and instances are on different cards, so each part is served without the other.
        parts = (self._on_cards(entries[request.id].pods[0], request) for _, request in order)
        of_many = [
            (request.user, request.id) for _, request in order if len(entries[request.id].pods) > 1
        ]
        tried = self._turns.choose(of_many)
        left_out = {key for _, key in of_many if key not in tried}
        on_cards = [part for part in parts if part is not None and part.id not in left_out]
        result = yield from self._backfill.serve(on_cards, placer, timeline, now)
        yield
        placed = dict(result.placed)
        pending = {status.id: status for status in result.pending}
        self._turns.keep(
            [*placed, *(status.id for status in result.pending if status.reservation is not None)]
        )
        not_tried = NotTried(len(tried))
        pending |= {key: queue.QueueStatus(key, 0, not_tried, None) for key in left_out}
        reserved = yield from self._serve_instances(order, entries, placed, pending)
        queue_entries = tuple(
            _queue_entry(
                entries[request.id], key, placed.get(request.id, ()), pending.get(request.id)
            )
            for key, request in order
        )
        yield
        reservations = sum(status.reservation is not None for status in result.pending)
        return queue_snapshot.QueueSnapshot(
            queue_entries,
            reservations < DEPTH,
            node_of_card | reserved if reserved else node_of_card,
            history,
            self._fairness,
            now,
        )

    def _read_requests(
        self,
        pending: Iterable[queue_snapshot.PendingEntry],
        excluded_nodes: Mapping[str, frozenset[str]],
        now: float,
    ) -> Steps[tuple[dict[str, queue_snapshot.PendingEntry], list[queue.PendingRequest]]]:
        """Return the entries that could be placed, by ID, and what they request."""
        entries: dict[str, queue_snapshot.PendingEntry] = {}
        requests: list[queue.PendingRequest] = []
        self._refresh_nodes()
        for entry in pending:
            yield
            request = self._request(entry, excluded_nodes.get(entry.id, frozenset()), now)
            if request is not None:
                entries[entry.id] = entry
                requests.append(request)
        return entries, requests

    def _serve_instances(
        self,
        order: Iterable[tuple[queue.SortKey, queue.PendingRequest]],
        entries: Mapping[str, queue_snapshot.PendingEntry],
        placed: dict[str, tuple[Placement, ...]],
        pending: dict[str, queue.QueueStatus],
    ) -> Steps[dict[DeviceId, str]]:
        """Serve what requests instances, and has not been placed on cards.

        Args:
            order: the requests in order, with their keys.
            entries: the pods, by ID.
            placed: what is placed, by ID. New placements are added.
            pending: what is not placed, and why.

        Returns:
            The node of each instance whose place is kept free.
        """
        instances = InstanceQueue(self._cluster, self._backfill.policy)
        for key, request in order:
            pod = entries[request.id].pods[0]
            divided = frozenset() if request.id in placed else self._divided(pod, request)
            if not divided:
                continue
            starves = key[1] == 0 and request.id not in pending
            verdict = instances.serve(pod, request.id, divided, starves=starves)
            if not isinstance(verdict, queue.QueueStatus):
                placed[request.id] = verdict
                pending.pop(request.id, None)
            else:
                pending.setdefault(request.id, verdict)
            yield
        return instances.reserved

    def requests_cards(self, pod: Pod) -> bool:
        """Return whether the pod requests something that fenka places, and can be read."""
        return pod.demand(self._cluster.dialects).dialect is not None

    def decides(self, pod: Pod) -> bool:
        """Return whether this queue decides when the pod is scheduled.

        It does not for whole cards and instances, which kube-scheduler also places on nodes that do not
        share. Nor does it for a pod that no sharing node could hold.
        """
        demand = pod.demand(self._cluster.dialects)
        return demand.dialect is not None and not demand.served_by_kubelet and self.has_nodes(pod)

    def has_nodes(self, pod: Pod) -> bool:
        """Return whether the pod is eligible for a node that could hold it without any allocations."""
        self._refresh_nodes()
        entry = queue_snapshot.PendingEntry(pod.metadata.uid, (pod,))
        return self._request(entry, frozenset(), 0.0) is not None

    def forget(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self._nodes_of.pop(uid, None)
        self._allocations.forget(uid)

    # ---- pending entries ----

    def _pending_entries(
        self,
        pods: Iterable[Pod],
        is_pending: Callable[[Pod], bool],
        starting: Collection[str],
    ) -> Iterable[queue_snapshot.PendingEntry]:
        gangs: dict[str, list[Pod]] = {}
        for pod in pods:
            if not is_open(pod) or self._cluster.is_assumed(pod.metadata.uid):
                continue
            gang = group_key(pod)
            if gang is None:
                if is_pending(pod):
                    yield queue_snapshot.PendingEntry(pod.metadata.uid, (pod,))
            elif self.requests_cards(pod):
                gangs.setdefault(gang, []).append(pod)
        for gang, members in gangs.items():
            if gang not in starting and any(map(is_pending, members)) and self._complete(members):
                yield queue_snapshot.PendingEntry(
                    gang, tuple(sorted(members, key=lambda pod: pod.metadata.name))
                )

    def _request(
        self, entry: queue_snapshot.PendingEntry, excluded: frozenset[str], now: float
    ) -> queue.PendingRequest | None:
        """Return what it requests of which nodes; None if no node could hold it, or one of its pods."""
        requests: list[Request] = []
        nodes: frozenset[str] = frozenset()
        for pod in entry.pods:
            demand = pod.demand(self._cluster.dialects)
            if demand.invalid is not None or not demand.parts:
                return None
            requests += [part.request for part in demand.parts]
            eligible = self._eligible_nodes(pod)
            if not eligible:
                return None
            # Mostly the same set for all: its hash is computed once.
            nodes = eligible if not nodes or nodes is eligible else nodes | eligible
        nodes = nodes - excluded if excluded else nodes
        if not nodes:
            return None
        same_node = len(entry.pods) == 1
        if not same_node and any(request.instance for request in requests):
            return None
        try:
            proximity = self._proximity(entry)
        except InvalidRecord:
            # The gang is not placed: its pods are told why.
            return None
        return entry.request(now, tuple(requests), nodes, same_node=same_node, proximity=proximity)

    def _proximity(self, entry: queue_snapshot.PendingEntry) -> Proximity | None:
        """Return how close together the members of a gang are placed. Raises InvalidRecord."""
        gang = group_key(entry.pods[0])
        if gang is None:
            return None
        return gang_proximity(entry.pods, self._cluster.topology(), self._cluster.gang_nodes(gang))

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
            shared.node.name: self._cluster.card_node(shared.node.name)
            for shared in self._cluster.shared_nodes()
            if self._cluster.node(shared.node.name) is not None
            and self._cluster.node_error(shared.node.name) is None
        }
        self._node_of_card = {
            card.uuid: name for name, node in self._nodes.items() for card in node.cards
        }
        self._with_mode = frozenset(
            name
            for name in self._nodes
            if nodes.MODE_LABEL in node_admission.labels(self._cluster, name)
        )
        self._kinds.clear()
        for name, node in self._nodes.items():
            kind = (
                node_admission.node_kind(node, repaired=True),
                node.unit_mib,
                node_admission.mode_labels(node_admission.labels(self._cluster, name)),
                self._geometries(name),
            )
            self._kinds.setdefault(kind, []).append(name)

    def _eligible_nodes(self, pod: Pod) -> frozenset[str]:
        """Return the nodes for which the pod is eligible and that could hold it when empty."""
        uid = pod.metadata.uid
        known = self._nodes_of.get(uid)
        if known is None or known[0] is not pod:
            names = self._by_rules(pod) & self._could_hold(pod)
            names -= node_admission.excluded_nodes(self._cluster, pod)
            known = self._nodes_of[uid] = pod, self._sets.setdefault(names, names)
        names = known[1]
        planned = self._cluster.pins.node_of(uid)
        if planned in names and self._fits_now(pod, planned):
            return frozenset({planned})
        for name in names & self._with_mode if self._with_mode else ():
            if not node_admission.admits(
                self._cluster, name, self._cluster.demand_on(name, pod).parts
            ):
                # Its present pods exclude this one. If there is no other node, it waits for their end.
                names = names - {name} or names
        return names

    def _fits_now(self, pod: Pod, name: str) -> bool:
        """Return whether a pod that requests cards of a node fits it now."""
        demand, node = self._cluster.demand_on(name, pod), self._nodes[name]
        requests = tuple(part.request for part in demand.parts)
        return not demand.in_instances and not isinstance(
            place_gang(self._live.usage, requests, "binpack", (node,)), Unschedulable
        )

    def _by_rules(self, pod: Pod) -> frozenset[str]:
        """Return the nodes for which the pod is eligible whatever they have."""
        spec = pod.spec
        rules = msgspec.json.encode((spec.node_selector, spec.tolerations, spec.affinity))
        if rules not in self._eligible:
            nodes = ((name, self._cluster.node(name)) for name in self._nodes)
            self._eligible[rules] = frozenset(
                name
                for name, node in nodes
                if node is not None and not node_admission.ineligibility_reasons(pod, node)
            )
        return self._eligible[rules]

    def _could_hold(self, pod: Pod) -> set[str]:
        names = set[str]()
        for alike in self._kinds.values():
            demand = self._cluster.demand_on(alike[0], pod)
            rule = node_admission.admission_rule(self._cluster, alike[0])
            if demand.invalid is not None or rule.rejection_by_mode(demand.parts) is not None:
                continue
            requests = tuple(part.request for part in demand.parts)
            if self._could_hold_on(alike[0], requests):
                names.update(alike)
        return names

    def _could_hold_on(self, name: str, requests: tuple[Request, ...]) -> bool:
        if not requests[0].instance:
            return node_admission.fits_when_empty(requests, self._nodes[name], repaired=True)
        shared = self._cluster.shared_node(name)
        return shared is not None and not never_fits_instances(shared, requests)

    def _geometries(self, name: str) -> tuple[Geometry | None, ...]:
        """Return what each card of a node can be divided into; empty if none is divided."""
        shared = self._cluster.shared_node(name)
        geometries = shared.division.geometries if shared else {}
        return tuple(geometries.get(card.uuid) for card in self._nodes[name].cards if geometries)

    # ---- cards and instances ----

    def _on_cards(self, pod: Pod, request: queue.PendingRequest) -> queue.PendingRequest | None:
        """Return the request of nodes where it is of cards; None if there are none."""
        nodes, divided = request.nodes or frozenset(), self._divided(pod, request)
        if not divided:
            return request
        return replace(request, nodes=nodes - divided) if nodes > divided else None

    def _divided(self, pod: Pod, request: queue.PendingRequest) -> frozenset[str]:
        return self._cluster.instance_nodes(pod, request.nodes or frozenset())


def is_open(pod: Pod) -> bool:
    """Return whether a scheduler may find a node for the pod, once fenka's own gate is removed."""
    return not (
        pod.spec.node_name
        or pod.finished
        or pod.metadata.deletion_timestamp is not None
        or any(gate.name != QUEUE_GATE for gate in pod.spec.scheduling_gates)
    )


def is_unplaced(pod: Pod) -> bool:
    """Return whether an open pod is pending by its own status: gated, or without a node that fits."""
    return pod.unschedulable is not None or pod.gated_by(QUEUE_GATE)


def _queue_entry(
    entry: queue_snapshot.PendingEntry,
    key: queue.SortKey,
    placements: tuple[Placement, ...],
    status: queue.QueueStatus | None,
) -> queue_snapshot.QueueEntry:
    if placements or status is None:
        return queue_snapshot.QueueEntry(entry, key, placements=placements)
    return queue_snapshot.QueueEntry(entry, key, status.unschedulable, status.reservation)
