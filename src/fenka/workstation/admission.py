"""How much of the daemon each user may have, so that none can keep the others out.

Root, and the user whose daemon it is, are bound by the number of descriptors alone.
"""

import asyncio
import contextlib
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable

from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import user_name
from fenka.workstation.job import Job

HELLO_TIMEOUT_S = 10.0
"""A client says Hello before anything else, in one line."""

IDLE_TIMEOUT_S = 60.0
"""Between the messages of a client that waits for no slice."""

WRITE_TIMEOUT_S = 10.0
"""A client that does not take its answer is left."""

MAX_LINE_BYTES = 1 << 16
"""Of one message; commands are sent shortened."""

BACKLOG = 1024
"""Connections that the daemon has not met yet; beyond that, commands wait for a moment."""

MAX_CONNECTIONS_PER_USER = 1024
"""Of one user: each program that waits or starts has one."""

MAX_JOBS_PER_USER = 512
"""Of one user: those that wait and those that hold slices, each member of a gang counted."""

_DESCRIPTORS_PER_CONNECTION = 4
"""A connection, and what watches the process behind it."""

_RESERVED_DESCRIPTORS = 256
"""For files, for root's connections, and for those that are being refused."""


class QuotaExceeded(FenkaError):
    """The user has as much as one user may; the message is one sentence."""


def raise_descriptor_limit() -> int:
    """Use as many descriptors as the kernel allows this process; the number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Admission:
    """Counts connections, and shares the daemon's time between users. exempt: users without bounds."""

    def __init__(self, descriptors: int, exempt: Collection[int]) -> None:
        self._exempt = exempt
        self._max_total = max(
            (descriptors - _RESERVED_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION, 8
        )
        self._max_per_user = min(MAX_CONNECTIONS_PER_USER, self._max_total // 4)
        self._connections: Counter[int] = Counter()
        self._locks: dict[int, asyncio.Lock] = {}

    def add_connection(self, uid: int) -> None:
        """One connection more, to be given back by :meth:`remove_connection`. Raises QuotaExceeded."""
        if uid != 0 and self._connections.total() >= self._max_total:
            raise QuotaExceeded(
                "the fenka daemon has no room for more connections: try again later"
            )
        if uid not in self._exempt and self._connections[uid] >= self._max_per_user:
            raise QuotaExceeded(
                f"{user_name(uid)} has {self._connections[uid]} connections to the fenka daemon, the "
                "limit for one user: end some of the waiting commands"
            )
        self._connections[uid] += 1

    def remove_connection(self, uid: int) -> None:
        """One connection less."""
        self._connections[uid] -= 1
        if not self._connections[uid]:
            del self._connections[uid]
            self._locks.pop(uid, None)

    def check_jobs(self, uid: int, more: int, here: Iterable[Job]) -> None:
        """Raises QuotaExceeded if the user would have too many jobs with so many more."""
        if uid in self._exempt:
            return
        have = sum(job.uid == uid for job in here)
        if have + more > MAX_JOBS_PER_USER:
            raise QuotaExceeded(
                f"{user_name(uid)} has {have} jobs here; {more} more exceed the limit of {MAX_JOBS_PER_USER} "
                "for one user: wait until some have ended"
            )

    @contextlib.asynccontextmanager
    async def time_share(self, uid: int) -> AsyncIterator[None]:
        """One request of each user at a time, and at most half of the daemon's time for each user."""
        if uid in self._exempt:
            yield
            return
        async with self._locks.setdefault(uid, asyncio.Lock()):
            began = time.monotonic()
            try:
                yield
            finally:
                await asyncio.sleep(time.monotonic() - began)
