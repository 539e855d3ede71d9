"""`fenka stop`: end programs of this machine, or notebooks of a cluster."""

from typing import Annotated

import typer

from fenka.cli import jobs
from fenka.cli.training.backend import JobTarget
from fenka.cli.training.selection import runs_here
from fenka.workstation import records
from fenka.workstation.client import known_snapshot


def stop(
    target: JobTarget,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    grace: Annotated[
        float | None,
        typer.Option(
            min=0, help="seconds between SIGTERM and SIGKILL on this machine; default: 10"
        ),
    ] = None,
) -> None:
    """Stop all jobs named, even if some of them cannot be stopped."""
    if runs_here(target, target.namespace) or not (target.of_cluster or _elsewhere(names)):
        jobs.stop(names, 10.0 if grace is None else grace)
        return
    from fenka.cli.training import notebooks

    notebooks.stop(target, names)


def _elsewhere(names: list[str]) -> bool:
    """Return whether this machine has none of these jobs."""
    snapshot = known_snapshot()
    here = {
        name for job in (snapshot.jobs if snapshot else ()) for name in (job.name, job.gang, job.id)
    }
    return not any(records.exists(name) or name in here for name in names)
