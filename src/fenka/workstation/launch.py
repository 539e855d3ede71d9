"""Waits for a lease, enters it, and executes the program in the same process.

The daemon watches the PID that requested the lease. Signals, terminal and exit code need no forwarding.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from fenka.core.errors import INVALID_INPUT, TEMPORARY_FAILURE, FenkaError
from fenka.isolation import sandbox
from fenka.jobs.spec import Isolation
from fenka.workstation import protocol
from fenka.workstation.broker import GRANT_TTL_S
from fenka.workstation.client import Connection, DaemonUnavailable, connect
from fenka.workstation.paths import Runtime


class LeaseNotGranted(FenkaError):
    """The request was rejected, or its time to wait is over. final: it can never be granted."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.exit_code = INVALID_INPUT if final else TEMPORARY_FAILURE


class NestedLease(FenkaError):
    """The command runs inside a lease."""

    exit_code = INVALID_INPUT


def acquire(
    runtime: Runtime,
    request: protocol.SubmitJob,
    *,
    timeout_s: float | None,
    on_wait: Callable[[protocol.JobQueued], None],
    announce: Callable[[str], None],
) -> tuple[Connection, protocol.LeaseGranted | protocol.GangGranted]:
    """Wait for a lease, or for a gang's leases. Restarts of the daemon keep the place in the queue.

    Args:
        runtime: The daemon's directory.
        request: What is requested.
        timeout_s: Seconds to wait; None for no limit.
        on_wait: Called at each change of the place in the queue.
        announce: Called with progress for the user.

    Raises:
        LeaseNotGranted, NestedLease, DaemonUnavailable, UnsafeDirectory, ProtocolMismatch: No lease.
    """
    if "FENKA_LEASE" in os.environ or sandbox.inside_lease():
        raise NestedLease("this shell is inside a lease already: leave it to ask for another one")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        connection = connect(runtime, announce)
    except DaemonUnavailable:
        if not (runtime.foreign and request.wait):
            raise
        announce("this machine's daemon does not answer; waiting until root has started it …")
        connection = _reconnect(runtime, deadline)
    while True:
        try:
            return connection, _await_grant(connection, request, deadline, on_wait)
        except _ConnectionLost as lost:
            connection.close()
            request = msgspec.structs.replace(request, job_id=lost.job_id)
            announce("the daemon went away; waiting for it with our place in the queue kept …")
            connection = _reconnect(runtime, deadline)


class _ConnectionLost(FenkaError):
    def __init__(self, job: str) -> None:
        super().__init__(job)
        self.job_id = job


def _await_grant(
    connection: Connection,
    request: protocol.SubmitJob,
    deadline: float | None,
    on_wait: Callable[[protocol.JobQueued], None],
) -> protocol.LeaseGranted | protocol.GangGranted:
    job_id, reason = request.job_id, ""
    try:
        connection.send(msgspec.structs.replace(request, spec=request.spec.truncate()))
    except ConnectionError:
        raise _ConnectionLost(job_id) from None
    while True:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
        try:
            answer = connection.receive(left)
        except TimeoutError:
            reason = reason or "the daemon has not answered yet"
            raise LeaseNotGranted(f"gave up waiting: {reason}", final=False) from None
        except ConnectionError:
            raise _ConnectionLost(job_id) from None
        match answer:
            case protocol.LeaseGranted() | protocol.GangGranted():
                return answer
            case protocol.JobRejected(reason=why, final=final):
                raise LeaseNotGranted(why, final=final)
            case protocol.JobQueued():
                job_id, reason = answer.job_id, answer.reason
                on_wait(answer)
            case _:
                raise LeaseNotGranted(protocol.failure_reason(answer), final=True)


def claim_member(runtime: Runtime, job: str) -> tuple[Connection, protocol.LeaseGranted]:
    """Take over the lease of one member of a gang, in a child of the process to which it was granted.

    Raises LeaseNotGranted, DaemonUnavailable, ProtocolMismatch.
    """
    deadline = time.monotonic() + GRANT_TTL_S
    while True:
        # Does not start a daemon, which would be a child of this member.
        with contextlib.suppress(ConnectionError, DaemonUnavailable):
            connection = Connection(runtime)
            answer = connection.call(protocol.SubmitJob(job_id=job))
            if isinstance(answer, protocol.LeaseGranted):
                return connection, answer
            raise LeaseNotGranted("the gang's grant has expired: try again", final=False)
        if time.monotonic() > deadline:
            raise LeaseNotGranted(
                "the daemon went away while the gang was starting: try again", final=False
            )
        time.sleep(0.1)


def _reconnect(runtime: Runtime, deadline: float | None) -> Connection:
    while True:
        try:
            return connect(runtime, lambda _: None)
        except DaemonUnavailable as why:
            over = deadline is not None and time.monotonic() > deadline
            if over or os.environ.get("FENKA_START_DAEMON") == "never":
                raise LeaseNotGranted(f"gave up waiting: {why}", final=False) from None
            time.sleep(0.5)


def enter(
    connection: Connection,
    granted: protocol.LeaseGranted,
    isolation: Isolation,
    *,
    user_namespaces: bool,
) -> dict[str, str]:
    """Move this process into the lease and return the environment for the program.

    user_namespaces: whether the program may create user namespaces.

    Raises IsolationError, LeaseNotGranted; the process must then end, and its lease ends with it.
    """
    environment = dict(os.environ)
    # By UUID, because CUDA's order of cards may differ from NVML's. The shim allows only the lease's cards,
    # whatever this variable says.
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(granted.uuids)
    shim = Path(granted.shim)
    if isolation == "namespace":
        sandbox.enter(
            sandbox.LeaseMounts(
                directory=Path(granted.directory),
                shim=shim,
                hidden=tuple(map(Path, granted.hidden)),
                linker_cache=Path(granted.linker_cache) if granted.linker_cache else None,
                proxies=Path(granted.proxies),
                driver=sandbox.DriverFiles(
                    {name: tuple(map(Path, files)) for name, files in granted.driver.items()},
                    Path(granted.simulated) if granted.simulated else None,
                ),
                user_namespaces=user_namespaces,
            )
        )
        shim = sandbox.SHIM
    else:
        environment["FENKA_LEASE"] = granted.directory
    # In a namespace this is a fallback: if /etc/ld.so.preload or the linker's cache is replaced on the host,
    # the kernel drops the mounts over them in every namespace.
    _prepend(environment, "LD_PRELOAD", str(shim))
    if granted.library_dir:
        _prepend(environment, "LD_LIBRARY_PATH", granted.library_dir)
    _confirm(connection, granted)
    return environment


def _confirm(connection: Connection, granted: protocol.LeaseGranted) -> None:
    """Confirm to the daemon that this process is in its lease, or to the next daemon if it was killed.

    This process cannot start a daemon any more: it would run inside the lease.
    """
    deadline = time.monotonic() + GRANT_TTL_S
    while True:
        try:
            answer = connection.call(protocol.ConfirmLease())
            break
        except (ConnectionError, DaemonUnavailable):
            if time.monotonic() > deadline:
                raise LeaseNotGranted(
                    "the daemon went away while the program was starting: try again", final=False
                ) from None
            time.sleep(0.1)
        with contextlib.suppress(ConnectionError, DaemonUnavailable):
            connection = connection.reconnect()
            connection.call(protocol.SubmitJob(job_id=granted.job_id))
    connection.close()
    if not isinstance(answer, protocol.Done):
        raise LeaseNotGranted(protocol.failure_reason(answer), final=False)


def exec_program(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Execute the program in place of this process. Raises OSError."""
    os.execvpe(command[0], command, environment)


def _prepend(environment: dict[str, str], name: str, value: str) -> None:
    old = environment.get(name)
    environment[name] = f"{value}:{old}" if old else value
