"""Runs groups of processes: starts them, watches them, starts them again, and ends them.

A group is a gang of processes with the leases of those that have cards: a training, or one replica. Each
start of it is a child of the supervisor, which waits for the leases, runs the gang in them, and leaves no
process behind. The daemon ends the programs if that child is killed. A service's supervisor is a group of its
guard, too.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import msgspec

from fenka import procfs
from fenka.core.errors import FAILURE, FenkaError
from fenka.jobs.job_spec import JobSpec
from fenka.jobs.local_ports import MAX_TAKEN
from fenka.jobs.processes import ErrorReporter, run_child
from fenka.local import workload
from fenka.local.launch import GroupPrograms, GroupProgress, Launcher, run_group
from fenka.local.records import ReplicaState, outcome
from fenka.workstation import protocol
from fenka.workstation.client import connect, own_jobs
from fenka.workstation.paths import Runtime

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Before a group that has ended is started again: doubled each time, up to the limit."""

STABLE_S = 60.0
"""A group that ran longer than this begins with the first pause again."""

END_SLACK_S = 5.0
"""After the grace period, until a process is killed that has not ended."""

PASS_S = 0.2
"""Between two passes of a job whose needs change, if nothing happens."""

RELEASE_POLL_S = 0.05
"""Between checks whether the daemon has released a start's leases."""

ATTACHED_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for what users have started in leases by `fenka attach`."""

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a supervisor with all its groups."""

# --- one start of a group, in a process of its own ------------------------------------------------------


class Waiting(msgspec.Struct, tag=True):
    """The start waits for its leases, or for their release."""

    reason: str


class Started(msgspec.Struct, tag=True):
    """All programs run. processes: the PID of each, and when it was started."""

    processes: list[tuple[int, int]]


class MemberEnded(msgspec.Struct, tag=True):
    """A program has ended; see gang.Ended."""

    member: int
    code: int
    ending: bool


class GroupEnd(msgspec.Struct, tag=True):
    """How a start has ended.

    Attributes:
        status: As GangResult.status, or the exit code of the start's process, negative for a signal.
        cause: As GangResult.cause.
        never_started: As GangResult.never_started.
        taken: A port that another program has taken.
        error: Why the programs were not started; empty if they were.
        lost: The start's process has ended without a report.
    """

    status: int
    cause: str = ""
    never_started: int | None = None
    taken: int | None = None
    error: str = ""
    lost: bool = False


Report = Waiting | Started | MemberEnded | GroupEnd

_decoder = msgspec.json.Decoder[Report](Report)


@dataclass(frozen=True, slots=True)
class Home:
    """The parts that all groups of a job share.

    Attributes:
        runtime: The daemon's runtime directory.
        directory: The job's directory.
        report_errors: The command's reporter of errors.
        leave: Closes in a start's process what belongs to the supervisor.
    """

    runtime: Runtime
    directory: Path
    report_errors: ErrorReporter
    leave: Callable[[], None] = lambda: None


Body = Callable[[Callable[[Report], None]], int]
"""A group's start, in its own process. It gets a function for reports, and returns its exit code."""


def fork(home: Home, body: Body) -> tuple[int, int]:
    """Start a group's process. Return its PID, and a pipe from which its reports are read. Raises OSError."""
    receive, send = os.pipe()
    parent = os.getpid()
    # This process's handlers would only note them in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(receive)
        os.close(send)
        raise
    if pid == 0:

        def report(event: Report) -> None:
            with contextlib.suppress(BrokenPipeError):
                os.write(send, msgspec.json.encode(event) + b"\n")

        def run() -> NoReturn:
            signal.set_wakeup_fd(-1)
            for number in (*ENDING, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            procfs.die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:
                sys.exit(1)
            os.close(receive)
            home.leave()
            sys.exit(body(report))

        run_child(run, home.report_errors(lambda why: report(GroupEnd(FAILURE, error=why))))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(send)
    os.set_blocking(receive, False)
    return pid, receive


@dataclass(frozen=True, slots=True)
class GroupStart:
    """A start of a gang.

    Attributes:
        home: The parts that the groups of its job share.
        request: The request to the daemon; None without cards.
        prepare: Returns the programs; see `run_group`.
        environment: That of the programs, besides their own variables; None for the supervisor's.
        releases: It ends once its leases are released, because the next start has the same name.
    """

    home: Home
    request: JobSpec | None
    prepare: Callable[[contextlib.ExitStack], GroupPrograms]
    environment: Mapping[str, str] | None = None
    releases: bool = False

    def run(self, report: Callable[[Report], None]) -> int:
        """Run the gang, and leave no process behind. Return its status."""
        workload.adopt_orphans()
        # The members of the gang handle it: before they exist it stays pending.
        signal.pthread_sigmask(signal.SIG_BLOCK, {protocol.EVICTION_SIGNAL})
        if self.environment is not None:
            os.environ.clear()
            os.environ.update(self.environment)
        progress = GroupProgress(
            lambda line: report(Waiting(line)),
            lambda pids: report(Started([(pid, procfs.start_ticks(pid) or 0) for pid in pids])),
            lambda member, code, ending: report(MemberEnded(member, code, ending)),
        )
        runtime, report_errors = self.home.runtime, self.home.report_errors
        launcher = Launcher(runtime, self.request, report_errors) if self.request else None
        result, taken = run_group(launcher, self.prepare, report_errors, progress)
        workload.end_orphans()
        if self.request and self.releases:
            _await_release(runtime, self.request.name, progress.notify)
        report(GroupEnd(result.status, result.cause, result.never_started, taken))
        return result.status


def _await_release(runtime: Runtime, name: str, notify: Callable[[str], None]) -> None:
    """Wait until the daemon has released the leases of a gang whose processes have ended."""
    reason = ""
    while True:
        with connect(runtime, lambda _: None) as connection:
            snapshot = connection.request(protocol.GetSnapshot(), protocol.MachineSnapshot)
            left = [job for job in own_jobs(snapshot) if job.gang == name]
            if not left:
                return
            # A user may have attached to a lease, which that program holds, too.
            connection.request(protocol.StopJob([name], ATTACHED_GRACE_S), protocol.JobsStopped)
        if left[0].reason != reason:
            reason = left[0].reason
            notify(f"a lease is not released: {reason}")
        time.sleep(RELEASE_POLL_S)


# --- a group as its supervisor sees it ------------------------------------------------------------------


def pause_s(failures: int) -> float:
    """Return the seconds before a process is started again that has failed this often in a row."""
    return float(min(FIRST_PAUSE_S * 2 ** min(failures - 1, 20), MAX_PAUSE_S))


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a group starts again.

    Evictions, and ports that other programs take, start it again at once and count for no limit.

    Attributes:
        retries: How often it starts again after a failure of its programs, at once; None for any number of
            times, after a pause, and also if it was killed or could not start.
        always: It starts again after success, too.
    """

    retries: int | None
    always: bool = False

    def pause_s(self, end: GroupEnd, failures: int, in_a_row: int, taken: int) -> float | None:
        """Return the seconds until the next start; None for no further start.

        Args:
            end: How the last start has ended.
            failures: How often the group was started again after a failure.
            in_a_row: Its ends so far without a long run in between, this one included.
            taken: How often in a row another program has taken its port, this time included.
        """
        if not (end.status or self.always):
            return None
        if self.retries is not None and (
            end.error or end.lost or end.cause not in ("", "eviction")
        ):
            return None
        if end.cause == "eviction" or 0 < taken <= MAX_TAKEN:
            return 0
        if self.retries is None:
            return pause_s(in_a_row)
        return None if taken or failures >= self.retries else 0


@dataclass(slots=True, kw_only=True, eq=False)
class ProcessGroup:
    """One group. Times are of the monotonic clock, except for `created_at`.

    Attributes:
        home: The parts that it shares with the other groups of its job.
        name: Its name.
        policy: When it starts again.
        grace_s: How long its programs may take to end.
        state: See ReplicaState.
        pid: The process of its start; 0 for none.
        program: Its first program's process, and when that was started; zeros for none.
        reports: The pipe with that process's reports; -1 for none.
        reason: Why it waits, or why it is started again.
        served: It has been ready since its start.
        restarts: How often it was started again.
        failures: How often it was started again after a failure that its policy counts.
        times_taken: How often in a row other programs have taken its port.
        was_lost: In this pass its process was found to have ended without a report.
        end: How it has ended; None while it may start again.
    """

    home: Home
    name: str
    policy: RestartPolicy
    grace_s: float
    created_at: float = field(default_factory=time.time)
    state: ReplicaState = "Backoff"
    pid: int = 0
    program: tuple[int, int] = (0, 0)
    reports: int = -1
    reason: str = ""
    served: bool = False
    restarts: int = 0
    failures: int = 0
    times_taken: int = 0
    was_lost: bool = False
    end: GroupEnd | None = None
    _rest: bytes = b""
    _result: GroupEnd | None = None
    _in_a_row: int = 0
    _started_at: float | None = None
    _next_at: float = 0.0
    """When it is started again, gets SIGTERM or SIGKILL, by its state."""

    # --- what differs by kind -------------------------------------------------------------------------

    def next_start(self) -> Body:
        """Return what its next process does. Raises FenkaError, OSError."""
        raise NotImplementedError

    def on_report(self, report: Report) -> None:
        """Note a report of its process."""

    def on_restart(self, end: GroupEnd) -> None:
        """Note that it is started again after this end."""

    def on_gone(self) -> None:
        """Remove what is left of it."""

    def close_inherited(self) -> None:
        """Close, in another group's process, what belongs to this one."""
        if self.reports >= 0:
            os.close(self.reports)

    # --- start and end --------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start its process."""
        self.state, self.reason = "Pending", ""
        self._rest, self._result, self._started_at = b"", None, None
        try:
            self.pid, self.reports = fork(self.home, self.next_start())
        except (FenkaError, OSError) as why:
            code = why.exit_code if isinstance(why, FenkaError) else FAILURE
            self._on_end(GroupEnd(code, error=str(why)), now)

    def drain(self, now: float) -> None:
        """Have it finish its requests, and then end."""
        if self.pid:
            self.state, self._next_at = "Draining", now + self.grace_s
        else:
            self._leave(GroupEnd(0))

    def stop(self, number: int) -> None:
        """Pass a signal on that ends it. The second one kills its programs."""
        self.state, self._next_at = "Ending", math.inf
        if self.pid:
            os.kill(self.pid, number)
        else:
            self._leave(GroupEnd(128 + number, "signal"))

    def _leave(self, end: GroupEnd) -> None:
        self.state, self.end = "Ending", end
        self.on_gone()

    # --- passes ---------------------------------------------------------------------------------------

    def observe(self, now: float) -> None:
        """Read the reports of its process, and whether it has ended."""
        self.was_lost = False
        # Its reports are complete once it has ended.
        ended, status = os.waitpid(self.pid, os.WNOHANG) if self.pid else (0, 0)
        for report in self._read():
            match report:
                case Waiting(reason=reason):
                    self.reason = reason
                case Started(processes=processes):
                    self.program = processes[0]
                    if self.state == "Pending":
                        self.state, self.reason, self._started_at = "Starting", "", now
                case GroupEnd():
                    self._result = report
            self.on_report(report)
        if ended:
            os.close(self.reports)
            self.pid, self.reports, self.program = 0, -1, (0, 0)
            self.was_lost = not self._result or bool(self._result.error)
            code = os.waitstatus_to_exitcode(status)
            end = self._result or GroupEnd(code, lost=True)
            if end.error:
                end.status = code
            self._on_end(end, now)

    def _read(self) -> list[Report]:
        with contextlib.suppress(BlockingIOError):
            while self.reports >= 0 and (part := os.read(self.reports, 1 << 16)):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        return [*map(_decoder.decode, lines)]

    def _on_end(self, end: GroupEnd, now: float) -> None:
        """Decide whether it starts again."""
        if self._started_at is not None and now - self._started_at > STABLE_S:
            self._in_a_row = 0
        self._in_a_row += 1
        self.times_taken = self.times_taken + 1 if end.taken and not self.served else 0
        counts = self.failures, self._in_a_row, self.times_taken
        ending = self.state in ("Draining", "Ending")
        pause = None if ending else self.policy.pause_s(end, *counts)
        if pause is None:
            self._leave(end)
            return
        self.state, self.served, self._next_at = "Backoff", False, now + pause
        self.failures += not (end.cause or self.times_taken)
        self.on_restart(end)

    def due_s(self, now: float) -> float:
        """Return the seconds until something is due, unless its process ends before."""
        timed = self.state in ("Backoff", "Draining", "Ending")
        return max(self._next_at - now, 0) if timed else math.inf

    def proceed(self, now: float, *, drained: bool) -> None:
        """Do what is due. drained: it has no requests and gets none."""
        due = now >= self._next_at
        if self.state == "Backoff" and due:
            self.restarts += 1
            self.start(now)
        elif self.state == "Draining" and (due or drained or not self.served):
            self.state, self._next_at = "Ending", now + self.grace_s + END_SLACK_S
            os.kill(self.pid, signal.SIGTERM)
        elif self.state == "Ending" and due and self.pid:
            os.kill(self.pid, signal.SIGKILL)


class SupervisedFunction(ProcessGroup):
    """A group of one process, which runs a function."""

    def __init__(self, home: Home, name: str, policy: RestartPolicy, body: Body) -> None:
        super().__init__(home=home, name=name, policy=policy, grace_s=math.inf)
        self._body = body

    def next_start(self) -> Body:
        """Return the function."""
        self._started_at = time.monotonic()
        return self._body

    def on_restart(self, end: GroupEnd) -> None:
        """Log it."""
        why = end.error or outcome(end.status)
        log.warning("%s ended with %s and is started again", self.name, why)


# --- the supervisor -------------------------------------------------------------------------------------

G = TypeVar("G", bound=ProcessGroup)


class Supervisor(Generic[G]):
    """Makes this process the supervisor of one job's groups, and runs them until none is left.

    Attributes:
        groups: Those that have not ended.
        children: Its other processes.
    """

    def __init__(self) -> None:
        self.groups = list[G]()
        self.children = set[int]()
        self._signals = list[int]()
        workload.adopt_orphans()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        # Where SIGCHLD is ignored, the kernel reaps children unasked, and others may get their PIDs.
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, self._on_signal)

    def run(
        self,
        step: Callable[[float, Sequence[int]], bool] | None = None,
        drained: Callable[[G], bool] = lambda _: False,
        publish: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Return when the job is over.

        Args:
            step: Starts and drains groups. It gets the monotonic clock's seconds and the signals that have
                told this process to end since the last pass. It returns whether the job may go on without
                groups. By default all groups get the signals.
            drained: Returns whether a group has no requests and gets none.
            publish: Records the groups at the end of a pass.
        """
        goes_on = True
        while self.groups or goes_on:
            now = time.monotonic()
            self._observe(now)
            signals, self._signals = self._signals, []
            goes_on = (step or self._pass_on)(now, signals)
            for group in self.groups:
                group.proceed(now, drained=drained(group))
            publish(now)
            if self.groups or goes_on:
                self._wait(PASS_S if step else min(group.due_s(now) for group in self.groups))
        signal.set_wakeup_fd(-1)
        for end in (self._woken, self._wake):
            end.close()

    def add(self, group: G) -> None:
        """Start a new group."""
        self.groups.append(group)
        group.start(time.monotonic())

    def close_inherited(self) -> None:
        """Close, in a group's process, what belongs to the groups."""
        for group in self.groups:
            group.close_inherited()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number in ENDING:
            self._signals.append(number)

    def _observe(self, now: float) -> None:
        for group in self.groups:
            group.observe(now)
        if any(group.was_lost for group in self.groups):
            # Its programs. Those of the other groups are no orphans.
            workload.end_orphans({*self.children, *(group.pid for group in self.groups)})
        self.groups = [group for group in self.groups if group.end is None]

    def _pass_on(self, _now: float, signals: Sequence[int]) -> bool:
        for group in self.groups:
            for number in signals:
                group.stop(number)
        return False

    def _wait(self, timeout_s: float) -> None:
        # Not select.select, which knows only the first 1024 descriptors.
        poll = select.poll()
        pipes = [group.reports for group in self.groups if group.reports >= 0]
        for descriptor in (self._woken.fileno(), *pipes):
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout_s == math.inf else timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 12)
