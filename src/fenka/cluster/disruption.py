"""PodDisruptionBudgets: how many of which pods may go now."""

from collections.abc import Iterable

import msgspec

from fenka.cluster.eligibility import matches
from fenka.cluster.objects import Object, ObjectMeta, Pod, SelectorRequirement
from fenka.core.preemption import DisruptionBudget

BUDGETS_PATH = "/apis/policy/v1/poddisruptionbudgets"


class LabelSelector(Object):
    """Which pods, by their labels. An empty one selects all of the namespace."""

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: list[SelectorRequirement] = msgspec.field(default_factory=list)

    def selects(self, labels: dict[str, str]) -> bool:
        """All of its conditions hold."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            matches(it, labels) for it in self.match_expressions
        )


class BudgetSpec(Object):
    """spec."""

    selector: LabelSelector | None = None


class BudgetStatus(Object):
    """status."""

    disruptions_allowed: int = 0


class PodDisruptionBudget(Object):
    """Of policy/v1."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: BudgetSpec = msgspec.field(default_factory=BudgetSpec)
    status: BudgetStatus = msgspec.field(default_factory=BudgetStatus)


def budgets_for(pod: Pod, budgets: Iterable[PodDisruptionBudget]) -> frozenset[DisruptionBudget]:
    """Those that the pod counts on."""
    return frozenset(
        DisruptionBudget(
            f"{it.metadata.namespace}/{it.metadata.name}", it.status.disruptions_allowed
        )
        for it in budgets
        if it.metadata.namespace == pod.metadata.namespace
        and it.spec.selector is not None
        and it.spec.selector.selects(pod.metadata.labels)
    )
