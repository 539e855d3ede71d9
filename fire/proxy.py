"""Forward connections to the API server and disturb them: `proxy.py PORT UPSTREAM-HOST UPSTREAM-PORT`.

Each line on stdin is a mode for new and open connections:

    pass     forward without delay
    slow     wait a tenth of a second before each piece
    stall    forward nothing, close nothing
    reset    reset open and new connections

The proxy forwards bytes; TLS is between client and server.
"""

import asyncio
import contextlib
import socket
import struct
import sys

PIECE_BYTES = 65536
SLOW_S = 0.1
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds, so that closing sends a reset."""


class Proxy:
    """A proxy from one port to one upstream."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.mode = "pass"
        self.changed = asyncio.Event()
        self.open: set[asyncio.StreamWriter] = set()

    def set(self, mode: str) -> None:
        """Change the mode."""
        self.mode = mode
        self.changed.set()
        self.changed = asyncio.Event()
        if mode == "reset":
            for writer in list(self.open):
                self.cut(writer)

    def cut(self, writer: asyncio.StreamWriter) -> None:
        """Reset a connection."""
        connection = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        if self.mode == "reset":
            self.cut(writer)
            return
        try:
            upstream = await asyncio.open_connection(*self.upstream)
        except OSError:
            self.cut(writer)
            return
        ends = {writer, upstream[1]}
        self.open |= ends
        pumps = [
            asyncio.ensure_future(self.pump(reader, upstream[1])),
            asyncio.ensure_future(self.pump(upstream[0], writer)),
        ]
        # Cancelled when the program ends: Python 3.11 prints a traceback for each handler that is.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self.open -= ends
        for end in ends:
            with contextlib.suppress(OSError):
                end.close()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction."""
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                while self.mode == "stall":
                    await self.changed.wait()
                if self.mode == "slow":
                    await asyncio.sleep(SLOW_S)
                writer.write(piece)
                await writer.drain()


async def main() -> None:
    """Serve until stdin ends."""
    port, host, upstream = sys.argv[1:]
    proxy = Proxy((host, int(upstream)))
    await asyncio.start_server(proxy.client, "0.0.0.0", int(port))
    print("ready", flush=True)
    modes = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(modes), sys.stdin)
    while line := await modes.readline():
        proxy.set(line.decode().strip())


if __name__ == "__main__":
    asyncio.run(main())
