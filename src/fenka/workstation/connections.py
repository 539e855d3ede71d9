"""Serves client connections: the handshake, quotas and time limits, and one request after another."""

import asyncio
from typing import Protocol

import msgspec

from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import process, user_name
from fenka.isolation.files import describe_os_error
from fenka.procfs import start_ticks
from fenka.workstation import admission, protocol
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.log import describe, log
from fenka.workstation.paths import Runtime

__all__ = ["Client", "ClientRegistry", "Connections", "Handler"]


class Client:
    """One connection, and the process that made it. Raises OSError if that process is gone."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._process = process(writer.get_extra_info("socket"))
        self.pid, self.uid = self._process.pid, self._process.uid
        self.start_ticks = start_ticks(self.pid) or 0
        """When that process started; valid while :attr:`lives`."""
        self.writer = writer
        self.job: str | None = None
        """The queue id, or the id of a gang's member, that this connection has requested."""

    @property
    def lives(self) -> bool:
        """Whether the process that connected still runs; another process may hold the connection."""
        return self._process.lives() and self.start_ticks != 0

    def is_process(self, pid: int, start_ticks: int) -> bool:
        """Return whether this PID and start time are those of the process that connected."""
        return (self.pid, self.start_ticks) == (pid, start_ticks)

    def close(self) -> None:
        """Close the connection."""
        self._process.close()
        self.writer.close()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without waiting.

        Queue positions are dropped while the client does not read, so that they cannot pile up. A closed
        connection is noticed when it is read.
        """
        stuck = self.writer.transport.get_write_buffer_size() > 0
        if not (stuck and isinstance(message, protocol.JobQueued)):
            self.writer.write(protocol.encode(message) + b"\n")


class ClientRegistry:
    """The connected clients by what they have requested: a queue id, or the id of a gang's member."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    def add(self, job: str, client: Client) -> None:
        """Register the client for a job. A client that was registered for it before is replaced."""
        client.job = job
        self._clients[job] = client

    def remove(self, client: Client) -> bool:
        """Unregister a client. Return False if it was not, or another has taken its place."""
        if client.job is None or self._clients.get(client.job) is not client:
            return False
        del self._clients[client.job]
        return True

    def send(self, job: str, message: protocol.Message) -> None:
        """Send a message to the client of a job, if one is connected."""
        client = self._clients.get(job)
        if client:
            client.send(message)


class Handler(Protocol):
    """Carries out what clients request."""

    def has_pending_request(self, client: Client) -> bool:
        """Return whether the client waits for a lease, and may be silent."""

    async def handle(self, client: Client, message: protocol.ToDaemon) -> None:
        """Carry out one request and send the answer. Raises FenkaError, OSError."""

    def on_disconnect(self, client: Client) -> None:
        """Give up what only this connection wanted."""


class Connections:
    """Serves the connections of one daemon."""

    def __init__(self, runtime: Runtime, admission: Admission, handler: Handler) -> None:
        self._runtime, self._admission, self._handler = runtime, admission, handler

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends; for :func:`asyncio.start_unix_server`."""
        try:
            client = Client(writer)
        except OSError:
            writer.close()
            return
        client.send(protocol.Hello())
        try:
            self._admission.add_connection(client.uid)
        except QuotaExceeded as why:
            client.send(protocol.Failure(str(why)))
            client.close()
            return
        try:
            await self._serve_admitted(client, reader)
        finally:
            self._admission.remove_connection(client.uid)
            self._handler.on_disconnect(client)
            if writer.transport.get_write_buffer_size() > 0:
                loop = asyncio.get_running_loop()
                loop.call_later(admission.WRITE_TIMEOUT_S, writer.transport.abort)
            client.close()

    async def _serve_admitted(self, client: Client, reader: asyncio.StreamReader) -> None:
        try:
            await self._serve_requests(client, reader)
        except protocol.ProtocolMismatch:
            pass  # Our Hello lets the client report the mismatch.
        except msgspec.MsgspecError as why:
            client.send(protocol.Failure(f"invalid message: {why}"))
        except (ConnectionError, TimeoutError):
            pass  # The client closed the connection, or exceeded a time limit.
        except asyncio.CancelledError:
            pass  # The daemon ends; asyncio would print a traceback.
        except Exception as why:  # One client's failing request must not affect other clients.
            log(f"a request of {user_name(client.uid)} failed: {describe(why)}")
            client.send(protocol.Failure("the fenka daemon failed to do it; its log says why"))

    async def _serve_requests(self, client: Client, reader: asyncio.StreamReader) -> None:
        """Serve requests until the client closes the connection."""
        async with asyncio.timeout(admission.HELLO_TIMEOUT_S):
            protocol.check_hello(await _read_line(reader), self._runtime.socket)
        while line := await self._next_line(client, reader):
            message = protocol.decode_request(line)
            if isinstance(message, protocol.StopJob):  # takes as long as the programs take to end
                await self._answer(client, message)
                continue
            async with self._admission.time_share(client.uid):
                await self._answer(client, message)

    async def _next_line(self, client: Client, reader: asyncio.StreamReader) -> bytes:
        pending = self._handler.has_pending_request(client)
        async with asyncio.timeout(None if pending else admission.IDLE_TIMEOUT_S):
            return await _read_line(reader)

    async def _answer(self, client: Client, message: protocol.ToDaemon) -> None:
        try:
            await self._handler.handle(client, message)
        except FenkaError as why:
            # The client gives up its place in the queue by disconnecting.
            client.send(protocol.Failure(str(why)))
        except OSError as why:
            client.send(protocol.Failure(describe_os_error(why)))
        try:
            async with asyncio.timeout(admission.WRITE_TIMEOUT_S):
                await client.writer.drain()
        except TimeoutError:
            client.writer.transport.abort()
            raise


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Read one line. Raises MsgspecError if it is too long."""
    try:
        return await reader.readline()
    except ValueError:
        raise msgspec.DecodeError(
            f"a message has at most {admission.MAX_LINE_BYTES} bytes"
        ) from None
