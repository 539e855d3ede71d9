"""How a command talks to the daemon, and starts one where none runs."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from fenka.hardware.peers import peer
from fenka.workstation import paths, protocol
from fenka.workstation.paths import Runtime, UnsafeDirectory

STARTS_WITHIN_S = 20.0
"""A daemon answers within a second; a real driver's first initialisation can take several."""


class NoDaemon(Exception):
    """No daemon answers, and none could be started; the message says why and what to do."""


class Connection:
    """One conversation with a daemon.

    Nothing is sent unless the runtime directory can be trusted and the kernel says that this user, or root,
    serves it. Raises NoDaemon, UnsafeDirectory, OtherVersion, and ConnectionError later on.
    """

    def __init__(self, runtime: Runtime, former: Self | None = None) -> None:
        """former: a connection of this process, whose directory has been checked already."""
        self._runtime = runtime
        with contextlib.ExitStack() as opened:
            try:
                self._directory: int = os.dup(former._directory) if former else runtime.open()
                opened.callback(os.close, self._directory)
                self._socket = opened.enter_context(paths.connect(self._directory))
            except OSError as why:
                raise NoDaemon(_nobody(runtime, why)) from None
            server = peer(self._socket)[1]
            if not former and server not in runtime.owners | {0}:
                raise UnsafeDirectory(
                    f"{runtime.socket} is served by user {server}, who cannot be trusted: remove it, or "
                    "name another directory in FENKA_RUNTIME"
                )
            self._lines = opened.enter_context(self._socket.makefile("rb"))
            self._greet()
            self._opened = opened.pop_all()

    def _greet(self) -> None:
        # A daemon that refuses us says so and hangs up, whatever we send.
        with contextlib.suppress(ConnectionError):
            self.send(protocol.Hello())
        self._socket.settimeout(STARTS_WITHIN_S)
        try:
            hello = self._lines.readline()
        except (ConnectionError, TimeoutError):
            hello = b""
        if not hello:
            # It was killed after it had let us in.
            raise NoDaemon(f"the daemon at {self._runtime.socket} went away: try again")
        protocol.check_hello(hello, self._runtime.socket)
        self._socket.settimeout(None)

    def again(self) -> Self:
        """Connect once more, after the daemon was started again.

        Also from within a lease's namespaces, in which paths and users may have other names.
        """
        fresh = type(self)(self._runtime, self)
        self.close()
        return fresh

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        self._socket.sendall(protocol.encode(message) + b"\n")

    def receive(self, timeout_s: float | None = None) -> protocol.FromDaemon:
        """The next message. Raises ConnectionError at the end, TimeoutError after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the daemon went away")
        return protocol.decode_answer(line)

    def call(self, message: msgspec.Struct) -> protocol.FromDaemon:
        """One question, one answer."""
        self.send(message)
        return self.receive()

    @property
    def daemon_pid(self) -> int:
        """The daemon's process, from the kernel."""
        return peer(self._socket)[0]

    def close(self) -> None:
        """Hang up; a request that waits is given up by that."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def connect(runtime: Runtime, announce: Callable[[str], None]) -> Connection:
    """Talk to the daemon, starting one first where none runs. Only root starts the system's.

    Raises NoDaemon, UnsafeDirectory, OtherVersion.
    """
    try:
        return Connection(runtime)
    except NoDaemon:
        if runtime.foreign:
            raise
        announce("starting the fenka daemon …")
        start_daemon(runtime, ["--resume"])
        return Connection(runtime)


def start_daemon(runtime: Runtime, options: list[str]) -> None:
    """Start a daemon behind this command and wait until it answers. Raises NoDaemon.

    With `--resume` it starts as the last one was started, if that left its configuration.
    """
    runtime.create()
    environment = {**os.environ, "FENKA_RUNTIME": str(runtime.root)}
    if runtime.system:
        del environment["FENKA_RUNTIME"]
    with open(runtime.log, "ab", opener=_without_links) as log:
        began = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "fenka", "daemon", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        if runtime.answers():
            return
        if process.poll() is not None and not runtime.answers():
            raise NoDaemon(_last_line(runtime.log, began) or f"see {runtime.log}")
        time.sleep(0.01)
    raise NoDaemon(f"the daemon did not answer within {STARTS_WITHIN_S:.0f} s: see {runtime.log}")


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def _nobody(runtime: Runtime, why: OSError) -> str:
    where = f"no fenka daemon answers at {runtime.socket} ({why.strerror})"
    if runtime.foreign:
        return f"{where}: only root can start this machine's, with `fenka daemon --background`"
    return f"{where}: start one with `fenka daemon`"


def _last_line(log: Path, began: int) -> str:
    with log.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("fenka: ") if lines else ""
