"""Gangs: pods that are placed together or not at all, and bound together.

kube-scheduler asks about one pod at a time and may drop any of them afterwards. So all of a gang is placed
when its first pod comes. The reservation holds the cards, and each member is answered with its own node. No
member is bound before all of them may be. A reservation that is not used in time ends completely. Two gangs
never each hold a half: neither holds anything before it has all.

Which pods a gang consists of, and how many of them lack a card.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fenka.cluster.mappings import RecentDict
from fenka.cluster.node_admission import admits, excluded_nodes, exclusion, ineligibility_reasons
from fenka.cluster.objects import Pod
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.pod_groups import (
    GangPods,
    PodGang,
    PodGroup,
    gang_proximity,
    group_key,
    group_name,
    pod_group,
)
from fenka.cluster.state import ClusterState
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.evaluate import Policy
from fenka.core.gangs import GangReservation, GangReservations, PlacementLimits, Placer, place_all
from fenka.core.inventory import DeviceId
from fenka.core.mig.instances import GANG_IN_INSTANCES
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity
from fenka.dialects.base import InvalidRecord, SliceRequest


@dataclass(frozen=True, slots=True)
class GangStatus:
    """The state of a gang's pods.

    Attributes:
        alive: pods that have not ended, the oldest first.
        succeeded: the number of pods that have succeeded. They count as present.
        missing: the number of pods that still need a node; 0 or less if the gang is complete.
    """

    alive: tuple[Pod, ...]
    succeeded: int
    missing: int

    @property
    def present(self) -> int:
        """Return the number of pods that exist or have succeeded."""
        return len(self.alive) + self.succeeded


class GangMembers:
    """Looks gangs up among the pods of the cluster."""

    def __init__(
        self,
        cluster: ClusterState,
        pods: Callable[[], GangPods],
        groups: Callable[[], Mapping[str, PodGroup]],
    ) -> None:
        """Args:
        cluster: the nodes.
        pods: returns all pods that name a gang.
        groups: returns all PodGroups, by namespace/name.
        """
        self._cluster, self._pods, self._groups = cluster, pods, groups

    def gang(self, pod: Pod) -> PodGang | None:
        """Return the pod's gang; None for a pod that requests nothing of fenka. Raises InvalidRecord."""
        in_gang = group_name(pod) is not None and self.requests_cards(pod)
        if in_gang and pod.demand(self._cluster.dialects).in_instances:
            raise InvalidRecord(GANG_IN_INSTANCES)
        return pod_group(pod, self._groups()) if in_gang else None

    def gang_or_none(self, pod: Pod) -> PodGang | None:
        """Return the pod's gang; None also if its size cannot be read."""
        try:
            return self.gang(pod)
        except InvalidRecord:
            return None

    def requests_cards(self, pod: Pod) -> bool:
        """Return whether fenka places the pod. Whole cards and instances only on nodes that share."""
        demand = pod.demand(self._cluster.dialects)
        if not demand.served_by_kubelet:
            return demand.requests_gpu
        nodes = (shared.node.name for shared in self._cluster.shared_nodes())
        return any(
            self._cluster.shares_with(name, demand) and admits(self._cluster, name, demand.parts)
            for name in nodes
        )

    def part(self, pod: Pod) -> SliceRequest:
        """Return what the one container of the pod requests. Raises InvalidRecord."""
        parts = pod.demand(self._cluster.dialects).parts
        if len(parts) != 1:
            raise InvalidRecord(
                f"pod {pod.metadata.name} of a gang requests cards in {len(parts)} containers: "
                "let one container of each of its pods request them"
            )
        return parts[0]

    def of(self, key: str) -> list[Pod]:
        """Return all pods of a gang, with those that request no card."""
        return list(self._pods().by_gang.get(key, {}).values())

    def exist(self, uids: Iterable[str]) -> bool:
        """Return whether all these pods exist."""
        pods = self._pods().by_uid
        return all(uid in pods for uid in uids)

    def names(self, uids: Iterable[str]) -> list[str]:
        """Return the names of those of these pods that exist, sorted."""
        pods = self._pods().by_uid
        return sorted(pods[uid].metadata.name for uid in uids if uid in pods)

    def keys_of(self, uids: Iterable[str]) -> Iterable[str]:
        """Return the keys of the gangs of those of these pods that exist, each once."""
        pods = self._pods().by_uid
        keys = (group_key(pods[uid]) for uid in uids if uid in pods)
        return dict.fromkeys(key for key in keys if key is not None)

    def by_gang(self, keys: Iterable[str] | None = None) -> dict[PodGang, list[Pod]]:
        """Return all pods of each gang whose size can be read. keys: of these gangs, None for all."""
        gangs = {}
        for key in list(self._pods().by_gang) if keys is None else keys:
            pods = self.of(key)
            gang = next(filter(None, map(self.gang_or_none, reversed(pods))), None)
            if gang is not None:
                gangs[gang] = pods
        return gangs

    def status(self, gang: PodGang, pods: Iterable[Pod] | None = None) -> GangStatus:
        """Return the state of the gang. pods: all of its pods, if the caller has them.

        Members that request no card count as soon as they exist: kube-scheduler places them.
        """
        alive, succeeded, placed = list[Pod](), 0, 0
        for pod in self.of(gang.key) if pods is None else pods:
            succeeded += pod.status.phase == "Succeeded"
            if not pod.finished and pod.metadata.deletion_timestamp is None:
                alive.append(pod)
                placed += bool(pod.spec.node_name) or not self.requests_cards(pod)
        alive.sort(key=lambda pod: (pod.metadata.creation_timestamp, pod.metadata.name))
        return GangStatus(tuple(alive), succeeded, gang.minimum - placed - succeeded)

    def is_placeable(self, pod: Pod) -> bool:
        """Return whether kube-scheduler will ask where to place the pod."""
        gated = bool(pod.spec.scheduling_gates) or pod.metadata.deletion_timestamp is not None
        return not (pod.spec.node_name or pod.finished or gated) and self.requests_cards(pod)

    def unplaced(self, status: GangStatus) -> list[Pod]:
        """Return the members that kube-scheduler will ask about, the oldest first."""
        return [member for member in status.alive if self.is_placeable(member)]

    def all_exist(self, pods: Sequence[Pod]) -> bool:
        """Return whether enough pods of a gang exist to start it. pods: some of them."""
        try:
            gang = self.gang(pods[0])
        except InvalidRecord:
            return False
        return gang is None or self.status(gang).present >= gang.minimum


def _rank(name: str) -> list[tuple[int, str]]:
    """Return what sorts the pods of a job by the numbers in their names: `train-worker-10` is after `-9`."""
    parts = re.split(r"([0-9]{1,9})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


RESERVATION_TTL_S = 30.0
"""A reservation waits this long for its members: twice kube-scheduler's longest backoff, and more."""

NODE_MISSING_TTL_S = 1.0
"""A reservation ends when a member's node is not offered twice, this far apart. Once is not enough: callers
over plain HTTP may be anybody, and kube-scheduler asks again."""

MAX_BACKOFF_S = 600.0
"""A gang that does not use its reservation gets the next one after a pause that doubles, up to this: it must
not hold cards indefinitely."""

MAX_LOOKED_AT = 512
"""Members of which is computed at a time whether their gang has become ready: the others have their turn
later."""

INCOMPLETE_TTL_S = 60.0
"""A gang that has lost members may run without them for this long before all of it is restarted."""


@dataclass(frozen=True, slots=True)
class GangPending:
    """The gang cannot be placed now. queued: it waits for cards, not for its own pods."""

    sentence: str
    queued: bool = False


@dataclass(frozen=True, slots=True)
class MemberPlacement:
    """Where a member goes. others: members that kube-scheduler should try now."""

    placement: Placement
    others: tuple[Pod, ...] = ()


@dataclass(frozen=True, slots=True)
class MembersAwaited:
    """The decision is made when `GangScheduler.on_settled` is called for this gang, or after the timeout."""

    gang: str
    timeout_s: float


@dataclass(slots=True)
class _Arrivals:
    """Members of a reservation that kube-scheduler has brought.

    Attributes:
        arrived: UIDs of members that may be bound.
        not_offered_since: when kube-scheduler first did not offer a member's node, by UID.
    """

    arrived: set[str] = field(default_factory=set)
    not_offered_since: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Backoff:
    """No reservation is made for a gang until this time."""

    failures: int
    until: float
    reason: str


class GangScheduler:
    """Reserves cards for gangs."""

    def __init__(
        self,
        members: GangMembers,
        cluster: ClusterState,
        policy: Policy,
        clock: Callable[[], float],
    ) -> None:
        """Args:
        members: the gangs' pods.
        cluster: the nodes, and what is used of them.
        policy: the placement policy.
        clock: seconds, monotonic.
        """
        self._members, self._cluster, self._policy, self._clock = members, cluster, policy, clock
        self._reservations = GangReservations(cluster)
        self.live = LiveColumns(cluster, self._reservations.usage)
        """The nodes, and what is used of their cards, reservations included."""
        self._arrivals: dict[str, _Arrivals] = {}
        self._incomplete_since: dict[str, float] = {}
        self._backoffs: dict[str, _Backoff] = {}
        self._told: RecentDict[str, str] = RecentDict()
        """The reasons that members were told of why their gang is not ready, by UID."""
        self.on_settled: Callable[[str], None] = lambda _: None
        """Called with a gang's key when all its members have arrived, or its reservation has ended."""

    def reserved(self) -> dict[str, tuple[Placement, ...]]:
        """Return what is reserved for members that have not started, by gang."""
        return self._reservations.outstanding()

    # ---- placing ----

    def gang(self, pod: Pod) -> PodGang | None:
        """Return the pod's gang; None for a pod that requests nothing of fenka. Raises InvalidRecord."""
        return self._members.gang(pod)

    def key(self, pod: Pod) -> str | None:
        """Return the key of the pod's gang; None for a single pod, or if the gang's size cannot be read."""
        gang = self._members.gang_or_none(pod)
        return gang.key if gang else None

    def place(
        self,
        pod: Pod,
        gang: PodGang,
        nodes: Sequence[str],
        reserved: frozenset[DeviceId] = frozenset(),
    ) -> MemberPlacement | GangPending | None:
        """Return where a member goes. If the gang has no reservation, one is made for all of it.

        Args:
            pod: the member.
            gang: its gang.
            nodes: nodes that kube-scheduler offers. They are taken to be the other members' too.
            reserved: cards that are held for others.

        Returns:
            None if enough of the gang runs already: the pod is placed like a single one.

        Raises:
            InvalidRecord: a member's request cannot be read.
        """
        self.expire()
        reservation, uid = self._reservations.get(gang.key), pod.metadata.uid
        self._told.pop(uid, None)
        if reservation is not None and uid in reservation.placements:
            answer = self._place_reserved(pod, gang, reservation.placements[uid], nodes)
            if answer is not None:
                return answer
        elif reservation is not None:
            return GangPending(f"gang {gang.name} is being placed without this pod")
        status = self._members.status(gang)
        if status.missing <= 0:
            return None
        unplaced = self._members.unplaced(status)
        if reason := _why_not_ready(gang, status, len(unplaced)):
            self._told[uid] = reason
            return GangPending(reason)
        backoff = self._backoffs.get(gang.key)
        if backoff is not None and self._clock() < backoff.until:
            pause_s = round(backoff.until - self._clock())
            return GangPending(f"{backoff.reason}; cards are reserved again in {pause_s} s")
        others = [member for member in unplaced if member.metadata.uid != uid][: status.missing - 1]
        return self._reserve(gang, [pod, *others], nodes, reserved)

    def obstacle(self, pod: Pod, gang: PodGang, nodes: Sequence[str]) -> GangPending | None:
        """Return why a gang cannot be placed now, None if it can. Nothing stays reserved.

        Raises:
            InvalidRecord: a member's request cannot be read.
        """
        placed = self.place(pod, gang, nodes)
        if isinstance(placed, GangPending):
            return placed
        self._release(gang.key)
        return None

    def unknown(self, pod: Pod) -> GangPending:
        """Return the answer for a member that kube-scheduler knows before fenka does."""
        answer = GangPending("the API server has not shown fenka this pod of a gang yet")
        self._told[pod.metadata.uid] = answer.sentence
        return answer

    def wrongly_informed(self, limit: int) -> list[Pod]:
        """Return up to this number of members that kube-scheduler is to try again, each once.

        They were told that their gang is not ready, for a reason that is not true any more. kube-scheduler
        does not retry a pod when another one is created, unless its feature gate GenericWorkload is on.
        """
        pods: list[Pod] = []
        looked_at = list(islice(self._told, MAX_LOOKED_AT))
        for uid in looked_at:
            self._told.move_to_end(uid)
        for gang, members in self._members.by_gang(self._members.keys_of(looked_at)).items():
            status = self._members.status(gang, members)
            unplaced = self._members.unplaced(status)
            reason = _why_not_ready(gang, status, len(unplaced))
            told = ((pod, self._told.get(pod.metadata.uid, reason)) for pod in unplaced)
            pods += [pod for pod, sentence in told if sentence != reason]
        for pod in pods[:limit]:
            self._told.pop(pod.metadata.uid)
        return pods[:limit]

    def nodes_after_preemption(
        self, pod: Pod, nodes: Collection[str], may_evict: Callable[[Pod, Pod], bool]
    ) -> Collection[str]:
        """Return the nodes on which evictions help the pod's gang.

        There are none unless all of it would fit if all pods that may be evicted for it were. If it must be
        in one domain, they are those of the domain in which it would. They are all nodes for a single pod.
        """
        key = self.key(pod)
        if key is None:
            return nodes
        members = [member for member in self._members.of(key) if self._members.is_placeable(member)]
        try:
            requests = [self._members.part(member).request for member in members]
            proximity = self._proximity(key, members)
        except InvalidRecord:
            return ()
        closed = excluded_nodes(self._cluster, pod)
        columns = self.live.read().copy()
        names = [name for name in self._open_nodes() if name not in closed]
        columns.remove(
            *(
                placement
                for name in names
                for allocation in self._cluster.allocations(name)
                if not allocation.lingering and may_evict(pod, allocation.pod)
                for placement in allocation.placements
            )
        )
        placer, limits = ColumnarPlacer(columns), PlacementLimits(among=frozenset(names))
        placed = place_all(placer, requests, self._policy, limits, proximity)
        if isinstance(placed, Unschedulable):
            return ()
        if proximity is None or not proximity.required or not placed:
            return nodes
        domain = proximity.domain(placed[0].node)
        return [name for name in nodes if proximity.domain(name) == domain]

    def _place_reserved(
        self, pod: Pod, gang: PodGang, placement: Placement, nodes: Sequence[str]
    ) -> MemberPlacement | GangPending | None:
        """Return None if the member's node is no longer possible: then the reservation has ended."""
        arrivals = self._arrivals[gang.key]
        if placement.node in nodes:
            arrivals.not_offered_since.pop(pod.metadata.uid, None)
            return MemberPlacement(placement)
        if self._is_lost(pod, placement.node, arrivals):
            self._release(gang.key)
            return None
        return GangPending(
            f"gang {gang.name} has reserved node {placement.node} for this pod, which was not offered"
        )

    def _is_lost(self, pod: Pod, node: str, arrivals: _Arrivals) -> bool:
        """Return whether a member cannot go to its reserved node, which kube-scheduler does not offer."""
        uid = pod.metadata.uid
        if not self._is_eligible(pod, node):
            return True
        if uid in arrivals.arrived:
            # kube-scheduler has chosen that node.
            return False
        now = self._clock()
        return now - arrivals.not_offered_since.setdefault(uid, now) >= NODE_MISSING_TTL_S

    def _is_eligible(self, pod: Pod, name: str) -> bool:
        node = self._cluster.node(name)
        if node is None or self._cluster.shared_node(name) is None:
            return False
        return self._cluster.node_error(name) is None and not ineligibility_reasons(pod, node)

    def _reserve(
        self,
        gang: PodGang,
        members: Sequence[Pod],
        names: Sequence[str],
        reserved: frozenset[DeviceId],
    ) -> MemberPlacement | GangPending:
        reason = "no node of the cluster shares cards with it"
        parts = {member.metadata.uid: self._members.part(member) for member in members}
        nodes = frozenset(
            name
            for name in names
            if self._is_eligible(members[0], name)
            and admits(self._cluster, name, list(parts.values()))
        )
        if nodes:
            # Jobs number their pods in the names, so that ranks follow the connections of cards.
            ranked = sorted(members, key=lambda member: _rank(member.metadata.name))
            requests = {
                uid: parts[uid].request for uid in (member.metadata.uid for member in ranked)
            }
            placer = ColumnarPlacer(self.live.read().copy())
            fixed = self._as_planned(members, requests, placer, PlacementLimits(reserved, nodes))
            planned_on = frozenset(placement.node for placement in fixed.values())
            proximity = self._proximity(gang.key, members, planned_on)
            if proximity is not None and not proximity.possible:
                # No label was known of these nodes when they were planned for.
                fixed, proximity = {}, self._proximity(gang.key, members)
            closed = [
                excluded_nodes(self._cluster, member)
                for member in members
                if member.metadata.uid not in fixed
            ]
            left = nodes.difference(*closed)
            reservation = self._reservations.reserve(
                gang.key,
                requests,
                self._policy,
                placer,
                self._clock() + RESERVATION_TTL_S,
                PlacementLimits(reserved, left),
                fixed=fixed,
                proximity=proximity,
            )
            if not isinstance(reservation, Unschedulable):
                self._arrivals[gang.key] = _Arrivals()
                first, *others = members
                return MemberPlacement(reservation.placements[first.metadata.uid], tuple(others))
            reason = reservation.sentence()
            if not left and not fixed:
                # Each of these nodes excludes a member, whatever its cards have free.
                every = (
                    exclusion(self._cluster, name, member) for name in nodes for member in members
                )
                reason = next(filter(None, every))
        sentence = f"no room for all {len(members)} pods of gang {gang.name}: {reason}"
        return GangPending(sentence, queued=True)

    def _as_planned(
        self,
        members: Sequence[Pod],
        requests: Mapping[str, Request],
        placer: Placer,
        limits: PlacementLimits,
    ) -> dict[str, Placement]:
        """Return placements of the members for which nodes were bought, on those that have room for them."""
        fixed: dict[str, Placement] = {}
        for pod in members:
            uid = pod.metadata.uid
            name = self._cluster.pins.node_of(uid) or ""
            shared, among = self._cluster.shared_node(name), limits.among or ()
            if shared is None or name not in among or exclusion(self._cluster, name, pod):
                continue
            cards = self._cluster.pins.planned_cards(name, uid)
            others = frozenset(card.uuid for card in shared.node.cards if card.index not in cards)
            # All pods there are planned together, so nothing is reserved of another's cards.
            on_node = PlacementLimits(others if cards else limits.reserved, frozenset({name}))
            placed = placer.place(requests[uid], self._policy, on_node)
            if not isinstance(placed, Unschedulable):
                fixed[uid] = placed
                placer.add(placed)
        for placement in fixed.values():
            placer.remove(placement)
        return fixed

    def _proximity(
        self, key: str, members: Iterable[Pod], planned_on: frozenset[str] = frozenset()
    ) -> Proximity | None:
        """Return how close together the members of a gang are placed.

        Args:
            key: of the gang.
            members: its pods.
            planned_on: nodes on which some of them are placed in any case.

        Raises:
            InvalidRecord: they require a level that is not configured.
        """
        beside = self._cluster.gang_nodes(key) | planned_on
        return gang_proximity(members, self._cluster.topology(), beside)

    def outside_domain(self, pod: Pod, gang: PodGang, nodes: Iterable[str]) -> dict[str, str]:
        """Return why a pod that joins a gang that has started may not go to some of these nodes.

        Raises:
            InvalidRecord: it requires a level that is not configured.
        """
        proximity = self._proximity(gang.key, [pod])
        if proximity is None or not proximity.required or not proximity.beside:
            return {}
        domains = proximity.domains_beside
        sentence = f"its gang is in another {proximity.label}, and must be in one"
        return {name: sentence for name in nodes if domains != {proximity.domain(name) or ()}}

    def _open_nodes(self) -> list[str]:
        """Return the nodes that share cards."""
        names = (shared.node.name for shared in self._cluster.shared_nodes())
        return [name for name in names if self._cluster.node_error(name) is None]

    # ---- binding ----

    def planned_placement(self, pod: Pod, node: str) -> Placement | None:
        """Return what is reserved for the pod on this node."""
        _, reservation = self._reservation_of(pod)
        placement = reservation.placements[pod.metadata.uid] if reservation else None
        return placement if placement is not None and placement.node == node else None

    def _reservation_of(self, pod: Pod) -> tuple[str, GangReservation | None]:
        """Return the key of the pod's gang, and the reservation that has the pod, if there is one."""
        key = self.key(pod) or ""
        reservation = self._reservations.get(key)
        has_pod = reservation is not None and pod.metadata.uid in reservation.placements
        return key, reservation if has_pod else None

    def arrive(self, pod: Pod, node: str) -> bool | MembersAwaited:
        """Record that kube-scheduler binds the pod to this node.

        Returns:
            True if it may be bound now, False if it may not. Else what to wait for: after that `may_bind`
            decides.
        """
        if group_name(pod) is None:
            return True
        try:
            gang = self.gang(pod)
        except InvalidRecord:
            return False
        reservation = self._reservations.get(gang.key) if gang else None
        if gang is None or reservation is None or self.planned_placement(pod, node) is None:
            # A pod without a reservation may start only if the gang is complete without it.
            return gang is None or self._members.status(gang).missing <= 0
        self._arrivals[gang.key].arrived.add(pod.metadata.uid)
        if self.may_bind(pod, node):
            self.on_settled(gang.key)
            self.expire()
            return self.may_bind(pod, node)
        return MembersAwaited(gang.key, reservation.expires_at - self._clock())

    def may_bind(self, pod: Pod, node: str) -> bool:
        """Return whether the pod is reserved this node and all members of the reservation have arrived.

        The reservation may be another than the one for which the pod arrived.
        """
        if self.planned_placement(pod, node) is None:
            return False
        key, reservation = self._reservation_of(pod)
        assert reservation is not None
        present = self._arrivals[key].arrived | reservation.started
        return present >= reservation.placements.keys()

    def waiting_status(self, pod: Pod) -> str | None:
        """Return how many members a pod waits for; None if it does not wait for any."""
        key, reservation = self._reservation_of(pod)
        if reservation is None:
            return None
        arrived, total = self._arrivals[key].arrived, len(reservation.placements)
        present = len(arrived | reservation.started)
        sentence = f"waiting for the rest of its gang: {present} of {total} pods can be bound"
        return sentence if present < total else None

    def start(self, pod: Pod) -> None:
        """Record that the pod is bound as reserved: the cluster's state counts it from now on."""
        key, reservation = self._reservation_of(pod)
        if reservation is None:
            return
        self._reservations.mark_started(key, pod.metadata.uid)
        if self._reservations.get(key) is None:
            self._arrivals.pop(key, None)
            self._backoffs.pop(key, None)

    def expire(self) -> None:
        """End reservations whose time is over or that have lost a member. Members that are bound stay."""
        now, members = self._clock(), self._members
        for key in self._reservations.overdue(now):
            self._backoffs[key] = self._next_backoff(key, now)
            self._release(key)
        for key in list(self._arrivals):
            reservation = self._reservations.get(key)
            if reservation is not None and not members.exist(reservation.placements):
                # Another pod replaces a member that was deleted.
                self._release(key)

    def incomplete_gangs(self) -> list[Pod]:
        """Return members to evict: their gang has been incomplete for too long, and restarts completely."""
        now, by_gang = self._clock(), self._members.by_gang()
        incomplete: dict[str, list[Pod]] = {}
        for gang, pods in by_gang.items():
            status = self._members.status(gang, pods)
            bound = [pod for pod in status.alive if pod.spec.node_name]
            if status.missing > 0 and any(map(self._members.requests_cards, bound)):
                incomplete[gang.key] = bound
        self._incomplete_since = {key: self._incomplete_since.get(key, now) for key in incomplete}
        keys = {gang.key for gang in by_gang}
        self._backoffs = {key: backoff for key, backoff in self._backoffs.items() if key in keys}
        return [
            pod
            for key, bound in incomplete.items()
            if now - self._incomplete_since[key] >= INCOMPLETE_TTL_S
            for pod in bound
        ]

    def _next_backoff(self, key: str, now: float) -> _Backoff:
        reservation = self._reservations.get(key)
        assert reservation is not None
        absent = reservation.placements.keys() - self._arrivals[key].arrived - reservation.started
        names = self._members.names(absent)
        failures = self._backoffs[key].failures + 1 if key in self._backoffs else 1
        reason = (
            f"kube-scheduler did not bind all of gang {key.partition('/')[2]} within "
            f"{RESERVATION_TTL_S:g} s, something else blocks {', '.join(names[:3]) or 'its pods'}"
        )
        pause_s = min(RESERVATION_TTL_S * 2 ** (failures - 1), MAX_BACKOFF_S)
        return _Backoff(failures, now + pause_s, reason)

    def _release(self, key: str) -> None:
        self._reservations.release(key)
        if self._arrivals.pop(key, None) is not None:
            self.on_settled(key)


def _why_not_ready(gang: PodGang, status: GangStatus, unplaced: int) -> str:
    """Return why the gang cannot be placed yet; empty if it can. unplaced: members that can be placed."""
    if unplaced >= status.missing:
        return ""
    if status.present < gang.minimum:
        return f"gang {gang.name} is incomplete: {status.present} of its {gang.minimum} pods exist"
    unready = status.missing - unplaced
    return f"gang {gang.name} waits for pods with scheduling gates: {unready} of its {gang.minimum}"
