"""The commands about services of this machine: deploy, change, divide requests, look, delete.

Screens show a service's records, with the daemon's view of its leases.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE, FenkaError
from fenka.core.request import InvalidRequest
from fenka.core.scaling import shares
from fenka.formats.quantities import InvalidSize
from fenka.hardware.peer_credentials import user_name
from fenka.jobs.local_ports import LOOPBACK
from fenka.jobs.processes import ErrorReporter, Notify
from fenka.jobs.routing_table import check_socket_path
from fenka.jobs.service import CLIENT_PORTS, PortName, ServiceSpec, check_change, check_versions
from fenka.local import records, service_replicas, workload
from fenka.local.launch import Launcher, LeaseNotGranted, NotRunning, become
from fenka.local.records import SERVICES, ServiceRecord, VersionRecord
from fenka.local.views import requested_cards, requested_units
from fenka.local.workload import end_process, end_writers
from fenka.views.workloads import JobProcess, ServiceVersion, ServingPort
from fenka.workstation import paths
from fenka.workstation.client import connect, known_snapshot, own_jobs
from fenka.workstation.paths import Runtime, machine_address
from fenka.workstation.protocol import JobView, MachineSnapshot

_PORTS: Mapping[PortName, str] = {"grpc-serving": "GRPC", "http-serving": "RESTFUL"}
"""arena's names of ports, in the order in which it prints them."""

_STATUS: Mapping[records.ReplicaState, str] = {
    "Pending": "Pending",
    "Starting": "Running",
    "Ready": "Running",
    "Draining": "Terminating",
    "Ending": "Terminating",
    "Backoff": "CrashLoopBackOff",
}
"""kubectl's words."""


def service_versions(
    record: ServiceRecord,
    status: records.ServiceStatus | None,
    snapshot: MachineSnapshot | None,
    user: str,
) -> list[ServiceVersion]:
    """Return the versions of a service as screens show them.

    Args:
        record: What is wanted.
        status: What there is; None if its supervisor does not live.
        snapshot: What the daemon knows; None if none answers.
        user: The user whose service it is.
    """
    leases = {job.gang or job.name: job for job in own_jobs(snapshot)}
    return [
        _version(record, version, status, leases, snapshot, user)
        for version in sorted(record.versions, key=lambda version: version.spec.version)
    ]


def unreadable_service(error: records.UnreadableRecord, user: str) -> ServiceVersion:
    """Return a service whose record cannot be read."""
    return ServiceVersion(error.name, user, "", "custom", "", 0, 0, 0, note=str(error))


def _version(
    record: ServiceRecord,
    version: VersionRecord,
    status: records.ServiceStatus | None,
    leases: Mapping[str, JobView],
    snapshot: MachineSnapshot | None,
    user: str,
) -> ServiceVersion:
    spec = version.spec
    known = (
        [replica for replica in status.replicas if replica.version == spec.version]
        if status
        else []
    )
    requested, units = _requested(version, snapshot)
    compute = spec.gpu.core if spec.gpu else 0
    replicas = [
        replace(
            _replica(replica, leases.get(replica.lease), requested),
            memory_units=units,
            compute=compute,
        )
        for replica in known
    ]
    # The supervisor has not seen a version yet that is missing.
    wanted = status.wanted.get(spec.version, max(spec.range.least, 1)) if status else 0
    several = len(record.versions) > 1
    current = all(
        replica.revision == version.revision and replica.state == "Ready" for replica in known
    )
    return ServiceVersion(
        spec.name,
        user,
        f"{record.uid}-{spec.version}",
        spec.kind,
        spec.version,
        wanted,
        sum(replica.ready for replica in replicas),
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
        requests_per_s=status.requests_per_s.get(spec.version) if status else None,
        waiting_requests=status.waiting_requests if status else None,
        page_host=status.page_host if status else "",
    )


def _replica(
    record: records.ReplicaRecord, lease: JobView | None, requested: float | None
) -> JobProcess:
    running = record.state not in ("Pending", "Backoff")
    return JobProcess(
        record.name,
        record.lease or record.name,
        "replica",
        0,
        chief=False,
        status=_STATUS[record.state],
        phase="Running" if running else "Pending",
        created=record.created_at,
        ready=int(record.state == "Ready"),
        restarts=record.restarts,
        node=socket.gethostname() if running else "",
        node_address=machine_address() if running else "",
        address=LOOPBACK if running else "",
        requested=requested,
        why=(lease.reason if lease and lease.reason else record.reason),
        sockets=tuple(port for port in record.ports.values() if isinstance(port, str)),
    )


def _requested(
    version: VersionRecord, snapshot: MachineSnapshot | None
) -> tuple[float | None, float]:
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


def _note(spec: ServiceSpec, status: records.ServiceStatus | None) -> str:
    if status is None:
        return (
            "its supervisor has ended, and nothing of it runs: start it again (fenka serve update "
            f"{spec.kind} --name {spec.name} -v {spec.version}) or delete it (fenka serve delete {spec.name})"
        )
    return status.reason


_IN_PLACE = ("replicas", "target", "up_after_s", "down_after_s")
"""Fields whose change replaces no replica."""


@contextlib.contextmanager
def _changing() -> Iterator[int]:
    """Let no other command change a service while the block runs, and a child has the descriptor.

    Raises OSError.
    """
    services = paths.services_directory()
    services.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.check_parents(services / "any")
    descriptor = os.open(services, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


class ServiceRefused(FenkaError):
    """The change is not possible as the service is now."""

    exit_code = INVALID_INPUT


def deploy(
    runtime: Runtime, spec: ServiceSpec, announce: Notify, report_errors: ErrorReporter
) -> list[str]:
    """Deploy a version; return the versions that there were before. If it fails, nothing is left of it.

    Args:
        runtime: The daemon's runtime directory.
        spec: The version.
        announce: Receives sentences for the user.
        report_errors: The command's reporter of errors.

    Raises:
        InvalidRequest: This machine cannot run it as requested.
        ServiceRefused: The service has a version of this name, or other ports.
        UnreadableRecord: The service's record cannot be read.
        JobNotStarted: It could not be started.
    """
    spec.validate()
    workload.refuse_cluster_options(spec, {})
    workload.check_mounts(spec)
    directory = workload.working_directory(spec)
    with _changing() as lock:
        record = SERVICES.load(spec.name) if SERVICES.exists(spec.name) else None
        if record is not None:
            _check_version(record, spec)
            if sentence := _ignored_ports(record, spec):
                announce(sentence)
        _check_program(spec, directory)
        _check_sockets(spec)
        _check_cards(runtime, spec, announce, report_errors)
        workload.announce_ignored(spec, announce)
        version = VersionRecord(spec, _revision(spec), time.time(), directory, _environment())
        if record is None:
            new = ServiceRecord(
                secrets.token_hex(8), _address(spec), _client_ports(spec), [], {spec.version: 100}
            )
            # The remains of one that was not removed completely.
            shutil.rmtree(SERVICES.place_of(spec.name), ignore_errors=True)
            SERVICES.create(spec.name, new, "replicas")
        new = record or new
        try:
            _add(new, version)
            _ensure_supervised(runtime, spec.name, lock, announce, report_errors)
        except BaseException:
            _restore(spec.name, record)
            raise
    return [] if record is None else [version.spec.version for version in record.versions]


def _revision(spec: ServiceSpec) -> int:
    """Return a revision that no replica has, also of a deleted version of the same name."""
    status = records.service_status(spec.name)
    replicas = status.replicas if status else []
    return 1 + max(
        (replica.revision for replica in replicas if replica.version == spec.version), default=0
    )


def _add(record: ServiceRecord, version: VersionRecord) -> None:
    place = SERVICES.place_of(version.spec.name)
    files = place / "files" / version.spec.version
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(mode=0o700, parents=True)
    binds = workload.provide_files(version.spec, files)
    version = msgspec.structs.replace(version, binds=binds)
    SERVICES.save(place, msgspec.structs.replace(record, versions=[*record.versions, version]))


def _restore(name: str, record: ServiceRecord | None) -> None:
    """Leave a service as it was."""
    if record is None:
        shutil.rmtree(SERVICES.place_of(name), ignore_errors=True)
    else:
        SERVICES.save(SERVICES.place_of(name), record)


def _check_version(record: ServiceRecord, spec: ServiceSpec) -> None:
    if record.version(spec.version):
        name, version = spec.name, spec.version
        raise ServiceRefused(
            f"version {version} of service {name} already exists on this machine: use fenka serve update "
            f"{spec.kind}, delete it (fenka serve delete {name} -v {version}) or choose another --version"
        )
    if not record.versions:
        raise ServiceRefused(f"service {spec.name} is being deleted: try again, or delete it again")
    if len(record.versions) >= records.MAX_VERSIONS:
        raise ServiceRefused(f"a service has at most {records.MAX_VERSIONS} versions")
    served, given = sorted(record.ports), sorted(_client_ports(spec))
    if served != given:
        raise ServiceRefused(
            f"service {spec.name} has the ports {', '.join(served)}, and this version {', '.join(given)}: "
            "give it the same by --restful-port and --port"
        )


def _ignored_ports(record: ServiceRecord, spec: ServiceSpec) -> str:
    """Return a sentence about ports of a further version that are not those of its service; else nothing."""
    other = {
        name: port for name, port in _client_ports(spec).items() if record.ports.get(name) != port
    }
    if not other:
        return ""
    ignored = ", ".join(str(port) for port in other.values())
    used = ", ".join(str(record.ports[name]) for name in other if name in record.ports)
    return (
        f"port {ignored} is ignored: all versions of service {spec.name} are reached at port {used}"
    )


def _check_program(spec: ServiceSpec, directory: str) -> None:
    program = spec.argv[0]
    there = Path(directory, program).exists() if "/" in program else shutil.which(program)
    if not there:
        raise InvalidRequest(f"there is no program called {program[:80]} on this machine")


def _check_sockets(spec: ServiceSpec) -> None:
    """Check that the kernel can have the paths of replicas' Unix sockets. Raises InvalidRequest."""
    if spec.unix_socket:
        try:
            check_socket_path(records.socket_path(SERVICES.place_of(spec.name)))
        except ValueError as why:
            raise InvalidRequest(
                f"--unix-socket: {why}: give the service a shorter --name, or set XDG_STATE_HOME to a "
                "directory with a shorter path"
            ) from None


def _check_cards(
    runtime: Runtime, spec: ServiceSpec, announce: Notify, report_errors: ErrorReporter
) -> None:
    """Check that the daemon could ever grant a replica's request. Raises LeaseNotGranted."""
    version = VersionRecord(spec, 0, 0, str(Path.cwd()), {})
    request = service_replicas.lease_request(
        version, service_replicas.lease_name(spec, secrets.token_hex(3))
    )
    if request is None:
        return
    launcher = Launcher(runtime, request, report_errors, wait=False)
    try:
        # It is not confirmed, so the daemon takes it back.
        launcher.acquire(announce)[0].close()
    except LeaseNotGranted as why:
        if why.exit_code != TEMPORARY_FAILURE:
            raise


def _client_ports(spec: ServiceSpec) -> dict[PortName, int]:
    return {name: spec.ports[name] for name in CLIENT_PORTS if name in spec.ports}


def _address(spec: ServiceSpec) -> str:
    """Return where the gateway listens: a service that is reached from outside does so everywhere."""
    return LOOPBACK if spec.service == "ClusterIP" else "0.0.0.0"


def _environment() -> dict[str, str]:
    """Return this process's variables that are text."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name + value).encode(errors="replace") == os.fsencode(name + value)
    }


def _ensure_supervised(
    runtime: Runtime, name: str, lock: int, announce: Notify, report_errors: ErrorReporter
) -> None:
    """Start the service's supervisor unless it lives. Raises JobNotStarted.

    lock: what keeps other commands from changing services; not for the supervisor.
    """
    if records.service_status(name) is not None:
        return
    if any(version.spec.gpu for version in SERVICES.load(name).versions):
        # Not by a replica, or its end would be that of the daemon's parent.
        connect(runtime, announce).close()

    def body(notify: Notify, started: Callable[[], None]) -> None:
        os.close(lock)

        def ready() -> None:
            notify(workload.STARTED)
            started()

        # Other commands about services need neither its event loop nor its parser of metrics.
        from fenka.local import service_supervisor

        service_supervisor.run(runtime, name, ready, report_errors)

    log = SERVICES.place_of(name) / "log"
    workload.start_supervisor(name, body, log, announce, report_errors)


# --- look -----------------------------------------------------------------------------------------------


def versions(name: str | None) -> list[ServiceVersion]:
    """Return the versions of all services, or of the one with this name, sorted.

    A service whose record cannot be read is shown, so that it can be deleted.
    """
    snapshot, user = known_snapshot(), user_name(os.geteuid())
    shown: list[ServiceVersion] = []
    services, unreadable = SERVICES.load_all(name)
    for record in services:
        # One without versions is being deleted.
        if record.versions:
            status = records.service_status(record.versions[0].spec.name)
            shown += service_versions(record, status, snapshot, user)
    return [*shown, *(unreadable_service(error, user) for error in unreadable)]


def attach_to(name: str, replica: str, command: Sequence[str]) -> NoReturn:
    """Become a command in the lease of a replica. It is ended with the replica.

    Raises RecordNotFound, records.UnreadableRecord, NotRunning, IsolationError, JobNotStarted.
    """
    record, status = SERVICES.load(name), records.service_status(name)
    known = [known for known in status.replicas if known.name == replica] if status else []
    version = record.version(known[0].version) if known else None
    if version is None:
        raise NotRunning(f"{replica} is not running")
    become(replica, known[0].program, version.directory, command)


def has_replica(name: str, replica: str) -> bool:
    """Return whether there is a replica of this name, which may be started again."""
    status = records.service_status(name)
    return status is not None and any(known.name == replica for known in status.replicas)


# --- changes --------------------------------------------------------------------------------------------


def update(
    runtime: Runtime,
    name: str,
    version: str,
    change: Callable[[ServiceSpec], ServiceSpec],
    announce: Notify,
    report_errors: ErrorReporter,
) -> ServiceSpec:
    """Change a version, or the only one if none is named; return it as it is now.

    If it fails, nothing changes. Its replicas are replaced one by one. A service whose supervisor has been
    killed is started again.

    Raises:
        RecordNotFound, records.UnreadableRecord, ServiceRefused: There is no such version.
        InvalidRequest: This machine cannot run it as requested.
        JobNotStarted: Its supervisor could not be started.
    """
    with _changing() as lock:
        record = SERVICES.load(name)
        old = _chosen(record, name, version)
        spec = change(old.spec)
        spec.validate()
        check_change(old.spec, spec)
        workload.refuse_cluster_options(spec, {})
        workload.check_mounts(spec)
        _check_sockets(spec)
        if spec.argv != old.spec.argv:
            _check_program(spec, old.directory)
        if spec.gpu != old.spec.gpu:
            _check_cards(runtime, spec, announce, report_errors)
        unchanged = {field: getattr(old.spec, field) for field in _IN_PLACE}
        same = msgspec.structs.replace(spec, **unchanged) == old.spec
        new = msgspec.structs.replace(
            old,
            spec=spec,
            revision=old.revision + (not same),
            previous=old.previous if spec == old.spec else old.spec,
        )
        versions = [new if version is old else version for version in record.versions]
        SERVICES.save(SERVICES.place_of(name), msgspec.structs.replace(record, versions=versions))
        try:
            _ensure_supervised(runtime, name, lock, announce, report_errors)
        except BaseException:
            _restore(name, record)
            raise
    return spec


def undo(
    runtime: Runtime, name: str, version: str, announce: Notify, report_errors: ErrorReporter
) -> ServiceSpec:
    """Make a version what it was before its last update. Return it as it is now. Raises as `update`."""
    chosen = _chosen(SERVICES.load(name), name, version)
    previous, version = chosen.previous, chosen.spec.version
    if previous is None:
        raise ServiceRefused(
            f"version {version} of service {name} has not been updated: there is nothing to undo"
        )
    return update(runtime, name, version, lambda _: previous, announce, report_errors)


def _chosen(record: ServiceRecord, name: str, version: str) -> VersionRecord:
    names = [version.spec.version for version in record.versions]
    if not version and len(names) != 1:
        raise ServiceRefused(
            f"service {name} has several versions: choose {', '.join(sorted(names))} by --version"
        )
    check_versions(name, {version or names[0]: 1}, names)
    chosen = record.version(version or names[0])
    assert chosen
    return chosen


def split(name: str, weights: Mapping[str, int]) -> None:
    """Divide a service's requests. Raises RecordNotFound, records.UnreadableRecord, InvalidRequest."""
    with _changing():
        record = SERVICES.load(name)
        check_versions(name, weights, [version.spec.version for version in record.versions])
        SERVICES.save(
            SERVICES.place_of(name), msgspec.structs.replace(record, weights=dict(weights))
        )


def delete(name: str, version: str) -> None:
    """Delete a version, or the whole service with all that is left of it.

    Raises RecordNotFound, records.UnreadableRecord, ServiceRefused, InvalidRequest, JobNotEnded.
    """
    with _changing():
        directory = SERVICES.directory_of(name)
        if version and not _delete_version(name, version):
            return
        _end(name, directory)
        SERVICES.remove(name)


def _delete_version(name: str, version: str) -> bool:
    """Withdraw a version. Return whether it is the last one, which is not withdrawn."""
    record = SERVICES.load(name)
    names = [version.spec.version for version in record.versions]
    check_versions(name, {version: 1}, names)
    rest = [kept for kept in record.versions if kept.spec.version != version]
    if not rest:
        return True
    weights = shares(record.weights, [kept.spec.version for kept in rest])
    if not weights:
        raise ServiceRefused(
            f"version {version} gets all requests of service {name}: move them first, by fenka "
            f"traffic-split --name {name} -v {rest[0].spec.version}:100"
        )
    changed = msgspec.structs.replace(record, versions=rest, weights=weights)
    SERVICES.save(SERVICES.place_of(name), changed)
    return False


def _end(name: str, directory: Path) -> None:
    """End the supervisor with all that it runs."""
    grace_s = ServiceSpec().grace_s
    with contextlib.suppress(records.UnreadableRecord):
        record = SERVICES.load(name)
        # The gateway finishes requests, and then the programs.
        grace_s = 2 * max((version.spec.grace_s for version in record.versions), default=grace_s)
        # A supervisor that is being started again may miss the signal. On a full disk there is only that.
        with contextlib.suppress(OSError):
            SERVICES.save(directory, msgspec.structs.replace(record, versions=[]))
    status = records.service_status(name)
    if status is not None:
        end_process(status.pid, lambda: status.supervised, name, grace_s)
    # If a guard was killed, its supervisor ends by itself.
    end_writers(directory / "log", name, grace_s)
