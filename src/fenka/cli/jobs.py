"""`fenka ps`, and stopping and the logs of jobs in the background: the jobs of this machine."""

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from fenka.cli import local_logs, tables
from fenka.cli.durations import short_duration
from fenka.cli.errors import UserError
from fenka.cli.local_logs import LogPart
from fenka.cli.options import OutputOption
from fenka.core.request import ComputeMode
from fenka.jobs import notebook
from fenka.workstation import paths, protocol
from fenka.workstation.client import Connection, RequestFailed, get_snapshot, jobs_called


def ps(output: OutputOption = "table") -> None:
    """Print running jobs, then pending ones in the order of their service.

    An exclamation mark after USED marks a job that exceeds its limits. A line below the table gives details.
    Further lines name the cards with memory that no lease uses: it counts as taken.
    """
    snapshot = get_snapshot(paths.current())
    if tables.print_data(snapshot.jobs, output):
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


def print_log(name: str, part: LogPart, *, follow: bool) -> None:
    """Print the log of a job that runs, or ran, in the background. follow: until the job ends."""
    log = _log_file(name)
    if not log.exists():
        raise UserError(_no_log(name))
    local_logs.print_log(log, part, lambda: not (follow and jobs_called(paths.current(), name)))


def _log_file(name: str) -> Path:
    return paths.jobs_directory() / name / "log"


def _no_log(name: str) -> str:
    jobs = jobs_called(paths.current(), name)
    if not jobs:
        return f"no job called {name} has left a log: `fenka ps` lists jobs"
    if jobs[0].uid != os.geteuid():
        return f"job {name} is {jobs[0].user}'s: only {jobs[0].user} can read its log"
    return f"{name} prints to the terminal that it was started from: only --detach keeps a log"


def resize(
    name: str, gpu_mem: str, gpu_core: int | None, gpu_core_mode: ComputeMode | None
) -> None:
    """Change the limits of a running job; its programs have them within a second."""
    with Connection(paths.current()) as connection:
        request = protocol.ResizeJob(name, gpu_mem, gpu_core, gpu_core_mode)
        answer = connection.request(request, protocol.Done)
    print(f"{tables.escape(answer.text)}: resized")


def stop(names: Sequence[str], grace: float) -> None:
    """Stop all jobs named, even if some of them cannot be stopped. grace: before SIGKILL, in seconds."""
    # `fenka ps` needs neither, and importing them takes an eighth of its start.
    from fenka.workstation import records
    from fenka.workstation.training import manage

    failures = []
    for name in names:
        if records.exists(name):
            # The daemon would end its processes, which its supervisor may start again.
            manage.stop(name)
            print(f"{name}: stopped")
            continue
        with Connection(paths.current()) as connection:
            try:
                answer = connection.request(protocol.StopJob(name, grace), protocol.Done)
            except RequestFailed as why:
                failures.append(str(why))
            else:
                print(f"{tables.escape(answer.text)}: stopped")
    if failures:
        raise UserError("; ".join(failures))
