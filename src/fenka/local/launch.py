"""Starts a job on this machine: waits for its lease, enters it, and becomes its program in the same process.

The daemon watches the PID that requested the lease, so signals, terminal and exit code need no forwarding.
The process that requests a gang's leases becomes its supervisor; each member is a child with a lease.
"""

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from fenka import procfs
from fenka.core.errors import (
    INVALID_INPUT,
    NOT_EXECUTABLE,
    PROGRAM_NOT_FOUND,
    TEMPORARY_FAILURE,
    FenkaError,
)
from fenka.isolation import lease_files, sandbox
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.local_ports import LOOPBACK, taken_port
from fenka.jobs.processes import ErrorReporter, JobNotStarted, Notify, run_child
from fenka.local import gang, workload
from fenka.workstation import protocol
from fenka.workstation.client import (
    DaemonConnection,
    DaemonNotStarting,
    DaemonUnavailable,
    connect,
)
from fenka.workstation.paths import Runtime, port_reservations, system_start

T = TypeVar("T")

RETRY_S = 0.1
"""Between attempts to reach the next daemon while a program starts."""

RECONNECT_S = 0.5
"""Between attempts to reach the next daemon while a request is pending."""


PATIENCE_S = 5.0
"""Until a pending request whose daemon went away reports that root has to start the next one."""

SHELL = "/bin/sh"
_FIRST_LINE_BYTES = 256

TERMINAL = ("TERM", "COLORTERM", "LINES", "COLUMNS")
"""Variables that describe this terminal, which is not the one that the program was started from."""


class LeaseNotGranted(FenkaError):
    """The request was rejected, or its time to wait is over. final: it can never be granted."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.exit_code = INVALID_INPUT if final else TEMPORARY_FAILURE


class NotRunning(FenkaError):
    """The process does not run now."""


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
        numa: Bind the program to the CPUs that are nearest to its cards.
    """

    runtime: Runtime
    spec: JobSpec
    report_errors: ErrorReporter
    wait: bool = True
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    numa: bool = False

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
        size = self.spec.gang or 0

        def prepare(opened: contextlib.ExitStack) -> GroupPrograms:
            port, lock = port_reservations().reserve()
            opened.enter_context(lock)
            members = [
                GroupProgram(
                    str(rank), self.spec.command, _member_environment(rank, size, port), lease=rank
                )
                for rank in range(size)
            ]
            return GroupPrograms(members, [port], logs)

        progress = GroupProgress(notify, lambda _: started())
        result, taken = run_group(self, prepare, self.report_errors, progress)
        if result.status and taken:
            raise JobNotStarted(
                f"another program took {self.spec.name}'s MASTER_PORT {taken}: run it again, which "
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
    ) -> tuple[DaemonConnection, protocol.LeaseGranted | protocol.GangGranted]:
        """Wait for a lease, or for a gang's leases. Restarts of the daemon keep the place in the queue.

        Raises:
            LeaseNotGranted, NestedLease, DaemonUnavailable, UnsafeDirectory, ProtocolMismatch: No lease.
        """
        if "FENKA_LEASE" in os.environ or sandbox.inside_lease():
            raise NestedLease(
                "this shell is inside a lease already: leave it to ask for another one"
            )
        deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        spec = self.spec.truncate()
        if not spec.team and (team := os.environ.get("FENKA_TEAM")):
            spec = msgspec.structs.replace(spec, team=team)
            spec.validate()
        request = protocol.SubmitJob(spec, self.wait)
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
            notify(_root_starts())
            connection = _reconnect(self.runtime, deadline, notify, reported=True)
        while True:
            try:
                connection.send(request)
                return connection, _await_grant(connection, deadline, on_wait)
            except ConnectionError:
                connection.close()
                notify("the daemon went away; waiting for it with our place in the queue kept …")
                connection = _reconnect(self.runtime, deadline, notify)

    # --- entering -----------------------------------------------------------------------------------

    def enter_member(self, job: str, binds: Sequence[sandbox.Bind] = ()) -> dict[str, str]:
        """Move a child of the process that acquired a gang into the lease of this member.

        Return the environment for its program. Raises IsolationError, LeaseNotGranted, ProtocolMismatch.
        """
        # The parent's connection stands for the gang as a whole.
        return self._enter(*_claim_member(self.runtime, job), binds)

    def _enter(
        self,
        connection: DaemonConnection,
        granted: protocol.LeaseGranted,
        binds: Sequence[sandbox.Bind] = (),
    ) -> dict[str, str]:
        """Move this process into the lease and return the environment for the program.

        Raises IsolationError, LeaseNotGranted; the process must then end, and its lease ends with it.
        """
        environment = dict(os.environ)
        environment["CUDA_VISIBLE_DEVICES"] = self._visible_devices(granted.uuids)
        near = _near_cpus(granted.mounts.directory)
        if near:
            environment[lease_files.AFFINITY] = near
        if self.numa:
            bind_cpus(near)
        shim = granted.mounts.shim
        if self.spec.isolation == "namespace":
            sandbox.enter(granted.mounts, binds)
            shim = sandbox.SHIM
        elif granted.mounts.node_server and os.geteuid() != 0:
            raise sandbox.IsolationError(
                "this machine's cards are closed, and only a lease with its own mounts can open one: leave "
                "out --isolation=cooperative"
            )
        else:
            environment["FENKA_LEASE"] = str(granted.mounts.directory)
        # In a namespace this is a fallback: if /etc/ld.so.preload or the linker's cache is replaced on the
        # host, the kernel drops the mounts over them in every namespace.
        _prepend(environment, "LD_PRELOAD", shim)
        if granted.library_dir:
            _prepend(environment, "LD_LIBRARY_PATH", granted.library_dir)
        _confirm(connection, granted)
        return {**environment, **self.environment}

    def _visible_devices(self, uuids: Sequence[str]) -> str:
        """Return CUDA_VISIBLE_DEVICES of the program.

        In a namespace these are numbers within the lease, because programs and launchers read them with
        int(). The shim names the cards to the driver, whose order may differ from NVML's. A cooperative
        program may start without the shim, and other drivers than CUDA's are not hooked by it, so their cards
        are named here.
        """
        numbers = self.spec.isolation == "namespace" and not self.spec.allow_unlimited_drivers
        return ",".join(map(str, range(len(uuids))) if numbers else uuids)


@dataclass(frozen=True, slots=True)
class GroupProgram:
    """A program of a group, in a process of its own.

    Attributes:
        name: Begins its lines in the output, and is its directory among the logs.
        command: The program and its arguments.
        environment: Variables besides those of the lease.
        lease: The rank of its lease; None without cards.
        required: The group succeeds when its required programs have; then the others are ended.
        before: Called in its process once all are ready.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    lease: int | None = None
    required: bool = True
    before: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class GroupPrograms:
    """The programs of a group.

    Attributes:
        programs: At least one.
        ports: Those on which they listen.
        logs: The directory of their logs; None for no logs.
        directory: Their working directory; empty for that of this process.
        binds: Files and directories that they see in another place, too.
        limits: How long they may run.
        forward: Write their output to this process's, too.
    """

    programs: Sequence[GroupProgram]
    ports: Collection[int] = ()
    logs: Path | None = None
    directory: str = ""
    binds: Sequence[tuple[str, str]] = ()
    limits: gang.GangLimits = gang.DEFAULT_LIMITS
    forward: bool = True


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Functions that learn how far a group is.

    Attributes:
        notify: Receives lines about the wait for the leases.
        started: Called once all programs have started.
        ended: Called when one has ended.
    """

    notify: Notify
    started: gang.Started
    ended: gang.Ended = lambda _member, _code, _ending: None


def run_group(
    launcher: Launcher | None,
    prepare: Callable[[contextlib.ExitStack], GroupPrograms],
    report_errors: ErrorReporter,
    progress: GroupProgress,
) -> tuple[gang.GangResult, int | None]:
    """Run programs that start together and end together, each in its lease if it has one.

    Return how they ended, and one of their ports if another program has taken it.

    Args:
        launcher: Requests their leases; None if none has cards.
        prepare: Returns the programs, once the leases are granted. The stack is closed after their end.
        report_errors: The command's reporter of errors.
        progress: Learns how far they are.

    Raises:
        As `Launcher.acquire`.
    """
    with contextlib.ExitStack() as opened:
        jobs = list[str]()
        if launcher:
            connection, granted = launcher.acquire(progress.notify)
            opened.callback(connection.close)
            assert isinstance(granted, protocol.GangGranted)
            jobs = granted.jobs
        group = prepare(opened)
        binds = [(Path(source), Path(target)) for source, target in group.binds]

        def become(program: GroupProgram, ready: gang.ReportReady) -> NoReturn:
            def body() -> None:
                environment = dict(os.environ)
                if launcher and program.lease is not None:
                    environment = launcher.enter_member(jobs[program.lease], binds)
                elif binds:
                    sandbox.enter_without_lease(binds)
                if group.directory:
                    workload.change_directory(group.directory)
                ready()
                program.before()
                execute(program.command, {**environment, **program.environment})

            run_child(body, report_errors())

        def started(pids: Sequence[int]) -> None:
            # The programs hold the leases now.
            if launcher:
                connection.close()
            progress.started(pids)

        result = gang.run(
            [
                gang.Member(program.name, partial(become, program), program.required)
                for program in group.programs
            ],
            started=started,
            ended=progress.ended,
            logs=group.logs,
            limits=group.limits,
            forward=group.forward,
        )
    return result, taken_port(group.ports)


# --- commands beside a program --------------------------------------------------------------------------


def become(name: str, process: tuple[int, int], directory: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of a process, with its environment. It holds the lease, too.

    Args:
        name: The name of the process.
        process: The process and its start, as recorded.
        directory: The working directory.
        command: The program and its arguments.

    Raises:
        NotRunning, IsolationError, JobNotStarted: The command was not started.
    """
    pid, start_ticks = process
    environment = _environment_of(name, pid, start_ticks)
    environment |= {key: os.environ[key] for key in TERMINAL if key in os.environ}
    sandbox.join(pid)
    workload.change_directory(directory)
    execute([*command], environment)


def _environment_of(name: str, pid: int, start_ticks: int) -> dict[str, str]:
    """Return the environment of a process that runs. Raises NotRunning."""
    try:
        content = (procfs.PROC / str(pid) / "environ").read_bytes()
        lives = procfs.lives(pid, start_ticks)
    except OSError:
        lives, content = False, b""
    if not lives:
        raise NotRunning(f"{name} is not running")
    pairs = (os.fsdecode(pair).partition("=") for pair in content.split(b"\0") if b"=" in pair)
    return {name: value for name, _, value in pairs}


def _near_cpus(lease: Path) -> str:
    """Return the CPUs that are nearest to a lease's cards; empty if the driver or the daemon cannot tell."""
    try:
        return lease_files.cpus_file(lease).read_text()
    except FileNotFoundError:
        return ""


def bind_cpus(near: str) -> None:
    """Bind this process, and so the program that it becomes, to these CPUs. Raises JobNotStarted.

    Linux then takes memory from their NUMA node when a thread first touches it.
    """
    if not near:
        raise JobNotStarted(
            "the driver does not report which CPUs are near the cards: leave out --numa",
            INVALID_INPUT,
        )
    cpus = lease_files.parse_cpus(near) & os.sched_getaffinity(0)
    if not cpus:
        raise JobNotStarted(
            f"the CPUs {near}, which are near the cards, are closed to this process: leave out --numa",
            INVALID_INPUT,
        )
    os.sched_setaffinity(0, cpus)


def execute(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become this program; for a script without `#!` the shell, like execvp(3). Raises JobNotStarted."""
    try:
        os.execvpe(command[0], command, environment)
    except OSError as why:
        reason = why
    script = shutil.which(command[0], path=environment.get("PATH"))
    if reason.errno == errno.ENOEXEC and script and _is_text(script):
        os.execve(SHELL, [SHELL, script, *command[1:]], environment)
    missing = reason.errno in (errno.ENOENT, errno.ENOTDIR)
    raise JobNotStarted(
        f"{command[0]} cannot be started: {reason.strerror}",
        PROGRAM_NOT_FOUND if missing else NOT_EXECUTABLE,
    )


def _is_text(path: str) -> bool:
    """Return whether a file may be a script: shells do not run one whose first line has a null byte."""
    try:
        with open(path, "rb") as file:
            line = file.read(_FIRST_LINE_BYTES).partition(b"\n")[0]
    except OSError:
        return False
    return b"\0" not in line and not line.startswith(b"\x7fELF")


def _await_grant(
    connection: DaemonConnection,
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


def _root_starts() -> str:
    return f"waiting for this machine's daemon: root has to start it, with {system_start()}"


def _reconnect(
    runtime: Runtime, deadline: float | None, notify: Notify, *, reported: bool = False
) -> DaemonConnection:
    """Wait for the next daemon.

    `notify` gets a line when one fails to start for another reason than before. It gets one after a while if
    only root can start a daemon, unless that is `reported`.
    """
    silent_until = time.monotonic() + PATIENCE_S
    reported = reported or not runtime.foreign
    failed = ""
    while True:
        try:
            return connect(runtime, lambda _: None)
        except DaemonUnavailable as why:
            over = deadline is not None and time.monotonic() > deadline
            if over or os.environ.get("FENKA_START_DAEMON") == "never":
                raise LeaseNotGranted(f"gave up waiting: {why}", final=False) from None
            if isinstance(why, DaemonNotStarting):
                if failed != (failed := str(why)):
                    notify(f"waiting: {failed}")
            elif not reported and time.monotonic() >= silent_until:
                reported = True
                notify(_root_starts())
            time.sleep(RECONNECT_S)


def _retry(action: Callable[[], T], starting: str) -> T:
    """Repeat an action while no daemon answers, as long as a grant lasts. Raises LeaseNotGranted.

    No daemon is started: it would be a child of a gang's member, or run inside the lease.
    """
    deadline = time.monotonic() + protocol.GRANT_TTL_S
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


def _claim_member(runtime: Runtime, job: str) -> tuple[DaemonConnection, protocol.LeaseGranted]:
    """Take over the lease of one member of a gang, in a child of the process to which it was granted.

    Raises LeaseNotGranted, ProtocolMismatch.
    """

    def claim() -> tuple[DaemonConnection, protocol.FromDaemon]:
        connection = DaemonConnection(runtime)
        return connection, connection.call(protocol.SubmitJob(job_id=job))

    connection, answer = _retry(claim, "gang")
    if not isinstance(answer, protocol.LeaseGranted):
        raise LeaseNotGranted("the gang's grant has expired: try again", final=False)
    return connection, answer


def _confirm(connection: DaemonConnection, granted: protocol.LeaseGranted) -> None:
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
