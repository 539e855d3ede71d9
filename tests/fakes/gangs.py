"""A cluster with gangs on a virtual clock, asked as kube-scheduler asks."""

from fenka.cluster.gang_members import GangMembers
from fenka.cluster.gang_reservations import (
    GangScheduler,
)
from fenka.cluster.objects import (
    Pod,
)
from fenka.cluster.pod_groups import (
    PodGroup,
)
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.scheduler.extender import Extender
from fenka.scheduler.gang_barrier import GangBarrier
from fenka.scheduler.queue_controller import QueueController
from tests.builders import T4_MIB, a_node, a_pod, gang_labels
from tests.core.builders import device
from tests.fakes.evaluators import ComparedEvaluator


class Cluster:
    """A world with nodes of one T4 each, the pods that the watch knows, and a clock."""

    def __init__(self, *nodes: str) -> None:
        self.world = ClusterState([a_node(name, T4_MIB) for name in nodes])
        self.pods: dict[str, Pod] = {}
        self.groups: dict[str, PodGroup] = {}
        self.now = 0.0
        self.woken: list[str] = []
        members = GangMembers(self.world, lambda: self.pods, lambda: self.groups)
        self.gangs = GangScheduler(members, self.world, "binpack", lambda: self.now)
        self.barrier = GangBarrier(self.gangs)
        self.queue = QueueController(
            queue_state(self.world, complete=members.all_exist),
            self.gangs.reserved,
            now=lambda: self.now,
        )
        self.extender = Extender(
            lambda: self.pods,
            self.queue,
            ComparedEvaluator(self.world, "binpack", self.gangs.live),
            self.gangs,
            PodPreemption(self.world, "binpack", self.gangs.live.usage, gang_key=self.gangs.key),
            requeue=lambda pods: self.woken.extend(it.metadata.name for it in pods),
        )

    def put(self, pod: Pod) -> Pod:
        """The watch brings it."""
        self.pods[pod.metadata.uid] = pod
        self.world.set_pod(pod)
        self.queue.set_pod(pod)
        return pod

    def gang(self, name: str, size: int, units: int, there: int | None = None) -> list[Pod]:
        """Its pods, all of them or so many."""
        return [
            self.put(a_pod(f"{name}-{n}", units, uid=f"{name}-{n}", labels=gang_labels(name, size)))
            for n in range(size if there is None else there)
        ]

    @property
    def names(self) -> list[str]:
        """Of the nodes."""
        return [it.metadata.name for it in self.world.nodes()]

    def filter(self, pod: Pod) -> list[str]:
        """Where it fits."""
        return self.extender.filter(pod, self.names).fitting

    def why(self, pod: Pod) -> str:
        """The first sentence."""
        found = self.extender.filter(pod, self.names)
        return next(iter({**found.failed, **found.unresolvable}.values()))

    def bind(self, pod: Pod, node: str) -> None:
        """As the binder does once the gang is there."""
        placement = self.gangs.planned_placement(pod, node)
        assert placement is not None
        self.world.assume(pod, (placement,))
        self.gangs.start(pod)

    def free(self, node: str) -> int:
        """MiB that nobody holds, plans included."""
        return T4_MIB - self.gangs.live.usage.card_usage(node, device(0, node)).memory_mib
