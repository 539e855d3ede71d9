"""Which nodes: an integer program of counts alone, with what is known of what they can hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fenka.autoscaler.solver.model import INFINITY, Infeasible, Model
from fenka.autoscaler.solver.service import Goals, ServiceColumns
from fenka.core.planning.problem import Problem


@dataclass(frozen=True, slots=True)
class Counts:
    """Nodes by type, and pods to be served by class."""

    nodes: Mapping[int, int]
    pods: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """What pods are worth together is at most what the nodes can hold of it.

    That is true for any worths, if no node of a type can hold more than its bound.

    Attributes:
        worths: by class.
        bounds: by type.
    """

    worths: Mapping[int, float]
    bounds: Mapping[int, float]

    def violation(self, counts: Counts) -> float:
        """Return by how much the pods are worth more than the nodes can hold; the dearest pod is 1."""
        worth = sum(it * counts.pods.get(each, 0) for each, it in self.worths.items())
        held = sum(it * self.bounds.get(number, 0.0) for number, it in counts.nodes.items())
        return (worth - held) / max(self.worths.values(), default=1.0)


class CutMaster:
    """The program of counts."""

    def __init__(
        self, problem: Problem, goals: Goals, cuts: Iterable[Cut], excluded: Iterable[Counts]
    ) -> None:
        self._model = Model()
        self._problem = problem
        self._service = ServiceColumns(self._model, problem, goals)
        for cut in cuts:
            self._cut(cut)
        for counts in excluded:
            self._exclude(counts)

    def solve(self, seconds: float) -> tuple[Counts | None, float] | None:
        """Return the best counts that no cut forbids and a bound of any plan's cost; None if there are none.

        The counts are None where there was no time to find them.
        """
        try:
            result = self._model.solve_integer(seconds)
        except Infeasible:
            return None
        if result is None:
            return None, -INFINITY
        nodes = {
            number: round(result.values[column]) for number, column in self._service.nodes.items()
        }
        pods = {each: round(result.values[column]) for each, column in self._service.pods.items()}
        return Counts(nodes, pods), result.bound

    def _cut(self, cut: Cut) -> None:
        scale = max(cut.worths.values(), default=0.0)
        if scale <= 0:
            return
        holds = [
            (column, cut.bounds[number] / scale) for number, column in self._service.nodes.items()
        ]
        worths = [(self._service.pods[each], -it / scale) for each, it in cut.worths.items()]
        self._model.row(0.0, INFINITY, [*holds, *worths])

    def _exclude(self, counts: Counts) -> None:
        """Forbid these counts, and all with fewer nodes or more pods: they cannot be packed either."""
        choices = []
        for number, column in self._service.nodes.items():
            more = counts.nodes.get(number, 0) + 1
            if more <= self._problem.types[number].most:
                choice = self._model.column(0.0, 0.0, 1.0, integer=True)
                self._model.row(0.0, INFINITY, [(column, 1.0), (choice, -float(more))])
                choices.append((choice, 1.0))
        for each, column in self._service.pods.items():
            demand, served = self._problem.classes[each].demand, counts.pods.get(each, 0)
            if served:
                choice = self._model.column(0.0, 0.0, 1.0, integer=True)
                fewer = float(demand - served + 1)
                self._model.row(-INFINITY, float(demand), [(column, 1.0), (choice, fewer)])
                choices.append((choice, 1.0))
        self._model.row(1.0, INFINITY, choices)
