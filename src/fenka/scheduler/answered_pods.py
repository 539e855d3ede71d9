"""Leaves room for pods that `filter` has answered with a single node, until they are bound there.

kube-scheduler asks about the next pod while it still binds the last ones. Both would get the card that is
best for both. The second binding would fail, and kube-scheduler retries such a pod only after its backoff.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Pod
from fenka.cluster.queue_constraints import HeldPlacement, QueueConstraints
from fenka.core.request import Placement

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
    """Holds placements for a short time."""

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
        held = dict(constraints.held)
        for uid, answer in self._answers.items():
            for placement in answer.placements:
                others = held.get(placement.node, ())
                own = HeldPlacement(uid, placement, answer.namespace)
                held[placement.node] = (*others, own)
        return replace(constraints, held=held, nodes=constraints.nodes | held.keys())
