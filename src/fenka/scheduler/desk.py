"""What kube-scheduler is told: by the judge for pods alone, by the plan for pods of a gang."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fenka.core.preemption import Budget
from fenka.dialects.gpushare import Unreadable
from fenka.kubernetes.gangs import name_of
from fenka.kubernetes.objects import Pod
from fenka.scheduler.decide import BEST, Filtered, Judge, Sacrifice
from fenka.scheduler.gangs import Gangs, Waits


class Desk:
    """Answers filter, prioritize and preempt.

    wake: have kube-scheduler ask for these pods again, which it may have put aside. budgets: the disruption
    budgets that cover a pod.
    """

    def __init__(
        self,
        judge: Judge,
        gangs: Gangs,
        wake: Callable[[Sequence[Pod]], None],
        budgets: Callable[[Pod], frozenset[Budget]],
    ) -> None:
        self._judge, self._gangs, self._wake, self._budgets = judge, gangs, wake, budgets

    def filter(self, pod: Pod, names: Sequence[str]) -> Filtered:
        """Which of the nodes the pod fits, and why the others do not."""
        if name_of(pod) is None:
            return self._judge.filter(pod, names)
        try:
            gang = self._gangs.gang(pod)
            place = self._gangs.place(pod, gang, names) if gang else None
        except Unreadable as why:
            return Filtered(hopeless=dict.fromkeys(names, str(why)))
        if place is None:
            return self._judge.filter(pod, names)
        if isinstance(place, Waits):
            return Filtered(failed=dict.fromkeys(names, place.sentence))
        self._wake(place.others)
        node = place.placement.node
        elsewhere = f"the plan for its gang has it on {node}"
        return Filtered([node], {name: elsewhere for name in names if name != node})

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score for each node, in the order given."""
        for name in names:
            if self._gangs.planned(pod, name) is not None:
                return [(it, BEST if it == name else 0) for it in names]
        return self._judge.prioritize(pod, names)

    def preempt(
        self, pod: Pod, node: str, victims: Collection[str], pods: Mapping[str, Pod]
    ) -> Sacrifice | None:
        """Who must go from the node, none where that does not help: a gang must fit whole, or nobody goes."""
        if not self._gangs.worth_preempting(pod):
            return None
        return self._judge.preempt(pod, node, victims, pods, self._budgets, self._gangs.key)
