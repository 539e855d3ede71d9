"""`fenka ps`, and stopping and the logs of jobs in the background: the jobs of this machine."""

import os
import shlex
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fenka.cli import local_logs, tables
from fenka.cli.errors import UserError, print_error
from fenka.cli.local_logs import LogPart
from fenka.cli.options import OutputOption, short_duration
from fenka.core.request import ComputeMode
from fenka.jobs import notebook
from fenka.workstation import paths, protocol
from fenka.workstation.client import Connection, get_snapshot, jobs_called, known_snapshot, own_jobs
from fenka.workstation.protocol import EndedJob, describe_status


def ps(
    ended: Annotated[
        bool, typer.Option("--all", "-a", help="also jobs that have ended, and how")
    ] = False,
    output: OutputOption = "table",
) -> None:
    """Print running jobs, then pending ones in the order of their service.

    An exclamation mark after USED marks a job that exceeds its limits. A line below the table gives details.
    Further lines name the cards with memory that no lease uses: it counts as taken.
    """
    snapshot = get_snapshot(paths.current())
    # `fenka ps` does not need it, and importing it takes an eighth of its start.
    past = import_module("fenka.local.runs").ended().jobs if ended else []
    data = {"jobs": snapshot.jobs, "ended": [*map(_document, past)]} if ended else snapshot.jobs
    if tables.print_data(data, output):
        return
    rows: list[tuple[str, ...]] = [
        ("NAME", "USER", "STATE", "GPU", "MEMORY", "CORE", "USED", "AGE", "COMMAND")
    ]
    rows += [_row(job) for job in snapshot.jobs]
    violations = [
        f"! {job.name} {violation}; `fenka stop {job.name}` ends it"
        for job in snapshot.jobs
        for violation in job.violations
    ]
    unleased = [f"card {card.index}: {card.unleased}" for card in snapshot.cards if card.unleased]
    tables.print_lines([*tables.align_to_terminal(rows), *violations, *unleased])
    if past:
        head = ("NAME", "RUN", "USER", "GPU", "PEAK", "WAITED", "RAN", "ENDED", "RESULT")
        newest = sorted(past, key=lambda job: -job.ended_at)
        tables.print_lines(["", *tables.align_wrapped([head, *map(_ended_row, newest)])])


def _ended_row(job: EndedJob) -> tuple[str, ...]:
    return (
        job.name,
        str(job.run or "-"),
        job.user,
        ",".join(map(str, job.cards)) or "-",
        "+".join(f"{mib}MiB" for mib in job.peak_mib) or "-",
        short_duration(job.waited_s),
        "-" if job.ran_s is None else short_duration(job.ran_s),
        f"{short_duration(time.time() - job.ended_at)} ago",
        job.sentence,
    )


def _document(job: EndedJob) -> dict[str, object]:
    """Return a job as data: its record, with the exit code or the signal."""
    number = None if job.status is None else job.status & 0x7F
    return {
        **msgspec.structs.asdict(job),
        "exit_code": None if number != 0 else job.exit_code,
        "signal": describe_status(job.status) if job.status is not None and number else None,
        "waited_s": job.waited_s,
        "ran_s": job.ran_s,
        "why": job.sentence,
    }


def _row(job: protocol.JobView) -> tuple[str, ...]:
    state = f"waiting ({job.position})" if job.state == "waiting" else job.state
    used = [slice_.used_mib for slice_ in job.slices if slice_.used_mib is not None]
    return (
        job.name,
        job.user,
        state,
        ",".join(map(_place, job.slices)) or "-",
        "+".join(f"{slice_.memory_mib}MiB" for slice_ in job.slices) or job.summary,
        _core(job),
        (f"{sum(used)}MiB" if used else "-") + ("!" if job.violations else ""),
        short_duration(time.time() - (job.started_at or job.requested_at)),
        job.reason if job.state == "waiting" else _command(job),
    )


def _place(piece: protocol.SliceView) -> str:
    """Return `0`, or `0/4 3g.20gb` for an instance."""
    return f"{piece.card}/{piece.start} {piece.profile}" if piece.profile else str(piece.card)


def _core(job: protocol.JobView) -> str:
    """Return the share of each card's time."""
    if not job.slices or not job.slices[0].compute:
        return "-"
    first = job.slices[0]
    return f"{first.compute}%" + ("" if first.compute_mode == "hard" else f" {first.compute_mode}")


def _command(job: protocol.JobView) -> str:
    url = notebook.url(paths.jobs_directory() / job.name) if job.kind == "notebook" else None
    return url or shlex.join(job.command)


def has_log(name: str) -> bool:
    """Return whether a job that runs, or ran, in the background has left a log."""
    return _log_file(name).exists()


def print_log(name: str, part: LogPart, *, follow: bool, run: int = 0) -> None:
    """Print the log of a job that runs, or ran, in the background, and how it ended.

    follow: until the job ends. run: the run of this number; 0 for the last.
    """
    log = _log_file(name, run)
    if not log.exists():
        raise UserError(_no_log(name, run))
    current = not run or log.parent == paths.jobs_directory() / name
    follow = follow and current
    local_logs.print_log(log, part, lambda: not (follow and jobs_called(paths.current(), name)))
    from fenka.local import runs

    name, number = name.partition("/")[0], run or runs.last_run(paths.jobs_directory() / name)
    if sentence := runs.run_outcome(name, number):
        # Not on stdout, which has what the program has printed.
        print_error(sentence)


def _log_file(name: str, run: int = 0) -> Path:
    gang, _, member = name.partition("/")
    directory = paths.jobs_directory() / gang
    if run:
        from fenka.local import runs

        directory = runs.place_of_run(gang, run)
    return directory / member / "log"


def _no_log(name: str, run: int) -> str:
    if run and _log_file(name).exists():
        from fenka.local import runs

        known = ", ".join(map(str, runs.numbers(name.partition("/")[0])))
        return f"run {run} of {name} has no log any more: there are {known}"
    snapshot = known_snapshot()
    every = snapshot.jobs if snapshot else []
    jobs = own_jobs(snapshot) or every
    jobs = [job for job in (*jobs, *every) if name in (job.name, job.gang)]
    if not jobs:
        return f"no job called {name} has left a log: `fenka ps` lists jobs"
    if jobs[0].uid != os.geteuid():
        return f"job {name} is {jobs[0].user}'s: only {jobs[0].user} can read its log"
    return f"{name} prints to the terminal that it was started from: only --detach keeps a log"


def resize_here(
    name: str, gpu_mem: str, gpu_core: int | None, gpu_core_mode: ComputeMode | None
) -> None:
    """Change the limits of a running job; its programs have them within a second."""
    with Connection(paths.current()) as connection:
        request = protocol.ResizeJob(name, gpu_mem, gpu_core, gpu_core_mode)
        answer = connection.request(request, protocol.Done)
    print(f"{tables.escape(answer.text)}: resized")


def stop_here(names: Sequence[str], grace: float) -> None:
    """Stop all jobs named, even if some of them cannot be stopped. grace: before SIGKILL, in seconds.

    What waits is cancelled first: otherwise it could start when something else has ended.
    """
    # `fenka ps` needs neither, and importing them takes an eighth of its start.
    from fenka.local import training_commands
    from fenka.local.records import TRAININGS

    trainings = [name for name in names if TRAININGS.exists(name)]
    # The daemon would end their processes, which their supervisors may start again.
    pending = [name for name in trainings if not training_commands.is_running(name)]
    failures = list[str]()
    for name in pending:
        training_commands.stop(name)
        print(f"{name}: stopped")
    if others := [name for name in names if name not in trainings]:
        with Connection(paths.current()) as connection:
            request = protocol.StopJob(others, grace)
            answer = connection.request(request, protocol.JobsStopped)
        failures += answer.failures
        for name in answer.stopped:
            print(f"{tables.escape(name)}: stopped")
    for name in trainings:
        if name not in pending:
            training_commands.stop(name)
            print(f"{name}: stopped")
    if failures:
        raise UserError("; ".join(failures))
