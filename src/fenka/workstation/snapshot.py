"""Builds the message with all cards and jobs, for `fenka ps`, `top node` and `doctor`."""

import os
import socket
import time

from fenka import __version__
from fenka.core.units import MIB
from fenka.hardware.nvml import Hardware
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import account
from fenka.isolation.driver_usage import NOTHING_UNLEASED
from fenka.isolation.lease_files import account_file
from fenka.jobs.job_spec import summarise
from fenka.procfs import process_name
from fenka.views.mig_rows import MigCardView
from fenka.workstation import protocol
from fenka.workstation.broker import Broker
from fenka.workstation.cards import CardsSample, GpuProcesses
from fenka.workstation.job import Job
from fenka.workstation.lease_processes import ProcessScan
from fenka.workstation.paths import Runtime, machine_address


def snapshot(
    hardware: Hardware,
    sample: CardsSample,
    broker: Broker,
    scan: ProcessScan,
    runtime: Runtime,
    divided: list[MigCardView],
) -> protocol.MachineSnapshot:
    """Return cards with the driver's readings, and jobs with their processes and slices."""
    driver = hardware.driver
    cards = []
    for card in broker.node.cards:
        if card.parent is not None:
            continue
        reading = sample.readings.get(card.uuid)
        unleased = sample.unleased.get(card.uuid, NOTHING_UNLEASED)
        parts = {part.uuid for part in broker.node.cards if card.uuid in (part.uuid, part.parent)}
        slices = (piece for job in broker.placed() for piece in job.slices)
        leased = sum(piece.memory_mib for piece in slices if piece.uuid in parts)
        cards.append(
            protocol.CardView(
                index=card.index,
                uuid=card.uuid,
                model=card.model,
                memory_mib=broker.usable_mib(card),
                healthy=card.healthy,
                context_mib=hardware.context_mib.get(card.uuid),
                leased_mib=leased,
                used_mib=reading.used_mib if reading else None,
                utilisation=reading.utilisation if reading else None,
                unleased_mib=unleased.total_mib,
                unleased=unleased.sentence(),
            )
        )
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
        cards=cards,
        jobs=[
            _job(broker, runtime, job, sample, scan)
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


def _order(broker: Broker, job: Job) -> tuple[int, float, str, int]:
    status = broker.queue_status(job)
    return status.position if status else 0, job.requested_at, job.queue_id, job.rank


def _job(
    broker: Broker, runtime: Runtime, job: Job, sample: CardsSample, scan: ProcessScan
) -> protocol.JobView:
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
        slices=_slices(runtime, broker, job, sample.processes),
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
        unreadable_pids=scan.unreadable.get(job.id, []),
        allow_user_namespaces=job.spec.allow_user_namespaces,
    )


def _slices(
    runtime: Runtime, broker: Broker, job: Job, processes: GpuProcesses
) -> list[protocol.SliceView]:
    cards = {card.uuid: card for card in broker.node.cards}
    return [
        protocol.SliceView(
            card=piece.card,
            uuid=piece.uuid,
            memory_mib=piece.memory_mib,
            used_mib=_used(runtime, job, position, processes.used_mib(job.id, piece.uuid)),
            compute=job.spec.gpu.core,
            compute_mode=job.spec.gpu.core_mode,
            profile=cards[piece.uuid].profile,
            start=cards[piece.uuid].start,
        )
        for position, piece in enumerate(job.slices)
    ]


def _used(runtime: Runtime, job: Job, position: int, by_driver: int | None) -> int | None:
    """Return the driver's figure; if it reports none, what the programs' account says."""
    if by_driver is not None:
        return by_driver
    try:
        memory_bytes = account.read(account_file(runtime.lease(job.id))).memory_bytes
    except (OSError, account.InvalidAccount):
        return None
    return memory_bytes[position] // MIB if position < len(memory_bytes) else None
