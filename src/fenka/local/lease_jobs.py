"""Programs of `fenka run` and notebooks, for the commands about jobs: their state is that of their leases.

A notebook's record is in the job's directory, which its user can write. Its files are in its root directory.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.request import InvalidRequest
from fenka.formats.quantities import InvalidSize
from fenka.hardware.peer_credentials import user_name
from fenka.jobs.local_ports import LOOPBACK
from fenka.jobs.notebook import url
from fenka.jobs.processes import JobNotStarted
from fenka.local import records, runs
from fenka.local.launch import NotRunning, become
from fenka.local.records import NOTEBOOKS, TRAININGS, RecordNotFound
from fenka.local.views import card_uses, requested_cards
from fenka.local.workload import end_leases
from fenka.procfs import start_ticks
from fenka.views.workloads import JobEvent, JobProcess, JobStatus, TrainingJob
from fenka.workstation import paths
from fenka.workstation.client import DaemonConnection, jobs_called, known_snapshot, own_jobs
from fenka.workstation.protocol import Done, EndedJob, JobView, MachineSnapshot, RemoveEnded


def load_stopped(name: str) -> records.NotebookRecord:
    """Return the record of a notebook that does not run.

    Raises RecordNotFound, records.UnreadableRecord, JobNotStarted if it runs.
    """
    NOTEBOOKS.directory_of(name)
    if jobs_called(paths.current(), name):
        raise JobNotStarted(f"notebook {name} runs or waits already: see fenka ps", INVALID_INPUT)
    return NOTEBOOKS.load(name)


def jobs(name: str | None = None) -> list[TrainingJob]:
    """Return all notebooks and programs of this user, or those with this name, as screens show them.

    A notebook whose record cannot be read is shown as failed, so that it can be deleted.
    """
    snapshot, user = known_snapshot(), user_name(os.geteuid())
    leases: dict[str, list[JobView]] = {}
    for lease in own_jobs(snapshot):
        leases.setdefault(lease.gang or lease.name, []).append(lease)
    shown = []
    for notebook in NOTEBOOKS.names() if name is None else filter(NOTEBOOKS.exists, [name]):
        # Another command may be deleting it.
        with contextlib.suppress(FileNotFoundError, RecordNotFound):
            shown.append(
                _notebook(notebook, next(iter(leases.get(notebook, [])), None), snapshot, user)
            )
    running = {job: found for job, found in leases.items() if found[0].kind == "run"}
    programs = [*running, *(log for log in _with_logs() if log not in running)]
    past = _past() if any(program not in running for program in programs) else {}
    return shown + [
        _program(program, running[program], snapshot)
        if program in running and snapshot
        else _ended(program, past.get((program, runs.last_run(runs.place_of(program))), []))
        for program in programs
        if name in (None, program)
    ]


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
        for (program, _), members in _past().items()
        for job in members
        if program == name
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
    """End a program or a notebook, if it runs, and remove its logs and records. A notebook's files stay.

    Raises RequestFailed, OSError.
    """
    end_leases(name)
    if NOTEBOOKS.exists(name):
        NOTEBOOKS.remove(name)
        return
    runs.delete(name)
    with (
        contextlib.suppress(FenkaError, ConnectionError),
        DaemonConnection(paths.current()) as connection,
    ):
        connection.request(RemoveEnded(name), Done)


def _with_logs() -> list[str]:
    """Return the names of this user's programs that have left a log."""
    return [
        name
        for name in paths.directory_names(paths.jobs_directory)
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


def _notebook(
    name: str, lease: JobView | None, snapshot: MachineSnapshot | None, user: str
) -> TrainingJob:
    """Return one notebook. Raises FileNotFoundError, RecordNotFound."""
    file = (NOTEBOOKS.place_of(name) / NOTEBOOKS.file).stat()
    job = TrainingJob(
        name,
        namespace=user,
        uid=f"{file.st_ino:x}-{file.st_mtime_ns:x}",
        status=_status(lease) if lease else "STOPPED",
        trainer="notebook",
        created=file.st_mtime,
    )
    try:
        record = NOTEBOOKS.load(name)
        if not lease or not snapshot:
            return job
        requested = requested_cards(record.spec.gpu, snapshot)
    except (records.UnreadableRecord, InvalidRequest, InvalidSize) as why:
        return replace(job, status="FAILED", note=str(why))
    return replace(
        job,
        instances=(_process(lease, snapshot, requested, "notebook", f"{name}-notebook-0"),),
        priority=str(lease.priority or ""),
        position=lease.position,
        why=lease.reason,
        address=url(NOTEBOOKS.place_of(name)) or "" if job.status == "RUNNING" else "",
    )


def _program(name: str, leases: list[JobView], snapshot: MachineSnapshot) -> TrainingJob:
    first = leases[0]
    return TrainingJob(
        name,
        namespace=first.user,
        uid=first.id,
        status=_status(first),
        trainer="run",
        created=first.requested_at,
        instances=tuple(
            _process(lease, snapshot, _held(lease, snapshot), "main") for lease in leases
        ),
        priority=str(first.priority or ""),
        position=first.position,
        why=first.reason,
    )


def _status(lease: JobView) -> JobStatus:
    return "PENDING" if lease.state == "waiting" else "RUNNING"


def _held(lease: JobView, snapshot: MachineSnapshot) -> float | None:
    """Return the cards of a lease, slices as shares of one; None without slices."""
    card_mib = {card.uuid: card.memory_mib for card in snapshot.cards}
    parts = (
        piece.memory_mib / card_mib.get(piece.uuid, piece.memory_mib) for piece in lease.slices
    )
    return round(sum(parts), 1) if lease.slices else None


def _process(
    lease: JobView, snapshot: MachineSnapshot, requested: float | None, role: str, name: str = ""
) -> JobProcess:
    """Return the process that runs in a lease, or waits for it. requested: in cards."""
    held = bool(lease.slices)
    return JobProcess(
        name or lease.name,
        lease.name,
        role,
        lease.rank or 0,
        chief=not lease.rank,
        status="Running" if held else "Pending",
        phase="Running" if held else "Pending",
        created=lease.started_at or lease.requested_at,
        node=snapshot.node if held else "",
        node_address=snapshot.address if held else "",
        address=LOOPBACK if held else "",
        requested=requested,
        allocated=(requested or 0) if held else 0,
        cards=card_uses(lease, snapshot),
    )


def _was_ended(job: EndedJob) -> bool:
    """Return whether its owner, the daemon's end or the machine's restart ended a job: it did not fail."""
    return job.restarted or job.cause in ("stopped", "cancelled", "shutdown")


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
        status="SUCCEEDED"
        if code == 0
        else "STOPPED"
        if decisive and _was_ended(decisive)
        else "FAILED",
        trainer="run",
        created=decisive.requested_at if decisive else created,
        ended=ended_at,
        note=decisive.sentence if decisive else runs.run_outcome(name, runs.last_run(directory)),
    )
