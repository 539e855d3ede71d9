"""What kube-scheduler is told: each pod in its order, and pods of a gang by the plan for it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import group_name
from fenka.cluster.pod_placement import BEST, FilterResult, PodEvaluator, PreemptionResult
from fenka.core.inventory import DeviceId
from fenka.core.preemption import DisruptionBudget
from fenka.dialects.base import InvalidRecord
from fenka.scheduler.gang_scheduler import GangPending, GangScheduler
from fenka.scheduler.queue_controller import QueuedEvaluator


class Extender:
    """Answers filter, prioritize and preempt.

    wake: have kube-scheduler ask for these pods again, which it may have put aside. budgets: the disruption
    budgets that cover a pod.
    """

    def __init__(
        self,
        queued_evaluator: QueuedEvaluator,
        judge: PodEvaluator,
        gangs: GangScheduler,
        wake: Callable[[Sequence[Pod]], None],
        budgets: Callable[[Pod], frozenset[DisruptionBudget]],
    ) -> None:
        self._in_order, self._evaluate_node, self._gangs = queued_evaluator, judge, gangs
        self._wake, self._budgets = wake, budgets

    def filter(self, pod: Pod, names: Sequence[str]) -> FilterResult:
        """Which of the nodes the pod fits, and why the others do not."""
        if group_name(pod) is None:
            return self._in_order.filter(pod, names)
        try:
            gang = self._gangs.gang(pod)
            kept = self._in_order.kept(pod) if gang else frozenset[DeviceId]()
            place = self._gangs.place(pod, gang, names, kept) if gang else None
        except InvalidRecord as why:
            return FilterResult(unresolvable=dict.fromkeys(names, str(why)))
        if place is None:
            return self._in_order.filter(pod, names)
        if isinstance(place, GangPending):
            stands = self._in_order.waits(pod, names) if place.in_line else ""
            return FilterResult(failed=dict.fromkeys(names, place.sentence + stands))
        self._wake(place.others)
        node = place.placement.node
        elsewhere = f"the plan for its gang has it on {node}"
        return FilterResult([node], {name: elsewhere for name in names if name != node})

    def look(self, pod: Pod, names: Sequence[str]) -> FilterResult:
        """Judge a pod that the watch has not brought, by what the caller says of it. Changes nothing."""
        if group_name(pod) is None:
            return self._evaluate_node.filter(pod, names, self._in_order.ahead(pod))
        why = "the API server has not shown fenka this pod of a gang yet"
        return FilterResult(failed=dict.fromkeys(names, why))

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score for each node, in the order given."""
        for name in names:
            if self._gangs.planned_placement(pod, name) is not None:
                return [(it, BEST if it == name else 0) for it in names]
        return self._in_order.prioritize(pod, names)

    def preempt(
        self, pod: Pod, node: str, victims: Collection[str], pods: Mapping[str, Pod]
    ) -> PreemptionResult | None:
        """Who must go from the node, none where that does not help: a gang must fit whole, or nobody goes."""
        if not self._gangs.fits_after_preemption(pod):
            return None
        ahead = self._in_order.ahead(pod)
        return self._evaluate_node.preempt(
            pod, node, victims, pods, self._budgets, self._gangs.key, ahead=ahead
        )
