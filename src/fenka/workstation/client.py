"""How a command talks to the daemon, and starts one where none runs."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from fenka.hardware.peers import peer
from fenka.workstation import protocol
from fenka.workstation.paths import Runtime

STARTS_WITHIN_S = 20.0
"""A daemon answers within a second; a real driver's first initialisation can take several."""


class NoDaemon(Exception):
    """No daemon answers, and none could be started; the message says why and what to do."""


class Connection:
    """One conversation with a daemon. Raises NoDaemon, OtherVersion, and ConnectionError later on."""

    def __init__(self, runtime: Runtime) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(runtime.socket))
        except OSError as why:
            self._socket.close()
            raise NoDaemon(
                f"no fenka daemon answers at {runtime.socket} ({why.strerror}): start one with "
                "`fenka daemon`"
            ) from None
        self._lines = self._socket.makefile("rb")
        try:
            self.send(protocol.Hello())
            hello = self._lines.readline()
        except ConnectionError:
            hello = b""
        if not hello:
            # It was killed after it had let us in.
            self.close()
            raise NoDaemon(f"the daemon at {runtime.socket} went away: try again")
        protocol.check_hello(hello, runtime.socket)

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
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def connect(runtime: Runtime, announce: Callable[[str], None]) -> Connection:
    """Talk to the daemon, starting one first where none runs. Raises NoDaemon, OtherVersion."""
    try:
        return Connection(runtime)
    except NoDaemon:
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
    with runtime.log.open("ab") as log:
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


def _last_line(log: Path, began: int) -> str:
    with log.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("fenka: ") if lines else ""
