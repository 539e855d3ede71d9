"""Pods of a queue, and the queue itself by its events, on a virtual clock."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.core.queue import Fairness
from fenka.core.request import Placement
from tests.builders import T4_MIB, Json, a_node, gang_labels, pod_json

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


UNSCHEDULABLE: Json = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
}


def stamp(at: float) -> str:
    """So many seconds after the start."""
    return datetime.fromtimestamp(START + at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make(
    name: str,
    units: int,
    at: float = 0,
    *,
    runs: int | None = None,
    started: float | None = None,
    spec: Json | None = None,
    namespace: str = "default",
    said: Json | None = None,
    **rest: Any,
) -> Pod:
    """A pod asked for at that time. runs: its deadline, with no grace."""
    made = pod_json(name, units, uid=name, **rest)
    made["metadata"] |= {"creationTimestamp": stamp(at), "namespace": namespace}
    made["spec"] |= {"terminationGracePeriodSeconds": 0, **(spec or {})}
    if runs is not None:
        made["spec"]["activeDeadlineSeconds"] = runs
    if started is not None:
        made["status"]["startTime"] = stamp(started)
    made["status"] |= said or {}
    return msgspec.convert(made, Pod)


def pending(name: str, units: int = 10, at: float = 0, **given: Any) -> Pod:
    """Return a pod for which kube-scheduler has found no node."""
    return make(name, units, at, said=UNSCHEDULABLE, **given)


def gang(name: str, units: int, at: float) -> Pod:
    """Return a pod of the gang g, which has two."""
    return make(name, units, at, labels=gang_labels("g", 2))


class QueueByEvents:
    """A queue over node n, which has T4s of 14 units. Times are seconds after START.

    Attributes:
        gangs: what is reserved for gangs.
    """

    def __init__(self, *running: Pod, cards: int = 1, fairness: Fairness | None = None) -> None:
        self.now, self.gangs = 0.0, dict[str, tuple[Placement, ...]]()
        self.cluster = ClusterState([a_node("n", *[T4_MIB] * cards)], running)
        self.state = queue_state(
            self.cluster, fairness=fairness or Fairness(penalty_per_request_s=0)
        )

    def set(self, *pods: Pod) -> None:
        """Bring pods, as the informer does."""
        for pod in pods:
            self.cluster.set_pod(pod)
            self.state.set_pod(pod, START + self.now)

    def end(self, name: str) -> None:
        """Report that a pod was deleted."""
        self.cluster.forget_pod(name)
        self.state.forget_pod(name, START + self.now)
