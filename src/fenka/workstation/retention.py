"""Decides whether a slice can be granted to another job after its last process has ended."""

from collections.abc import Collection, Iterable, Mapping

from fenka.core.inventory import Card
from fenka.hardware.nvml import Reading
from fenka.workstation.gpu_processes import GpuProcesses, UnleasedProcess, unattributed_mib
from fenka.workstation.job import Job

MEMORY_TOLERANCE = 0.05
"""Of a card's memory: drivers round, reserve and account for memory differently from moment to moment."""


def retention_reason(
    job: Job,
    jobs: Collection[Job],
    cards: Mapping[str, Card],
    readings: Mapping[str, Reading],
    processes: GpuProcesses,
) -> str:
    """Return why the slice of a job without processes must be retained; empty if it need not be.

    There are two reasons (docs/workstation.md). Unleased compute processes of the job's user, started after
    the
    job, use its card, and use more than the user's other retained slices cover. Or memory of the card belongs
    to no process, beyond what did so at the grant and what the other leases may still take.

    Args:
        job: The job, whose last process has ended.
        jobs: All jobs that hold slices; this one may be among them.
        cards: Cards by UUID.
        readings: The driver's readings by card UUID.
        processes: The processes on the cards.
    """
    others = [other for other in jobs if other.id != job.id]
    for piece in job.slices:
        suspects = [
            unleased.process
            for unleased in processes.unleased
            if unleased.process.uuid == piece.uuid and _may_come_from(unleased, job)
        ]
        used_mib = sum(
            piece.memory_mib if process.used_mib is None else process.used_mib
            for process in suspects
        )
        retained = [other for other in others if other.retained and other.uid == job.uid]
        if used_mib > sum(_held_mib(other, piece.uuid) for other in retained):
            pids = ", ".join(str(process.pid) for process in suspects)
            return f"process {pids} uses card {piece.card} outside of its lease"
        excess_mib = _unexplained_mib(job, piece.uuid, others, readings, processes)
        if excess_mib > MEMORY_TOLERANCE * cards[piece.uuid].memory_mib:
            return (
                f"{excess_mib} MiB of card {piece.card} are still in use by no process that the "
                "driver names"
            )
    return ""


def _may_come_from(unleased: UnleasedProcess, job: Job) -> bool:
    """Return whether the job may have started the process: not if it is older, another user's, or a
    desktop."""
    younger = unleased.uid == job.uid and unleased.start >= job.start_ticks
    return younger and not unleased.process.graphics


def _held_mib(job: Job, uuid: str) -> int:
    return sum(piece.memory_mib for piece in job.slices if piece.uuid == uuid)


def _unexplained_mib(
    job: Job,
    uuid: str,
    others: Iterable[Job],
    readings: Mapping[str, Reading],
    processes: GpuProcesses,
) -> int:
    """Return the memory of no process, beyond that at the grant and what other leases may still take."""
    before, now = job.unattributed_mib.get(uuid), unattributed_mib(uuid, readings, processes)
    if before is None or now is None:
        return 0
    unused_mib = sum(
        max(_held_mib(other, uuid) - (processes.used_mib(other.id, uuid) or 0), 0)
        for other in others
    )
    return now - before - unused_mib
