"""Starts a job on this machine: waits for its lease, enters it, and becomes its program in the same process.

The daemon watches the PID that requested the lease, so signals, terminal and exit code need no forwarding.
The process that requests a gang's leases becomes its supervisor; each member is a child with a lease.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from fenka.core.errors import INVALID_INPUT, PROGRAM_NOT_FOUND, TEMPORARY_FAILURE, FenkaError
from fenka.isolation import sandbox
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.notebook import LOOPBACK, taken_port
from fenka.jobs.processes import ErrorReporter, JobNotStarted, Notify, run_child
from fenka.local import supervisor
from fenka.workstation import protocol
from fenka.workstation.broker import GRANT_TTL_S
from fenka.workstation.client import Connection, DaemonUnavailable, connect
from fenka.workstation.paths import Runtime, port_reservations

T = TypeVar("T")

RETRY_S = 0.1
"""Between attempts to reach the next daemon while a program starts."""

RECONNECT_S = 0.5
"""Between attempts to reach the next daemon while a request is pending."""


PATIENCE_S = 5.0
"""Until a pending request whose daemon went away reports that root has to start the next one."""

_ROOT_STARTS = (
    "waiting for this machine's daemon: root has to start it, with `fenka daemon --background`"
)


class LeaseNotGranted(FenkaError):
    """The request was rejected, or its time to wait is over. final: it can never be granted."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.exit_code = INVALID_INPUT if final else TEMPORARY_FAILURE


class NestedLease(FenkaError):
    """The command runs inside a lease."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts a job, and never returns: the process that calls it is replaced or ends.

    Attributes:
        runtime: The daemon's runtime directory.
        spec: The job.
        report_errors: The command's reporter of errors.
        wait: Queue if nothing is free now.
        timeout_s: The longest wait; None to wait indefinitely.
        environment: Variables to add to the program's own.
        binds: What the program sees in another place.
    """

    runtime: Runtime
    spec: JobSpec
    report_errors: ErrorReporter
    wait: bool = True
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    binds: Sequence[sandbox.Bind] = ()

    def start(
        self, notify: Notify, started: Callable[[], None] = lambda: None, logs: Path | None = None
    ) -> NoReturn:
        """Become the job's program, or the supervisor of its gang.

        Args:
            notify: Receives lines about the wait for the lease.
            started: Called once a gang's members run.
            logs: The directory in which each member of a gang gets a log.
        """
        if self.spec.gang:
            self._supervise(notify, started, logs)
        self.exec_program(notify)

    def exec_program(
        self, notify: Notify, before_exec: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """Become the job's program; `before_exec` is called last."""
        connection, granted = self.acquire(notify)
        assert isinstance(granted, protocol.LeaseGranted)
        environment = self._enter(connection, granted)
        before_exec()
        execute(self.spec.command, environment)

    def _supervise(
        self, notify: Notify, started: Callable[[], None], logs: Path | None
    ) -> NoReturn:
        connection, granted = self.acquire(notify)
        assert isinstance(granted, protocol.GangGranted)
        jobs = granted.jobs
        port, port_lock = port_reservations().reserve()

        def become_member(rank: int, ready: supervisor.ReportReady) -> NoReturn:
            def body() -> None:
                environment = self.enter_member(jobs[rank])
                ready()
                execute(self.spec.command, environment | _member_environment(rank, len(jobs), port))

            run_child(body, self.report_errors())

        def all_started(_: Sequence[int]) -> None:
            connection.close()
            started()

        members = [
            supervisor.Member(str(rank), partial(become_member, rank)) for rank in range(len(jobs))
        ]
        with port_lock:
            result = supervisor.run(members, started=all_started, logs=logs)
        if result.status and taken_port([port]):
            raise JobNotStarted(
                f"another program took {self.spec.name}'s MASTER_PORT {port}: run it again, which "
                "takes another port",
                result.status,
            )
        if result.never_started is not None:
            raise JobNotStarted(
                f"{self.spec.name} was not started: member {result.never_started} could not be",
                result.status,
            )
        sys.exit(result.status)

    # --- waiting ------------------------------------------------------------------------------------

    def acquire(
        self, notify: Notify
    ) -> tuple[Connection, protocol.LeaseGranted | protocol.GangGranted]:
        """Wait for a lease, or for a gang's leases. Restarts of the daemon keep the place in the queue.

        Raises:
            LeaseNotGranted, NestedLease, DaemonUnavailable, UnsafeDirectory, ProtocolMismatch: No lease.
        """
        if "FENKA_LEASE" in os.environ or sandbox.inside_lease():
            raise NestedLease(
                "this shell is inside a lease already: leave it to ask for another one"
            )
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        request = protocol.SubmitJob(self.spec.truncate(), self.wait)
        last_line = ""

        def on_wait(queued: protocol.JobQueued) -> None:
            nonlocal last_line
            request.job_id = queued.job_id
            line = f"waiting, position {queued.position} of {queued.length}: {queued.reason}"
            if line != last_line:
                last_line = line
                notify(line)

        try:
            connection = connect(self.runtime, notify)
        except DaemonUnavailable:
            if not (self.runtime.foreign and self.wait):
                raise
            notify(_ROOT_STARTS)
            connection = _reconnect(self.runtime, deadline, lambda _: None)
        while True:
            try:
                connection.send(request)
                return connection, _await_grant(connection, deadline, on_wait)
            except ConnectionError:
                connection.close()
                notify("the daemon went away; waiting for it with our place in the queue kept …")
                connection = _reconnect(self.runtime, deadline, notify)

    # --- entering -----------------------------------------------------------------------------------

    def enter_member(self, job: str) -> dict[str, str]:
        """Move a child of the process that acquired a gang into the lease of this member.

        Return the environment for its program. Raises IsolationError, LeaseNotGranted, ProtocolMismatch.
        """
        # The parent's connection stands for the gang as a whole.
        return self._enter(*_claim_member(self.runtime, job))

    def _enter(self, connection: Connection, granted: protocol.LeaseGranted) -> dict[str, str]:
        """Move this process into the lease and return the environment for the program.

        Raises IsolationError, LeaseNotGranted; the process must then end, and its lease ends with it.
        """
        environment = dict(os.environ)
        # By UUID, because CUDA's order of cards may differ from NVML's. The shim allows only the lease's
        # cards, whatever this variable says.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(granted.uuids)
        shim = granted.mounts.shim
        if self.spec.isolation == "namespace":
            sandbox.enter(granted.mounts, self.binds)
            shim = sandbox.SHIM
        else:
            environment["FENKA_LEASE"] = str(granted.mounts.directory)
        # In a namespace this is a fallback: if /etc/ld.so.preload or the linker's cache is replaced on the
        # host, the kernel drops the mounts over them in every namespace.
        _prepend(environment, "LD_PRELOAD", shim)
        if granted.library_dir:
            _prepend(environment, "LD_LIBRARY_PATH", granted.library_dir)
        _confirm(connection, granted)
        return {**environment, **self.environment}


def execute(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become this program. Raises JobNotStarted."""
    try:
        os.execvpe(command[0], command, environment)
    except OSError as why:
        raise JobNotStarted(
            f"{command[0]} cannot be started: {why.strerror}", PROGRAM_NOT_FOUND
        ) from None


def _await_grant(
    connection: Connection,
    deadline: float | None,
    on_wait: Callable[[protocol.JobQueued], None],
) -> protocol.LeaseGranted | protocol.GangGranted:
    """Wait for the answer to a request. Raises LeaseNotGranted, ConnectionError."""
    reason = "the daemon has not answered yet"
    while True:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
        try:
            answer = connection.receive(left)
        except TimeoutError:
            raise LeaseNotGranted(f"gave up waiting: {reason}", final=False) from None
        match answer:
            case protocol.LeaseGranted() | protocol.GangGranted():
                return answer
            case protocol.JobRejected(reason=why, final=final):
                raise LeaseNotGranted(why, final=final)
            case protocol.JobQueued():
                reason = answer.reason
                on_wait(answer)
            case _:
                raise LeaseNotGranted(protocol.failure_reason(answer), final=True)


def _reconnect(runtime: Runtime, deadline: float | None, notify: Notify) -> Connection:
    """Wait for the next daemon. `notify` gets a line if only root can start it, after a while."""
    silent_until = time.monotonic() + PATIENCE_S
    reported = not runtime.foreign
    while True:
        try:
            return connect(runtime, lambda _: None)
        except DaemonUnavailable as why:
            over = deadline is not None and time.monotonic() > deadline
            if over or os.environ.get("FENKA_START_DAEMON") == "never":
                raise LeaseNotGranted(f"gave up waiting: {why}", final=False) from None
            if not reported and time.monotonic() >= silent_until:
                reported = True
                notify(_ROOT_STARTS)
            time.sleep(RECONNECT_S)


def _retry(action: Callable[[], T], starting: str) -> T:
    """Repeat an action while no daemon answers, as long as a grant lasts. Raises LeaseNotGranted.

    No daemon is started: it would be a child of a gang's member, or run inside the lease.
    """
    deadline = time.monotonic() + GRANT_TTL_S
    while True:
        try:
            return action()
        except (ConnectionError, DaemonUnavailable):
            if time.monotonic() > deadline:
                raise LeaseNotGranted(
                    f"the daemon went away while the {starting} was starting: try again",
                    final=False,
                ) from None
        time.sleep(RETRY_S)


def _claim_member(runtime: Runtime, job: str) -> tuple[Connection, protocol.LeaseGranted]:
    """Take over the lease of one member of a gang, in a child of the process to which it was granted.

    Raises LeaseNotGranted, ProtocolMismatch.
    """

    def claim() -> tuple[Connection, protocol.FromDaemon]:
        connection = Connection(runtime)
        return connection, connection.call(protocol.SubmitJob(job_id=job))

    connection, answer = _retry(claim, "gang")
    if not isinstance(answer, protocol.LeaseGranted):
        raise LeaseNotGranted("the gang's grant has expired: try again", final=False)
    return connection, answer


def _confirm(connection: Connection, granted: protocol.LeaseGranted) -> None:
    """Confirm to the daemon that this process is in its lease, or to the next daemon if it was killed."""
    lost = False

    def confirm() -> protocol.FromDaemon:
        nonlocal connection, lost
        if lost:
            connection = connection.reconnect()
            connection.call(protocol.SubmitJob(job_id=granted.job_id))
        lost = True
        return connection.call(protocol.ConfirmLease())

    answer = _retry(confirm, "program")
    connection.close()
    if not isinstance(answer, protocol.Done):
        raise LeaseNotGranted(protocol.failure_reason(answer), final=False)


def _prepend(environment: dict[str, str], name: str, value: Path) -> None:
    old = environment.get(name)
    environment[name] = f"{value}:{old}" if old else str(value)


def _member_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for the only process of a node.

    Each member sees its own cards and no others. So its first card is card 0, and LOCAL_RANK, by which
    scripts choose a card, is 0.
    """
    return {
        "FENKA_GANG_RANK": str(rank),
        "FENKA_GANG_SIZE": str(size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
