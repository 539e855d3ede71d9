"""Builds the message with all cards and jobs, for `fenka ps`, `top node` and `doctor`."""

import os
import socket
import time

from fenka import __version__
from fenka.core.inventory import Card
from fenka.core.units import MIB
from fenka.hardware.nvml import Hardware
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import account
from fenka.isolation.driver_usage import NO_ACTIVITY, NOTHING_UNLEASED
from fenka.isolation.lease_files import account_file
from fenka.jobs.job_spec import summarise
from fenka.procfs import process_name
from fenka.views.mig_rows import MigCardView
from fenka.workstation import protocol
from fenka.workstation.broker import Broker
from fenka.workstation.cards import CardsSample, problems_of
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import ProcessScan
from fenka.workstation.paths import Runtime, machine_address
from fenka.workstation.screens.what_if import NO_HELPS, Rehearsals


def snapshot(
    hardware: Hardware,
    sample: CardsSample,
    rehearsals: Rehearsals,
    scan: ProcessScan,
    runtime: Runtime,
    divided: list[MigCardView],
) -> protocol.MachineSnapshot:
    """Return cards with the driver's readings, and jobs with their processes and slices."""
    broker = rehearsals.broker
    driver = hardware.driver
    return protocol.MachineSnapshot(
        version=__version__,
        pid=os.getpid(),
        node=socket.gethostname(),
        address=machine_address(),
        driver=driver.version,
        cuda=driver.cuda_version,
        simulated=driver.simulated,
        library_dir=str(runtime.simulated / "lib") if driver.simulated else "",
        policy=broker.policy,
        unit_mib=broker.node.unit_mib,
        cards=[
            _card(hardware, sample, broker, card)
            for card in broker.node.cards
            if card.parent is None
        ],
        jobs=[
            _job(rehearsals, runtime, job, sample, scan)
            for job in sorted(broker.jobs.values(), key=lambda job: _order(broker, job))
            if job.state != "waiting" or job.rank == 0
        ],
        divided=divided,
        unleased=[
            protocol.ProcessView(
                card=card.index,
                pid=outside.process.pid,
                user=user_name(outside.uid),
                program=process_name(outside.process.pid),
                used_mib=outside.process.used_mib,
            )
            for card in broker.node.cards
            for outside in sample.processes.unleased
            if outside.process.uuid == card.uuid
        ],
    )


def _card(hardware: Hardware, sample: CardsSample, broker: Broker, card: Card) -> protocol.CardView:
    reading = sample.readings.get(card.uuid)
    unleased = sample.unleased.get(card.uuid, NOTHING_UNLEASED)
    parts = {part.uuid for part in broker.node.cards if card.uuid in (part.uuid, part.parent)}
    slices = [piece for job in broker.placed() for piece in job.slices if piece.uuid in parts]
    return protocol.CardView(
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory_mib=broker.usable_mib(card),
        healthy=card.healthy,
        context_mib=hardware.context_mib.get(card.uuid),
        leased_mib=sum(piece.memory_mib for piece in slices),
        used_mib=reading.used_mib if reading else None,
        utilisation=reading.utilisation if reading else None,
        unleased_mib=unleased.total_mib,
        unleased=unleased.sentence(),
        free_mib=broker.free_mib(card),
        cordoned=card.cordoned,
        temperature_c=reading.temperature_c if reading else None,
        power_w=reading.power_w if reading else None,
        power_limit_w=reading.power_limit_w if reading else None,
        xids=[*sample.xids.get(card.uuid, ())],
        problem=sample.problems.get(card.uuid, ""),
    )


def _order(broker: Broker, job: Job) -> tuple[int, float, str, int]:
    status = broker.queue_status(job)
    return status.position if status else 0, job.requested_at, job.queue_id, job.rank


def _job(
    rehearsals: Rehearsals, runtime: Runtime, job: Job, sample: CardsSample, scan: ProcessScan
) -> protocol.JobView:
    broker, outlook = rehearsals.broker, rehearsals.outlook
    status = broker.queue_status(job)
    pending = status is not None
    reservation = status.reservation if status else None
    reserved = reservation.cards if reservation else frozenset[str]()
    return protocol.JobView(
        id=job.queue_id if pending else job.id,
        name=job.display_name if pending else job.name,
        user=user_name(job.uid),
        uid=job.uid,
        pid=job.pid,
        kind=job.spec.kind,
        state=job.state,
        command=job.spec.command,
        directory=job.spec.directory,
        requested_at=job.requested_at,
        started_at=job.started_at,
        isolation=job.spec.isolation,
        summary=summarise(
            [member.spec.gpu for member in broker.jobs_of(job.queue_id)], job.spec.gang
        ),
        whole=job.request.whole,
        slices=_slices(runtime, broker, job, sample),
        pids=scan.holders.get(job.id, []),
        position=status.position if status else None,
        reason=broker.reason(job),
        priority=job.spec.priority,
        deadline=job.deadline,
        gang=job.gang.name if job.gang else "",
        rank=job.rank if job.gang and not pending else None,
        size=job.gang.size if job.gang else 1,
        run=job.spec.run,
        reserved=[card.index for card in broker.node.cards if card.uuid in reserved],
        starts_by=reservation.starts_by if reservation else None,
        used_s=round(broker.usage_history.history(str(job.account), 0, time.time()).used_s, 1)
        if pending
        else 0.0,
        violations=sample.violations.get(job.id, []),
        problems=problems_of(job, sample.problems),
        unreadable_pids=scan.unreadable.get(job.id, []),
        allow_user_namespaces=job.spec.allow_user_namespaces,
        allow_unlimited_drivers=job.spec.allow_unlimited_drivers,
        last_active=_last_active(job, sample),
        refusals=None if pending else _refused(runtime, job),
        helps=rehearsals.sentences(outlook.helps.get(job.queue_id, NO_HELPS)) if pending else [],
        container_id=job.in_container.id if job.in_container else "",
        engine=job.in_container.engine if job.in_container else "",
        starts=[] if pending else [*outlook.starts.get(job.queue_id, ())],
    )


def _last_active(job: Job, sample: CardsSample) -> float | None:
    """Return when a job last had card time; its granting if it had none, or has no process on a card."""
    if not sample.processes.by_lease.get(job.id):
        return job.started_at
    times = [
        activity.last_active_at
        for piece in job.slices
        if (activity := sample.activity.get((job.id, piece.uuid))) is not None
    ]
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) == len(job.slices) else None


def _refused(runtime: Runtime, job: Job) -> int | None:
    try:
        return account.refused(account_file(runtime.lease(job.id)))
    except (OSError, account.InvalidAccount):
        return None


def _slices(
    runtime: Runtime, broker: Broker, job: Job, sample: CardsSample
) -> list[protocol.SliceView]:
    cards = {card.uuid: card for card in broker.node.cards}
    return [
        protocol.SliceView(
            card=piece.card,
            uuid=piece.uuid,
            memory_mib=piece.memory_mib,
            used_mib=_used(runtime, job, position, sample.processes.used_mib(job.id, piece.uuid)),
            compute=job.spec.gpu.core,
            compute_mode=job.spec.gpu.core_mode,
            profile=cards[piece.uuid].profile,
            start=cards[piece.uuid].start,
            busy=sample.activity.get((job.id, piece.uuid), NO_ACTIVITY).share,
        )
        for position, piece in enumerate(job.slices)
    ]


def _used(runtime: Runtime, job: Job, position: int, by_driver: int | None) -> int | None:
    """Return the driver's figure; if it reports none, what the programs' account says."""
    if by_driver is not None:
        return by_driver
    return in_use(None, read_account(runtime, job.id), position)


def read_account(runtime: Runtime, job_id: str) -> account.Account | None:
    """Return a lease's account; None if it cannot be read."""
    try:
        return account.read(account_file(runtime.lease(job_id)))
    except (OSError, account.InvalidAccount):
        return None


def in_use(by_driver: int | None, own: account.Account | None, position: int) -> int | None:
    """Return the driver's figure; if it reports none, what the programs' account says."""
    if by_driver is not None or own is None:
        return by_driver
    memory_bytes = own.memory_bytes
    return memory_bytes[position] // MIB if position < len(memory_bytes) else None
