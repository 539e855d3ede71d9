"""This machine as rows of the screens. A program's namespace is its user."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.request import reserved_percent
from fenka.core.units import card_units, mib_to_units
from fenka.formats.quantities import parse_memory
from fenka.jobs.job_spec import GpuResources
from fenka.views.mig_rows import InstanceSlice, instance_rows
from fenka.views.node_rows import NO_ROLE, NodeRow, ProgramRow, card_rows, compute_by_card
from fenka.views.workloads import CardUse, QueueRow
from fenka.workstation.protocol import JobView, MachineSnapshot


def node_row(snapshot: MachineSnapshot) -> NodeRow:
    """Return this machine as a node."""
    sizes = {card.uuid: card.memory_mib for card in snapshot.cards}
    sizes |= {
        instance.uuid: instance.memory_mib
        for card in snapshot.divided
        for instance in card.instances
    }
    programs = [
        ProgramRow(
            job.name,
            job.user,
            _units_by_card(job, sizes, snapshot.unit_mib),
            whole=sum(not piece.profile for piece in job.slices) if job.whole else 0,
            core=compute_by_card(
                (piece.card, reserved_percent(piece.compute, piece.compute_mode))
                for piece in job.slices
            ),
            core_mode=job.slices[0].compute_mode,
            weight=sum(piece.compute for piece in job.slices if piece.compute_mode == "weight"),
        )
        for job in sorted(snapshot.jobs, key=lambda job: job.name)
        if job.slices
    ]
    return NodeRow(
        name=snapshot.node,
        address=snapshot.address,
        role=NO_ROLE,
        status="ready",
        shareable=True,
        whole=sum(program.whole for program in programs),
        cards=card_rows(
            (
                (card.index, card_units(card.memory_mib, snapshot.unit_mib), card.healthy)
                for card in snapshot.cards
            ),
            programs,
        ),
        core=any(program.core or program.weight for program in programs),
        programs=programs,
        unhealthy=sum(not card.healthy for card in snapshot.cards),
        unit_mib=snapshot.unit_mib,
        instances=instance_rows(snapshot.divided, _slices_by_device(snapshot)),
        free={card.index: card.free for card in snapshot.divided},
        unleased={card.index: card.unleased for card in snapshot.cards if card.unleased},
        problems={
            card.index: f"takes no new programs: {card.problem}"
            for card in snapshot.cards
            if card.problem
        },
    )


def _units_by_card(job: JobView, sizes: Mapping[str, int], unit_mib: int) -> dict[int, float]:
    """Return units by card index. sizes: the MiB of each device, by its UUID."""
    units: dict[int, float] = {}
    for piece in job.slices:
        size = mib_to_units(piece.memory_mib, sizes.get(piece.uuid, piece.memory_mib), unit_mib)
        units[piece.card] = units.get(piece.card, 0) + size
    return units


def _slices_by_device(snapshot: MachineSnapshot) -> dict[str, list[InstanceSlice]]:
    compute = {
        instance.uuid: instance.compute for card in snapshot.divided for instance in card.instances
    }
    slices = defaultdict[str, list[InstanceSlice]](list)
    for job in snapshot.jobs:
        for piece in job.slices:
            share = compute.get(piece.uuid, WHOLE_COMPUTE) if job.whole else piece.compute
            holder = f"{job.user}/{job.name}"
            slices[piece.uuid].append(InstanceSlice(holder, piece.memory_mib, share))
    return slices


def queue_rows(snapshot: MachineSnapshot) -> list[QueueRow]:
    """Return the pending jobs in order. Cards are named by their index."""
    return [
        QueueRow(
            position=job.position,
            name=job.name,
            namespace=job.user,
            priority=job.priority,
            asks=job.summary,
            since=job.requested_at,
            reserved=[str(card) for card in job.reserved],
            starts_by=job.starts_by,
            why=job.reason,
            used_s=job.used_s,
        )
        for job in snapshot.jobs
        if job.position is not None
    ]


class Explanation(msgspec.Struct, frozen=True):
    """Why a job waits or runs. helps: what would let it start, in sentences; empty if nothing is known."""

    name: str
    state: str
    summary: str
    helps: list[str] = []

    @property
    def lines(self) -> list[str]:
        """Return it as text."""
        helps = ["", "What helps:", *(f"  - {sentence}" for sentence in self.helps)]
        return [self.summary, *(helps if self.helps else [])]


def explain_jobs(
    snapshot: MachineSnapshot, name: str, helps_of: Callable[[str], list[str]]
) -> list[Explanation]:
    """Return why each of this user's jobs of this name waits or runs; else of all users' jobs.

    helps_of: returns what would let a pending job start, by its id.
    """
    named = [job for job in snapshot.jobs if name in (job.name, job.gang, job.id)]
    own = [job for job in named if job.uid == os.geteuid()]
    pending = sum(job.position is not None for job in snapshot.jobs)
    return [
        explain(job, pending, helps_of(job.id) if job.position is not None else [])
        for job in own or named
    ]


def explain(job: JobView, pending: int, helps: list[str]) -> Explanation:
    """Return why a job waits or runs.

    Args:
        job: The job.
        pending: How many requests wait.
        helps: What would let it start.
    """
    return Explanation(job.name, job.state, _explanation(job, pending), helps)


def _explanation(job: JobView, pending: int) -> str:
    if job.position is None:
        cards = ", ".join(f"{piece.memory_mib} MiB of card {piece.card}" for piece in job.slices)
        holds = f"{job.name} is {job.state}" + (f": it holds {cards}" if cards else "")
        return "; ".join([holds, *(f"it {problem}" for problem in job.problems)])
    where = f"{job.name} waits at position {job.position} of {pending} for {job.summary}"
    reserved = ", ".join(map(str, job.reserved))
    return f"{where}: {job.reason}" + (f"; card {reserved} is reserved for it" if reserved else "")


def requested_cards(gpu: GpuResources, snapshot: MachineSnapshot) -> float:
    """Return what a process requests in cards, slices as shares of this machine's first card."""
    if gpu.whole or gpu.mig:
        return gpu.cards
    memory = parse_memory(gpu.memory, snapshot.unit_mib)
    units = card_units(snapshot.cards[0].memory_mib, memory.unit_mib or snapshot.unit_mib)
    return round(gpu.cards * memory.amount / units, 1) if units else 0


def requested_units(gpu: GpuResources, snapshot: MachineSnapshot) -> float:
    """Return the units of card memory that a process requests; 0 for whole cards and instances."""
    if gpu.whole or gpu.mig:
        return 0
    memory = parse_memory(gpu.memory, snapshot.unit_mib)
    return gpu.cards * memory.amount * (memory.unit_mib or snapshot.unit_mib) / snapshot.unit_mib


def card_uses(lease: JobView, snapshot: MachineSnapshot) -> tuple[CardUse, ...]:
    """Return the cards that a lease holds parts of."""
    cards = {card.uuid: card for card in snapshot.cards}
    return tuple(
        CardUse(
            index=piece.card,
            duty_percent=cards[piece.uuid].utilisation if piece.uuid in cards else None,
            used_mib=piece.used_mib,
            total_mib=piece.memory_mib,
        )
        for piece in lease.slices
    )
