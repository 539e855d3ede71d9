"""Plans by integer programming: patterns, node counts and cuts (docs/understand/node-plans.md)."""

import os
from collections.abc import Callable

from fenka.core.nodes.plan import Solver
from fenka.installation import how_to_add_extra


def available_solver(report: Callable[[str], None]) -> Solver | None:
    """Return the solver, None where its library is not installed. report: receives a sentence then."""
    # No linear algebra is needed, whose threads would wait in a loop when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from fenka.autoscaler.solver.solve import improve
    except ModuleNotFoundError as why:
        if why.name not in ("highspy", "numpy"):
            raise
        report(
            f"{why.name} is not installed, so the plan may not be the best: "
            f"{how_to_add_extra('autoscaler')}"
        )
        return None
    return improve
