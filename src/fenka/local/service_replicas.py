"""A replica as its service's supervisor sees it, from its start over restarts to its end.

One replica: a process that waits for its lease, runs the program in it, and leaves nothing behind.

It is a child of the service's supervisor, and supervises the program as a gang of one. Orphans of the program
become its children, which it ends. The daemon ends the program if this process is killed.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NoReturn

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import listener_uid, socket_listener_uid
from fenka.isolation import sandbox
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.notebook import LOOPBACK, MAX_TAKEN, taken_port
from fenka.jobs.processes import ErrorReporter, run_child
from fenka.jobs.routing_table import ListenAddress
from fenka.jobs.service import CLIENT_PORTS, PortName
from fenka.local import records, service_plan, supervisor, workload
from fenka.local.launch import Launcher, execute
from fenka.local.records import ReplicaRecord, ReplicaState, VersionRecord, outcome
from fenka.local.workload import change_directory
from fenka.workstation import paths, protocol
from fenka.workstation.paths import Runtime

STARTED = "started "
"""Begins the report after which the program runs, in the process that it names."""

FAILED = "failed: "
"""Begins the report of why the program was not started."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplicaProgram:
    """What a replica runs.

    Attributes:
        runtime: The daemon's runtime directory.
        name: The replica's name, by which its log is found.
        request: What the daemon is asked for; None without cards.
        version: The version.
        ports: Where it is to listen.
        logs: The directory of all replicas' logs.
        report_errors: The command's reporter of errors.
    """

    runtime: Runtime
    name: str
    request: JobSpec | None
    version: VersionRecord
    ports: Mapping[PortName, ListenAddress]
    logs: Path
    report_errors: ErrorReporter

    def fork(self, leave: Callable[[], None]) -> tuple[int, int]:
        """Start the replica's process. leave: closes in it what belongs to the supervisor.

        Return its PID, and the reading end of a pipe with its reports. Raises OSError.
        """
        receive, send = os.pipe()
        try:
            parent, pid = os.getpid(), os.fork()
        except OSError:
            os.close(receive)
            os.close(send)
            raise
        if pid == 0:

            def report(line: str) -> None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(send, f"{line}\n".encode())

            def body() -> NoReturn:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                workload.die_with_parent(signal.SIGTERM)
                if os.getppid() != parent:
                    sys.exit(1)
                os.close(receive)
                leave()
                self._run(report)

            run_child(body, self.report_errors(lambda sentence: report(f"{FAILED}{sentence}")))
        os.close(send)
        os.set_blocking(receive, False)
        return pid, receive

    def _run(self, report: Report) -> NoReturn:
        workload.adopt_orphans()
        os.environ.clear()
        os.environ.update(self.version.environment)
        binds = [(Path(source), Path(target)) for source, target in self.version.binds]
        with contextlib.ExitStack() as opened:
            launcher, jobs = None, list[str]()
            if self.request:
                launcher = Launcher(self.runtime, self.request, self.report_errors, binds=binds)
                connection, granted = launcher.acquire(report)
                opened.callback(connection.close)
                assert isinstance(granted, protocol.GangGranted)
                jobs = granted.jobs

            def started(pids: Sequence[int]) -> None:
                opened.close()
                report(f"{STARTED}{pids[0]}")

            result = supervisor.run(
                [supervisor.Member(self.name, partial(self._become, launcher, jobs, binds))],
                started=started,
                logs=self.logs,
                limits=supervisor.Limits(self.version.spec.grace_s),
                forward=False,
            )
        workload.end_orphans()
        sys.exit(result.status)

    def _become(
        self,
        launcher: Launcher | None,
        jobs: Sequence[str],
        binds: Sequence[sandbox.Bind],
        ready: supervisor.ReportReady,
    ) -> NoReturn:
        """Become the program, in a child."""

        def body() -> None:
            environment = dict(os.environ)
            if launcher:
                environment = launcher.enter_member(jobs[0])
            elif binds:
                sandbox.enter_without_lease(binds)
            spec = self.version.spec
            change_directory(self.version.directory)
            ready()
            execute(
                service_plan.program(spec, self.ports),
                environment | service_plan.environment(spec, self.ports),
            )

        run_child(body, self.report_errors())


@dataclass(frozen=True, slots=True)
class ReplicaHome:
    """What all replicas of a service share.

    Attributes:
        runtime: The daemon's runtime directory.
        directory: The service's directory.
        report_errors: The command's reporter of errors.
        leave: Closes in a replica's process what belongs to the supervisor.
    """

    runtime: Runtime
    directory: Path
    report_errors: ErrorReporter
    leave: Callable[[], None]


@dataclass(slots=True)
class Replica:
    """One replica. Times are of the monotonic clock, except for `created_at`.

    Attributes:
        version: The version that it was started for, as it was then.
        state: See ReplicaState.
        served: It has been ready since its start, so the gateway knows it.
        pid: Its process; 0 for none.
        uid: The user whose program serves its ports; None while it is not known.
        reports: The pipe with its process's reports; -1 for none.
        was_killed: In this pass its process was found killed by a signal.
        gone: Nothing is left of it.
    """

    home: ReplicaHome
    version: VersionRecord
    name: str
    created_at: float = field(default_factory=time.time)
    state: ReplicaState = "Backoff"
    served: bool = False
    pid: int = 0
    reports: int = -1
    was_killed: bool = False
    gone: bool = False
    ports: dict[PortName, ListenAddress] = field(default_factory=dict)
    uid: int | None = None
    reason: str = ""
    restarts: int = 0
    _locks: list[FileIO] = field(default_factory=list)
    _failures: int = 0
    _times_taken: int = 0
    _program: tuple[int, int] = (0, 0)
    _started_at: float | None = None
    _next_at: float = 0.0
    """When it is started again, gets SIGTERM or SIGKILL, by its state."""

    @classmethod
    def create(cls, home: ReplicaHome, version: VersionRecord, now: float) -> "Replica":
        """Return a new replica, whose process is started."""
        replica = cls(home, version, service_plan.lease_name(version.spec, secrets.token_hex(3)))
        replica._start(now)
        return replica

    @property
    def record(self) -> ReplicaRecord:
        """What others see of it."""
        return ReplicaRecord(
            self.name,
            self.version.spec.version,
            self.version.revision,
            self.state,
            self.created_at,
            self._lease,
            self.pid,
            self._program if self.pid else (0, 0),
            self.restarts,
            self.ports.copy(),
            self.reason,
        )

    @property
    def readiness(self) -> tuple[ListenAddress, str]:
        """Where it listens when it is ready, and the path that answers then; empty for none."""
        name, path = self.version.spec.readiness
        return self.ports[name], path

    @property
    def _port_numbers(self) -> list[int]:
        return [address for address in self.ports.values() if isinstance(address, int)]

    @property
    def _lease(self) -> str:
        # What is left of an earlier lease may still hold its slice, and its name.
        return f"{self.name}.{self.restarts}" if self.restarts else self.name

    # --- start and end ------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        self.state, self._started_at, self.reason = "Pending", None, ""
        try:
            self._reserve_ports()
            program = ReplicaProgram(
                self.home.runtime,
                self.name,
                service_plan.lease_request(self.version, self._lease),
                self.version,
                self.ports,
                records.replicas_directory(self.home.directory),
                self.home.report_errors,
            )
            self.pid, self.reports = program.fork(self.home.leave)
        except (FenkaError, OSError) as why:
            self._fail(now, str(why))

    def _reserve_ports(self) -> None:
        self._release_ports()
        directory = self.home.directory
        for name in self.version.spec.ports:
            if self.version.spec.unix_socket and name in CLIENT_PORTS:
                records.sockets_directory(directory).mkdir(mode=0o700, exist_ok=True)
                # Another path after each restart: few programs replace what a killed one has left.
                self.ports[name] = records.socket_path(directory)
            else:
                self.ports[name], lock = paths.port_reservations().reserve()
                self._locks.append(lock)

    def _release_ports(self) -> None:
        for lock in self._locks:
            lock.close()
        for address in self.ports.values():
            if isinstance(address, str):
                with contextlib.suppress(OSError):
                    os.unlink(address)
        self._locks, self.ports = [], {}

    def drain(self, now: float) -> None:
        """Have it finish its requests, and then end."""
        if self.pid:
            self.state, self._next_at = "Draining", now + self.version.spec.grace_s
        else:
            self._leave()

    def leave_inherited(self) -> None:
        """Close, in another replica's process, what belongs to this one."""
        for lock in self._locks:
            lock.close()
        if self.reports >= 0:
            os.close(self.reports)

    def _leave(self) -> None:
        self.state, self.gone = "Ending", True
        self._release_ports()
        shutil.rmtree(
            records.replica_log(self.home.directory, self.name).parent, ignore_errors=True
        )

    # --- passes -------------------------------------------------------------------------------------

    def observe(self, now: float) -> None:
        """Read what its process has reported, and whether it has ended."""
        self.was_killed = False
        # What it has reported is complete once it has ended.
        ended, status = os.waitpid(self.pid, os.WNOHANG) if self.pid else (0, 0)
        for line in self._read_reports():
            if not line.startswith(STARTED):
                self.reason = line.removeprefix(FAILED)
                continue
            pid = int(line.removeprefix(STARTED))
            self._program = pid, procfs.start_ticks(pid) or 0
            if self.state == "Pending":
                self.state, self.reason, self._started_at = "Starting", "", now
        if ended:
            self._on_end(status, now)

    def _read_reports(self) -> list[str]:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while self.reports >= 0 and (part := os.read(self.reports, 1 << 16)):
                data += part
        return data.decode(errors="replace").splitlines()

    def _on_end(self, status: int, now: float) -> None:
        os.close(self.reports)
        self.pid, self.reports, self.was_killed = 0, -1, os.WIFSIGNALED(status)
        if self.state in ("Draining", "Ending"):
            self._leave()
            return
        reason = self.reason
        if not reason:
            reason = f"ended with {outcome(os.waitstatus_to_exitcode(status))}"
            line = supervisor.last_line(records.replica_log(self.home.directory, self.name))
            reason += f": {line}" if line else ""
        taken = None if self.served else taken_port(self._port_numbers)
        self._fail(now, reason)
        self._times_taken = self._times_taken + 1 if taken else 0
        if 0 < self._times_taken <= MAX_TAKEN:
            self.reason, self._next_at = f"another program took its port {taken}", now

    def _fail(self, now: float, reason: str) -> None:
        if self._started_at is not None and now - self._started_at > service_plan.STABLE_S:
            self._failures = 0
        self._failures += 1
        self._release_ports()
        self.state, self.served, self.reason, self.uid = "Backoff", False, reason, None
        self._next_at = now + service_plan.pause_s(self._failures)

    def check_ports(self) -> bool:
        """Return whether its user listens where it shows readiness, and no other user on its ports.

        Otherwise the gateway must send it nothing: a ready replica becomes Starting. Raises OSError.
        """
        listening = {
            address: uid
            for address in {self.readiness[0], *service_plan.client_ports(self).values()}
            if (uid := self._listener_uid(address)) is not None
        }
        # A program of root may give up its rights before it listens.
        users = {os.geteuid()} if os.geteuid() else procfs.users_below(self.pid)
        foreign = {address: uid for address, uid in listening.items() if uid not in users}
        for address, uid in foreign.items():
            self.reason = f"a program of user {uid} listens in its place, at {address}"
        if not foreign and self.readiness[0] in listening:
            self.uid = listening[self.readiness[0]]
            return True
        if self.state == "Ready":
            self.state = "Starting"
        return False

    def _listener_uid(self, address: ListenAddress) -> int | None:
        """Return the user whose program listens at an address; None for nobody. Raises OSError."""
        if isinstance(address, int):
            return listener_uid((LOOPBACK, address))
        if self.state == "Ready":
            # Its program would have to serve another connection. No other user can listen there.
            return self.uid if os.path.exists(address) else None
        return socket_listener_uid(address)

    def on_ready(self) -> None:
        """It answers: the gateway may know it."""
        self.state, self.served, self.reason, self._times_taken = "Ready", True, "", 0

    def proceed(self, now: float, *, drained: bool) -> None:
        """Do what is due. drained: it has no requests and gets none."""
        due = now >= self._next_at
        if self.state == "Backoff" and due:
            self.restarts += 1
            self._start(now)
        elif self.state == "Draining" and (due or drained or not self.served):
            self.state = "Ending"
            self._next_at = now + self.version.spec.grace_s + service_plan.END_SLACK_S
            os.kill(self.pid, signal.SIGTERM)
        elif self.state == "Ending" and due and self.pid:
            os.kill(self.pid, signal.SIGKILL)
