"""Programs of `fenka run` for the commands about jobs: those that run or wait, or have left a log.

Runs a command beside a program of a training or a service: in its lease, with its environment.

Runs a command beside a process of a training.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import sandbox
from fenka.jobs.notebook import LOOPBACK
from fenka.local import runs
from fenka.local.launch import execute
from fenka.local.records import NOTEBOOKS, TRAININGS, RecordNotFound, directory_names
from fenka.local.views import card_uses
from fenka.local.workload import change_directory
from fenka.procfs import start_ticks
from fenka.views.workloads import JobEvent, JobProcess, JobStatus, TrainingJob
from fenka.workstation import paths
from fenka.workstation.client import Connection, known_snapshot, own_jobs, stop_jobs
from fenka.workstation.protocol import Done, EndedJob, JobView, RemoveEnded, Snapshot

TERMINAL = ("TERM", "COLORTERM", "LINES", "COLUMNS")
"""Variables that describe this terminal, which is not the one that the program was started from."""


class NotRunning(FenkaError):
    """The process does not run now."""


def become(name: str, process: tuple[int, int], directory: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of a process. The command holds the lease, too.

    Args:
        name: What the process is called.
        process: The process and its start, as recorded.
        directory: The working directory.
        command: The program and its arguments.

    Raises:
        NotRunning, IsolationError, JobNotStarted: The command was not started.
    """
    pid, start_ticks = process
    environment = _environment(name, pid, start_ticks)
    environment |= {key: os.environ[key] for key in TERMINAL if key in os.environ}
    sandbox.join(pid)
    change_directory(directory)
    execute([*command], environment)


def _environment(name: str, pid: int, start_ticks: int) -> dict[str, str]:
    """Return the environment of a process that runs. Raises NotRunning."""
    try:
        content = (procfs.PROC / str(pid) / "environ").read_bytes()
        lives = procfs.lives(pid, start_ticks)
    except OSError:
        lives, content = False, b""
    if not lives:
        raise NotRunning(f"{name} is not running")
    pairs = (os.fsdecode(pair).partition("=") for pair in content.split(b"\0") if b"=" in pair)
    return {name: value for name, _, value in pairs}


def jobs(name: str | None = None) -> list[TrainingJob]:
    """Return all programs of this user, or the one with this name, as screens show them."""
    snapshot = known_snapshot()
    leases: dict[str, list[JobView]] = {}
    for job in own_jobs(snapshot):
        if job.kind == "run":
            leases.setdefault(job.gang or job.name, []).append(job)
    names = [*leases, *(log for log in _with_logs() if log not in leases)]
    past = _past() if any(name not in leases for name in names) else {}
    return [
        _running(each, leases[each], snapshot)
        if each in leases and snapshot
        else _ended(each, past.get((each, runs.last_run(runs.place_of(each))), []))
        for each in names
        if name in (None, each)
    ]


def exists(name: str) -> bool:
    """Return whether a program of this user has this name."""
    return bool(jobs(name))


def events(name: str) -> list[JobEvent]:
    """Return what is known of a program's runs, the oldest first."""
    return [
        JobEvent(
            f"run/{job.run}" if job.run else f"job/{job.name}",
            "Warning" if job.status != 0 else "Normal",
            job.ended_at,
            "Ended",
            job.sentence,
        )
        for (each, _), members in _past().items()
        for job in members
        if each == name
    ]


def attach_to(name: str, instance: str, command: Iterable[str]) -> NoReturn:
    """Become this command in a program's lease: of a gang's first member, if none is named.

    Raises RecordNotFound, NotRunning, IsolationError, JobNotStarted.
    """
    members = [
        job
        for job in own_jobs(known_snapshot())
        if name in (job.name, job.gang) and instance in ("", job.name)
    ]
    if not members:
        known = f"{name} has no instance {instance[:80]}" if instance else f"{name} is not running"
        raise RecordNotFound(known)
    job = members[0]
    if not job.slices:
        raise NotRunning(f"{job.name} waits for its slice: it is not running yet")
    # It may have ended while its children hold the slice.
    pid = next((pid for pid in (job.pid, *job.pids) if start_ticks(pid) is not None), job.pid)
    become(job.name, (pid, start_ticks(pid) or 0), job.directory, [*command])


def delete(name: str) -> None:
    """End a program, if it runs, and remove its logs and records. Raises RequestFailed, OSError."""
    runtime = paths.current()
    if any(name in (job.name, job.gang) for job in own_jobs(known_snapshot())):
        stop_jobs(runtime, [name])
    runs.delete(name)
    with contextlib.suppress(FenkaError, ConnectionError), Connection(runtime) as connection:
        connection.request(RemoveEnded(name), Done)


def _with_logs() -> list[str]:
    """Return the names of this user's programs that have left a log."""
    return [
        name
        for name in directory_names(paths.jobs_directory)
        if runs.has_runs(name) and not TRAININGS.exists(name) and not NOTEBOOKS.exists(name)
    ]


def _past() -> dict[tuple[str, int], list[EndedJob]]:
    """Return this user's ended programs by name and run; none if no daemon answers."""
    past: dict[tuple[str, int], list[EndedJob]] = {}
    with contextlib.suppress(FenkaError, ConnectionError):
        for job in runs.ended().jobs:
            if job.uid == os.geteuid() and job.kind == "run":
                past.setdefault((job.gang or job.name, job.run), []).append(job)
    return past


def _running(name: str, leases: list[JobView], snapshot: Snapshot) -> TrainingJob:
    first = leases[0]
    status: JobStatus = "PENDING" if first.state == "waiting" else "RUNNING"
    return TrainingJob(
        name,
        namespace=first.user,
        uid=first.id,
        status=status,
        trainer="run",
        created=first.requested_at,
        instances=tuple(_instance(lease, snapshot) for lease in leases),
        priority=str(first.priority or ""),
        position=first.position,
        why=first.reason,
    )


def _instance(lease: JobView, snapshot: Snapshot) -> JobProcess:
    held = bool(lease.slices)
    card_mib = {card.uuid: card.memory_mib for card in snapshot.cards}
    parts = (
        piece.memory_mib / card_mib.get(piece.uuid, piece.memory_mib) for piece in lease.slices
    )
    requested = round(sum(parts), 1)
    return JobProcess(
        lease.name,
        lease.name,
        "main",
        lease.rank or 0,
        chief=not lease.rank,
        status="Running" if held else "Pending",
        phase="Running" if held else "Pending",
        created=lease.started_at or lease.requested_at,
        node=snapshot.node if held else "",
        node_address=snapshot.address if held else "",
        address=LOOPBACK if held else "",
        requested=requested if held else None,
        allocated=requested,
        cards=card_uses(lease, snapshot),
    )


def _ended(name: str, members: list[EndedJob]) -> TrainingJob:
    """Return a program that has ended. members: what the daemon knows of its last run."""
    directory = runs.place_of(name)
    end = runs.end_of(directory)
    decisive = next((job for job in members if job.status), members[0] if members else None)
    code = decisive.status if decisive else end.status if end else None
    ended_at = decisive.ended_at if decisive else end.ended_at if end else None
    try:
        created = (directory / "run").stat().st_mtime
    except OSError:
        created = ended_at or 0
    return TrainingJob(
        name,
        namespace=user_name(os.geteuid()),
        uid=decisive.id if decisive else "",
        status="SUCCEEDED" if code == 0 else "FAILED",
        trainer="run",
        created=decisive.requested_at if decisive else created,
        ended=ended_at,
        note=decisive.sentence if decisive else runs.run_outcome(name, runs.last_run(directory)),
    )


def run(name: str, instance: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of an instance: the chief's if none is named.

    It is ended when the training ends or starts again.

    Raises RecordNotFound, UnreadableRecord, NotRunning, IsolationError, JobNotStarted.
    """
    record = TRAININGS.load(name)
    process = record.instance(instance)
    if process is None:
        raise RecordNotFound(
            f"job {name} has no instance {instance[:80]}: fenka get {name} lists them"
        )
    if process.ended_at is not None:
        raise NotRunning(f"{process.name} is not running")
    become(process.name, (process.pid, process.start_ticks), record.directory, command)
