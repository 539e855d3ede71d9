"""`fenka logs` and `fenka attach`: what a job prints, and a command in one of its instances."""

import sys
from typing import Annotated

import typer

from fenka.cli import jobs
from fenka.cli.durations import parse_duration
from fenka.cli.errors import UserError
from fenka.cli.local_logs import LogPart
from fenka.cli.training.backend import (
    CommandArgument,
    ContainerOption,
    InstanceOption,
    JobTarget,
    LogRequest,
    SinceOption,
    TailOption,
    TimestampsOption,
)
from fenka.cli.training.selection import find_job, open_backend
from fenka.core.errors import INVALID_INPUT
from fenka.workstation import records


def logs(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a job")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="print until the job ends")
    ] = False,
    instance: InstanceOption = "",
    container: ContainerOption = "",
    tail: TailOption = None,
    since: SinceOption = "",
    timestamps: TimestampsOption = False,
    run: Annotated[
        int | None,
        typer.Option(
            "--run",
            metavar="N",
            min=1,
            help="this run of the name, on this machine; default: the last",
        ),
    ] = None,
) -> None:
    """Print the log of a job's chief, or of the instance that is named."""
    since_s = parse_duration("--since", since) if since else None
    elsewhere = target.of_cluster or records.exists(name)
    if not elsewhere and (jobs.has_log(name) or _local(target)):
        if instance or container:
            raise UserError(f"{name} is one process with one log: leave out -i and -c")
        jobs.print_log(name, LogPart(tail, since_s, timestamps), follow=follow, run=run or 0)
        return
    if run:
        raise UserError(f"{name} is no program of this machine: leave out --run", INVALID_INPUT)
    request = LogRequest(follow, instance, container, tail, since_s, timestamps)
    open_backend(target).logs(name, request)


def _local(target: JobTarget) -> bool:
    """Return whether this machine's daemon answers, or is to."""
    from fenka.cli import cluster

    return cluster.local(target) is not None


def attach(
    target: JobTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the job")],
    command: CommandArgument = None,
    instance: InstanceOption = "",
    container: ContainerOption = "",
) -> None:
    """Run a command in an instance, connected to this terminal."""
    backend = open_backend(target)
    request = LogRequest(instance=instance, container=container)
    code = backend.attach(find_job(backend, name), request, command or ["sh"])
    if code:
        sys.exit(code)
