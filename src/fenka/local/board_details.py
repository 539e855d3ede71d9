"""One program in full for the dashboard: why it waits or runs, what happened to it, and its log."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.isolation.lease_files import open_regular_file
from fenka.local import records, runs, training_commands
from fenka.local.log_files import BLOCK_BYTES, last_lines
from fenka.local.records import SERVICES
from fenka.local.views import explain
from fenka.views.board import ProgramDetail, ProgramLine, World
from fenka.workstation.protocol import EndedJob, MachineSnapshot

FOLLOW_INTERVAL_S = 0.5


def detail(snapshot: MachineSnapshot, world: World, uid: int, id_: str) -> ProgramDetail | None:
    """Return a program that runs or waits; None if there is none with this id.

    Args:
        snapshot: What the daemon knows.
        world: The page's view of it.
        uid: The user who looks, the only one whose logs are shown.
        id_: The program's.
    """
    job = next((job for job in snapshot.jobs if job.id == id_), None)
    if job is None:
        return None
    line = next((line for line in world.programs if line.id == id_), None)
    waiting = next((line for line in world.waiting if line.id == id_), None)
    pending = sum(other.position is not None for other in snapshot.jobs)
    events = [(job.requested_at, f"asked for {job.summary}")]
    if job.started_at is not None:
        events.append((job.started_at, f"started on card {_cards(line)}"))
    mates = [
        other.id
        for other in world.programs
        if line and line.group and other.group == line.group and other.id != id_
    ]
    return ProgramDetail(
        program=line,
        waiting=waiting,
        explanation=[*explain(job, pending, job.helps).lines, *job.violations, *job.problems],
        events=events,
        refused=job.refusals,
        logs=log_of(snapshot, world, uid, id_) is not None,
        mates=mates,
    )


def ended_detail(jobs: Iterable[EndedJob], uid: int, id_: str) -> ProgramDetail | None:
    """Return a program that has ended; None if nothing is known of it. Arguments as of `detail`."""
    job = next((job for job in jobs if job.id == id_), None)
    if job is None:
        return None
    events = [(job.requested_at, f"asked for {job.summary}")]
    if job.started_at is not None:
        events.append((job.started_at, "started"))
    events.append((job.ended_at, f"ended: {job.sentence}"))
    return ProgramDetail(
        program=None,
        waiting=None,
        explanation=[f"{job.name} has ended: {job.sentence}"],
        events=events,
        refused=job.refused,
        logs=ended_log(jobs, uid, id_) is not None,
    )


def log_of(snapshot: MachineSnapshot, world: World, uid: int, id_: str) -> Path | None:
    """Return the file with what a program prints; None if it keeps none, or is another user's."""
    line = next((line for line in world.programs if line.id == id_), None)
    job = next((job for job in snapshot.jobs if job.id == id_), None)
    if job is None or line is None or job.uid != uid:
        return None
    try:
        match job.kind:
            case "training":
                log = training_commands.log_file(line.group, job.name)
            case "service":
                log = records.replica_log(SERVICES.directory_of(line.group), job.name)
            case _:
                member = "" if job.rank is None else str(job.rank)
                log = runs.place_of(job.gang or job.name) / member / "log"
    except FenkaError:
        return None
    return log if log.exists() else None


def ended_log(jobs: Iterable[EndedJob], uid: int, id_: str) -> Path | None:
    """Return the log of a run that has ended; None if it left none, or is another user's."""
    job = next((job for job in jobs if job.id == id_), None)
    if job is None or job.uid != uid or not job.run:
        return None
    member = str(job.rank) if job.gang else ""
    log = runs.place_of_run(job.gang or job.name, job.run) / member / "log"
    return log if log.exists() else None


async def log_parts(log: Path, lines: int, follows: Callable[[], bool]) -> AsyncGenerator[bytes]:
    """Yield the last lines of a log, and what is added while it is followed and not replaced.

    Raises OSError.
    """
    with open_regular_file(log) as file:
        file.seek(last_lines(file, lines))
        while True:
            while block := file.read(BLOCK_BYTES):
                yield block
            if not follows() or _replaced(log, file.fileno()):
                return
            await asyncio.sleep(FOLLOW_INTERVAL_S)


def _replaced(log: Path, descriptor: int) -> bool:
    """Return whether another run writes there now, or the log was deleted."""
    try:
        return not os.path.samestat(log.stat(), os.fstat(descriptor))
    except OSError:
        return True


def _cards(line: ProgramLine | None) -> str:
    return ", ".join(line.cards) if line else ""
