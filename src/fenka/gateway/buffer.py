"""Keeps requests while no replica accepts any, in their order. Bounded in number, bytes and time. Pure."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

MIB = 1024 * 1024

Request = TypeVar("Request", bound=Hashable)


class BufferLimits(msgspec.Struct, frozen=True):
    """The limits of a buffer.

    Attributes:
        requests: The number of requests.
        total_bytes: The bytes of their heads and bodies that are in memory.
        wait_s: Seconds that a request waits: long enough for a model server to start.
    """

    requests: int = 1000
    total_bytes: int = 64 * MIB
    wait_s: float = 60.0


class RequestBuffer(Generic[Request]):
    """Requests without a replica, in the order of their arrival."""

    def __init__(self, limits: BufferLimits) -> None:
        self.limits = limits
        self._waiting: OrderedDict[Request, tuple[float, int]] = OrderedDict()
        """When each arrived, and its bytes."""
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def add(self, request: Request, size: int, arrived_at: float) -> bool:
        """Keep a request. Return False, and keep nothing, if a limit would be exceeded."""
        if (
            len(self._waiting) >= self.limits.requests
            or self.total_bytes + size > self.limits.total_bytes
        ):
            return False
        self._waiting[request] = arrived_at, size
        self.total_bytes += size
        return True

    def resize(self, request: Request, size: int) -> bool:
        """Count a request that has grown. Return False, and count nothing, if a limit would be exceeded."""
        arrived_at, known = self._waiting[request]
        if self.total_bytes + size - known > self.limits.total_bytes:
            return False
        self._waiting[request] = arrived_at, size
        self.total_bytes += size - known
        return True

    def remove(self, request: Request) -> None:
        """Drop a request, if it is kept."""
        _, size = self._waiting.pop(request, (0.0, 0))
        self.total_bytes -= size

    def expire(self, now: float) -> list[Request]:
        """Remove and return the requests that have waited too long."""
        expired = [
            request
            for request, (arrived_at, _) in self._waiting.items()
            if now - arrived_at >= self.limits.wait_s
        ]
        for request in expired:
            self.remove(request)
        return expired
