"""PodDisruptionBudgets: how many of which pods may be evicted now."""

from collections.abc import Iterable, Mapping

import msgspec

from fenka.cluster.eligibility import matches
from fenka.cluster.objects import Object, ObjectMeta, Pod, SelectorRequirement, drop_notes
from fenka.cluster.pod_limits import MAX_RULE_BYTES
from fenka.core.preemption import DisruptionBudget

BUDGETS_PATH = "/apis/policy/v1/poddisruptionbudgets"


class LabelSelector(Object):
    """Selects pods by their labels. An empty selector selects all of the namespace."""

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[SelectorRequirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether all of its requirements match."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            matches(requirement, labels) for requirement in self.match_expressions
        )


class BudgetSpec(Object):
    """The spec of a budget."""

    selector: LabelSelector | None = None


class BudgetStatus(Object):
    """The status of a budget."""

    disruptions_allowed: int = 0


class PodDisruptionBudget(Object):
    """A PodDisruptionBudget of policy/v1."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: BudgetSpec = msgspec.field(default_factory=BudgetSpec)
    status: BudgetStatus = msgspec.field(default_factory=BudgetStatus)

    def __post_init__(self) -> None:
        drop_notes(self.metadata)
        if len(msgspec.json.encode(self.spec)) > MAX_RULE_BYTES:
            # Its owner's pods may be evicted as if there were no budget.
            self.spec.selector = None


def budgets_for(pod: Pod, budgets: Iterable[PodDisruptionBudget]) -> frozenset[DisruptionBudget]:
    """Return the budgets that select the pod."""
    return frozenset(
        DisruptionBudget(
            f"{budget.metadata.namespace}/{budget.metadata.name}", budget.status.disruptions_allowed
        )
        for budget in budgets
        if budget.metadata.namespace == pod.metadata.namespace
        and budget.spec.selector is not None
        and budget.spec.selector.selects(pod.metadata.labels)
    )
