"""The gateway of a service: a child of the supervisor, started again whenever it has ended.

Its sockets belong to the supervisor and its guard. So a killed gateway refuses no connection, and no other
program gets its port.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fenka.core.errors import INVALID_INPUT
from fenka.isolation.files import write_atomically
from fenka.jobs import routing_table
from fenka.jobs.ports import LOOPBACK
from fenka.jobs.processes import JobNotStarted
from fenka.jobs.routing_table import RoutingTable
from fenka.jobs.service import PortName
from fenka.workstation import guard
from fenka.workstation.files import trim_log
from fenka.workstation.serving import probes
from fenka.workstation.serving.plan import END_SLACK_S, GatewayUse

BACKLOG = 1024
"""Connections that the kernel accepts while there is no gateway."""

RESTART_PAUSE_S = 1.0
"""Between two starts, if the first gateway ended at once."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The listening sockets of a service.

    Attributes:
        clients: By the name of the replicas' port.
        admin: For its metrics.
    """

    clients: Mapping[str, socket.socket]
    admin: socket.socket

    def close(self) -> None:
        """Close this process's copies."""
        for each in (*self.clients.values(), self.admin):
            each.close()


def listen(address: str, ports: Mapping[PortName, int]) -> Sockets:
    """Return listening sockets. Raises JobNotStarted if a port is used."""
    admin, clients = _listen(LOOPBACK, 0), dict[str, socket.socket]()
    try:
        for name, port in ports.items():
            clients[name] = _listen(address, port)
    except OSError as why:
        Sockets(clients, admin).close()
        reason = os.strerror(why.errno or 0)
        raise JobNotStarted(
            f"cannot listen on port {port} of {address} ({reason}): choose another --restful-port or --port",
            INVALID_INPUT,
        ) from None
    return Sockets(clients, admin)


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


@dataclass(slots=True)
class GatewayProcess:
    """The gateway's process, if there is one."""

    directory: Path
    sockets: Sockets
    _process: subprocess.Popen[bytes] | None = None
    _started_at: float = -RESTART_PAUSE_S
    _table: RoutingTable | None = field(default=None)
    _grace_s: float = 0.0
    _kill_at: float | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 for none."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    @property
    def admin_port(self) -> int:
        """Where it shows its metrics."""
        port: int = self.sockets.admin.getsockname()[1]
        return port

    def route(self, table: RoutingTable) -> None:
        """Write the table, if it is new. Raises OSError."""
        if table != self._table:
            write_atomically(self._file, routing_table.encode(table))
            self._table = table

    @property
    def _log(self) -> Path:
        return self.directory / "gateway.log"

    @property
    def _file(self) -> Path:
        return self.directory / "table.json"

    def start(self, now: float, wait_s: float, grace_s: float) -> None:
        """Start it unless it runs, has ended at once, or has no table. Raises OSError.

        Args:
            now: The monotonic clock's seconds.
            wait_s: How long requests wait for a replica.
            grace_s: How long it finishes requests when it ends.
        """
        if self.pid or self._table is None or now < self._started_at + RESTART_PAUSE_S:
            return
        self._started_at, self._grace_s = now, grace_s
        listening = [
            f"--listen={name}=fd:{each.fileno()}" for name, each in self.sockets.clients.items()
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-Pm", "fenka", "gateway", f"--table={self._file}"),
                    *(*listening, f"--admin=fd:{self.sockets.admin.fileno()}"),
                    *(f"--wait={wait_s:g}", f"--grace={grace_s:g}"),
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[
                    each.fileno() for each in (*self.sockets.clients.values(), self.sockets.admin)
                ],
                # Ctrl-C and signals to the group are the supervisor's.
                start_new_session=True,
                preexec_fn=partial(guard.die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def use(self) -> GatewayUse | None:
        """Return what it reports; None if it does not answer. Its log is kept short."""
        with contextlib.suppress(OSError):
            trim_log(self._log)
        return probes.gateway_use(self.admin_port) if self.pid else None

    def end(self, now: float) -> None:
        """Have it finish its requests and end; kill it if it has not ended after the grace period."""
        if not self._process or not self.pid:
            return
        if self._kill_at is None:
            self._kill_at = now + self._grace_s + END_SLACK_S
        self._process.send_signal(signal.SIGTERM if now < self._kill_at else signal.SIGKILL)
