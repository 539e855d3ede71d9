"""This machine as the dashboard's messages: the daemon's snapshot in, values out; no I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fenka.core.units import card_units, units_to_mib
from fenka.views import board
from fenka.views.board_sums import IDLE_AFTER_S, MAX_WAITING, idle_for, people, total, workload_line
from fenka.views.workloads import Workload
from fenka.workstation.protocol import CardView, JobView, MachineSnapshot


@dataclass(frozen=True, slots=True)
class Viewer:
    """The user of the dashboard's process, and whether the page may stop and resize programs for them."""

    uid: int
    acts: bool = True

    def owns(self, job: JobView) -> bool:
        """Return whether the daemon lets this user stop and resize a job."""
        return self.uid in (0, job.uid)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """State of this machine that the daemon's snapshot does not have.

    Attributes:
        workloads: the viewer's trainings, notebooks and versions of services.
        addresses: URLs without a token by the ids of the viewer's programs.
        loss: steps and values by the names of trainings.
        problems: sentences about what is not known now.
        idle_after_s: without card time, before a program is called idle.
    """

    workloads: Sequence[Workload] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)
    loss: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    problems: Sequence[str] = ()
    idle_after_s: float = IDLE_AFTER_S


def world(
    snapshot: MachineSnapshot, viewer: Viewer, around: Surroundings, now: float
) -> board.World:
    """Return all that the page shows of this machine. now: Unix seconds."""
    own = {job.name: job.id for job in snapshot.jobs if job.uid == viewer.uid}
    groups = {
        own[pod]: workload.name
        for workload in around.workloads
        for pod in _pods(workload)
        if pod in own and pod != workload.name
    }
    holding = [job for job in snapshot.jobs if job.slices]
    pending = [job for job in snapshot.jobs if job.position is not None]
    programs = [_program(job, viewer, around, groups.get(job.id, ""), now) for job in holding]
    open_mib = {card.uuid: free_mib(card, snapshot.unit_mib) for card in snapshot.cards}
    kept = {index for job in pending for index in job.reserved}
    at_once = [open_mib[card.uuid] for card in snapshot.cards if card.index not in kept]
    return board.World(
        at=now,
        place="workstation",
        name=snapshot.node,
        version=snapshot.version,
        simulated=snapshot.simulated,
        unit_mib=snapshot.unit_mib,
        cards=[_card(card, snapshot, holding, pending) for card in snapshot.cards],
        programs=programs,
        programs_total=len(programs),
        waiting=[_waiting(job, viewer) for job in pending[:MAX_WAITING]],
        waiting_total=len(pending),
        workloads=[
            workload_line(
                workload,
                [own[pod] for pod in _pods(workload) if pod in own],
                around.loss.get(workload.name),
            )
            for workload in around.workloads
        ],
        people=people(programs, [(job.user, job.requested_at) for job in pending]),
        free_mib=sum(open_mib.values()),
        largest_mib=max(at_once, default=0),
        problems=[*around.problems],
        actions=viewer.acts,
    )


def free_mib(card: CardView, unit_mib: int) -> int:
    """Return the largest slice of whole units that a card can give, if it is kept for nobody."""
    units = free_units(card, unit_mib)
    return units_to_mib(units, card.memory_mib, unit_mib) if units else 0


def free_units(card: CardView, unit_mib: int) -> int:
    """Return the most units that a card can give: the inverse of `units_to_mib`, which rounds down."""
    total = card_units(card.memory_mib, unit_mib)
    return (((card.free_mib or 0) + 1) * total - 1) // card.memory_mib if total else 0


def _card(
    card: CardView,
    snapshot: MachineSnapshot,
    holding: Sequence[JobView],
    pending: Sequence[JobView],
) -> board.CardTile:
    return board.CardTile(
        id=str(card.index),
        node=snapshot.node,
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory_mib=card.memory_mib,
        units=card_units(card.memory_mib, snapshot.unit_mib),
        free_units=free_units(card, snapshot.unit_mib),
        healthy=card.healthy,
        held_mib=card.leased_mib,
        used_mib=card.used_mib,
        busy=None if card.utilisation is None else card.utilisation / 100,
        temperature_c=card.temperature_c,
        power_w=card.power_w,
        power_limit_w=card.power_limit_w,
        unleased_mib=card.unleased_mib,
        unleased=card.unleased,
        note=_note(card, snapshot, pending),
        xids=card.xids,
        readable="" if card.used_mib is not None else "the driver does not answer for this card",
        slices=[
            board.SliceTile(
                program=job.id,
                name=job.name,
                user=job.user,
                held_mib=piece.memory_mib,
                used_mib=piece.used_mib,
                compute=piece.compute,
                compute_mode=piece.compute_mode,
                busy=piece.busy,
                profile=piece.profile,
                start=piece.start,
            )
            for job in holding
            for piece in job.slices
            if piece.card == card.index
        ],
    )


def _note(card: CardView, snapshot: MachineSnapshot, pending: Sequence[JobView]) -> str:
    """Return why a card takes nothing new."""
    if not card.healthy:
        return f"takes no new programs: {card.problem or 'lost or unhealthy'}"
    if any(card.uuid == divided.uuid for divided in snapshot.divided):
        return "divided into MIG instances"
    if card.cordoned:
        return "its layout is to change: takes no new programs"
    kept = next((job for job in pending if card.index in job.reserved), None)
    return f"kept for {kept.name}" if kept else ""


def _program(
    job: JobView, viewer: Viewer, around: Surroundings, group: str, now: float
) -> board.ProgramLine:
    return board.ProgramLine(
        id=job.id,
        name=job.name,
        user=job.user,
        kind=job.kind,
        state=job.state,
        asks=job.summary,
        requested_at=job.requested_at,
        started_at=job.started_at,
        deadline=job.deadline,
        group=group or job.gang,
        cards=[*dict.fromkeys(str(piece.card) for piece in job.slices)],
        held_mib=sum(piece.memory_mib for piece in job.slices),
        used_mib=total(piece.used_mib for piece in job.slices),
        busy=total(piece.busy for piece in job.slices),
        compute=job.slices[0].compute,
        compute_mode=job.slices[0].compute_mode,
        idle_s=_idle_s(job, around.idle_after_s, now),
        starts=job.starts,
        violations=[*job.violations, *job.problems],
        own=viewer.owns(job),
        address=around.addresses.get(job.id, ""),
        priority=job.priority,
    )


def _idle_s(job: JobView, after_s: float, now: float) -> float | None:
    """Return for how long a program has been idle; None if it is not, or that is not known."""
    if job.started_at is None or job.last_active is None:
        return None
    quiet_s = now - max(job.last_active, job.started_at)
    return idle_for([quiet_s], now - job.started_at, after_s)


def _waiting(job: JobView, viewer: Viewer) -> board.WaitingLine:
    return board.WaitingLine(
        id=job.id,
        position=job.position or 0,
        name=job.name,
        user=job.user,
        asks=job.summary,
        priority=job.priority,
        since=job.requested_at,
        reserved=[str(card) for card in job.reserved],
        starts_by=job.starts_by,
        why=job.reason,
        helps=job.helps,
        own=viewer.owns(job),
    )


def _pods(workload: Workload) -> list[str]:
    """Return the names of a workload's leases."""
    return [instance.pod for instance in workload.instances if instance.pod]
