"""Services of this machine as values of the screens: records, and what the daemon knows of their leases."""

import socket
from collections.abc import Mapping
from dataclasses import replace

from fenka.core.request import InvalidRequest
from fenka.dialects.sizes import InvalidSize
from fenka.jobs.ports import LOOPBACK
from fenka.jobs.service import PortName, ServiceSpec
from fenka.views.services import Replica, ServiceVersion, ServingPort
from fenka.workstation.client import own_jobs
from fenka.workstation.protocol import JobView, Snapshot
from fenka.workstation.serving.records import (
    InvalidService,
    ReplicaRecord,
    ReplicaState,
    ServiceRecord,
    ServiceStatus,
    VersionRecord,
)
from fenka.workstation.snapshot import address as machine_address
from fenka.workstation.views import requested_cards, requested_units

_PORTS: Mapping[PortName, str] = {"grpc-serving": "GRPC", "http-serving": "RESTFUL"}
"""arena's names of ports, in the order in which it prints them."""

_STATUS: Mapping[ReplicaState, str] = {
    "Pending": "Pending",
    "Starting": "Running",
    "Ready": "Running",
    "Draining": "Terminating",
    "Ending": "Terminating",
    "Backoff": "CrashLoopBackOff",
}
"""kubectl's words."""


def service_versions(
    name: str,
    record: ServiceRecord,
    status: ServiceStatus | None,
    snapshot: Snapshot | None,
    user: str,
) -> list[ServiceVersion]:
    """Return the versions of a service as screens show them.

    Args:
        name: The service.
        record: What is wanted.
        status: What there is; None if its supervisor does not live.
        snapshot: What the daemon knows; None if none answers.
        user: The user whose service it is.
    """
    leases = {job.gang or job.name: job for job in own_jobs(snapshot)}
    return [
        _version(record, each, status, leases, snapshot, user)
        for each in sorted(record.versions, key=lambda each: each.spec.version)
        if each.spec.name == name
    ]


def unreadable_service(error: InvalidService, user: str) -> ServiceVersion:
    """Return a service whose record cannot be read."""
    return ServiceVersion(error.name, user, "", "custom", "", 0, 0, 0, note=str(error))


def _version(
    record: ServiceRecord,
    version: VersionRecord,
    status: ServiceStatus | None,
    leases: Mapping[str, JobView],
    snapshot: Snapshot | None,
    user: str,
) -> ServiceVersion:
    spec = version.spec
    known = [each for each in status.replicas if each.version == spec.version] if status else []
    requested, units = _requested(version, snapshot)
    compute = spec.gpu.core if spec.gpu else 0
    replicas = [
        replace(
            _replica(each, leases.get(each.lease), requested), memory_units=units, compute=compute
        )
        for each in known
    ]
    # The supervisor has not seen a version yet that is missing.
    wanted = status.wanted.get(spec.version, max(spec.range.least, 1)) if status else 0
    several = len(record.versions) > 1
    current = all(each.revision == version.revision and each.state == "Ready" for each in known)
    return ServiceVersion(
        spec.name,
        user,
        f"{record.uid}-{spec.version}",
        spec.kind,
        spec.version,
        wanted,
        sum(each.ready for each in replicas),
        version.created_at,
        LOOPBACK if record.address == LOOPBACK else machine_address(),
        tuple(
            ServingPort(word, record.ports[port])
            for port, word in _PORTS.items()
            if port in record.ports
        ),
        record.weight(spec.version) if several else None,
        tuple(replicas),
        _note(spec, status),
        rolled_out=current and len(known) == wanted,
    )


def _replica(record: ReplicaRecord, lease: JobView | None, requested: float | None) -> Replica:
    running = record.state not in ("Pending", "Backoff")
    return Replica(
        record.name,
        _STATUS[record.state],
        record.created_at,
        ready=int(record.state == "Ready"),
        restarts=record.restarts,
        node=socket.gethostname() if running else "",
        node_address=machine_address() if running else "",
        address=LOOPBACK if running else "",
        requested=requested,
        why=(lease.reason if lease and lease.reason else record.reason),
        sockets=tuple(each for each in record.ports.values() if isinstance(each, str)),
    )


def _requested(version: VersionRecord, snapshot: Snapshot | None) -> tuple[float | None, float]:
    """Return the cards that a replica requests, None if that is not known, and its units of memory."""
    gpu = version.spec.gpu
    if gpu is None:
        return 0, 0
    if snapshot is None:
        return None, 0
    try:
        return requested_cards(gpu, snapshot), requested_units(gpu, snapshot)
    except (InvalidSize, InvalidRequest):
        return None, 0


def _note(spec: ServiceSpec, status: ServiceStatus | None) -> str:
    if status is None:
        return (
            "its supervisor has ended, and nothing of it runs: start it again (fenka serve update "
            f"{spec.kind} --name {spec.name} -v {spec.version}) or delete it (fenka serve delete {spec.name})"
        )
    return status.reason
