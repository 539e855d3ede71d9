"""Processes of jobs: children that replace themselves by a program, attached or in the background.

Where systemd-logind manages sessions, it decides whether background programs outlive a logout.

A session's processes are ended with it if logind.conf has KillUserProcesses=yes. Those of the user's service
manager end with the user's last session, unless the user lingers.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from fenka.core.errors import FAILURE, INTERRUPTED, FenkaError
from fenka.hardware.peer_credentials import user_name
from fenka.jobs import exit_keeper
from fenka.jobs.disk_room import lack_of_room

LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose service manager runs without a session."""

_BUS_TIMEOUT_S = 5.0

_LOGIND = (
    "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
)  # fmt: skip
_MANAGER = (
    "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
)  # fmt: skip

_WARNING = (
    "ends when you log out, as this machine is set up: `loginctl enable-linger` lets what you start "
    "in the background afterwards go on"
)


def outlive(pid: int) -> str:
    """Let a child that was just started go on after the logout, if that is allowed.

    Return an empty string; or why the child will end with the session, and what would change that.
    """
    groups = _groups()
    user = user_name(os.getuid())
    if f"/user@{os.getuid()}.service/" in groups:
        return "" if _lingers(user) else _WARNING
    if not re.search(r"/session-[^/]+\.scope$", groups, re.MULTILINE) or not _ends_with_session(
        user
    ):
        return ""
    return "" if _lingers(user) and _move_to_manager(pid) else _WARNING


def _groups(pid: int | Literal["self"] = "self") -> str:
    """Return a process's control groups."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def _lingers(user: str) -> bool:
    return (LINGERING / user).exists()


def _ends_with_session(user: str) -> bool:
    """Return whether logind ends the processes of this user's sessions."""
    names = ("KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers")
    lines = _busctl("get-property", *_LOGIND, *names).splitlines()
    if len(lines) != len(names) or lines[0] != "b true":
        return False
    excluded, only = (re.findall(r'"([^"]*)"', line) for line in lines[1:])
    return user not in excluded and (not only or user in only)


def _move_to_manager(pid: int) -> bool:
    """Move a process from its session into a scope of the user's own service manager."""
    name = f"fenka-{pid}.scope"
    scope = (
        "ssa(sv)a(sa(sv))",
        name,
        "fail",
        "1",
        "PIDs",
        "au",
        "1",
        str(pid),
        "0",
    )
    if not _busctl("--user", "call", *_MANAGER, "StartTransientUnit", *scope):
        return False
    # The manager answers before it moves the process, whose children would stay behind.
    deadline = time.monotonic() + _BUS_TIMEOUT_S
    while name not in _groups(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _busctl(*words: str) -> str:
    """Return the output of systemd's client of the message bus; nothing if it fails."""
    try:
        done = subprocess.run(
            ["busctl", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=_BUS_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


TERMINATE_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL for a background job whose start was interrupted."""

FAILED = "failed: "
"""Begins the status line of a process that cannot start its program."""

STARTED = "started"
"""The last status line of `--status-fd` before the process becomes its program."""

Notify = Callable[[str], None]

ErrorReporter = Callable[..., AbstractContextManager[None]]
"""Turns an expected exception into SystemExit and one sentence, on stderr or for the function given."""


class JobNotStarted(FenkaError):
    """A job could not be started. It carries the exit code of the process that tried."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_child(body: Callable[[], object], reporting: AbstractContextManager[None]) -> NoReturn:
    """Run a forked child. Never return into the parent's code, whatever fails."""
    code = FAILURE
    try:
        with reporting:
            body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILURE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class BackgroundProcess:
    """A job's process in a session of its own.

    Attributes:
        pid: Its process ID, which is also its process group's; of its keeper, if it has one, which ends with
            the program and with its exit code.
        status_pipe: Carries lines until the program has been started.
        logout: Why it ends when the user logs out; empty if it goes on.
        room: Why its output is lost; empty if its log can be written.
    """

    pid: int
    status_pipe: int
    logout: str = ""
    room: str = ""

    def status_lines(self) -> Iterator[str]:
        """Yield the lines until the program has been started. Raises JobNotStarted."""
        with os.fdopen(self.status_pipe) as lines:
            for line in map(str.strip, lines):
                if line.startswith(FAILED):
                    _, status = os.waitpid(self.pid, 0)
                    code = os.waitstatus_to_exitcode(status)
                    raise JobNotStarted(line.removeprefix(FAILED), code)
                yield line

    def terminate(self) -> None:
        """End it with all that it has started."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            deadline = time.monotonic() + TERMINATE_GRACE_S
            while time.monotonic() < deadline:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.02)


@contextlib.contextmanager
def start_in_background(
    body: Callable[[Notify, Callable[[], None]], object],
    log: Path,
    report_errors: ErrorReporter,
    end: Path | None = None,
) -> Iterator[BackgroundProcess]:
    """Start a process in a session of its own; if the caller is interrupted meanwhile, end it again.

    Args:
        body: What replaces the process. It gets a function for status lines, and one to call once started,
            if it is not replaced by exec.
        log: The file that receives the output.
        report_errors: The command's reporter of errors.
        end: The file in which a keeper records how the program ended; None without one.
    """
    receive, send = os.pipe()
    placed, place = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        os.close(receive)
        os.close(place)
        os.read(placed, 1)  # Its own children must be where it is to outlive a logout.
        os.close(placed)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _redirect_output(log)
        if end is not None:
            _leave_keeper(end)

        def notify(line: str) -> None:
            # The command that started this leaves once it knows that the job waits.
            with contextlib.suppress(BrokenPipeError):
                os.write(send, f"{line}\n".encode())

        reporting = report_errors(lambda sentence: notify(f"{FAILED}{sentence}"))
        run_child(lambda: body(notify, lambda: os.close(send)), reporting)
    os.close(send)
    os.close(placed)
    process = BackgroundProcess(child, receive, outlive(child), lack_of_room(log.parent))
    os.close(place)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield process
    except KeyboardInterrupt:
        # The user gave up before the state of the job was known, so nothing may be left of it.
        process.terminate()
        raise


def _leave_keeper(end: Path) -> None:
    """Return in a child of this process, which becomes the keeper of that child's exit code."""
    child = os.fork()
    if child == 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    try:
        os.execv(
            sys.executable,
            [sys.executable, "-I", "-S", exit_keeper.__file__, str(child), str(end.absolute())],
        )
    except OSError:
        os._exit(FAILURE)


def _redirect_output(log: Path) -> None:
    descriptors = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600),
    )
    os.dup2(descriptors[0], 0)
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[1], 2)
    for descriptor in descriptors:
        os.close(descriptor)


def run_attached(
    body: Callable[[], object],
    follow: Callable[[int], int],
    report_errors: ErrorReporter,
) -> int:
    """Run a child, pass SIGINT and SIGTERM on as SIGTERM, and return its exit code.

    Args:
        body: What replaces the child.
        follow: Waits for the child with this process ID; returns its wait status.
        report_errors: The command's reporter of errors.
    """
    # Blocked until both processes have their own handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run_child(body, report_errors())
    received: list[int] = []

    def terminate(number: int, _frame: object) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, terminate)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = os.waitstatus_to_exitcode(follow(child))
    if signal.SIGINT in received:
        return INTERRUPTED
    return code if code >= 0 else 128 - code
