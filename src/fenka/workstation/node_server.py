"""Gives the process that enters a lease the device nodes of its cards, where they are closed to others.

The client connects and sends nothing. The kernel says which process it is. The answer is the paths of the
nodes with descriptors of mounts, as for the hook of containers, or nothing if the process is no job's.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.hardware.nvml import Hardware
from fenka.hardware.peer_credentials import process
from fenka.isolation.closed_nodes import ClosedNodes
from fenka.workstation.broker import Broker
from fenka.workstation.containers import packet_server
from fenka.workstation.containers.card_nodes import node_directory
from fenka.workstation.job import Job
from fenka.workstation.lifetime import describe, log
from fenka.workstation.paths import Runtime


class NodeServer:
    """Serves the clients of one daemon of root's."""

    def __init__(self, runtime: Runtime, hardware: Hardware, broker: Broker) -> None:
        self._runtime, self._hardware, self._broker = runtime, hardware, broker
        directory = node_directory(runtime, simulated=hardware.driver.simulated)
        self._nodes = ClosedNodes(directory, runtime.own_nodes, runtime.closed_nodes)
        self._remade: set[Path] = set()
        """Nodes whose closing has been logged."""

    def close(self) -> None:
        """Close the machine's nodes to other programs than leases'. Raises FenkaError, OSError."""
        self._nodes.close()

    def check(self) -> None:
        """Close nodes that another program has opened to all users."""
        try:
            remade = set(self._nodes.close())
        except (OSError, FenkaError) as why:
            log(f"the cards' device nodes are not closed: {describe(why)}")
            return
        for path in remade - self._remade:
            log(f"{path} was open to other users, and is root's again; `fenka doctor` says why")
        self._remade |= remade

    def reopen(self) -> None:
        """Make the machine's nodes what they were, if they were closed. Raises FenkaError, OSError."""
        self._nodes.reopen()

    def record(self) -> None:
        """Write what the nodes were, after the daemon's directory was removed. Raises FenkaError, OSError."""
        self._nodes.record()

    def copies(self, job: Job) -> Iterator[tuple[Path, int]]:
        """Yield the machine's nodes of a job's cards, with descriptors of mounts of its own.

        A container whose slice is pending gets all: nothing can be placed in it later, and its control group
        decides which it may open. Raises NoDriver, OSError.
        """
        driver = self._hardware.driver
        minors = {driver.minor(piece.card_uuid) for piece in job.slices}
        return self._nodes.copies(minors or None)

    def listening(self) -> AbstractContextManager[None]:
        """Return a context in which clients are served. It raises OSError."""
        return packet_server.listening(self._runtime.nodes, self._serve, 0o666)

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client, which cannot delay it."""
        with connection, contextlib.ExitStack() as opened:
            try:
                job = self._job_of(connection)
                if job is None:
                    return
                names, descriptors = list[bytes](), list[int]()
                for path, descriptor in self.copies(job):
                    opened.callback(os.close, descriptor)
                    names.append(os.fsencode(path))
                    descriptors.append(descriptor)
                socket.send_fds(connection, [b"\0".join(names) or b"\0"], descriptors)
            except Exception as why:  # One client must not affect others.
                log(f"a lease gets no device nodes: {describe(why)}")

    def _job_of(self, connection: socket.socket) -> Job | None:
        """Return the job with a slice that this process becomes the program of."""
        try:
            client = process(connection)
        except OSError:  # It has ended.
            return None
        client.close()
        for job in self._broker.placed():
            same = (job.pid, job.start_ticks) == (client.pid, client.start_ticks)
            if same and not job.in_container:
                return job
        return None
