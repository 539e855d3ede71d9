"""The order in which pods are served, kept towards kube-scheduler, which asks for one pod at a time.

A pod that it was told no for waits there for seconds before it is asked about again, while others come. So
for each pod that is asked about, what those before it in line have named, or would get now, is kept off it.
What kube-scheduler does with a pod, fenka does not see: who would fit and is not bound within PATIENCE_S is
kept waiting by something else, and keeps nothing from anybody until it is asked about again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Protocol, TypeVar

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.pending_queue import (
    DEPTH,
    PendingEntry,
    PendingQueue,
    QueueEntry,
    QueueSnapshot,
    gang_complete_by_label,
    is_open,
    time_limit_s,
    waits,
)
from fenka.cluster.pod_groups import group_key
from fenka.cluster.pod_placement import (
    FilterResult,
    HeldPlacement,
    Infeasible,
    PodEvaluator,
    QueueConstraints,
)
from fenka.cluster.state import ClusterState
from fenka.cluster.usage_accounting import UsageAccounting
from fenka.core.evaluate import Policy
from fenka.core.fairness import Fairness
from fenka.core.inventory import DeviceId
from fenka.core.queue import SortKey
from fenka.core.request import Placement

RESERVATION_TTL_S = 15.0
"""kube-scheduler tries a pod again 10 s after it could have, at the latest, and binds it at once."""

REQUEUE_AFTER_S = 0.5
"""By then kube-scheduler has mostly come back to a pod by itself."""

MIN_INTERVAL_S = 0.25
"""The line is not served anew more often, but for a pod that comes to wait, and before one is told no."""

SHARE = 4
"""Where serving takes long: so many times as long passes before it is done again."""

REMEMBERED = 10_000
"""Pods that were refused and have not been heard of since; and pods that were let through."""

FIRST = QueueConstraints(position=1, of=1)

T = TypeVar("T")


@dataclass(slots=True)
class _Fits:
    """Since when a waiter has fitted; whether it was asked about since, and refused all the same; whether
    it was named as due."""

    since: float
    asked: bool = False
    named: bool = False


class GangPlans(Protocol):
    """Of gangs."""

    def planned(self) -> dict[str, tuple[Placement, ...]]:
        """What gangs hold that is in plans and not in the world; these do not wait."""

    def complete(self, pods: Sequence[Pod]) -> bool:
        """Whether of a gang, of which these wait, enough are there."""


class QueueController:
    """Who waits, and what is kept for them. Told of pods as the watch brings them, after the world.

    now: seconds since 1970. took: any clock, for what serving costs.
    """

    def __init__(
        self,
        world: ClusterState,
        policy: Policy = "binpack",
        fairness: Fairness | None = None,
        *,
        now: Callable[[], float] = time.time,
        took: Callable[[], float] = time.monotonic,
        gangs: GangPlans | None = None,
    ) -> None:
        self._world, self._now, self._took = world, now, took
        self._planned = gangs.planned if gangs else dict
        self._uses = UsageAccounting(world, fairness or Fairness())
        complete = gangs.complete if gangs else gang_complete_by_label
        self._line = PendingQueue(world, policy, fairness, complete, self._uses.uses)
        self._open: dict[str, Pod] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._waiting: set[str] = set()
        """Of the open ones those for which no node was found."""
        self._gated: dict[str, Pod] = {}
        """Pods on which fenka's gate is the only one left."""
        self._ungated: tuple[QueueSnapshot, int] | None = None
        """As of which serving, and how many gated pods, `to_ungate` found nothing."""
        self._turn, self._stamp = QueueSnapshot(), (-1, -1)
        self._plans: Mapping[str, tuple[Placement, ...]] = {}
        self._changes, self._urgent = 0, False
        self._served_at, self._cost, self._due = -inf, 0.0, inf
        self._fits: dict[str, _Fits] = {}
        self._excluded_nodes: dict[str, frozenset[str]] = {}
        """By waiter, nodes that kube-scheduler rules out for it though a card there would do."""
        self._stalled: dict[str, str] = {}
        """Waiters that something else keeps waiting, with what kube-scheduler said then."""
        self._bypassed: dict[str, float] = {}

    # ---- what happens ----

    def resync(self, pods: Iterable[Pod]) -> None:
        """These are all pods there are."""
        pods = list(pods)
        there = {pod.metadata.uid for pod in pods}
        for uid in [uid for uid in self._open | self._gated if uid not in there]:
            self.forget(uid)
        self._uses.resync(there, self._now())
        for pod in pods:
            self.set_pod(pod)

    def set_pod(self, pod: Pod) -> None:
        """The pod is new, or is so now."""
        uid = pod.metadata.uid
        known = self._open.get(uid)
        self._uses.set(pod, self._now())
        self._set_gated(pod)
        if not is_open(pod) or not self._line.wants(pod):
            if known is not None and pod.spec.node_name:
                self._count_bypassed(known)
            self._close(uid)
            return
        self._open[uid] = pod
        if self._waits(pod):
            self._changes += 1
            self._requeue_stalled(pod)
            if uid not in self._waiting:
                self._waiting.add(uid)
                self._mark_urgent(pod)
        elif self._waiting and group_key(pod) is not None:
            self._changes += 1

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._gated.pop(uid, None)
        self._uses.forget(uid, self._now())
        self._close(uid)
        self._line.forget(uid)

    def refused(self, pod: Pod, names: Iterable[str]) -> None:
        """None of these nodes does for it: it waits from now on, if the watch has brought it."""
        uid = pod.metadata.uid
        new = uid not in self._refused
        _remember(self._refused, uid, None)
        if uid not in self._open:
            return
        self._waiting.add(uid)
        waiter_id = _waiter_id(pod)
        if waiter_id in self._fits:
            self._fits[waiter_id].asked = True
        struck = self._excluded_nodes.get(waiter_id)
        if self._stalled.pop(waiter_id, None) is not None:
            new = True
        if struck and not struck.isdisjoint(names):
            self._excluded_nodes[waiter_id] = struck.difference(names)
            self._changes += 1
        if new:
            self._changes += 1
            self._mark_urgent(pod)

    # ---- what is asked ----

    def ahead(self, pod: Pod, *, last: bool = False) -> QueueConstraints:
        """What is kept for those before this pod. last: it is about to be told no."""
        if not self._waiting:
            return FIRST
        turn = self._current(last=last)
        mine, runs = _waiter_id(pod), time_limit_s(pod)
        ends_by = None if runs is None else self._now() + runs
        rank = turn.rank(self._key(pod))
        reserved: set[DeviceId] = set()
        kept: dict[str, list[HeldPlacement]] = {}
        for at, it in turn.marks:
            if at >= rank:
                break
            if it.waiter.id == mine or not self._still(it.waiter.pods):
                continue
            if it.reservation is not None and it.reservation.blocks(ends_by):
                reserved |= it.reservation.cards
            for placement in it.placements:
                kept.setdefault(placement.node, []).append(HeldPlacement(it.waiter.id, placement))
        nodes = {turn.home[uuid] for uuid in reserved if uuid in turn.home}
        return QueueConstraints(
            frozenset(reserved),
            {node: tuple(some) for node, some in kept.items()},
            frozenset(nodes.union(kept)),
            rank + 1,
            len(turn.places) + (mine not in turn),
        )

    def still(self, ahead: QueueConstraints) -> QueueConstraints:
        """Without what was kept for those who have it by now, or wait no more."""
        there = {_waiter_id(it) for it in self._open.values() if self._still((it,))}
        kept = {
            node: tuple(it for it in some if it.id in there) for node, some in ahead.kept.items()
        }
        return replace(ahead, kept=kept)

    def position(self, pod: Pod) -> str:
        """How the pod stands in line, as sentences end: `; position 3 of 5 in the queue`.

        Empty for one that could be nowhere: that it waits for others is not the reason.
        """
        if not self._line.units(pod):
            return ""
        turn, waiter_id = self._current(), _waiter_id(pod)
        rank = turn.rank(self._key(pod))
        of = len(turn.places) + (waiter_id not in turn)
        return f"; position {rank + 1} of {of} in the queue"

    def used(self) -> dict[str, float]:
        """Return the card-seconds of all namespaces that have had any of late."""
        return self._uses.uses.used(self._now())

    def places(self) -> Sequence[QueueEntry]:
        """Those who wait, in order."""
        return self._current().places if self._waiting else ()

    def due(self, most: int) -> list[Pod]:
        """Those for whom there has been room for DUE_S, about so many; each once, while there is."""
        found: list[Pod] = []
        now = self._now()
        for it in self.places():
            fits = self._fits.get(it.waiter.id)
            if fits is None or fits.named or now - fits.since < REQUEUE_AFTER_S:
                continue
            if self._still(it.waiter.pods) and not any(
                pod.metadata.uid in self._gated for pod in it.waiter.pods
            ):
                fits.named = True
                found += it.waiter.pods
            if len(found) >= most:
                break
        return found

    def pods_to_ungate(self, most: int) -> list[Pod]:
        """Return gated pods that kube-scheduler is to try now, about so many, in order.

        These are the pods for which anything is kept, because they fit or have named cards, and the first
        that do not fit, whether or not there is a card to name. kube-scheduler preempts for these, and says
        why they wait. Pods that are not in this line are kube-scheduler's alone. Of a gang that lacks pods
        one is ungated, so that its events say how many are missing.
        """
        if not self._gated:
            return []
        state = self._current(), len(self._gated)
        turn = state[0]
        if self._ungated is not None and self._ungated[0] is turn and self._ungated[1] == state[1]:
            return []
        unfit = (place for place in turn.places if not place.placements)
        places = [place for _, place in turn.marks] + list(islice(unfit, DEPTH))
        uids = [it.metadata.uid for place in places for it in place.waiter.pods]
        uids += [
            uid
            for uid, pod in self._gated.items()
            if (waiter_id := _waiter_id(pod)) in self._stalled
            or (waiter_id not in turn and not self._line.orders(pod))
        ]
        asked = {_waiter_id(pod) for uid, pod in self._open.items() if uid not in self._gated}
        for uid, pod in self._gated.items():
            gang = group_key(pod)
            if gang is not None and gang not in turn and gang not in asked:
                asked.add(gang)
                uids.append(uid)
        found = [self._gated[uid] for uid in dict.fromkeys(uids) if uid in self._gated]
        if not found:
            self._ungated = state
        return found[:most]

    @property
    def max_bypass_s(self) -> float:
        """By how much later a request has come, at most, that was served before one of its priority that
        waits now. Those who use what it does not wait for, behind it in line, are not counted."""
        there = (self._bypassed.get(it.waiter.id, 0.0) for it in self.places())
        return max(there, default=0.0)

    @property
    def max_bypass_bound_s(self) -> float:
        """What that is never more than."""
        return self._line.fairness.starvation_s

    # ---- inside ----

    def _key(self, pod: Pod) -> SortKey:
        return self._turn.key(PendingEntry(_waiter_id(pod), (pod,)).waiting(self._now()))

    def _waits(self, pod: Pod) -> bool:
        return pod.metadata.uid in self._refused or waits(pod)

    def _set_gated(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        gates = {it.name for it in pod.spec.scheduling_gates}
        if gates == {QUEUE_GATE} and pod.metadata.deletion_timestamp is None and not pod.finished:
            self._gated[uid] = pod
            # Its place in line is kept until kube-scheduler has asked for it.
            _remember(self._refused, uid, None)
        elif self._gated.pop(uid, None) is not None:
            self._ungated = None

    def _still(self, pods: Iterable[Pod]) -> bool:
        """Whether any of them waits on, and is not just being bound."""
        uids = (it.metadata.uid for it in pods)
        return any(uid in self._open and not self._world.is_assumed(uid) for uid in uids)

    def _close(self, uid: str) -> None:
        pod = self._open.pop(uid, None)
        self._refused.pop(uid, None)
        self._waiting.discard(uid)
        if pod is None:
            return
        self._changes += 1
        waiter_id = _waiter_id(pod)
        self._fits.pop(waiter_id, None)
        self._excluded_nodes.pop(waiter_id, None)
        self._stalled.pop(waiter_id, None)
        self._bypassed.pop(waiter_id, None)

    def _mark_urgent(self, pod: Pod) -> None:
        """Serve before anybody else is asked about, unless nothing would be kept for this one."""
        turn = self._turn
        if self._urgent or turn.room is None or not turn.room.isdisjoint(self._line.units(pod)):
            self._urgent = True
        elif turn.marks:
            self._urgent = turn.rank(self._key(pod)) <= turn.marks[-1][0]

    def _requeue_stalled(self, pod: Pod) -> None:
        """kube-scheduler says of one that was passed over that it is units that are lacking now."""
        waiter_id = _waiter_id(pod)
        said = pod.unschedulable or ""
        if waiter_id in self._stalled and said != self._stalled[waiter_id]:
            resources = (name for it in self._world.dialects for name in it.RESOURCES)
            if any(f"Insufficient {name}" in said for name in resources):
                del self._stalled[waiter_id]
                self._urgent = True

    def _current(self, *, last: bool = False) -> QueueSnapshot:
        now = self._now()
        planned = self._planned()
        changed = (
            self._stamp != (self._world.version, self._changes)
            or now >= self._due
            or planned != self._plans
        )
        idle = now - self._served_at
        rested = idle >= max(0.0 if last else MIN_INTERVAL_S, SHARE * self._cost)
        # A clock that was put back does not stop the line.
        if self._urgent or (changed and (rested or idle < 0)):
            begun = self._took()
            self._serve(now, planned)
            self._served_at, self._cost = now, self._took() - begun
        return self._turn

    def _serve(self, now: float, planned: Mapping[str, tuple[Placement, ...]]) -> None:
        self._uses.renew(now)
        # Who loses patience with one leaves its cards to the next, who may have waited as long.
        for _ in range(3):
            waiting = [it for it in self._open.values() if _waiter_id(it) not in self._stalled]
            self._turn = self._line.serve(
                waiting, now, refused=self._waits, planned=planned, struck=self._excluded_nodes
            )
            lost = self._expire_reservations(now)
            if not lost:
                break
        self._stamp, self._plans = (self._world.version, self._changes), dict(planned)
        self._urgent = False
        first = min((it.since for it in self._fits.values()), default=inf)
        self._due = now if lost else first + RESERVATION_TTL_S

    def _expire_reservations(self, now: float) -> bool:
        """With those who have fitted for too long. Whether there were any."""
        fitting = {it.waiter.id: it for it in self._turn.places if it.placements}
        for waiter_id in self._fits.keys() - fitting.keys():
            del self._fits[waiter_id]
        lost = False
        for waiter_id, place in fitting.items():
            fits = self._fits.setdefault(waiter_id, _Fits(now))
            if now - fits.since < RESERVATION_TTL_S:
                continue
            lost = True
            del self._fits[waiter_id]
            # Else pods that can never start would keep a card from everybody, one after another.
            self._uses.charge(
                place.waiter.namespace, place.placements, fits.since, place.requested_at, now
            )
            if fits.asked:
                # These nodes were not even named.
                there = frozenset(it.node for it in place.placements)
                self._excluded_nodes[waiter_id] = (
                    self._excluded_nodes.get(waiter_id, frozenset()) | there
                )
            else:
                self._stalled[waiter_id] = place.waiter.pods[0].unschedulable or ""
        return lost

    def _count_bypassed(self, pod: Pod) -> None:
        """It is bound: before whom that came earlier and still waits, though not behind it in line?"""
        turn = self._turn
        if not turn.places or not self._waiting:
            return
        found = self._key(pod)
        rank, requested_at = turn.rank(found), found[3]
        # Of each namespace its first one alone.
        seen = {it.waiter.namespace for it in turn.places[:rank] if it.key[0] == found[0]}
        seen.add(pod.metadata.namespace)
        for it in turn.places[rank:]:
            if it.key[0] != found[0]:
                break
            namespace = it.waiter.namespace
            if namespace in seen or not self._still(it.waiter.pods):
                continue
            seen.add(namespace)
            since = max(it.requested_at, turn.past(namespace).served_at(it.requested_at))
            if since < requested_at:
                by = requested_at - since
                self._bypassed[it.waiter.id] = max(by, self._bypassed.get(it.waiter.id, 0.0))


class QueuedEvaluator:
    """The judge, with what is kept for those before a pod: what kube-scheduler is answered.

    A pod is judged by one and the same order from filter to bind. Where bind finds that nothing is left by
    the order as it is by then, that of filter counts, less what others have got since: a card that was kept
    for somebody then is never given, one that came to be kept in between is, if it is free.
    """

    def __init__(self, judge: PodEvaluator, order: QueueController) -> None:
        self._evaluate_node, self._order = judge, order
        self._filter_constraints: OrderedDict[str, QueueConstraints] = OrderedDict()

    def filter(self, pod: Pod, names: Sequence[str]) -> FilterResult:
        """Which of the nodes the pod fits; where none does, it waits from now on."""
        ahead = self._order.ahead(pod)
        found = self._evaluate_node.filter(pod, names, ahead)
        if not found.fitting and ahead.nodes:
            # What was kept a moment ago may not be any more.
            fresh = self._order.ahead(pod, last=True)
            if fresh != ahead:
                ahead, found = fresh, self._evaluate_node.filter(pod, names, fresh)
        if found.fitting:
            _remember(self._filter_constraints, pod.metadata.uid, ahead)
        elif found.failed:
            self._filter_constraints.pop(pod.metadata.uid, None)
            self._order.refused(pod, names)
        return found

    def ahead(self, pod: Pod) -> QueueConstraints:
        """What is kept for those before it now."""
        return self._order.ahead(pod)

    def kept(self, pod: Pod) -> frozenset[DeviceId]:
        """The cards on which anything is kept for those before a pod of a gang."""
        ahead = self._order.ahead(pod, last=True)
        placements = (it.placement for some in ahead.kept.values() for it in some)
        return ahead.reserved.union(it.uuid for one in placements for it in one.slices)

    def waits(self, pod: Pod, names: Sequence[str]) -> str:
        """The pod's gang waits from now on; how it stands, as sentences end."""
        self._order.refused(pod, names)
        return self._order.position(pod)

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """As filter was answered."""
        ahead = self._filter_constraints.get(pod.metadata.uid) or self._order.ahead(pod)
        return self._evaluate_node.prioritize(pod, names, ahead)

    def placements(self, pod: Pod, name: str) -> tuple[Placement, ...] | Infeasible:
        """Where on this node the pod goes; nothing if it asks for nothing."""
        found = self._evaluate_node.placements(pod, name, self._order.ahead(pod))
        then = self._filter_constraints.pop(pod.metadata.uid, None)
        if isinstance(found, Infeasible) and then is not None:
            found = self._evaluate_node.placements(pod, name, self._order.still(then))
        return found


def _waiter_id(pod: Pod) -> str:
    return group_key(pod) or pod.metadata.uid


def _remember(known: "OrderedDict[str, T]", key: str, what: T) -> None:
    known[key] = what
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
