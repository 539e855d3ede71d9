"""`fenka delete` and `fenka prune`: remove jobs with all that belongs to them."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from fenka.cli.durations import parse_duration
from fenka.cli.errors import UserError
from fenka.cli.tables import escape
from fenka.cli.training.backend import (
    AllNamespacesOption,
    JobTarget,
    TypeOption,
)
from fenka.cli.training.selection import find_job, open_backend
from fenka.core.errors import FenkaError
from fenka.views.jobs import TrainingJob


def delete(
    target: JobTarget,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    type_: TypeOption = None,
) -> None:
    """Delete all jobs named, even if some of them cannot be deleted."""
    backend, failures = open_backend(target), []
    for name in dict.fromkeys(names):
        try:
            backend.delete([find_job(backend, name, type_)])
        except FenkaError as why:
            failures.append(str(why))
        else:
            _report(name)
    if failures:
        raise UserError("; ".join(failures))


def prune(
    target: JobTarget,
    since: Annotated[
        str,
        typer.Option("-s", "--since", metavar="TIME", help="ended longer ago than, such as 10h"),
    ],
    all_namespaces: AllNamespacesOption = False,
) -> None:
    """Delete jobs that ended some time ago."""
    age_s = parse_duration("--since", since)
    backend = open_backend(target, all_namespaces=all_namespaces)
    now = time.time()
    ended: Sequence[TrainingJob] = [
        job
        for job in backend.jobs()
        if job.finished
        # A notebook is started again.
        and job.status != "STOPPED"
        and not job.foreign
        and now - (job.ended or job.created) > age_s
    ]
    if not ended:
        print(f"no job has ended more than {since} ago")
        return
    backend.delete(ended)
    for job in ended:
        _report(job.name)


def _report(name: str) -> None:
    print(f"The training job {escape(name)} has been deleted successfully")
