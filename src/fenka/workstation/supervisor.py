"""Processes that start together or not at all, and end together: what a gang's own process does.

Each member prepares itself, says that it is ready, and waits; when all are, one write lets all of them go,
and if this process dies before, none. Then it passes on what they print, line by line with their rank in
front, and as mpirun does it ends the others when one has failed. It knows nothing of cards or leases.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, as for `fenka stop`."""

DRAIN_S = 1.0
"""For what was printed before the last member ended; more comes only of those that it left behind."""

MAX_LINE_BYTES = 1 << 16
"""What has no end by then is passed on as it is."""

_PR_SET_PDEATHSIG = 1

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ReportReady = Callable[[], None]
"""A member calls it when only its program is left to start; it comes back when all have done so."""

Member = Callable[[int, ReportReady], NoReturn]
"""What a member does in its own process, given its rank."""


@dataclass(frozen=True, slots=True)
class GangResult:
    """status: of the first member that failed (128 + the signal's number if one ended it), else 0.

    never_started: the member for which the gang was not let go, if it was not. by: the signal that this
    process got, if that ended the gang.
    """

    status: int
    never_started: int | None = None
    signal: int | None = None


def run(
    size: int, member: Member, *, started: Callable[[], None], logs: Path | None = None
) -> GangResult:
    """Start the members, and come back when the last has ended.

    started: called once all have been let go. logs: also write what they print to `RANK/log` in there,
    without the rank in front.
    """
    with contextlib.closing(_Supervisor(size, started, logs)) as gang:
        gang.start(member)
        gang.follow()
        return GangResult(gang.status, gang.never_started, gang.by)


@dataclass(slots=True)
class _Stream:
    """One stream of one member: what has come of a line so far, and where lines go."""

    prefix: bytes
    to: int
    log: BinaryIO | None
    rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Pass on whole lines; with nothing more to come, what is left. Raises OSError."""
        if self.log:
            with contextlib.suppress(OSError):  # The disk is full: no reason to end what computes.
                self.log.write(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) > MAX_LINE_BYTES):
            lines, self.rest = [*lines, self.rest], b""
        if lines:
            _write(self.to, b"".join(self.prefix + line + b"\n" for line in lines))


@dataclass(slots=True)
class _Member:
    rank: int
    pid: int
    pidfd: int


@dataclass(slots=True)
class _Supervisor:
    size: int
    started: Callable[[], None]
    logs: Path | None
    status: int = 0
    never_started: int | None = None
    by: int | None = None
    _left: dict[int, _Member] = field(default_factory=dict)
    _ready: int = 0
    _gone: bool = False
    """They have been let go."""
    _ending: bool = False
    _kill_at: float | None = None
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _go: int = -1

    _streams: list[_Stream] = field(default_factory=list)
    _passed_on: list[signal.Signals] = field(default_factory=list)
    """Without those that are ignored because who started this said so (nohup)."""

    def close(self) -> None:
        for number in self._passed_on:
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        self._files.close()

    # --- the beginning ----------------------------------------------------------------------------

    def start(self, member: Member) -> None:
        """Fork all. Signals are kept back meanwhile, so that each reaches all members or none."""
        (ready, say_ready), (go, self._go), (signals, say_signal) = (os.pipe() for _ in range(3))
        for ours in (ready, self._go, signals, say_signal):
            self._files.callback(os.close, ours)
        os.set_blocking(say_signal, False)
        former = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        self._passed_on = [it for it in FORWARDED_SIGNALS if signal.getsignal(it) != signal.SIG_IGN]
        for rank in range(self.size):
            outputs = [os.pipe() for _ in range(2)]
            pid = os.fork()
            if pid == 0:
                for ours in (self._go, ready, signals):
                    os.close(ours)
                _become_member(outputs, self._passed_on, former)
                member(rank, lambda: _wait_for_start(say_ready, go))
            # Both do it, so that it is done whoever comes first.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._left[rank] = _Member(rank, pid, os.pidfd_open(pid))
            self._listen(self._left[rank].pidfd, lambda rank=rank: self._ended(rank))  # type: ignore[misc]
            self._connect(rank, outputs)
        for theirs in (say_ready, go):
            os.close(theirs)
        self._listen(ready, lambda: self._one_ready(ready))
        self._listen(signals, lambda: self._signalled(os.read(signals, 1)[0]))
        for number in self._passed_on:
            signal.signal(number, lambda number, _: os.write(say_signal, bytes([number])))
        signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def _listen(self, descriptor: int, heard: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, heard)

    def _connect(self, rank: int, outputs: list[tuple[int, int]]) -> None:
        log = self._log(rank)
        for number, (ours, theirs) in enumerate(outputs, start=1):
            os.close(theirs)
            os.set_blocking(ours, False)
            self._files.callback(os.close, ours)
            stream = _Stream(b"[%d] " % rank, number, log)
            self._streams.append(stream)
            self._listen(ours, lambda ours=ours, stream=stream: self._heard(ours, stream))  # type: ignore[misc]

    def _log(self, rank: int) -> BinaryIO | None:
        if self.logs is None:
            return None
        directory = self.logs / str(rank)
        directory.mkdir(mode=0o700)
        return self._files.enter_context((directory / "log").open("wb", buffering=0))

    def _one_ready(self, ready: int) -> None:
        said = os.read(ready, self.size)
        self._ready += len(said)
        if not said:
            self._selector.unregister(ready)
        elif self._ready == self.size and not self._ending:
            self._gone = True
            # At once for all: so few bytes are never written in part.
            os.write(self._go, b"g" * self.size)
            self.started()

    # --- the rest ---------------------------------------------------------------------------------

    def follow(self) -> None:
        """Until the last member has ended and all that it said is passed on."""
        while self._left:
            self._hear(self._patience())
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._signal(signal.SIGKILL)
        # A child of a member may hold on to its output for ever; what has been said by now is here.
        until = time.monotonic() + DRAIN_S
        while self._hear(0) and time.monotonic() < until:
            pass
        for stream in self._streams:
            self._take(stream, b"")

    def _hear(self, patience_s: float | None) -> bool:
        events = self._selector.select(patience_s)
        for key, _ in events:
            key.data()
        return bool(events)

    def _patience(self) -> float | None:
        return None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0)

    def _heard(self, descriptor: int, stream: _Stream) -> None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._selector.unregister(descriptor)
        self._take(stream, data)

    def _take(self, stream: _Stream, data: bytes) -> None:
        try:
            stream.take(data)
        except OSError:
            # Nobody reads us any more (`| head`, or a terminal that was closed).
            stream.to = -1
            self._end(signal.SIGTERM)

    def _ended(self, rank: int) -> None:
        process = self._left.pop(rank)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if not self._gone and not self._ending:
            self.never_started, code = rank, code or 1
        if code and not self._ending:
            self.status = code if code > 0 else 128 - code
            self._end(signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        if self._ending:
            self._signal(signal.SIGKILL)
            return
        self.by, self.status = number, 128 + number
        self._end(number)

    def _end(self, number: int) -> None:
        if self._ending:
            return
        self._ending, self._kill_at = True, time.monotonic() + GRACE_S
        self._signal(number)

    def _signal(self, number: int) -> None:
        """To the members, and to what they have started in their process groups."""
        for process in self._left.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _become_member(
    outputs: list[tuple[int, int]],
    handled: list[signal.Signals],
    mask: set[int | signal.Signals],
) -> None:
    """In the child: a process group of its own, so that Ctrl-C reaches it once, through its gang."""
    os.setpgid(0, 0)
    for passed_on in handled:
        signal.signal(passed_on, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, (_, theirs) in enumerate(outputs, start=1):
        os.dup2(theirs, number)


def _wait_for_start(say_ready: int, go: int) -> None:
    # Where no daemon lives, nobody else would end this when the gang's process was killed. Only now: a
    # process that enters a user namespace loses it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.write(say_ready, b"r")
    # Nothing: the gang's process is gone, or ends all of us.
    if os.read(go, 1) != b"g":
        os._exit(1)


def _write(descriptor: int, data: bytes) -> None:
    if descriptor < 0:
        return
    while data:
        data = data[os.write(descriptor, data) :]
