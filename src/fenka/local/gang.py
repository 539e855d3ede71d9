"""Runs the members of a gang: processes that start together or not at all, and end together.

Each member prepares itself, reports that it is ready, and waits. When all are ready, one write starts all of
them; if this process dies before, none starts. Then it forwards their output, each line prefixed with the
member's name, and notes the times of their logs' lines. Like mpirun, it ends the others when one has failed.
"""

import bisect
import contextlib
import os
import selectors
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from fenka import procfs
from fenka.isolation.lease_files import open_regular_file
from fenka.workstation.protocol import EVICTION_SIGNAL

_ENTRY = struct.Struct("<Qd")
"""A place in the log, and the Unix time at which the bytes from there on were read."""

RESOLUTION_S = 0.001
"""Bytes that are read within this time share an entry, which bounds the file of times."""

_MAX_TIME = 253_402_300_799
"""The last second of the year 9999."""


# --- the times of a log's lines, in a file beside it ------------------------------------------------------

# The log itself stays what its process has printed. Programs of the same user can write both files. So a
# reader ignores entries that make no sense, and waits for neither file.


def times_file(log: Path) -> Path:
    """Return the file with a log's times."""
    return log.with_name(f"{log.name}-times")


class LogWriter:
    """Appends to a log, and to its times. No error ends the program whose output it is."""

    def __init__(self, log: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises OSError."""
        self._clock, self._noted_at = clock, 0.0
        with contextlib.ExitStack() as opened:
            # First: where there is a log, its times are there.
            self._times = opened.enter_context(times_file(log).open("ab", buffering=0))
            self._drop_part()
            self._log = opened.enter_context(log.open("ab", buffering=0))
            self._opened = opened.pop_all()

    def write(self, data: bytes) -> None:
        """Append what was read now. Raises OSError."""
        now = self._clock()
        if abs(now - self._noted_at) >= RESOLUTION_S:
            if self._times.write(_ENTRY.pack(self._log.tell(), now)) == _ENTRY.size:
                self._noted_at = now
            else:
                self._drop_part()
        self._log.write(data)

    def _drop_part(self) -> None:
        """Remove a part of an entry, as a full disk leaves it: it would shift all later ones."""
        self._times.truncate(self._times.tell() // _ENTRY.size * _ENTRY.size)

    def close(self) -> None:
        """Close both files."""
        self._opened.close()


class LogTimes:
    """Reads the times of a log, which may be growing."""

    def __init__(self, log: Path) -> None:
        """Raises OSError, FileNotFoundError for a log without times."""
        self._file = open_regular_file(times_file(log))
        self._entries: list[tuple[int, float]] = []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def refresh(self) -> None:
        """Read what was added."""
        data = self._file.read()
        # A part of an entry is read again when the rest is there.
        self._file.seek(-(len(data) % _ENTRY.size), 1)
        whole = data[: len(data) // _ENTRY.size * _ENTRY.size]
        added = [entry for entry in _ENTRY.iter_unpack(whole) if 0 <= entry[1] <= _MAX_TIME]
        if added:
            self._entries += added
            self._entries.sort(key=lambda entry: entry[0])

    def at(self, place: int) -> float | None:
        """Return when the byte at a place was read; None if that is unknown."""
        number = bisect.bisect_right(self._entries, place, key=lambda entry: entry[0])
        return self._entries[number - 1][1] if number else None

    def first_since(self, moment: float) -> int | None:
        """Return the first place that was read at this time or later; None if there is none yet."""
        return next((place for place, at in self._entries if at >= moment), None)


# --- gangs ------------------------------------------------------------------------------------------------

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, as for `fenka stop`."""

DRAIN_S = 1.0
"""To forward the remaining output after the last member has ended. Its children may still print more."""

MAX_LINE_BYTES = 1 << 16
"""Longer lines are forwarded in pieces."""

MAX_REASON_BYTES = 400
"""Of a line that tells why a member has ended."""

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ReportReady = Callable[[], None]
"""Called by a member when only its program is left to start. Returns when all members have called it."""

Started = Callable[[Sequence[int]], None]
"""Called with the processes of the members."""

Ended = Callable[[int, int, bool], None]
"""Called with a member's number, its exit code (negative for a signal), and whether the gang was ending."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a gang.

    Attributes:
        name: Begins its lines in the supervisor's output, and is its directory among the logs.
        body: What it does in its own process.
        required: The gang succeeds when its required members have; then the others are ended.
    """

    name: str
    body: Callable[[ReportReady], NoReturn]
    required: bool = True


@dataclass(frozen=True, slots=True)
class GangLimits:
    """How long members may run, in seconds.

    Attributes:
        grace_s: Between SIGTERM and SIGKILL.
        timeout_s: Until they are ended; None for no limit.
    """

    grace_s: float = GRACE_S
    timeout_s: float | None = None


DEFAULT_LIMITS = GangLimits()

Cause = Literal["", "signal", "timeout", "eviction"]


@dataclass(frozen=True, slots=True)
class GangResult:
    """How a gang ended.

    Attributes:
        status: The exit code of the first member that failed (128 + the number of a signal that ended it),
            else 0.
        never_started: The member that prevented the start, if the gang was not started.
        cause: Why the supervisor ended the members: a signal to itself, the time limit, or because a
            request of higher priority needs their cards; else empty.
    """

    status: int
    never_started: int | None = None
    cause: Cause = ""


def run(
    members: Sequence[Member],
    *,
    started: Started,
    ended: Ended = lambda _member, _code, _ending: None,
    logs: Path | None = None,
    limits: GangLimits = DEFAULT_LIMITS,
    forward: bool = True,
) -> GangResult:
    """Start the members, and return when the last has ended.

    Args:
        members: The members, at least one.
        started: Called once all have started.
        ended: Called when one has ended.
        logs: A directory; their output is also written to `NAME/log` in it, without the prefix.
        limits: How long they may run.
        forward: Write their output to this process's, too.
    """
    gang = _Gang(members, started, ended, logs, limits, forward)
    with contextlib.closing(gang):
        gang.start()
        gang.follow()
        return GangResult(gang.status, gang.never_started, gang.cause)


def last_line(log: Path) -> str:
    """Return the last line that a member has printed, cut at its beginning if it is long."""
    try:
        with open_regular_file(log) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - MAX_REASON_BYTES, 0))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("fenka: ") if lines else ""


@dataclass(slots=True)
class _Stream:
    """One output stream of one member. rest: the incomplete last line."""

    prefix: bytes
    to: int
    log: LogWriter | None
    rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Forward complete lines; at the end (empty data) also the rest. Raises OSError."""
        if self.log:
            with contextlib.suppress(OSError):  # a full disk must not end the program
                self.log.write(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) > MAX_LINE_BYTES):
            lines, self.rest = [*lines, self.rest], b""
        if lines:
            _write(self.to, b"".join(self.prefix + line + b"\n" for line in lines))


@dataclass(slots=True)
class _Process:
    pid: int
    pidfd: int


@dataclass(slots=True)
class _Gang:
    members: Sequence[Member]
    started: Started
    ended: Ended
    logs: Path | None
    limits: GangLimits
    forward: bool
    status: int = 0
    never_started: int | None = None
    cause: Cause = ""
    _required: set[int] = field(default_factory=set)
    """Required members that have not succeeded yet."""
    _left: dict[int, _Process] = field(default_factory=dict)
    _ready: int = 0
    _all_started: bool = False
    _ending: bool = False
    _end_at: float | None = None
    _kill_at: float | None = None
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _go: int = -1
    _streams: list[_Stream] = field(default_factory=list)
    _forwarded: list[signal.Signals] = field(default_factory=list)
    """Without signals that this process was started to ignore (nohup)."""

    def close(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {EVICTION_SIGNAL})
        for number in self._forwarded:
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        self._files.close()

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fork all members. Signals are blocked meanwhile, so that each reaches all members or none."""
        (ready, send_ready), (go, self._go), (signals, send_signal) = (os.pipe() for _ in range(3))
        for ours in (ready, self._go, signals, send_signal):
            self._files.callback(os.close, ours)
        os.set_blocking(send_signal, False)
        handled = (*FORWARDED_SIGNALS, EVICTION_SIGNAL)
        # An eviction that is requested before is blocked until now, and may be pending.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, handled) - {EVICTION_SIGNAL}
        self._forwarded = [
            number for number in handled if signal.getsignal(number) != signal.SIG_IGN
        ]
        self._required = {rank for rank, member in enumerate(self.members) if member.required}
        for rank, member in enumerate(self.members):
            outputs = [os.pipe() for _ in range(2)]
            pid = os.fork()
            if pid == 0:
                for ours in (self._go, ready, signals):
                    os.close(ours)
                _become_member(outputs, self._forwarded, former)
                member.body(lambda: _wait_for_start(send_ready, go))
            # Parent and child both do this, because either may run first.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._left[rank] = _Process(pid, os.pidfd_open(pid))
            self._listen(self._left[rank].pidfd, lambda rank=rank: self._on_member_end(rank))  # type: ignore[misc]
            self._connect(rank, outputs)
        for theirs in (send_ready, go):
            os.close(theirs)
        self._listen(ready, lambda: self._count_ready(ready))
        self._listen(signals, lambda: self._on_signal(os.read(signals, 1)[0]))
        for number in self._forwarded:
            signal.signal(number, lambda number, _: os.write(send_signal, bytes([number])))
        signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def _listen(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)

    def _connect(self, rank: int, outputs: list[tuple[int, int]]) -> None:
        log = self._log(rank)
        for number, (ours, theirs) in enumerate(outputs, start=1):
            os.close(theirs)
            os.set_blocking(ours, False)
            self._files.callback(os.close, ours)
            to = number if self.forward else -1
            stream = _Stream(f"[{self.members[rank].name}] ".encode(), to, log)
            self._streams.append(stream)
            self._listen(ours, lambda ours=ours, stream=stream: self._forward(ours, stream))  # type: ignore[misc]

    def _log(self, rank: int) -> LogWriter | None:
        if self.logs is None:
            return None
        directory = self.logs / self.members[rank].name
        directory.mkdir(mode=0o700, exist_ok=True)
        return self._files.enter_context(contextlib.closing(LogWriter(directory / "log")))

    def _count_ready(self, ready: int) -> None:
        reports = os.read(ready, len(self.members))
        self._ready += len(reports)
        if not reports:
            self._selector.unregister(ready)
        elif self._ready == len(self.members) and not self._ending:
            self._all_started = True
            # One write for all: so few bytes are never written in part.
            os.write(self._go, b"g" * len(self.members))
            if self.limits.timeout_s is not None:
                self._end_at = time.monotonic() + self.limits.timeout_s
            self.started([self._left[rank].pid for rank in sorted(self._left)])

    # --- until the end ----------------------------------------------------------------------------

    def follow(self) -> None:
        """Wait until the last member has ended and its output is forwarded."""
        while self._left:
            self._dispatch(self._time_left())
            now = time.monotonic()
            if self._end_at is not None and now >= self._end_at and not self._ending:
                self.status, self.cause = 128 + signal.SIGTERM, "timeout"
                self._end(signal.SIGTERM)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._signal(signal.SIGKILL)
        # A member's child may keep the output open indefinitely. Its output so far is forwarded.
        until = time.monotonic() + DRAIN_S
        while self._dispatch(0) and time.monotonic() < until:
            pass
        for stream in self._streams:
            self._take(stream, b"")

    def _dispatch(self, timeout_s: float | None) -> bool:
        events = self._selector.select(timeout_s)
        for key, _ in events:
            key.data()
        return bool(events)

    def _time_left(self) -> float | None:
        until = self._kill_at if self._ending else self._end_at
        return None if until is None else max(until - time.monotonic(), 0)

    def _forward(self, descriptor: int, stream: _Stream) -> None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._selector.unregister(descriptor)
        self._take(stream, data)

    def _take(self, stream: _Stream, data: bytes) -> None:
        try:
            stream.take(data)
        except OSError:
            # The reader has gone (`| head`, or a closed terminal).
            stream.to = -1
            self._end(signal.SIGTERM)

    def _on_member_end(self, rank: int) -> None:
        process = self._left.pop(rank)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if not self._all_started and not self._ending:
            self.never_started, code = rank, code or 1
        self.ended(rank, code, self._ending)
        if self._ending:
            return
        if code:
            self.status = code if code > 0 else 128 - code
            self._end(signal.SIGTERM)
            return
        self._required.discard(rank)
        if not self._required:
            self._end(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if number == EVICTION_SIGNAL:
            if not self._ending:
                self.status, self.cause = 128 + signal.SIGTERM, "eviction"
                self._end(signal.SIGTERM)
            return
        if self._ending:
            self._signal(signal.SIGKILL)
            return
        self.status, self.cause = 128 + number, "signal"
        self._end(number)

    def _end(self, number: int) -> None:
        if self._ending:
            return
        self._ending, self._kill_at = True, time.monotonic() + self.limits.grace_s
        self._signal(number)

    def _signal(self, number: int) -> None:
        """Send a signal to the process groups of the remaining members."""
        for process in self._left.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _become_member(
    outputs: list[tuple[int, int]],
    handled: list[signal.Signals],
    mask: set[int | signal.Signals],
) -> None:
    """Set up the child. Its own process group lets Ctrl-C reach it once, through the supervisor."""
    os.setpgid(0, 0)
    for passed_on in handled:
        signal.signal(passed_on, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, (_, theirs) in enumerate(outputs, start=1):
        os.dup2(theirs, number)


def _wait_for_start(send_ready: int, go: int) -> None:
    # Without a daemon, nothing else would end this process if the supervisor is killed. The setting is made
    # now, because a process that enters a user namespace loses it.
    procfs.die_with_parent(signal.SIGTERM)
    os.write(send_ready, b"r")
    # End of file: the supervisor has ended, or ends all members.
    if os.read(go, 1) != b"g":
        os._exit(1)


def _write(descriptor: int, data: bytes) -> None:
    if descriptor < 0:
        return
    while data:
        data = data[os.write(descriptor, data) :]
