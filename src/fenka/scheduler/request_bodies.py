"""Reads the bodies of requests within limits: of each body, and of all bodies at a time.

Both are checked before anything is read if Content-Length gives the size, else while the body is read.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from fenka.core.errors import FenkaError

MIB = 1024 * 1024
SMALL = 64 * 1024
"""Bodies up to this size never wait for larger ones; the number of connections bounds them."""
WAIT_S = 4.0
"""A body waits this long for others to be answered; kube-scheduler waits 5 s in total."""


class BodyRejected(FenkaError):
    """The body is not read. status: HTTP's. The message is for kube-scheduler's event."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits in bytes. largest: of one body; together: of all bodies that are read or answered at a time."""

    largest: int = 8 * MIB
    together: int = 64 * MIB


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, bounds: BodyLimits) -> None:
        self._bounds = bounds
        self._held = 0
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Return the number of bytes that are reserved now."""
        return self._held

    @contextlib.asynccontextmanager
    async def reading(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the body; its reservation ends with the block. Raises BodyRejected."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise BodyRejected(415, "the request's body is compressed: send it uncompressed")
        reserved = 0
        try:
            length = request.content_length
            # The size of a chunked body is known only at its end.
            reserved = await self._reserve(0, length or 0)
            # A list of parts of one byte each would be large.
            body = bytearray()
            async for part in request.content.iter_any():
                body += part
                reserved = await self._reserve(reserved, len(body))
            yield bytes(body)
        finally:
            if reserved:
                self._held -= reserved
                async with self._freed:
                    self._freed.notify_all()

    async def _reserve(self, reserved: int, size: int) -> int:
        """Return the number of bytes that are reserved for a body of this size."""
        if size > self._bounds.largest:
            raise BodyRejected(
                413,
                f"the request's body has more than {self._bounds.largest // MIB} MiB: set nodeCacheCapable: "
                "true in kube-scheduler's configuration, or raise scheduler.bodies.largestMiB of the chart",
            )
        if size <= max(SMALL, reserved):
            return reserved
        try:
            async with asyncio.timeout(WAIT_S), self._freed:
                await self._freed.wait_for(
                    lambda: self._held - reserved + size <= self._bounds.together
                )
                self._held += size - reserved
        except TimeoutError:
            raise BodyRejected(
                503, f"requests of {self._bounds.together // MIB} MiB are being answered: try again"
            ) from None
        return size
