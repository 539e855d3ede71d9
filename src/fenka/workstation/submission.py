"""Turns submitted jobs into the daemon's jobs. The values are checked here, whoever sent them."""

import os
import secrets
from collections.abc import Collection

import msgspec

from fenka.core.request import InvalidRequest, Request, reserved_percent
from fenka.dialects.sizes import parse_memory
from fenka.hardware.peer_credentials import Process, user_name
from fenka.jobs.spec import GpuResources, JobSpec, generate_name
from fenka.workstation.job import Gang, Job


def create_jobs(
    spec: JobSpec,
    process: Process,
    unit_mib: int,
    existing: Collection[Job],
    now: float,
    account: int | None = None,
) -> list[Job]:
    """Return the job, or the members of the gang, that a specification describes.

    Args:
        spec: The job as submitted.
        process: The client's.
        unit_mib: The unit of sizes that name none.
        existing: All current jobs.
        now: Unix seconds.
        account: The user that the jobs count for; None for the client's.

    Raises:
        InvalidSize, InvalidRequest: The request is rejected.
    """
    spec.validate()
    spec = spec.truncate()
    if spec.priority > 0 and process.uid not in (0, os.geteuid()):
        raise InvalidRequest(
            f"only {user_name(os.geteuid())}, who runs this daemon, may give a priority above 0: use 0 "
            f"or less, not {spec.priority}"
        )
    first = Job(
        id=secrets.token_hex(4),
        name=spec.name or generate_name(spec.command or [spec.kind]),
        uid=process.uid,
        account_uid=account,
        pid=process.pid,
        start_ticks=process.start_ticks,
        spec=spec,
        request=_request(spec.requests[0], unit_mib),
        # Later than all other requests, also if the clock was set back.
        requested_at=max([now, *(job.requested_at + 1e-3 for job in existing)]),
    )
    if any(first.name in job.names for job in existing if job.uid == process.uid):
        raise InvalidRequest(f"a job called {first.name} already exists: choose another --name")
    if spec.gang is None:
        return [first]
    gang = Gang(first.id, first.name, spec.gang, first.pid, first.start_ticks)
    return [
        msgspec.structs.replace(
            first,
            id=secrets.token_hex(4),
            name=f"{first.name}/{rank}",
            spec=msgspec.structs.replace(spec, gpu=gpu, members=[]),
            request=_request(gpu, unit_mib),
            gang=gang,
            rank=rank,
        )
        for rank, gpu in enumerate(spec.requests)
    ]


def _request(gpu: GpuResources, unit_mib: int) -> Request:
    return Request(
        memory=parse_memory(gpu.memory, unit_mib) if gpu.memory else None,
        compute=reserved_percent(gpu.core, gpu.core_mode),
        cards=gpu.cards,
        whole=gpu.whole or bool(gpu.mig),
        models=frozenset(gpu.models),
        instance=gpu.mig or gpu.inside,
    )
