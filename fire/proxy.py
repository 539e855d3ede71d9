"""A proxy before the API server that can be told to fail: `proxy.py PORT UPSTREAM-HOST UPSTREAM-PORT`.

Each line on stdin is a mode for connections from then on, and for open ones at once:

    pass     as if it were not there
    slow     a tenth of a second before each piece
    stall    nothing goes through, nothing is closed
    reset    every connection ends within a moment, also new ones

It passes bytes; TLS is between the others.
"""

import asyncio
import contextlib
import socket
import struct
import sys

PIECE_BYTES = 65536
SLOW_S = 0.1
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: closing sends a reset."""


class Proxy:
    """One port, one upstream, one mode."""

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
        """End a connection without a word."""
        line = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
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
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self.open -= ends
        for end in ends:
            with contextlib.suppress(OSError):
                end.close()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction."""
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
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        proxy.set(line.decode().strip())


if __name__ == "__main__":
    asyncio.run(main())
