"""The columnar evaluator of pods, compared with the definition at every call."""

from collections.abc import Iterable, Sequence

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Pod
from fenka.cluster.placement import (
    NO_CONSTRAINTS,
    FilterResult,
    PodEvaluator,
    QueueConstraints,
    Verdict,
)
from fenka.cluster.pod_columns import ColumnarPodEvaluator, LiveColumns
from fenka.cluster.state import ClusterState


class ComparedEvaluator(ColumnarPodEvaluator):
    """Answers as the columnar evaluator does, also for few nodes; fails where the definition differs."""

    min_nodes = 0

    def __init__(
        self,
        cluster: ClusterState,
        policy: str,
        live: LiveColumns | None = None,
        max_nodes: int = 0,
    ) -> None:
        super().__init__(cluster, policy, live, max_nodes)
        self._definition = PodEvaluator(cluster, policy, self._live.usage, max_nodes)

    def filter(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> FilterResult:
        """Compare which nodes fit, in their order, and what is said of the others."""
        names = list(names)
        result = super().filter(pod, names, constraints)
        assert result == self._definition.filter(pod, names, constraints)
        return result

    def evaluate(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, Verdict | None]]:
        """Compare which nodes fit, and what is said of the others. Return the definition's verdicts."""
        names = list(names)
        expected = self._definition.evaluate(pod, names, constraints)
        verdicts = super().evaluate(pod, names, constraints)
        assert list(map(_shown, verdicts)) == list(map(_shown, expected))
        return expected

    def ranked(
        self, pod: Pod, names: Sequence[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[str]:
        """Compare the order."""
        ranked = super().ranked(pod, names, constraints)
        assert ranked == self._definition.ranked(pod, names, constraints)
        return ranked

    def prioritize(
        self, pod: Pod, names: Sequence[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, int]]:
        """Compare the scores."""
        scores = super().prioritize(pod, names, constraints)
        assert scores == self._definition.prioritize(pod, names, constraints)
        return scores

    def explain(self, pod: Pod) -> str | None:
        """Compare the sentence."""
        explanation = super().explain(pod)
        assert explanation == self._definition.explain(pod)
        return explanation


def _shown(named: tuple[str, Verdict | None]) -> tuple[object, ...]:
    """What a caller sees of a verdict when it filters."""
    name, verdict = named
    if isinstance(verdict, Infeasible):
        return name, verdict.sentence, verdict.unresolvable
    return name, verdict is not None
