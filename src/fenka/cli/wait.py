"""`fenka wait`: wait until a job of this machine has ended."""

import sys
import time
from typing import Annotated

import typer

from fenka.cli.errors import UserError, print_error
from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE
from fenka.workstation import records, runs
from fenka.workstation.ended import EndedJob
from fenka.workstation.training import manage

POLL_S = 0.2


def wait(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a job, or its id")],
    run: Annotated[
        int | None, typer.Option("--run", metavar="N", min=1, help="this run; default: the last")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="give up then, with code 75"),
    ] = None,
) -> None:
    """Wait for the end of a job, print how it ended, and exit with its exit code."""
    deadline = None if timeout is None else time.monotonic() + timeout
    if not run and records.exists(name):
        while not manage.record(name).finished:
            _sleep(name, deadline)
        sys.exit(manage.exit_code(name))
    while (answer := runs.ended(name, run or 0)).present and not (run and answer.jobs):
        _sleep(name, deadline)
    if not answer.jobs:
        which = f"run {run} of {name}" if run else f"a job called {name}"
        raise UserError(f"{which} is not known: `fenka ps -a` lists jobs", INVALID_INPUT)
    job = _decisive(answer.jobs)
    print_error(f"{job.name}: {job.sentence}")
    code = job.exit_code
    if code is None:
        raise UserError(f"the exit code of {job.name} is not known")
    sys.exit(code)


def _decisive(jobs: list[EndedJob]) -> EndedJob:
    """Return the job, or the first member of a gang that failed: the others were ended because of it."""
    failed = [job for job in jobs if job.status != 0]
    return min(failed or jobs, key=lambda job: job.ended_at)


def _sleep(name: str, deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise UserError(f"{name} has not ended yet", TEMPORARY_FAILURE)
    time.sleep(POLL_S)
