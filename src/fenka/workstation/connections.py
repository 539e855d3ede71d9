"""Serves client connections: the handshake, quotas and time limits, and one request after another."""

import asyncio
import os
from dataclasses import dataclass

import msgspec

from fenka.build import build_id
from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import peer, user_name
from fenka.isolation.files import describe_os_error
from fenka.workstation import admission, protocol
from fenka.workstation.admission import Admission, QuotaExceeded
from fenka.workstation.clients import Client
from fenka.workstation.log import describe, log
from fenka.workstation.paths import Runtime
from fenka.workstation.requests import RequestHandler


@dataclass(frozen=True, slots=True)
class Connections:
    """Serves the connections of one daemon."""

    runtime: Runtime
    admission: Admission
    handler: RequestHandler

    async def serve_by_name(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a connection to the daemon's abstract name, which any user can connect to."""
        if peer(writer.get_extra_info("socket")).uid in (0, os.geteuid()):
            await self.serve(reader, writer)
        else:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends; for :func:`asyncio.start_unix_server`."""
        try:
            client = Client(writer)
        except OSError:
            writer.close()
            return
        client.send(protocol.Hello(build=build_id()))
        try:
            self.admission.add_connection(client.account)
        except QuotaExceeded as why:
            client.send(protocol.Failure(str(why)))
            client.close()
            return
        try:
            await self._serve_admitted(client, reader)
        finally:
            self.admission.remove_connection(client.account)
            self.handler.on_disconnect(client)
            if writer.transport.get_write_buffer_size() > 0:
                loop = asyncio.get_running_loop()
                loop.call_later(admission.WRITE_TIMEOUT_S, writer.transport.abort)
            client.close()

    async def _serve_admitted(self, client: Client, reader: asyncio.StreamReader) -> None:
        try:
            await self._serve_requests(client, reader)
        except protocol.ProtocolMismatch:
            pass  # It is no client of fenka.
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
            first = protocol.decode_first_line(await _read_line(reader), self.runtime.socket)
        if isinstance(first, protocol.StopDaemon):
            await self._answer(client, first)
            return
        if first.protocol != protocol.PROTOCOL:
            return  # Our Hello lets the client report the mismatch.
        while line := await self._next_line(client, reader):
            message = protocol.decode_request(line)
            if isinstance(message, protocol.StopJob):  # takes as long as the programs take to end
                await self._answer(client, message)
                continue
            async with self.admission.time_share(client.account):
                await self._answer(client, message)

    async def _next_line(self, client: Client, reader: asyncio.StreamReader) -> bytes:
        pending = self.handler.has_pending_request(client)
        async with asyncio.timeout(None if pending else admission.IDLE_TIMEOUT_S):
            return await _read_line(reader)

    async def _answer(
        self, client: Client, message: protocol.ToDaemon | protocol.StopDaemon
    ) -> None:
        try:
            await self.handler.handle(client, message)
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
