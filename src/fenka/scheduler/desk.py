"""What kube-scheduler is told: each pod in its order, and pods of a gang by the plan for it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fenka.core.preemption import Budget
from fenka.dialects.gpushare import Unreadable
from fenka.kubernetes.gangs import name_of
from fenka.kubernetes.objects import Pod
from fenka.scheduler.decide import BEST, Filtered, Judge, Sacrifice
from fenka.scheduler.gangs import Gangs, Waits
from fenka.scheduler.order import InOrder


class Desk:
    """Answers filter, prioritize and preempt.

    wake: have kube-scheduler ask for these pods again, which it may have put aside. budgets: the disruption
    budgets that cover a pod.
    """

    def __init__(
        self,
        in_order: InOrder,
        judge: Judge,
        gangs: Gangs,
        wake: Callable[[Sequence[Pod]], None],
        budgets: Callable[[Pod], frozenset[Budget]],
    ) -> None:
        self._in_order, self._judge, self._gangs = in_order, judge, gangs
        self._wake, self._budgets = wake, budgets

    def filter(self, pod: Pod, names: Sequence[str]) -> Filtered:
        """Which of the nodes the pod fits, and why the others do not."""
        if name_of(pod) is None:
            return self._in_order.filter(pod, names)
        try:
            gang = self._gangs.gang(pod)
            kept = self._in_order.kept(pod) if gang else frozenset()
            place = self._gangs.place(pod, gang, names, kept) if gang else None
        except Unreadable as why:
            return Filtered(hopeless=dict.fromkeys(names, str(why)))
        if place is None:
            return self._in_order.filter(pod, names)
        if isinstance(place, Waits):
            stands = self._in_order.waits(pod, names) if place.in_line else ""
            return Filtered(failed=dict.fromkeys(names, place.sentence + stands))
        self._wake(place.others)
        node = place.placement.node
        elsewhere = f"the plan for its gang has it on {node}"
        return Filtered([node], {name: elsewhere for name in names if name != node})

    def look(self, pod: Pod, names: Sequence[str]) -> Filtered:
        """Judge a pod that the watch has not brought, by what the caller says of it. Changes nothing."""
        if name_of(pod) is None:
            return self._judge.filter(pod, names, self._in_order.ahead(pod))
        why = "the API server has not shown fenka this pod of a gang yet"
        return Filtered(failed=dict.fromkeys(names, why))

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score for each node, in the order given."""
        for name in names:
            if self._gangs.place_of(pod, name) is not None:
                return [(it, BEST if it == name else 0) for it in names]
        return self._in_order.prioritize(pod, names)

    def preempt(
        self, pod: Pod, node: str, victims: Collection[str], pods: Mapping[str, Pod]
    ) -> Sacrifice | None:
        """Who must go from the node, none where that does not help: a gang must fit whole, or nobody goes."""
        if not self._gangs.worth_preempting(pod):
            return None
        ahead = self._in_order.ahead(pod)
        return self._judge.preempt(
            pod, node, victims, pods, self._budgets, self._gangs.key, ahead=ahead
        )
