"""The extender over a cluster on a virtual clock, called as kube-scheduler calls it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fenka.cluster.gang_placement import GangMembers, GangScheduler
from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_groups import GangPods, PodGroup
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.core.queue import Fairness
from fenka.core.request import Placement
from fenka.scheduler.binder import GangBarrier
from fenka.scheduler.extender import Extender
from fenka.scheduler.queue_controller import QueueController
from tests.builders import T4_MIB, Json, a_pod, gang_labels, node_json, on_card
from tests.core.builders import device
from tests.fakes.evaluators import ComparedEvaluator
from tests.fakes.queue import START, make

PLAIN = Fairness(penalty_per_request_s=0)


class ExtenderHarness:
    """Nodes, their pods, the queue and the gangs.

    Attributes:
        now: seconds after START.
        plans: what is reserved for gangs beside what `gangs` has reserved.
        woken: names of the pods that kube-scheduler is to try again.
    """

    def __init__(self, nodes: Sequence[Json], fairness: Fairness = PLAIN, now: float = 0) -> None:
        self.now = now
        self.plans: dict[str, tuple[Placement, ...]] = {}
        self.pods: dict[str, Pod] = {}
        self.groups: dict[str, PodGroup] = {}
        self.woken: list[str] = []
        self.names = [it["metadata"]["name"] for it in nodes]
        self.state = ClusterState(msgspec.convert(it, Node) for it in nodes)
        members = GangMembers(self.state, lambda: GangPods(self.pods.values()), lambda: self.groups)
        self.gangs = GangScheduler(members, self.state, "binpack", lambda: self.now)
        self.barrier = GangBarrier(self.gangs)
        self.queue = QueueController(
            queue_state(self.state, fairness=fairness, complete=members.all_exist),
            lambda: {**self.gangs.reserved(), **self.plans},
            now=lambda: START + self.now,
            stopwatch=lambda: 0.0,
        )
        self.preemption = PodPreemption(
            self.state, "binpack", self.gangs.live.usage, gang_key=self.gangs.key
        )
        self.evaluator = ComparedEvaluator(self.state, "binpack", self.gangs.live)
        self.extender = self.extender_with(self.queue)

    def extender_with(self, queue: QueueController, max_nodes: int = 0) -> Extender:
        """Return an extender with another queue, or that returns at most so many nodes from filter."""
        return Extender(
            lambda: self.pods,
            queue,
            ComparedEvaluator(self.state, "binpack", self.gangs.live, max_nodes),
            self.gangs,
            self.preemption,
            requeue=lambda pods: self.woken.extend(it.metadata.name for it in pods),
            clock=lambda: self.now,
        )

    # ---- what the informer brings ----

    def set(self, *pods: Pod) -> None:
        """Bring pods that are new or have changed."""
        for pod in pods:
            self.pods[pod.metadata.uid] = pod
            self.state.set_pod(pod)
            self.queue.set_pod(pod)

    def put(self, pod: Pod) -> Pod:
        """Bring a pod, and return it."""
        self.set(pod)
        return pod

    def gone(self, *uids: str) -> None:
        """Report that pods were deleted."""
        for uid in uids:
            self.pods.pop(uid, None)
            self.state.forget_pod(uid)
            self.queue.forget_pod(uid)

    def holds(self, name: str, card: int, units: int, node: str = "n", **rest: Any) -> None:
        """Bring a pod that is on this card."""
        self.set(make(name, units, node=node, annotations=on_card(card, units), **rest))

    def gang(self, name: str, size: int, units: int, present: int | None = None) -> list[Pod]:
        """Bring the pods of a gang, by default all of them."""
        return [
            self.put(a_pod(f"{name}-{n}", units, uid=f"{name}-{n}", labels=gang_labels(name, size)))
            for n in range(size if present is None else present)
        ]

    # ---- what kube-scheduler asks ----

    def filter(self, pod: Pod, *names: str) -> list[str]:
        """Return the nodes that fit the pod."""
        return self.extender.filter(pod, names or self.names).fitting

    def ask(self, pod: Pod, *names: str) -> dict[str, str]:
        """Return the sentences of the nodes that do not fit the pod, none if any node fits."""
        self.pods[pod.metadata.uid] = pod
        result = self.extender.filter(pod, names or self.names)
        return {} if result.fitting else {**result.failed, **result.unresolvable}

    def why(self, pod: Pod) -> str:
        """Return the first sentence of the nodes that do not fit the pod."""
        result = self.extender.filter(pod, self.names)
        return next(iter({**result.failed, **result.unresolvable}.values()))

    def start(self, pod: Pod) -> str:
        """Filter, prioritize and bind: return node/card, or the first sentence."""
        if refused := self.ask(pod):
            return next(iter(refused.values()))
        fitting = self.filter(pod)
        node = max(self.extender.prioritize(pod, fitting), key=lambda it: it[1])[0]
        return self.bind(pod, node)

    def bind(self, pod: Pod, node: str) -> str:
        """Bind as the binder does once the pod's gang is complete: return node/card, or the sentence."""
        placements = self.extender.placements(pod, node)
        if isinstance(placements, Infeasible):
            return placements.sentence
        self.state.assume(pod, placements)
        self.gangs.start(pod)
        return f"{node}/{placements[0].slices[0].card}"

    def wait(self, *pods: Pod) -> list[dict[str, str]]:
        """Bring pods that no node fits, and return the sentences for each."""
        self.set(*pods)
        refused = [self.ask(pod) for pod in pods]
        assert all(refused), refused
        return refused

    def free(self, node: str) -> int:
        """Return the MiB of a node of one T4 that neither a pod nor a reservation has."""
        return T4_MIB - self.gangs.live.usage.card_usage(node, device(0, node)).memory_mib


def on_t4(*names: str) -> ExtenderHarness:
    """Return nodes of one T4 each."""
    return ExtenderHarness([node_json(name, T4_MIB) for name in names])


def two_cards() -> ExtenderHarness:
    """14 units each; 10 of card 0 are held until 300, 10 of card 1 until 200."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    cluster.holds("h0", 0, 10, runs=300, started=0)
    cluster.holds("h1", 1, 10, runs=200, started=0)
    return cluster


def freed_card(head: int, later: int) -> tuple[ExtenderHarness, Pod, Pod]:
    """Return node n, whose card a pod has just left, the pod that waits for it, and one that came after."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 14)
    pods = make("head", head, 1), make("later", later, 2)
    cluster.wait(pods[0])
    cluster.set(pods[1])
    cluster.gone("h")
    cluster.now = 1
    return cluster, *pods
