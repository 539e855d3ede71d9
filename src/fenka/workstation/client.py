"""Connects a command to the daemon, and starts a daemon if none runs."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import peer
from fenka.jobs import processes
from fenka.workstation import failing_start, paths, protocol
from fenka.workstation.paths import Runtime, UnsafeDirectory

T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""A daemon is ready within a second; a real driver's first initialisation can take many."""

EXIT_TIMEOUT_S = 10.0

RETURN_TIMEOUT_S = 10.0
"""For a daemon whose directory was removed; it tries to make it again every second."""

POLL_S = 0.02
"""Between two checks whether a daemon answers."""

SYSTEMD = Path("/run/systemd/system")
"""Exists where systemd is the machine's service manager."""

READY = b"fenka daemon: ready\n"
"""The last output of a background daemon to the process that started it: clients can connect now."""

WAITING = b"fenka daemon: waiting\n"
"""The first output of a daemon that is to replace another one: it starts as soon as that has ended."""

DAEMON_MARK = "FENKA_DAEMON"
"""Variable of a daemon that a command has started, and of its children: no job's end ends them."""

EXIT_ALREADY_RUNNING = 75
"""A daemon's exit code if another one serves the runtime directory."""


class DaemonUnavailable(FenkaError):
    """No daemon answers, and none could be started."""


class DaemonNotStarting(DaemonUnavailable):
    """No daemon answers, since it fails to start; the message says why."""


class DaemonDisplaced(DaemonUnavailable):
    """A daemon runs whose directory was removed and cannot be made again."""


class RequestFailed(FenkaError):
    """The daemon refused a request; the message is its reason."""


class DaemonConnection:
    """One connection to a daemon.

    Nothing is sent unless the runtime directory can be trusted and the daemon runs as this user or root.
    Raises
    DaemonUnavailable, UnsafeDirectory, ProtocolMismatch; later calls raise ConnectionError.
    """

    def __init__(
        self,
        runtime: Runtime,
        previous: Self | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Args:
        runtime: the daemon's directory.
        previous: an earlier connection of this process, which has checked the directory.
        timeout_s: until the daemon has greeted.
        """
        self._runtime, self._timeout_s = runtime, timeout_s
        with contextlib.ExitStack() as opened:
            try:
                self._open(opened, previous)
            except OSError as why:
                if previous is not None or not await_return(runtime):
                    raise _unavailable(runtime, why) from None
                self._open(opened, None)
            if not previous:
                check_server(runtime, self._socket)
            self._lines = opened.enter_context(self._socket.makefile("rb"))
            self._greet()
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack, previous: Self | None) -> None:
        directory = os.dup(previous._directory) if previous else self._runtime.open()
        opened.callback(os.close, directory)
        self._socket = opened.enter_context(paths.connect(directory))
        self._directory: int = directory

    def _greet(self) -> None:
        # A daemon that rejects the connection reports that and closes it, whatever is sent.
        with contextlib.suppress(ConnectionError):
            self.send(protocol.Hello())
        self._socket.settimeout(self._timeout_s)
        try:
            hello = self._lines.readline()
        except (ConnectionError, TimeoutError):
            hello = b""
        if not hello:
            # It was killed after it had accepted the connection.
            raise DaemonUnavailable(f"the daemon at {self._runtime.socket} went away: try again")
        advice = (
            "only root can replace it, with `fenka daemon --restart`"
            if self._runtime.foreign
            else "`fenka daemon --restart` goes over to this build, and programs go on; "
            "`fenka daemon --stop` ends the other one"
        )
        protocol.check_hello(hello, self._runtime.socket, self.daemon_pid, advice)
        self._socket.settimeout(None)

    def fileno(self) -> int:
        """Return the socket's descriptor, for those who wait for several."""
        return self._socket.fileno()

    def reconnect(self) -> Self:
        """Connect to the next daemon.

        This works inside a lease, too, where paths and users may have other names.
        """
        connection = type(self)(self._runtime, self)
        self.close()
        return connection

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        self._socket.sendall(protocol.encode(message) + b"\n")

    def receive(self, timeout_s: float | None = None) -> protocol.FromDaemon:
        """Receive the next message. Raises ConnectionError at the end, TimeoutError after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the daemon went away")
        return protocol.decode_answer(line)

    def call(self, message: msgspec.Struct) -> protocol.FromDaemon:
        """Send a request and return its answer."""
        self.send(message)
        return self.receive()

    def request(self, message: msgspec.Struct, expected: type[T]) -> T:
        """Send a message and return its answer. Raises RequestFailed for any other answer."""
        answer = self.call(message)
        if not isinstance(answer, expected):
            raise RequestFailed(protocol.failure_reason(answer))
        return answer

    @property
    def daemon_pid(self) -> int:
        """The daemon's process, by what the kernel reports."""
        return peer(self._socket).pid

    def close(self) -> None:
        """Close the connection, which cancels a pending request."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(runtime: Runtime, announce: Callable[[str], None]) -> DaemonConnection:
    """Connect to the daemon, and start one if none runs. Only root starts the system's.

    With FENKA_START_DAEMON=never in the environment, none is started.

    Raises DaemonUnavailable, UnsafeDirectory, ProtocolMismatch, OSError.
    """
    try:
        return DaemonConnection(runtime)
    except DaemonDisplaced:
        raise
    except DaemonUnavailable:
        if runtime.foreign or os.environ.get("FENKA_START_DAEMON") == "never":
            raise
        announce("starting the fenka daemon …")
        if runtime.system and paths.SYSTEM_UNIT.exists() and SYSTEMD.exists():
            # One outside of the unit would keep systemd's from starting.
            subprocess.run(["systemctl", "--quiet", "start", paths.SYSTEM_UNIT.name], check=False)
            return DaemonConnection(runtime)
        start_daemon(runtime, ["--resume"])
        return DaemonConnection(runtime)


def await_return(runtime: Runtime) -> bool:
    """Wait until a daemon whose directory was removed has made it again. Return False if there is none.

    Raises DaemonDisplaced.
    """
    pid = _displaced(runtime)
    if pid is None:
        return False
    deadline = time.monotonic() + RETURN_TIMEOUT_S
    while not runtime.answers():
        if time.monotonic() > deadline:
            raise DaemonDisplaced(
                f"the directory {runtime.root} of the fenka daemon (process {pid}) was removed and cannot be "
                "made again: log in, or end the daemon with `fenka daemon --stop`"
            )
        time.sleep(POLL_S)
    return True


def _displaced(runtime: Runtime) -> int | None:
    """Return the process of the directory's daemon that answers at its abstract name, if any."""
    try:
        with paths.connect_to(runtime.name) as connection:
            server = peer(connection)
    except OSError:
        return None
    return server.pid if server.uid in runtime.owners else None


def check_server(runtime: Runtime, connection: socket.socket) -> None:
    """Raise UnsafeDirectory if a user serves the directory's socket who cannot be trusted."""
    server = peer(connection).uid
    if server not in runtime.owners | {0}:
        raise UnsafeDirectory(
            f"{runtime.socket} is served by user {server}, who cannot be trusted: remove it, or "
            "name another directory in FENKA_RUNTIME"
        )


def get_snapshot(runtime: Runtime) -> protocol.MachineSnapshot:
    """Return what the daemon knows now. Raises DaemonUnavailable, ProtocolMismatch."""
    with DaemonConnection(runtime) as connection:
        return connection.request(protocol.GetSnapshot(), protocol.MachineSnapshot)


def known_snapshot() -> protocol.MachineSnapshot | None:
    """Return what this user's daemon knows now; None if none answers. Raises ProtocolMismatch."""
    try:
        return get_snapshot(paths.current())
    except (DaemonUnavailable, UnsafeDirectory, ConnectionError):
        return None


def get_helps(runtime: Runtime, job_id: str) -> list[str]:
    """Return what would let a pending job start, in sentences; none if the daemon is too old to tell.

    Raises DaemonUnavailable, ProtocolMismatch.
    """
    with contextlib.suppress(RequestFailed), DaemonConnection(runtime) as connection:
        return connection.request(protocol.GetHelps(job_id), protocol.HelpsListed).helps
    return []


def own_jobs(snapshot: protocol.MachineSnapshot | None) -> list[protocol.JobView]:
    """Return this user's jobs: names of jobs are each user's own."""
    jobs = snapshot.jobs if snapshot else []
    return [job for job in jobs if job.uid == os.geteuid()]


def jobs_called(runtime: Runtime, name: str) -> list[protocol.JobView]:
    """Return this user's jobs of this name, or the members of this gang; none if no daemon answers.

    They hold slices or wait for some.
    """
    try:
        jobs = own_jobs(get_snapshot(runtime))
    except DaemonUnavailable:
        return []
    return [job for job in jobs if name in (job.name, job.gang)]


def request_stop(
    connection: DaemonConnection, names: Sequence[str], grace_s: float
) -> protocol.JobsStopped:
    """Have the daemon stop jobs, a bounded number in each request. Raises RequestFailed, ConnectionError."""
    answer = protocol.JobsStopped([], [])
    for batch in batched(names, protocol.MAX_STOPPED):
        more = connection.request(protocol.StopJob(batch, grace_s), protocol.JobsStopped)
        answer = protocol.JobsStopped(
            [*answer.stopped, *more.stopped], [*answer.failures, *more.failures]
        )
    return answer


def batched(names: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield the names in lists of at most this size."""
    for first in range(0, len(names), size):
        yield list(names[first : first + size])


def stop_jobs(runtime: Runtime, names: list[str], grace_s: float = 10.0) -> None:
    """Stop jobs. Raises RequestFailed if one could not be stopped, DaemonUnavailable."""
    with DaemonConnection(runtime) as connection:
        answer = request_stop(connection, names, grace_s)
    if answer.failures:
        raise RequestFailed("; ".join(answer.failures))


def _unavailable(runtime: Runtime, why: OSError) -> DaemonUnavailable:
    """Return the error for a daemon that does not answer, with the reason if it fails to start."""
    if sentence := failing_start.failure(runtime):
        return DaemonNotStarting(f"the fenka daemon does not start: {sentence}")
    return DaemonUnavailable(unavailable_reason(runtime, why))


def unavailable_reason(runtime: Runtime, why: OSError) -> str:
    """Return the sentence for a daemon that does not answer."""
    where = f"no fenka daemon answers at {runtime.socket} ({why.strerror})"
    if runtime.foreign:
        return f"{where}: only root can start this machine's, with {paths.system_start()}"
    if runtime.system:
        return f"{where}: start one with {paths.system_start()}"
    return f"{where}: start one with `fenka daemon`"


def start_daemon(
    runtime: Runtime,
    options: list[str],
    lifeline: int | None = None,
    on_waiting: Callable[[], None] = lambda: None,
) -> subprocess.Popen[bytes]:
    """Start a daemon in the background and wait until one answers. Raises DaemonUnavailable, OSError.

    A daemon ends at once if this process has ended when it is ready.

    Args:
        runtime: The daemon's directory.
        options: Options of `fenka daemon`. With `--resume` it uses the last daemon's configuration, if any.
        lifeline: The reading end of a pipe. At its end of file the daemon ends, with all jobs.
        on_waiting: Called once a daemon with `--replace` only waits for the end of the one that runs.

    Returns:
        The process that was started; it has ended if another process's daemon answers.
    """
    from fenka.isolation.lease_files import require_native

    require_native()
    runtime.create()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        process, reason = _launch(runtime, options, lifeline, deadline, on_waiting)
        if reason is None or _answers(runtime, process):
            return process
        if process.returncode != EXIT_ALREADY_RUNNING:
            raise DaemonNotStarting(reason)
        if time.monotonic() > deadline:
            raise DaemonUnavailable(
                f"no daemon answers within {START_TIMEOUT_S:.0f} s, though {reason}"
            )


def daemon_environment(runtime: Runtime) -> dict[str, str]:
    """Return the environment of a daemon that serves this directory."""
    environment = {**os.environ, DAEMON_MARK: "1", "FENKA_RUNTIME": str(runtime.root)}
    environment.pop(
        "NOTIFY_SOCKET", None
    )  # It is the caller's unit that systemd starts, not the daemon.
    if runtime.system:
        del environment["FENKA_RUNTIME"]
    return environment


def _launch(
    runtime: Runtime,
    options: list[str],
    lifeline: int | None,
    deadline: float,
    on_waiting: Callable[[], None] = lambda: None,
) -> tuple[subprocess.Popen[bytes], str | None]:
    """Start a daemon. Return its process, and why it has ended, or None once it is ready."""
    environment = daemon_environment(runtime)
    tied = [] if lifeline is None else ["--lifeline"]
    # A signal between here and the assignment would lose the process. The daemon unblocks signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, protocol.SIGNALS)
    process = subprocess.Popen(
        [sys.executable, "-Pm", "fenka", "daemon", "--background-child", *tied, *options],
        stdin=subprocess.DEVNULL if lifeline is None else lifeline,
        # Not the log, which may be on a full disk.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
        cwd="/",
    )
    assert process.stdout
    if lifeline is None:
        processes.outlive(process.pid)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with process.stdout as pipe:
            output = _read_output(pipe.fileno(), deadline, on_waiting)
            if output.endswith(READY):
                said = output.removesuffix(READY)
                _record(runtime, said)
                sys.stderr.write(said.decode(errors="replace"))
                return process, None
        process.wait(EXIT_TIMEOUT_S)
    except BaseException:
        # Interrupted: nothing must be left. The daemon ends in order, once it can.
        process.terminate()
        try:
            process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if not _recorded(runtime, output):
        _record(runtime, output)
    return process, _failure_reason(output, process.returncode)


def _record(runtime: Runtime, output: bytes) -> None:
    """Write to the log what a daemon printed before it was ready."""
    with contextlib.suppress(OSError), open(runtime.log, "ab", opener=open_log) as log:
        log.write(output)


def _recorded(runtime: Runtime, output: bytes) -> bool:
    """Return whether the log ends with this output, as when clients start a daemon that fails."""
    from fenka.isolation.lease_files import open_regular_file

    try:
        with open_regular_file(runtime.log) as log:
            log.seek(-len(output), os.SEEK_END)
            return log.read() == output
    except OSError:  # There is no log, or a shorter one.
        return False


def _read_output(pipe: int, deadline: float, on_waiting: Callable[[], None]) -> bytes:
    """Return a daemon's output until it is ready or has ended. Raises DaemonUnavailable."""
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not output.endswith(READY):
            if not selector.select(deadline - time.monotonic()):
                raise DaemonUnavailable(
                    f"the daemon was not ready within {START_TIMEOUT_S:.0f} s: see whether the driver "
                    "answers, as with `nvidia-smi`"
                )
            if not (data := os.read(pipe, 1 << 16)):
                break
            output += data
            if output == WAITING:
                on_waiting()
                output = b""
    return output


def _failure_reason(output: bytes, code: int) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    if lines:
        return lines[-1].removeprefix("fenka: ")
    outcome = (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    )
    return f"the daemon {outcome} while it started: try again; `dmesg` says if memory was short"


def _answers(runtime: Runtime, process: subprocess.Popen[bytes]) -> bool:
    """Return whether another process's daemon answers, which may be starting or ending at this moment."""
    deadline = time.monotonic() + (0.5 if process.returncode == EXIT_ALREADY_RUNNING else 0)
    while not (answers := runtime.answers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return answers


def open_log(path: str, flags: int) -> int:
    """Open a daemon's log without waiting and without following links. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
