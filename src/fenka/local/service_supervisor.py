"""Runs a service: the number of its replicas, their readiness, and the gateway, until the service is deleted.

Its guard starts a killed supervisor again, after it has ended all replicas. The guard's sockets stay open
meanwhile, so clients wait, and no other program gets its ports.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from fenka import procfs
from fenka.core.errors import FAILURE, INVALID_INPUT, FenkaError
from fenka.core.scaling import ReplicaScaler, ScalingPolicy
from fenka.gateway import client_sockets
from fenka.gateway.envoy_binary import find_envoy
from fenka.isolation.lease_files import write_atomically
from fenka.jobs import routing_table
from fenka.jobs.local_ports import LOOPBACK
from fenka.jobs.processes import ErrorReporter, JobNotStarted
from fenka.jobs.routing_table import ListenAddress, RoutingTable
from fenka.jobs.service import PortName
from fenka.local import records, service_replicas, supervisor
from fenka.local.held_ports import HeldPorts
from fenka.local.records import SERVICES, STATUSES, ServiceRecord, ServiceStatus, VersionRecord
from fenka.local.request_rates import RequestRates
from fenka.local.service_replicas import GatewayUse, ServiceReplica
from fenka.local.supervisor import END_SLACK_S, PASS_S, Home, Supervisor
from fenka.server.loopback_name import DOMAIN, hold_other_address, new_name, release
from fenka.workstation.files import trim_log
from fenka.workstation.paths import Runtime

TIMEOUT_S = 1.0
MAX_RESPONSE_BYTES = 4 << 20

_PREFIX = "fenka_gateway_"

OWN_NAMES = (LOOPBACK, DOMAIN, f"*.{DOMAIN}")
"""Host names of a service that only this machine reaches. No name server knows those below `localhost`."""


def gateway_use(port: int) -> GatewayUse | None:
    """Return what the gateway reports at this port; None if it does not answer."""
    body = asyncio.run(_get(port, "/metrics"))
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        return None if body is None else _parse(body.decode())
    return None


def _parse(text: str) -> GatewayUse:
    """Return what metrics say. Raises ValueError."""
    waiting = generation = 0
    in_flight, responses, terminating = Counter[str](), Counter[str](), Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            match sample.name.removeprefix(_PREFIX):
                case "requests_waiting":
                    waiting = int(sample.value)
                case "table_generation":
                    generation = int(sample.value)
                case "requests_in_flight":
                    in_flight[sample.labels["version"]] += int(sample.value)
                case "responses_total":
                    responses[sample.labels["version"]] += int(sample.value)
                case "terminating_requests":
                    terminating[sample.labels["replica"]] += int(sample.value)
    return GatewayUse(waiting, in_flight, responses, terminating, generation)


async def _get(address: ListenAddress, path: str) -> bytes | None:
    """Return the body of a successful response; None for any other, and if there is none in time."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if isinstance(address, str):
                host = "localhost"
                reader, writer = await asyncio.open_unix_connection(address)
            else:
                host = f"{LOOPBACK}:{address}"
                reader, writer = await asyncio.open_connection(LOOPBACK, address)
            try:
                # A response of version 1.0 has no parts, and ends with the connection.
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode())
                response = await _read(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError, UnicodeEncodeError):
        return None
    head, separator, body = response.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return body if separator and status and status[0][:1] in (b"2", b"3") else None


async def _read(reader: asyncio.StreamReader) -> bytes:
    response = b""
    while len(response) < MAX_RESPONSE_BYTES and (part := await reader.read(1 << 16)):
        response += part
    return response


def ready(replicas: Mapping[str, tuple[ListenAddress, str]]) -> set[str]:
    """Return the names of the replicas that answer, of those whose programs listen.

    Args:
        replicas: Where each listens, and the path that answers when it is ready; empty if listening suffices.
    """

    async def ask() -> list[bytes | None]:
        return await asyncio.gather(*(_get(*probed[name]) for name in probed))

    probed = {name: place for name, place in replicas.items() if place[1]}
    bodies = asyncio.run(ask()) if probed else []
    silent = {name for name, body in zip(probed, bodies, strict=True) if body is None}
    return replicas.keys() - silent


RESTART_PAUSE_S = 1.0
"""Between two starts, if the first gateway ended at once."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The listening sockets of a service.

    Attributes:
        clients: By the name of the replicas' port.
        admin: For its metrics.
        held: The same ports at the other loopback address, where nobody listens.
        page_host: A name that nobody can guess, for browsers; empty if another program could answer.
    """

    clients: Mapping[str, socket.socket]
    admin: socket.socket
    held: Sequence[socket.socket] = ()
    page_host: str = ""

    def close(self) -> None:
        """Close this process's copies."""
        for client in (*self.clients.values(), self.admin, *self.held):
            client.close()


def listen(address: str, ports: Mapping[PortName, int]) -> Sockets:
    """Return listening sockets. Raises JobNotStarted if a port is used."""
    admin, clients = socket.create_server((LOOPBACK, 0)), dict[str, socket.socket]()
    try:
        for name, port in ports.items():
            clients[name] = client_sockets.listen(address, port)
    except OSError as why:
        Sockets(clients, admin).close()
        reason = os.strerror(why.errno or 0)
        raise JobNotStarted(
            f"cannot listen on port {port} of {address} ({reason}): choose another --restful-port or --port",
            INVALID_INPUT,
        ) from None
    if address != LOOPBACK:
        return Sockets(clients, admin)
    held = list[socket.socket]()
    try:
        for port in ports.values():
            held += hold_other_address(LOOPBACK, port)
    except OSError:
        # A browser would ask the program there first. Clients use 127.0.0.1 anyway.
        release(held)
        return Sockets(clients, admin)
    return Sockets(clients, admin, held, new_name())


@dataclass(slots=True)
class GatewayProcess:
    """The gateway's process, if there is one.

    Attributes:
        directory: The service's directory.
        sockets: Where clients connect.
        generation: The number of the newest table.
    """

    directory: Path
    sockets: Sockets
    generation: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _started_at: float = -RESTART_PAUSE_S
    _table: RoutingTable | None = field(default=None)
    _grace_s: float = 0.0
    _kill_at: float | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 for none."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    @property
    def admin_port(self) -> int:
        """Where it shows its metrics."""
        port: int = self.sockets.admin.getsockname()[1]
        return port

    def route(self, table: RoutingTable) -> None:
        """Write the table, if it is new. Raises OSError."""
        if table != self._table:
            numbered = msgspec.structs.replace(table, generation=self.generation + 1)
            write_atomically(self._file, routing_table.encode(numbered))
            self._table, self.generation = table, numbered.generation

    @property
    def _log(self) -> Path:
        return self.directory / "gateway.log"

    @property
    def _file(self) -> Path:
        return self.directory / "table.json"

    def start(self, now: float, wait_s: float, grace_s: float) -> None:
        """Start it unless it runs, has ended at once, or has no table. Raises OSError.

        Args:
            now: The monotonic clock's seconds.
            wait_s: How long requests wait for a replica.
            grace_s: How long it finishes requests when it ends.
        """
        if self.pid or self._table is None or now < self._started_at + RESTART_PAUSE_S:
            return
        self._started_at, self._grace_s = now, grace_s
        listening = [
            f"--listen={name}=fd:{client.fileno()}" for name, client in self.sockets.clients.items()
        ]
        # Other machines have names for this one that only they know.
        local = all(client.getsockname()[0] == LOOPBACK for client in self.sockets.clients.values())
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-Pm", "fenka", "gateway", f"--table={self._file}"),
                    *(*listening, f"--admin=fd:{self.sockets.admin.fileno()}"),
                    *(f"--wait={wait_s:g}", f"--grace={grace_s:g}"),
                    *(f"--host={name}" for name in OWN_NAMES if local),
                    f"--directory={self.directory / 'envoy'}",
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[
                    client.fileno()
                    for client in (*self.sockets.clients.values(), self.sockets.admin)
                ],
                # Ctrl-C and signals to the group are the supervisor's.
                start_new_session=True,
                preexec_fn=partial(procfs.die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def use(self) -> GatewayUse | None:
        """Return what it reports; None if it does not answer. Its log is kept short."""
        with contextlib.suppress(OSError):
            trim_log(self._log)
        return gateway_use(self.admin_port) if self.pid else None

    def end(self, now: float) -> None:
        """Have it finish its requests and end; kill it if it has not ended after the grace period."""
        if not self._process or not self.pid:
            return
        if self._kill_at is None:
            self._kill_at = now + self._grace_s + END_SLACK_S
        self._process.send_signal(signal.SIGTERM if now < self._kill_at else signal.SIGKILL)


log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at the gateway's metrics and at the users of replicas' ports."""

PREDECESSOR_S = 60.0
"""An earlier supervisor of the service has ended its replicas by then."""


def run(
    runtime: Runtime, name: str, started: Callable[[], None], report_errors: ErrorReporter
) -> NoReturn:
    """Run the service until it is deleted or told to end. Call this in a background process.

    started: called once clients can connect. Raises FenkaError if the service cannot be started.
    """
    # Without it no request would be answered, which only the gateway's log would say.
    find_envoy()
    directory, record = SERVICES.directory_of(name), SERVICES.load(name)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with (
        _only_supervisor(directory) as lock,
        contextlib.closing(listen(record.address, record.ports)) as sockets,
    ):
        status = records.supervised_by_me(
            ServiceStatus(uid=record.uid, page_host=sockets.page_host)
        )
        STATUSES.save(directory, status)
        started()

        def supervise(_report: Callable[[supervisor.Report], None]) -> int:
            now_wanted = _latest(name, record)
            return RunningService(
                runtime, directory, now_wanted, status, sockets, lock, report_errors
            ).run()

        home = Home(runtime, directory, report_errors)
        policy, guard = supervisor.RestartPolicy(None), Supervisor[supervisor.SupervisedFunction]()
        guard.add(supervisor.SupervisedFunction(home, "the supervisor", policy, supervise))
        guard.run()
    raise SystemExit(0)


def _latest(name: str, record: ServiceRecord) -> ServiceRecord:
    """Return what the user wants now; what is known if that cannot be read."""
    with contextlib.suppress(FenkaError):
        return SERVICES.load(name)
    return record


@contextlib.contextmanager
def _only_supervisor(directory: Path) -> Iterator[int]:
    """Wait until no other process supervises the service, and keep others from it. Raises JobNotStarted."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + PREDECESSOR_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise JobNotStarted(
                        f"an earlier supervisor of {directory.name} does not end: see `fenka ps`",
                        FAILURE,
                    ) from None
            time.sleep(PASS_S)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _Version:
    """A version, with the facts that a pass leaves to the next."""

    record: VersionRecord
    wanted: int
    scaler: ReplicaScaler


@dataclass(slots=True)
class RunningService:
    """One service, from the start of its supervisor to its end.

    Attributes:
        runtime: The daemon's runtime directory.
        directory: The service's directory.
        record: The service as the user wants it.
        status: The service as others see it.
        sockets: Where clients connect.
        lock: The descriptor that keeps other supervisors away.
        report_errors: The command's reporter of errors.
    """

    runtime: Runtime
    directory: Path
    record: ServiceRecord
    status: ServiceStatus
    sockets: Sockets
    lock: int
    report_errors: ErrorReporter
    _held: HeldPorts = field(default_factory=HeldPorts)
    _supervisor: Supervisor[ServiceReplica] = field(default_factory=Supervisor)
    _gateway: GatewayProcess = field(init=False)
    _rates: RequestRates = field(init=False)
    _versions: dict[str, _Version] = field(default_factory=dict)
    _use: GatewayUse | None = None
    _looked_at: float = 0.0
    _ending: bool = False
    _record_seen: tuple[int, int, int] | None = None
    _published: bytes = b""

    def __post_init__(self) -> None:
        # Of replicas whose supervisor was killed.
        shutil.rmtree(records.sockets_directory(self.directory), ignore_errors=True)
        self._gateway = GatewayProcess(self.directory, self.sockets)
        self._rates = RequestRates()

    def run(self) -> int:
        """Return 0 when nothing of the service is left."""
        self._supervisor.run(self._step, self._is_drained, self._publish)
        return 0

    @property
    def _replicas(self) -> list[ServiceReplica]:
        return self._supervisor.groups

    def _leave(self) -> None:
        """Close, in a replica's process, what belongs to the supervisor."""
        os.close(self.lock)
        self.sockets.close()
        self._held.close_inherited()
        self._supervisor.close_inherited()

    # --- a pass -------------------------------------------------------------------------------------

    def _step(self, now: float, signals: Sequence[int]) -> bool:
        """Start and drain replicas. Return whether the service goes on, or its gateway has not ended."""
        self._ending = self._ending or bool(signals)
        self._read_record()
        self._observe_readiness()
        if now >= self._looked_at + LOOK_S:
            self._look(now)
        if self._ending:
            self._gateway.end(now)
        for version in [*self._versions]:
            self._change(version, now)
        return not self._ending or bool(self._gateway.pid)

    def _read_record(self) -> None:
        try:
            file = (self.directory / "service.json").stat()
            seen = file.st_ino, file.st_mtime_ns, file.st_size
            if seen != self._record_seen:
                self._record_seen = seen
                self.record = SERVICES.load(self.directory.name)
                self.status.reason = ""
        except FileNotFoundError:
            # Somebody has removed the directory, so no command finds the service any more.
            self._ending = True
        except (FenkaError, OSError) as why:
            # The last record stays in use, as the last table does for the gateway.
            self.status.reason = str(why)
        self._ending = self._ending or not self.record.versions
        for version in self.record.versions:
            self._update_version(version)

    def _update_version(self, record: VersionRecord) -> None:
        name, spec = record.spec.version, record.spec
        known = self._versions.get(name)
        if known and known.record == record:
            return
        scale = spec.range
        policy = ScalingPolicy(
            scale.least, scale.most, spec.target, spec.up_after_s, spec.down_after_s
        )
        # A version begins with a replica, so that one that cannot start is noticed at once.
        wanted = min(max(known.wanted if known else 1, scale.least), scale.most)
        self._versions[name] = _Version(record, wanted, ReplicaScaler(policy))

    def _observe_readiness(self) -> None:
        starting = {
            replica.name: replica.readiness
            for replica in self._replicas
            if replica.state == "Starting" and replica.check_ports()
        }
        answering = ready(starting)
        for replica in self._replicas:
            if replica.name in answering:
                replica.on_ready()

    def _look(self, now: float) -> None:
        """Check who serves the replicas' ports, and scale by what the gateway reports, if it does."""
        self._looked_at, before, self._use = now, self._use, self._gateway.use()
        self._rates.on_report(now, self._use.responses if self._use else None)
        for replica in self._replicas:
            if replica.state == "Ready":
                replica.check_ports()
        if self._use is None:
            return
        loads = service_replicas.loads(self.record, self._replicas, self._use, before)
        for name, version in self._versions.items():
            if name in loads and version.record.spec.range.scales:
                active = sum(map(service_replicas.is_active, self._of(name)))
                version.wanted = version.scaler.step(now, active, loads[name])

    def _change(self, name: str, now: float) -> None:
        """Start and drain replicas of one version."""
        version = self._versions[name]
        wanted = version.wanted
        if self._ending or self.record.version(name) is None:
            wanted = 0
        changes = service_replicas.changes(wanted, version.record.revision, self._of(name))
        for replica in self._replicas:
            if replica.name in changes.drain:
                replica.drain(now)
        for _ in range(changes.start):
            home = Home(self.runtime, self.directory, self.report_errors, self._leave)
            replica = ServiceReplica(home, version.record, self._held)
            self._supervisor.add(replica)
        if not wanted and not self._of(name) and self.record.version(name) is None:
            del self._versions[name]

    def _of(self, version: str) -> list[ServiceReplica]:
        return [replica for replica in self._replicas if replica.version.spec.version == version]

    def _is_drained(self, replica: ServiceReplica) -> bool:
        """Return whether the gateway has seen that a replica gets no requests, and it has none left."""
        if self._ending:
            return not self._gateway.pid
        if replica.state != "Draining" or not replica.served or self._use is None:
            return False
        return self._use.terminating.get(service_replicas.address(replica)) == 0

    # --- what others see ----------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        """Write the table and the status. A full disk delays both; the programs go on."""
        name = self.directory.name
        with contextlib.suppress(OSError):
            self._gateway.route(service_replicas.routing_table(name, self.record, self._replicas))
            if not self._ending:
                specs = [version.spec for version in self.record.versions]
                wait_s = max(spec.buffer_timeout_s for spec in specs)
                self._gateway.start(now, wait_s, max(spec.grace_s for spec in specs))
                self._supervisor.children = {self._gateway.pid}
            self._settle_ports()
            self._publish_status()

    def _settle_ports(self) -> None:
        newest = known = self._gateway.generation
        if self._gateway.pid:
            # Without a gateway nothing is sent, and the next one begins with the newest table.
            known = self._use.generation if self._use else -1
        self._held.settle(newest, known)

    def _publish_status(self) -> None:
        status = self.status
        status.wanted = {name: version.wanted for name, version in self._versions.items()}
        status.replicas = [replica.record for replica in self._replicas]
        status.gateway_pid = self._gateway.pid
        status.requests_per_s = self._rates.per_s
        status.waiting_requests = self._use.waiting if self._use else None
        status.metrics = f"http://{LOOPBACK}:{self._gateway.admin_port}/metrics"
        content = msgspec.json.encode(status)
        if content != self._published:
            STATUSES.save(self.directory, status)
            self._published = content
