"""Reads from all connections into one buffer.

asyncio's ordinary protocols allocate 256 KiB for each read, which costs more than parsing what was read.
"""

import asyncio

_BUFFER = bytearray(64 * 1024)
"""What was read is taken out before another connection is read."""
_VIEW = memoryview(_BUFFER)


class Reader(asyncio.BufferedProtocol):
    """A protocol that gets bytes, as asyncio.Protocol does."""

    def get_buffer(self, _: int) -> memoryview:
        """Return where the transport puts what it reads."""
        return _VIEW

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read."""
        self.data_received(bytes(_VIEW[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take what was read."""
        raise NotImplementedError
