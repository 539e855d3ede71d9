"""Changing what a running job may have: the ledger, the disk, and the lease's control page, in that order.

At each moment what is written down is at least what programs may use: so a daemon that is killed half-way has
promised nobody else what is in use, and asking again completes it.
"""

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
from fenka.workstation import protocol
from fenka.workstation.broker import Broker, Job


class CannotResize(FenkaError):
    """Nothing was changed; the message is one sentence that says why."""


class Daemon(Protocol):
    """What is needed of it."""

    broker: Broker
    hardware: Hardware
    unit_mib: int

    def record_placement(self, job: Job, placement: Placement) -> None:
        """The ledger and the disk have this placement. Raises Conflict."""

    def lease_dir(self, job_id: str) -> Path:
        """Where a job's lease is."""


def compute_of(job: Job) -> ComputeShare:
    """What the control page says of a job's compute."""
    return ComputeShare(job.compute_percent or 100, job.compute_mode)


def resize(daemon: Daemon, job: Job, wanted: protocol.ResizeJob) -> None:
    """Puts in force what is wanted, for programs that run, within a second. Raises CannotResize, OSError."""
    before = job.placement
    if job.state != "running" or before is None:
        raise CannotResize(f"{job.name} is {job.state}: only what runs can be resized")
    if before.whole:
        raise CannotResize(f"{job.name} holds whole cards: there is nothing to resize")
    former = job.compute_percent, job.compute_mode
    core = job.compute_percent if wanted.gpu_core is None else wanted.gpu_core
    mode = wanted.gpu_core_mode or (job.compute_mode if core else "hard")
    if mode != "hard" and not core:
        raise CannotResize(f"{job.name} has no share of compute: say how much with --gpu-core")
    try:
        after = _placement(daemon, job, before, wanted, 0 if mode == "weight" else core)
        daemon.record_placement(job, _larger(before, after))
    except (InvalidSize, InvalidRequest) as why:
        raise CannotResize(str(why)) from None
    except Conflict:
        raise CannotResize(f"{job.name} cannot grow: its cards have no room for that now") from None
    directory = daemon.lease_dir(job.id)
    job.compute_percent, job.compute_mode = core, mode
    limits = card_limits(after.slices, daemon.hardware.context_mib, compute_of(job))
    try:
        put_in_force(directory / "lease" / "control", directory / "account" / "slots", limits)
    except (InUse, control.InvalidControl, InvalidAccount) as why:
        job.compute_percent, job.compute_mode = former
        daemon.record_placement(job, before)
        raise CannotResize(str(why)) from None
    daemon.record_placement(job, after)


def _placement(
    daemon: Daemon, job: Job, before: Placement, wanted: protocol.ResizeJob, compute: int
) -> Placement:
    sizes = {card.uuid: card.memory_mib for card in daemon.broker.node.cards}
    memory = parse_memory(wanted.gpu_mem, daemon.unit_mib) if wanted.gpu_mem else None
    Request(
        memory=job.request.memory, compute=compute
    )  # raises InvalidRequest for what no card has

    def changed(piece: Slice) -> Slice:
        mib = memory.mib_on(sizes[piece.uuid]) if memory else piece.memory_mib
        if mib is None:
            raise CannotResize(f"card {piece.card} has less memory than {wanted.gpu_mem}")
        return replace(piece, memory_mib=mib, compute=compute)

    return replace(before, slices=tuple(map(changed, before.slices)))


def _larger(one: Placement, other: Placement) -> Placement:
    """Slice by slice."""
    return replace(
        one,
        slices=tuple(
            replace(
                a, memory_mib=max(a.memory_mib, b.memory_mib), compute=max(a.compute, b.compute)
            )
            for a, b in zip(one.slices, other.slices, strict=True)
        ),
    )
