"""The sockets on which clients connect. They stay open while there is no Envoy, so clients wait.

Envoy cannot use a socket of another process; it opens one of its own at the same address (SO_REUSEPORT). The
kernel gives all connections to Envoy's while there is one, and to ours otherwise. Connections in between are
relayed to the next Envoy, with the client's address (the PROXY protocol, version 1).
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

BACKLOG = 1024
"""Connections that the kernel accepts while there is no Envoy."""
_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RETURN_CONSTANT = 0x06
_ENVOYS = 1
"""The place of Envoy's socket among those of an address: ours was there first."""
_PART_BYTES = 1 << 16
RETRY_S = 0.05
"""Between two attempts to connect to Envoy."""


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket that an Envoy of the same user can take connections from.

    Raises OSError if any program has the port, also one of the same user that would share it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as trial:
        # A number that the kernel has chosen is kept.
        port = trial.getsockname()[1]
    listener = socket.create_server(
        (address, port), family=family, backlog=BACKLOG, reuse_port=True
    )
    share(listener)
    return listener


def share(listener: socket.socket) -> None:
    """Let Envoy listen at the same address, and have the kernel give it all connections.

    A program of the packet filter selects the socket (socket(7), SO_ATTACH_REUSEPORT_CBPF). Where the kernel
    refuses it, as for a socket that was bound without SO_REUSEPORT, some connections are relayed.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    instruction = ctypes.create_string_buffer(
        struct.pack("HBBI", _BPF_RETURN_CONSTANT, 0, 0, _ENVOYS)
    )
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(instruction))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)


class ConnectionRelay:
    """Relays what Envoy has not accepted itself."""

    def __init__(self, listeners: Mapping[str, socket.socket], path: Callable[[str], Path]) -> None:
        """Relay nothing yet.

        Args:
            listeners: Our sockets, by the name of the replicas' port.
            path: Returns Envoy's Unix socket for relayed connections of a port.
        """
        self._listeners, self._path = dict(listeners), path
        self._relays, self._connected = set[asyncio.Task[None]](), set[asyncio.Task[None]]()

    def start(self) -> None:
        """Accept connections: an Envoy is there."""
        for port, listener in self._listeners.items():
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener, self._accept, port, listener)

    def stop(self) -> None:
        """Accept no more connections, and end those that are relayed: there is no Envoy."""
        for listener in self._listeners.values():
            asyncio.get_running_loop().remove_reader(listener)
        for relay in self._connected:
            relay.cancel()

    def close(self) -> None:
        """Close the sockets. Connections that are relayed go on."""
        for listener in self._listeners.values():
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, port: str, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            relay = asyncio.create_task(self._relay(connection, self._path(port)))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)
            relay.add_done_callback(self._connected.discard)

    async def _relay(self, connection: socket.socket, path: Path) -> None:
        with contextlib.suppress(OSError):
            line = proxy_line(connection.getpeername(), connection.getsockname())
            client = await asyncio.open_connection(sock=connection)
            writers = [client[1]]
            try:
                envoy = await _connect(path)
                writers.append(envoy[1])
                self._connected |= self._relays & {asyncio.current_task()}
                envoy[1].write(line)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pump(client[0], envoy[1]))
                    both.create_task(_pump(envoy[0], client[1]))
            finally:
                for writer in writers:
                    writer.transport.abort()


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to Envoy, or to the next one: that it has ended is known only after a moment."""
    while True:
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(path)
        await asyncio.sleep(RETRY_S)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(_PART_BYTES):
            writer.write(part)
            await writer.drain()
    # Clients that close their half first hang up, as Envoy sees it.
    writer.close()


def proxy_line(client: tuple[str, int], server: tuple[str, int]) -> bytes:
    """Return the first line of a relayed connection, by version 1 of the PROXY protocol.

    Source: https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, section 2.1.
    """
    version = ipaddress.ip_address(client[0]).version
    return f"PROXY TCP{version} {client[0]} {server[0]} {client[1]} {server[1]}\r\n".encode()
