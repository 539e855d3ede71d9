"""What the daemon knows, as one message: the source of `fenka ps`, `top node` and `doctor`."""

import os
import socket
import time
from collections.abc import Mapping

import psutil

from fenka import __version__
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import Reading
from fenka.hardware.peers import user_name
from fenka.isolation import account
from fenka.workstation import files, members, protocol
from fenka.workstation.broker import Broker, Job
from fenka.workstation.paths import Runtime

MIB = 1 << 20


def snapshot(
    hardware: Hardware,
    readings: Mapping[str, Reading],
    broker: Broker,
    runtime: Runtime,
    unit_mib: int,
    library_dir: str,
) -> protocol.Snapshot:
    """Cards with the driver's readings (by UUID), and jobs with their processes and what they hold."""
    driver = hardware.driver
    holders = members.holders()
    cards = []
    for card in broker.node.cards:
        reading = readings.get(card.uuid)
        leased = sum(
            piece.memory_mib
            for job in broker.jobs.values()
            if job.placement
            for piece in job.placement.slices
            if piece.uuid == card.uuid
        )
        cards.append(
            protocol.CardView(
                index=card.index,
                uuid=card.uuid,
                model=card.model,
                memory_mib=card.memory_mib,
                healthy=card.healthy,
                context_mib=hardware.context_mib.get(card.uuid),
                leased_mib=leased,
                used_mib=reading.used_mib if reading else None,
                utilisation=reading.utilisation if reading else None,
                temperature_c=reading.temperature_c if reading else None,
                power_w=reading.power_w if reading else None,
            )
        )
    return protocol.Snapshot(
        version=__version__,
        pid=os.getpid(),
        node=socket.gethostname(),
        address=_address(),
        driver=driver.version,
        cuda=driver.cuda_version,
        simulated=driver.simulated,
        library_dir=library_dir,
        policy=broker.policy,
        unit_mib=unit_mib,
        cards=cards,
        jobs=[
            _job(broker, runtime, job, holders.get(job.id, []))
            for job in sorted(broker.jobs.values(), key=lambda job: _order(broker, job))
            if job.state != "waiting" or job.rank == 0
        ],
    )


def _order(broker: Broker, job: Job) -> tuple[int, float, str, int]:
    standing = broker.standing(job)
    return standing.position if standing else 0, job.requested_at, job.entry, job.rank


def _job(broker: Broker, runtime: Runtime, job: Job, processes: list[int]) -> protocol.JobView:
    standing = broker.standing(job)
    waits = standing is not None
    reservation = standing.reservation if standing else None
    named = reservation.cards if reservation else frozenset[str]()
    return protocol.JobView(
        job=job.entry if waits else job.id,
        name=job.title if waits else job.name,
        user=user_name(job.uid),
        uid=job.uid,
        pid=job.pid,
        kind=job.kind,
        state=job.state,
        command=job.command,
        directory=job.directory,
        requested_at=job.requested_at,
        started_at=job.started_at,
        isolation=job.isolation,
        wanted=job.wanted,
        whole=job.request.whole,
        slices=_slices(runtime, job),
        processes=processes,
        position=standing.position if standing else None,
        reason=standing.reason if standing else "",
        priority=job.priority,
        ends_at=job.ends_at,
        gang=job.gang.name if job.gang else "",
        rank=job.rank if job.gang and not waits else None,
        size=job.gang.size if job.gang else 1,
        reserved=[card.index for card in broker.node.cards if card.uuid in named],
        starts_by=reservation.starts_by if reservation else None,
        used_s=round(broker.uses.past(str(job.uid), 0, time.time()).used_s, 1) if waits else 0.0,
    )


def _slices(runtime: Runtime, job: Job) -> list[protocol.SliceView]:
    if job.placement is None:
        return []
    try:
        held = account.read(files.slots(runtime.lease(job.id))).memory_bytes
    except (OSError, account.BadAccount):
        held = ()
    return [
        protocol.SliceView(
            card=piece.card,
            uuid=piece.uuid,
            memory_mib=piece.memory_mib,
            used_mib=held[position] // MIB if position < len(held) else None,
            compute=job.core,
            compute_mode=job.core_mode,
        )
        for position, piece in enumerate(job.placement.slices)
    ]


def _address() -> str:
    """This machine's first address that others could use."""
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    return "127.0.0.1"
