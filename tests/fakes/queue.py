"""A cluster with a queue of pods on a virtual clock, asked as kube-scheduler asks."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from fenka.cluster.gang_members import GangMembers
from fenka.cluster.gang_reservations import GangScheduler
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.core.fairness import Fairness
from fenka.core.request import Placement
from fenka.scheduler.extender import Extender
from fenka.scheduler.queue_controller import QueueController
from tests.builders import T4_MIB, Json, node_json, on_card, pod_json
from tests.fakes.evaluators import ComparedEvaluator

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


PLAIN = Fairness(penalty_per_request_s=0)


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


@dataclass
class Cluster:
    """Nodes, what is on them, and the order; `now` in seconds after the start."""

    nodes: list[Json]
    fairness: Fairness = PLAIN
    now: float = 0
    plans: dict[str, tuple[Placement, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = ClusterState(msgspec.convert(it, Node) for it in self.nodes)
        self.queue = QueueController(
            queue_state(self.world, fairness=self.fairness),
            lambda: self.plans,
            now=lambda: START + self.now,
            stopwatch=lambda: 0.0,
        )
        self.pods: dict[str, Pod] = {}
        members = GangMembers(self.world, lambda: {}, dict)
        self.gangs = GangScheduler(members, self.world, "binpack", lambda: self.now)
        self.evaluator = ComparedEvaluator(self.world, "binpack")
        self.preemption = PodPreemption(self.world, "binpack")
        self.extender = Extender(
            lambda: self.pods, self.queue, self.evaluator, self.gangs, self.preemption
        )
        self.names = [it["metadata"]["name"] for it in self.nodes]

    def set(self, *pods: Pod) -> None:
        """The informer brings them."""
        for pod in pods:
            self.world.set_pod(pod)
            self.queue.set_pod(pod)

    def gone(self, *names: str) -> None:
        """The informer reports that they were deleted."""
        for name in names:
            self.world.forget_pod(name)
            self.queue.forget_pod(name)

    def holds(self, name: str, card: int, units: int, node: str = "n", **rest: Any) -> None:
        """A pod that is on this card."""
        self.set(make(name, units, node=node, annotations=on_card(card, units), **rest))

    def ask(self, pod: Pod, *names: str) -> dict[str, str]:
        """As kube-scheduler does: sentences of the nodes that refuse it, empty if any does."""
        self.pods[pod.metadata.uid] = pod
        found = self.extender.filter(pod, names or self.names)
        return {} if found.fitting else {**found.failed, **found.unresolvable}

    def start(self, pod: Pod) -> str:
        """Filter, prioritize, bind: node/card, or the first sentence."""
        if refused := self.ask(pod):
            return next(iter(refused.values()))
        fitting = self.extender.filter(pod, self.names).fitting
        node = max(self.extender.prioritize(pod, fitting), key=lambda it: it[1])[0]
        return self.bind(pod, node)

    def bind(self, pod: Pod, node: str) -> str:
        """The last of the three alone."""
        found = self.extender.placements(pod, node)
        if isinstance(found, Infeasible):
            return found.sentence
        self.world.assume(pod, found)
        return f"{node}/{found[0].slices[0].card}"

    def wait(self, *pods: Pod) -> list[dict[str, str]]:
        """They come and are refused."""
        self.set(*pods)
        refused = [self.ask(pod) for pod in pods]
        assert all(refused), refused
        return refused


def two_cards() -> Cluster:
    """14 units each; 10 of card 0 are held until 300, 10 of card 1 until 200."""
    cluster = Cluster([node_json("n", T4_MIB, T4_MIB)])
    cluster.holds("h0", 0, 10, runs=300, started=0)
    cluster.holds("h1", 1, 10, runs=200, started=0)
    return cluster


def gang(name: str, units: int, at: float) -> Pod:
    """One of the gang g."""
    return make(name, units, at, labels={"pod-group.scheduling.sigs.k8s.io/name": "g"})
