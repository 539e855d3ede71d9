"""Ends a daemon of any version, and replaces it by one of this version under running programs."""

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import peer
from fenka.workstation import files, paths, protocol
from fenka.workstation.client import (
    START_TIMEOUT_S,
    DaemonUnavailable,
    RequestFailed,
    await_return,
    check_server,
    start_daemon,
    unavailable_reason,
)
from fenka.workstation.paths import Runtime, UnsafeDirectory

END_TIMEOUT_S = 10.0


class NotReplaced(FenkaError):
    """The daemon could not be ended or replaced."""


def stop_daemon(runtime: Runtime, *, force: bool) -> None:
    """End the daemon of a directory, whatever its version, and wait until it has ended.

    It is found even if its directory was removed. force: even if programs hold slices; they go on.

    Raises DaemonUnavailable, UnsafeDirectory, ProtocolMismatch, RequestFailed, NotReplaced.
    """
    with _reach(runtime) as connection:
        pid = peer(connection).pid
        ending = os.pidfd_open(pid)
        try:
            answer = _request_stop(runtime, connection, force=force)
            if answer is None:
                _end_old(pid, ending, force=force)
            elif answer.type == "failure":
                raise RequestFailed(answer.reason)
            if not select.select([ending], [], [], END_TIMEOUT_S)[0]:
                raise NotReplaced(
                    f"the daemon, process {pid}, has not ended within {END_TIMEOUT_S:.0f} s: `kill {pid}`, "
                    "and its programs go on"
                )
        finally:
            os.close(ending)


def _reach(runtime: Runtime) -> socket.socket:
    """Connect to the daemon by its directory, or by its name if that was removed or replaced."""
    try:
        directory = runtime.open()
        try:
            connection = paths.connect(directory)
        finally:
            os.close(directory)
    except (OSError, UnsafeDirectory) as why:
        try:
            connection = paths.connect_to(runtime.name)
        except OSError:
            if isinstance(why, UnsafeDirectory):
                raise why from None
            raise DaemonUnavailable(unavailable_reason(runtime, why)) from None
    try:
        check_server(runtime, connection)
    except FenkaError:
        connection.close()
        raise
    connection.settimeout(START_TIMEOUT_S)
    return connection


def _request_stop(
    runtime: Runtime, connection: socket.socket, *, force: bool
) -> protocol.StopAnswer | None:
    """Return the daemon's answer; None if it is older than the request."""
    with connection.makefile("rb") as lines:
        try:
            connection.sendall(protocol.encode(protocol.StopDaemon(force)) + b"\n")
            protocol.decode_first_line(lines.readline(), runtime.socket)
            return protocol.decode_stop_answer(lines.readline())
        except ConnectionError:
            return None
        except TimeoutError:
            raise NotReplaced(
                f"the daemon, process {peer(connection).pid}, does not answer: `kill` ends it, and its "
                "programs go on"
            ) from None


def _end_old(pid: int, process: int, *, force: bool) -> None:
    if not force:
        raise RequestFailed(
            f"the daemon, process {pid}, is of an older version that cannot say whether programs run: add "
            "--force to end it; programs go on"
        )
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise RequestFailed(f"the daemon, process {pid}, is another user's") from None


def restart_daemon(runtime: Runtime, options: list[str]) -> None:
    """Replace the daemon by one of this build, or start one if none runs. Programs go on.

    The new one is ready to serve before the other is ended, so that no client starts one in between.

    Raises:
        NotReplaced: systemd runs the daemon.
        InvalidState: This build does not understand the other's records. Nothing was changed.
        DaemonUnavailable, UnsafeDirectory, RequestFailed: The daemon was not replaced.
    """
    files.load_config(runtime)
    files.load_jobs(runtime)
    files.load_layouts(runtime)
    await_return(runtime)
    _check_unit(runtime)

    def end_other() -> None:
        with contextlib.suppress(DaemonUnavailable):  # It has ended meanwhile.
            stop_daemon(runtime, force=True)

    start_daemon(runtime, ["--replace", *options], on_waiting=end_other)


def _check_unit(runtime: Runtime) -> None:
    try:
        with _reach(runtime) as connection:
            pid = peer(connection).pid
    except DaemonUnavailable:
        return
    unit = unit_of(pid)
    if unit:
        raise NotReplaced(
            f"systemd runs the daemon, process {pid}: `systemctl restart {unit}` goes over to this build, "
            "and programs go on if the unit has KillMode=process"
        )


def unit_of(pid: int) -> str:
    """Return the unit whose main process this is, if systemd has started it; else nothing."""
    process = procfs.PROC / str(pid)
    try:
        environment = (process / "environ").read_bytes().split(b"\0")
        groups = (process / "cgroup").read_text().split()
    except OSError:
        return ""
    if b"SYSTEMD_EXEC_PID=%d" % pid not in environment:
        return ""
    return next(
        (name for name in (Path(path).name for path in groups) if name.endswith(".service")), ""
    )
