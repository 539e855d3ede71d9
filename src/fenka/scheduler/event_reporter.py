"""Posts events for conditions that kube-scheduler does not report: on pods and on nodes.

Each sentence is posted once per object; the recorder counts and bounds the rest. Why a pod fits nowhere is
explained in the background: that takes an evaluation of all nodes, and hundreds of pods may come at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from fenka.cluster.mappings import RecentDict
from fenka.cluster.objects import PREEMPTED as PREEMPTION
from fenka.cluster.objects import Node, Pod
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.state import ClusterState

UNSCHEDULABLE, INVALID_RECORD = "FenkaUnschedulable", "FenkaInvalidRecord"
NODE_UNAVAILABLE, PREEMPTED = "FenkaNodeUnavailable", "FenkaPreempted"

REPORT_INTERVAL_S = 0.1
"""Between two pods that are explained. The recorder writes fewer events in the long run."""


class Recorder(Protocol):
    """Posts events."""

    def record_on_pod(self, pod: Pod, reason: str, note: str) -> object:
        """Post an event on a pod."""

    def record_on_node(self, node: Node, reason: str, note: str) -> None:
        """Post an event on a node."""


class EventReporter:
    """Hears of pods and nodes after the cluster's state does. It is silent while another replica leads.

    `run` is the task that explains pods.
    """

    def __init__(  # noqa: PLR0913
        self,
        cluster: ClusterState,
        evaluator: PodEvaluator,
        recorder: Recorder,
        is_leading: Callable[[], bool],
        *,
        position: Callable[[Pod], str] = lambda _: "",
        is_settled: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        cluster: what is reported about.
        evaluator: explains why a pod does not fit.
        recorder: posts the events.
        is_leading: whether this replica leads.
        position: returns a pod's position in the queue, as the end of a sentence.
        is_settled: whether positions are known of all pods.
        sleep: waits for a number of seconds.
        """
        self._cluster, self._evaluator, self._recorder = cluster, evaluator, recorder
        self._is_leading, self._position = is_leading, position
        self._is_settled, self._sleep = is_settled, sleep
        self._unexplained: dict[str, Pod] = {}
        """Pods that wait for their explanation, by UID."""
        self._filtered: RecentDict[str, None] = RecentDict()
        self._preemptors: RecentDict[str, str] = RecentDict()
        """For which pods others may have been evicted, in words, by the others' UIDs."""
        self._posted: RecentDict[tuple[str, str], None] = RecentDict()

    def filtered(self, pod: Pod) -> None:
        """Record that kube-scheduler asked about this pod: its own event has the reasons."""
        self._filtered[pod.metadata.uid] = None
        self._unexplained.pop(pod.metadata.uid, None)

    def preempted(self, pod: Pod, uids: Sequence[str]) -> None:
        """Record that some of these pods may be evicted for this one, as kube-scheduler describes it."""
        owner = next((owner for owner in pod.metadata.owner_references if owner.controller), None)
        words = f"pod {pod.full_name}"
        words += f" of {owner.kind} {owner.name}" if owner else ""
        words += f", whose priority {pod.spec.priority or 0} is higher"
        if pod.spec.priority_class_name:
            words += f" (PriorityClass {pod.spec.priority_class_name})"
        self._preemptors |= dict.fromkeys(uids, words)

    def forget(self, uid: str) -> None:
        """Record that the pod was deleted."""
        self._filtered.pop(uid, None)
        self._unexplained.pop(uid, None)

    def pod(self, pod: Pod) -> None:
        """Report what is wrong with a new or changed pod."""
        if not self._is_leading():
            return
        uid = pod.metadata.uid
        if uid in self._preemptors and any(
            condition.reason == PREEMPTION for condition in pod.status.conditions
        ):
            note = f"fenka: evicted for {self._preemptors.pop(uid)}"
            self._recorder.record_on_pod(pod, PREEMPTED, note)
        allocation = self._cluster.allocation(uid)
        error = allocation.error if allocation else None
        waiting = _is_unschedulable(pod)
        if error is not None and self._is_new(uid, error):
            note = (
                f"fenka: {error}; the pod is counted for what it requests, on the cards where it was placed "
                "or else on the first cards of its node"
            )
            self._recorder.record_on_pod(pod, INVALID_RECORD, note)
        if waiting and error is None and uid not in self._filtered:
            self._unexplained[uid] = pod
        else:
            self._unexplained.pop(uid, None)
        if waiting:
            # The next time that it is found unschedulable is another occasion.
            self._filtered.pop(uid, None)

    async def run(self) -> None:
        """Explain the pods that wait for it, one after the other, until cancelled."""
        while True:
            await self._sleep(REPORT_INTERVAL_S)
            if self._unexplained and self._is_settled():
                pod = self._unexplained.pop(next(iter(self._unexplained)))
                if self._is_leading():
                    self._explain(pod)

    def _explain(self, pod: Pod) -> None:
        invalid = pod.demand(self._cluster.dialects).invalid
        explanation = self._evaluator.explain(pod) if invalid is None else invalid
        if explanation is not None:
            note = f"fenka: {explanation}{self._position(pod)}"
            self._recorder.record_on_pod(pod, UNSCHEDULABLE, note)

    def node(self, node: Node) -> None:
        """Report why a new or changed node admits no pods."""
        name = node.metadata.name
        error = self._cluster.node_error(name)
        if error is None or not self._is_leading():
            return
        count = len(self._cluster.allocations(name))
        keep = f"; {count} of its pods keep what they have until they end" if count else ""
        if self._is_new(node.metadata.uid, error):
            note = f"fenka: admits no new pods: {error}{keep}"
            self._recorder.record_on_node(node, NODE_UNAVAILABLE, note)

    def _is_new(self, uid: str, sentence: str) -> bool:
        new = (uid, sentence) not in self._posted
        self._posted[uid, sentence] = None
        return new


def _is_unschedulable(pod: Pod) -> bool:
    """Return whether kube-scheduler has found no node for a pod that requests cards."""
    if pod.spec.node_name or pod.finished or pod.metadata.deletion_timestamp is not None:
        return False
    return pod.unschedulable is not None and pod.demand().requests_gpu
