"""Resizes a running job, in the order that :mod:`fenka.isolation.resize_plan` defines.

The records are the ledger and the state file. If the daemon is killed meanwhile, the same request completes
the resize.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fenka.core.errors import FenkaError
from fenka.core.ledger import Conflict
from fenka.core.request import InvalidRequest, Placement, Request, Slice
from fenka.dialects.sizes import InvalidSize, parse_memory
from fenka.hardware.machine import Hardware
from fenka.isolation import control
from fenka.isolation.account import InvalidAccount
from fenka.isolation.files import ComputeShare, card_limits
from fenka.isolation.resize import InUse
from fenka.isolation.resize import resize as put_in_force
from fenka.isolation.resize_plan import ResizePlan
from fenka.workstation import protocol
from fenka.workstation.broker import Broker
from fenka.workstation.job import Job


class CannotResize(FenkaError):
    """The job keeps its size. The message says why."""


class Daemon(Protocol):
    """The part of the daemon that a resize needs."""

    broker: Broker
    hardware: Hardware
    unit_mib: int

    def record_placement(self, job: Job, placement: Placement) -> None:
        """Record a placement in the ledger and on disk. Raises Conflict."""

    def lease_dir(self, job_id: str) -> Path:
        """Return the directory of a job's lease."""


def compute_of(job: Job) -> ComputeShare:
    """Return a job's compute as its control page has it."""
    return ComputeShare(job.compute_percent or 100, job.compute_mode)


def resize(daemon: Daemon, job: Job, wanted: protocol.ResizeJob) -> None:
    """Resize a running job. Its programs have the new size within a second. Raises CannotResize, OSError."""
    before = job.placement
    if job.state != "running" or before is None:
        raise CannotResize(f"{job.name} is {job.state}: only a running job can be resized")
    if before.whole:
        raise CannotResize(f"{job.name} holds whole cards: there is nothing to resize")
    former = job.compute_percent, job.compute_mode
    percent = job.compute_percent if wanted.gpu_core is None else wanted.gpu_core
    mode = wanted.gpu_core_mode or (job.compute_mode if percent else "hard")
    if mode != "hard" and not percent:
        raise CannotResize(f"{job.name} has no share of compute: say how much with --gpu-core")
    try:
        after = _placement(daemon, job, before, wanted, 0 if mode == "weight" else percent)
        plan = ResizePlan({job.id: before.slices}, {job.id: after.slices})
        daemon.record_placement(job, replace(before, slices=tuple(plan.reserved[job.id])))
    except (InvalidSize, InvalidRequest) as error:
        raise CannotResize(str(error)) from None
    except Conflict:
        raise CannotResize(f"{job.name} cannot grow: its cards have no room for that now") from None
    job.compute_percent, job.compute_mode = percent, mode
    try:
        plan.enforce(lambda _, slices: _apply(daemon, job, slices))
    except (InUse, control.InvalidControl, InvalidAccount) as error:
        job.compute_percent, job.compute_mode = former
        daemon.record_placement(job, before)
        raise CannotResize(str(error)) from None
    daemon.record_placement(job, after)


def _apply(daemon: Daemon, job: Job, slices: Sequence[Slice]) -> None:
    directory = daemon.lease_dir(job.id)
    limits = card_limits(slices, daemon.hardware.context_mib, compute_of(job))
    put_in_force(directory / "lease" / "control", directory / "account" / "slots", limits)


def _placement(
    daemon: Daemon, job: Job, before: Placement, wanted: protocol.ResizeJob, compute: int
) -> Placement:
    sizes = {card.uuid: card.memory_mib for card in daemon.broker.node.cards}
    memory = parse_memory(wanted.gpu_mem, daemon.unit_mib) if wanted.gpu_mem else None
    Request(
        memory=job.request.memory, compute=compute
    )  # raises InvalidRequest for what no card has

    def changed(piece: Slice) -> Slice:
        mib = memory.mib_on(sizes[piece.uuid], daemon.unit_mib) if memory else piece.memory_mib
        if mib is None:
            raise CannotResize(f"card {piece.card} has less memory than {wanted.gpu_mem}")
        return replace(piece, memory_mib=mib, compute=compute)

    return replace(before, slices=tuple(map(changed, before.slices)))
