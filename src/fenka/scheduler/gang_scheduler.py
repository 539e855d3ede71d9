"""Gangs on the cluster: their pods are placed together or not at all, and bound together.

kube-scheduler asks for one pod at a time and may drop any of them afterwards. So when the first of a gang
comes, the core plans all of it; the plan holds the cards, each member is sent to its place, and nobody is
bound before the last one has come. A plan that is not fulfilled in time ends, and nothing is left of it. Two
gangs can never each hold a half: none of them holds anything before it has all.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fenka.cluster.eligibility import ineligibility_reasons
from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import Gang, PodGroup, group_key, group_name, pod_group
from fenka.cluster.pod_placement import resident_compute
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy
from fenka.core.gangs import GangReservations, place_gang
from fenka.core.inventory import DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement
from fenka.core.usage import CardUsage, UsageOverlay
from fenka.dialects import node_modes, nvidia
from fenka.dialects.base import InvalidRecord, SliceRequest

PLAN_TTL_S = 30.0
"""So long a plan waits for its members: longer than kube-scheduler's longest backoff, twice."""

NODE_MISSING_TTL_S = 1.0
"""A member's plan is given up when its node is not offered twice, so far apart: callers over plain HTTP may
be anybody, and kube-scheduler asks again."""

MAX_BACKOFF_S = 600.0
"""A gang whose plans are not fulfilled is planned anew after pauses that double, up to this: it must not hold
cards for ever that it does not come for."""

INCOMPLETE_TTL_S = 60.0
"""So long a gang that has lost members may run without them before all of it is started anew."""


@dataclass(frozen=True, slots=True)
class GangPending:
    """The gang cannot be placed now; the sentence says why.

    in_line: it waits for cards, and not for pods of its own.
    """

    sentence: str
    in_line: bool = True


@dataclass(frozen=True, slots=True)
class MemberPlacement:
    """Where a member goes. others: who is awaited there too, and should be asked for again now."""

    placement: Placement
    others: tuple[Pod, ...] = ()


@dataclass(slots=True)
class _Barrier:
    """Members whose binding was asked for, of those that are planned."""

    arrived: set[str] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """All are here, or the plan has ended."""
    doubts: dict[str, float] = field(default_factory=dict)
    """By member, since when its node has not been offered."""


@dataclass(frozen=True, slots=True)
class _GangStatus:
    """How a gang stands, from one look at its pods. alive: the oldest first. missing: how many more must have
    a card, at most 0 where it is whole."""

    alive: tuple[Pod, ...]
    succeeded: int
    missing: int

    @property
    def there(self) -> int:
        """Who has done its work is missed by nobody."""
        return len(self.alive) + self.succeeded


@dataclass(frozen=True, slots=True)
class _PlanBackoff:
    """After a plan that was not fulfilled. until: of the clock."""

    failures: int
    until: float
    why: str


class GangScheduler:
    """A Held for the judge: what plans hold is held.

    pods, groups: what the watches know, by UID and by namespace/name. clock: seconds.
    """

    def __init__(
        self,
        world: ClusterState,
        policy: Policy,
        pods: Callable[[], Mapping[str, Pod]],
        groups: Callable[[], Mapping[str, PodGroup]],
        clock: Callable[[], float],
    ) -> None:
        self._world, self._policy, self._clock = world, policy, clock
        self._pods, self._groups = pods, groups
        self._plans = GangReservations(world)
        self._barriers: dict[str, _Barrier] = {}
        self._incomplete_since: dict[str, float] = {}
        self._backoffs: dict[str, _PlanBackoff] = {}

    # ---- a View ----

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """What is held of this card, by plans too."""
        return self._plans.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """kube-scheduler counts CPU and host memory itself."""
        return self._plans.host_usage(node)

    def generation(self, node: str) -> int:
        """Changes with the world, and with plans for this node."""
        return self._plans.generation(node)

    def planned(self) -> dict[str, tuple[Placement, ...]]:
        """What plans hold besides what the world knows, by gang."""
        return self._plans.outstanding()

    def complete(self, pods: Sequence[Pod]) -> bool:
        """Whether enough of a gang's pods are there, these and those that have a node."""
        try:
            gang = self.gang(pods[0])
        except InvalidRecord:
            return False
        return gang is None or self._state(gang).there >= gang.minimum

    # ---- planning ----

    def gang(self, pod: Pod) -> Gang | None:
        """Return a pod's gang, None for a pod that asks for nothing of fenka's. Raises InvalidRecord."""
        return pod_group(pod, self._groups()) if group_name(pod) and self._asks(pod) else None

    def _asks(self, pod: Pod) -> bool:
        """Whether it wants something of cards that fenka places; whole cards it does on few nodes."""
        wanted = pod.demand(self._world.dialects)
        if wanted.dialect is not nvidia:
            return wanted.requests_gpu
        return any(self._admits(it.node.name, wanted.parts(1)) for it in self._world.shared_nodes())

    def _admits(self, node: str, parts: Sequence[SliceRequest]) -> bool:
        known = self._world.node(node)
        try:
            node_modes.check_admission(
                known.metadata.labels if known else {}, parts, resident_compute(self._world, node)
            )
        except InvalidRecord:
            return False
        return True

    def place(
        self,
        pod: Pod,
        gang: Gang,
        names: Sequence[str],
        reserved: frozenset[DeviceId] = frozenset(),
    ) -> MemberPlacement | GangPending | None:
        """Where a member goes; a plan for the whole gang is made if there is none.

        None: enough of the gang run already, the pod is placed like any other. names: the nodes that it may
        go to, which are taken to be the others' too. Raises InvalidRecord.
        """
        self.expire()
        plan, uid = self._plans.get(gang.key), pod.metadata.uid
        if plan is not None and uid in plan.placements:
            place = self._planned(pod, gang, plan.placements[uid], names)
            if place is not None:
                return place
        elif plan is not None:
            return GangPending(
                f"the gang {gang.name} is being placed, without this pod", in_line=False
            )
        state = self._state(gang)
        if state.missing <= 0:
            return None
        unbound = [it for it in state.alive if self._comes(it)]
        if len(unbound) < state.missing:
            return GangPending(
                f"the gang {gang.name} waits whole: {state.there} of its {gang.minimum} pods are there",
                in_line=False,
            )
        pause = self._backoffs.get(gang.key)
        if pause is not None and self._clock() < pause.until:
            again = round(pause.until - self._clock())
            return GangPending(f"{pause.why}: it is planned again in {again} s", in_line=False)
        rest = [it for it in unbound if it.metadata.uid != uid][: state.missing - 1]
        return self._plan(gang, [pod, *rest], names, reserved)

    def _planned(
        self, pod: Pod, gang: Gang, placement: Placement, names: Sequence[str]
    ) -> MemberPlacement | GangPending | None:
        """Where a member of a plan goes; None where its node does not do and the plan is given up."""
        gathering, uid = self._barriers[gang.key], pod.metadata.uid
        if placement.node in names:
            gathering.doubts.pop(uid, None)
            return MemberPlacement(placement)
        if self._doubted(pod, placement.node, gathering):
            self._drop(gang.key)
            return None
        sentence = f"the plan for the gang {gang.name} has the pod on {placement.node}, which was not offered"
        return GangPending(sentence, in_line=False)

    def _doubted(self, pod: Pod, node: str, gathering: _Barrier) -> bool:
        """Whether a member, for which its planned node was not offered, is to be planned elsewhere."""
        if not self._may_go(pod, node):
            return True
        if pod.metadata.uid in gathering.arrived:
            # kube-scheduler has chosen that node.
            return False
        now = self._clock()
        return now - gathering.doubts.setdefault(pod.metadata.uid, now) >= NODE_MISSING_TTL_S

    def _may_go(self, pod: Pod, name: str) -> bool:
        """By what the API server says of both."""
        node = self._world.node(name)
        there = self._world.shared_node(name) is not None and self._world.node_error(name) is None
        return node is not None and there and not ineligibility_reasons(pod, node)

    def _plan(
        self,
        gang: Gang,
        members: Sequence[Pod],
        names: Sequence[str],
        reserved: frozenset[DeviceId],
    ) -> MemberPlacement | GangPending:
        why = "no node of the cluster shares cards with it"
        names = [name for name in names if self._may_go(members[0], name)]
        for unit, nodes in self._nodes(names).items():
            parts = {it.metadata.uid: self._part(it, unit) for it in members}
            requests = {uid: part.request for uid, part in parts.items()}
            open_ = [it for it in nodes if self._admits(it.name, list(parts.values()))]
            if not open_:
                continue
            found = self._plans.reserve(
                gang.key, requests, self._policy, open_, self._clock() + PLAN_TTL_S, reserved
            )
            if isinstance(found, Unschedulable):
                why = found.sentence()
                continue
            self._barriers[gang.key] = _Barrier()
            mine, *others = members
            return MemberPlacement(found.placements[mine.metadata.uid], tuple(others))
        return GangPending(f"the gang {gang.name} of {len(members)} waits whole: {why}")

    def _nodes(self, names: Sequence[str]) -> dict[int, list[Node]]:
        """Those that share, by their unit."""
        found: dict[int, list[Node]] = {}
        for name in names:
            share = self._world.shared_node(name)
            if share is not None and self._world.node_error(name) is None:
                found.setdefault(share.unit_mib, []).append(share.node)
        return found

    def _part(self, pod: Pod, unit_mib: int) -> SliceRequest:
        parts = pod.demand(self._world.dialects).parts(unit_mib)
        if len(parts) != 1:
            raise InvalidRecord(
                f"the pod {pod.metadata.name} of a gang asks for cards in {len(parts)} containers: "
                "let one container of each of its pods ask"
            )
        return parts[0]

    def fits_after_preemption(self, pod: Pod) -> bool:
        """Whether all of its gang would fit, were everybody of less priority gone; True without a gang."""
        key = self.key(pod)
        if key is None:
            return True
        unbound = [it for it in self._of(key) if self._comes(it)]
        view, priority = UsageOverlay(self._plans), pod.spec.priority or 0
        shares = self._world.shared_nodes()
        for share in shares:
            for holding in self._world.allocations(share.node.name):
                if not holding.lingering and (holding.pod.spec.priority or 0) < priority:
                    for placement in holding.placements:
                        view.remove(placement)
        try:
            return any(
                not isinstance(
                    place_gang(
                        view, [self._part(it, unit).request for it in unbound], self._policy, nodes
                    ),
                    Unschedulable,
                )
                for unit, nodes in self._nodes([share.node.name for share in shares]).items()
            )
        except InvalidRecord:
            return False

    # ---- binding ----

    def planned_placement(self, pod: Pod, node: str) -> Placement | None:
        """What is planned for the pod on this node."""
        key = self.key(pod)
        plan = self._plans.get(key) if key else None
        found = plan.placements.get(pod.metadata.uid) if plan else None
        return found if found is not None and found.node == node else None

    async def wait_for_members(self, pod: Pod, node: str) -> bool:
        """The pod may be bound: wait until all of its plan may be. False if the plan has ended before, or is
        another by now. True at once for a pod alone.
        """
        if group_name(pod) is None:
            return True
        try:
            gang = self.gang(pod)
        except InvalidRecord:
            return False
        plan = self._plans.get(gang.key) if gang else None
        gathering = self._barriers.get(gang.key) if gang else None
        if plan is None or gathering is None or self.planned_placement(pod, node) is None:
            # Who is not planned there is let in only where the gang is whole without it.
            return gang is None or self._state(gang).missing <= 0
        gathering.arrived.add(pod.metadata.uid)
        if gathering.arrived | plan.started >= plan.placements.keys():
            gathering.over.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(plan.expires_at - self._clock()):
                await gathering.over.wait()
        self.expire()
        return self.planned_placement(pod, node) is not None

    def waiting_status(self, pod: Pod) -> str | None:
        """While the pod waits for its gang: how far that is; None if it does no more."""
        key = self.key(pod)
        plan, gathering = self._plans.get(key or ""), self._barriers.get(key or "")
        if plan is None or gathering is None or pod.metadata.uid not in plan.placements:
            return None
        here, of = len(gathering.arrived | plan.started), len(plan.placements)
        return f"it waits for the rest of its gang: {here} of {of} are here" if here < of else None

    def start(self, pod: Pod) -> None:
        """The pod is where it was planned, and from now on in the world's own record."""
        key = self.key(pod)
        plan = self._plans.get(key or "")
        if key is None or plan is None or pod.metadata.uid not in plan.placements:
            return
        self._plans.mark_started(key, pod.metadata.uid)
        if self._plans.get(key) is None:
            self._barriers.pop(key, None)
            self._backoffs.pop(key, None)

    def expire(self) -> None:
        """Drop plans whose time is over. Members that were bound stay: `broken` tells if they are too few."""
        now, known = self._clock(), self._pods()
        for key in self._plans.overdue(now):
            self._backoffs[key] = self._pause(key, now)
            self._drop(key)
        for key in list(self._barriers):
            plan = self._plans.get(key)
            if plan is not None and not plan.placements.keys() <= known.keys():
                # Somebody else comes in the place of a member that was deleted.
                self._drop(key)

    def _pause(self, key: str, now: float) -> _PlanBackoff:
        plan, gathering = self._plans.get(key), self._barriers[key]
        assert plan is not None
        known = self._pods()
        away = plan.placements.keys() - gathering.arrived - plan.started
        names = sorted(known[uid].metadata.name for uid in away if uid in known)
        failures = self._backoffs[key].failures + 1 if key in self._backoffs else 1
        why = (
            f"kube-scheduler has not brought all of the gang in {PLAN_TTL_S:g} s, "
            f"something else keeps {', '.join(names[:3]) or 'them'}"
        )
        return _PlanBackoff(
            failures, now + min(PLAN_TTL_S * 2 ** (failures - 1), MAX_BACKOFF_S), why
        )

    # ---- gangs that have lost members ----

    def incomplete_gangs(self) -> list[Pod]:
        """Members that must go: their gang has been incomplete for too long, and starts anew, whole."""
        now, found = self._clock(), list[Pod]()
        by_key: dict[str, list[Pod]] = {}
        for pod in self._pods().values():
            if (key := group_key(pod)) is not None:
                by_key.setdefault(key, []).append(pod)
        gangs = {
            key: gang
            for key, pods in by_key.items()
            if (gang := next(filter(None, map(self._gang, reversed(pods))), None))
        }
        incomplete: dict[str, list[Pod]] = {}
        for key, gang in gangs.items():
            state = self._state(gang, by_key[key])
            if state.missing > 0:
                bound = [it for it in state.alive if it.spec.node_name]
                if any(map(self._asks, bound)):
                    incomplete[key] = bound
        self._incomplete_since = {key: self._incomplete_since.get(key, now) for key in incomplete}
        self._backoffs = {key: it for key, it in self._backoffs.items() if key in gangs}
        for key, bound in incomplete.items():
            if now - self._incomplete_since[key] >= INCOMPLETE_TTL_S:
                found += bound
        return found

    # ---- what is known ----

    def _state(self, gang: Gang, pods: Iterable[Pod] | None = None) -> _GangStatus:
        """pods: all of the gang's, where they are known. Members that want no card count as soon as they are
        there: kube-scheduler places them."""
        pods = self._of(gang.key) if pods is None else pods
        alive, succeeded, there = list[Pod](), 0, 0
        for pod in pods:
            succeeded += pod.status.phase == "Succeeded"
            if not pod.finished and pod.metadata.deletion_timestamp is None:
                alive.append(pod)
                there += bool(pod.spec.node_name) or not self._asks(pod)
        alive.sort(key=lambda it: (it.metadata.creation_timestamp, it.metadata.name))
        return _GangStatus(tuple(alive), succeeded, gang.minimum - there - succeeded)

    def _comes(self, pod: Pod) -> bool:
        """Whether kube-scheduler will ask where to put it."""
        gated = bool(pod.spec.scheduling_gates) or pod.metadata.deletion_timestamp is not None
        return not (pod.spec.node_name or pod.finished or gated) and self._asks(pod)

    def _succeeded(self, gang: Gang) -> int:
        """Who has done its work is missed by nobody."""
        return sum(it.status.phase == "Succeeded" for it in self._of(gang.key))

    def _of(self, key: str) -> list[Pod]:
        """Those that want no card too."""
        return [pod for pod in self._pods().values() if group_key(pod) == key]

    def key(self, pod: Pod) -> str | None:
        """Of the gang that a pod is in; None for a pod alone, and for one that does not say enough."""
        gang = self._gang(pod)
        return gang.key if gang else None

    def _gang(self, pod: Pod) -> Gang | None:
        try:
            return self.gang(pod)
        except InvalidRecord:
            return None

    def _drop(self, key: str) -> None:
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.release(key)
        gathering = self._barriers.pop(key, None)
        if gathering is not None:
            gathering.over.set()
