"""Answers kube-scheduler: single pods under the constraints of the queue, members of a gang by its plan."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from fenka.cluster.gang_placement import GangPending, GangScheduler
from fenka.cluster.mappings import RecentDict
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Pod
from fenka.cluster.placement import (
    BEST,
    FilterResult,
    HeldPlacement,
    PodEvaluator,
    QueueConstraints,
)
from fenka.cluster.pod_groups import group_name
from fenka.cluster.pod_preemption import PodPreemption, PreemptionResult
from fenka.core.request import Placement
from fenka.dialects.base import InvalidRecord
from fenka.scheduler.queue_controller import QueueController

HOLD_S = 2.0
"""kube-scheduler binds a pod within milliseconds, or has given up by then without a report."""

MAX_HELD = 64
"""Room is left for this number of pods. kube-scheduler binds fewer at a time; anybody may call plain HTTP."""

Place = Callable[[], tuple[Placement, ...] | Infeasible]


@dataclass
class _Answer:
    ends_at: float
    place: Place
    namespace: str

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        placed = self.place()
        return () if isinstance(placed, Infeasible) else placed


class AnsweredPods:
    """Holds placements for a short time.

    kube-scheduler asks about the next pod while it still binds the last ones. Both would get the card that
    is best for both. The second binding would fail, and kube-scheduler retries such a pod only after its
    backoff.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        """By UID. The first one ends first."""

    def hold(self, pod: Pod, place: Place) -> None:
        """Leave room for this pod.

        place: returns where it goes. It is called only if another pod comes before the binding.
        """
        self.release(pod)
        self._answers[pod.metadata.uid] = _Answer(
            self._clock() + HOLD_S, place, pod.metadata.namespace
        )
        if len(self._answers) > MAX_HELD:
            del self._answers[next(iter(self._answers))]

    def release(self, pod: Pod) -> None:
        """Leave no room for this pod any more."""
        self._answers.pop(pod.metadata.uid, None)

    def constrain(self, constraints: QueueConstraints) -> QueueConstraints:
        """Return constraints that leave room for these pods too; the same object if there are none."""
        now = self._clock()
        while self._answers and self._answers[oldest := next(iter(self._answers))].ends_at <= now:
            del self._answers[oldest]
        if not self._answers:
            return constraints
        answered = {uid: answer for uid, answer in self._answers.items() if answer.placements}
        # They do not count twice: what the queue holds for them may be on another node.
        held = {
            node: tuple(hold for hold in holds if hold.entry_id not in answered)
            for node, holds in constraints.held.items()
        }
        for uid, answer in answered.items():
            for placement in answer.placements:
                others = held.get(placement.node, ())
                own = HeldPlacement(uid, placement, answer.namespace)
                held[placement.node] = (*others, own)
        return replace(constraints, held=held, nodes=constraints.nodes | held.keys())


class Extender:
    """Answers filter, prioritize and preempt, and says where `bind` places a pod.

    A pod is evaluated under the same constraints from filter to bind. If those of bind leave nothing, those
    of filter count, without what other pods have received since. So cards that were held for others at
    filter are never given away, and cards that came to be held in between are, if they are free.

    A pod that filter answers with a single node will be bound there. Other pods get other room meanwhile, if
    there is any.
    """

    def __init__(  # noqa: PLR0913
        self,
        pods: Callable[[], Mapping[str, Pod]],
        queue: QueueController,
        evaluator: PodEvaluator,
        gangs: GangScheduler,
        preemption: PodPreemption,
        *,
        on_filter: Callable[[Pod], None] = lambda _: None,
        on_preempt: Callable[[Pod, Sequence[str]], None] = lambda *_: None,
        requeue: Callable[[Sequence[Pod]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        pods: returns the pods of the API server, by UID. The caller's copy of a pod changes nothing here:
        callers over plain HTTP may be anybody. queue: the pending pods. evaluator: evaluates nodes. gangs:
        the gangs that are starting. preemption: chooses victims. on_filter: hears of pods that kube-scheduler
        asks about. on_preempt: hears of pods, and of the UIDs of those of which some may be evicted for them.
        requeue: has kube-scheduler try these pods, which may be in backoff. clock: seconds, monotonic.
        """
        self._pods, self._queue, self._evaluator, self._gangs = pods, queue, evaluator, gangs
        self._preemption, self._requeue = preemption, requeue
        self._on_filter, self._on_preempt = on_filter, on_preempt
        self._filter_constraints: RecentDict[str, QueueConstraints] = RecentDict()
        self._answered = AnsweredPods(clock)

    def filter(self, sent: Pod, nodes: Sequence[str]) -> FilterResult:
        """Return which of the nodes fit the pod. A pod that fits nowhere is pending from now on."""
        pod = self._pods().get(sent.metadata.uid)
        if pod is None:
            return self._filter_unknown(sent, nodes)
        self._on_filter(pod)
        refusal = self._queue.pause(pod)
        if refusal is not None:
            # kube-scheduler preempts nothing on nodes that it takes for unresolvable.
            sentence = refusal.sentence(self._queue.now())
            return FilterResult(unresolvable=dict.fromkeys(nodes, sentence))
        self._queue.ask(pod, nodes)
        outside: Mapping[str, str] = {}
        if group_name(pod) is not None:
            member = self._filter_member(pod, nodes)
            if isinstance(member, FilterResult):
                return member
            outside = member
            nodes = [name for name in nodes if name not in outside]
        uid = pod.metadata.uid
        self._answered.release(pod)
        constraints = self._queue.constraints(pod)
        available = self._answered.constrain(constraints)
        result = self._evaluator.filter(pod, nodes, available)
        if not result.fitting and available is not constraints:
            available = constraints
            result = self._evaluator.filter(pod, nodes, constraints)
        if not result.fitting and constraints.nodes:
            # The snapshot may be older than the last change.
            fresh = self._queue.constraints(pod, final=True)
            if fresh != constraints:
                constraints = available = fresh
                result = self._evaluator.filter(pod, nodes, fresh)
        result.failed.update(outside)
        if result.fitting:
            self._filter_constraints[uid] = constraints
            if len(result.fitting) == 1:
                place = partial(self._evaluator.placements, pod, result.fitting[0], available)
                self._answered.hold(pod, place)
        elif result.failed:
            self._filter_constraints.pop(uid, None)
            self._queue.reject(pod, nodes)
        return result

    def prioritize(self, sent: Pod, nodes: Sequence[str]) -> list[tuple[str, int]]:
        """Return a score for each node, in the order given."""
        pod = self._pods().get(sent.metadata.uid, sent)
        if group_name(pod) is not None:
            for name in nodes:
                if self._gangs.planned_placement(pod, name) is not None:
                    return [(other, BEST if other == name else 0) for other in nodes]
        constraints = self._filter_constraints.get(pod.metadata.uid)
        return self._evaluator.prioritize(pod, nodes, constraints or self._queue.constraints(pod))

    def placements(self, pod: Pod, node: str) -> tuple[Placement, ...] | Infeasible:
        """Return where on this node the pod is bound; nothing if it requests nothing."""
        planned = self._gangs.planned_placement(pod, node)
        if planned is not None:
            return (planned,)
        self._answered.release(pod)
        queued = self._queue.constraints(pod)
        available = self._answered.constrain(queued)
        result = self._evaluator.placements(pod, node, available)
        if isinstance(result, Infeasible) and available is not queued:
            result = self._evaluator.placements(pod, node, queued)
        constraints = self._filter_constraints.pop(pod.metadata.uid, None)
        if isinstance(result, Infeasible) and constraints is not None:
            constraints = self._queue.state.without_served(constraints)
            result = self._evaluator.placements(pod, node, constraints)
        return result

    def preempt(
        self, sent: Pod, victims: Mapping[str, Collection[str]], sent_pods: Mapping[str, Pod]
    ) -> dict[str, PreemptionResult]:
        """Return which pods to evict, on each node where that makes room.

        Args:
            sent: the pod that needs room.
            victims: UIDs of the pods that kube-scheduler would evict, by node.
            sent_pods: victims that kube-scheduler has sent whole, by UID.
        """
        known = self._pods()
        pod = known.get(sent.metadata.uid, sent)
        if self._queue.pause(pod) is not None:
            return {}
        chosen = {uid for uids in victims.values() for uid in uids}
        pods = {**sent_pods, **{uid: known[uid] for uid in chosen if uid in known}}
        # A gang must fit whole, or nothing is evicted for it.
        helpful = self._gangs.nodes_after_preemption(
            pod, victims.keys(), self._preemption.may_evict
        )
        if not helpful:
            return {}
        constraints = self._queue.constraints(pod)
        results = {}
        for node in helpful:
            uids = victims[node]
            result = self._preemption.victims(pod, node, uids, pods, constraints)
            # kube-scheduler takes a node without victims for an error of the extender.
            if result is not None and result.uids:
                results[node] = result
        self._on_preempt(sent, [uid for result in results.values() for uid in result.uids])
        return results

    def _filter_unknown(self, pod: Pod, nodes: Sequence[str]) -> FilterResult:
        """Evaluate a pod that the informer has not brought, as the caller describes it; reserve nothing."""
        if group_name(pod) is None:
            return self._evaluator.filter(pod, nodes, self._queue.constraints(pod))
        return FilterResult(failed=dict.fromkeys(nodes, self._gangs.unknown(pod).sentence))

    def _filter_member(self, pod: Pod, nodes: Sequence[str]) -> FilterResult | Mapping[str, str]:
        """Return the answer for a member of a gang.

        If it is placed like a single pod, return why it may not go to some of the nodes.
        """
        try:
            gang = self._gangs.gang(pod)
            if gang is None:
                return {}
            reserved = self._queue.constraints(pod, final=True).all_cards
            placed = self._gangs.place(pod, gang, nodes, reserved)
            if placed is None:
                return self._gangs.outside_domain(pod, gang, nodes)
        except InvalidRecord as why:
            return FilterResult(unresolvable=dict.fromkeys(nodes, str(why)))
        if isinstance(placed, GangPending):
            sentence = placed.sentence
            if placed.queued:
                self._queue.reject(pod, nodes)
                sentence += self._queue.position(pod)
            return FilterResult(failed=dict.fromkeys(nodes, sentence))
        self._requeue(placed.others)
        node = placed.placement.node
        reason = f"its gang's reservation is on {node}"
        return FilterResult([node], {name: reason for name in nodes if name != node})
