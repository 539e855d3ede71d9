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
from fenka.workstation.broker import Job

HELLO_WITHIN_S = 10.0
"""A client says Hello before anything else, in one line."""

IDLE_S = 60.0
"""Between the messages of a client that waits for no slice."""

READS_WITHIN_S = 10.0
"""A client that does not take its answer is left."""

LINE_BYTES = 1 << 16
"""Of one message; commands are sent shortened."""

BACKLOG = 1024
"""Connections that the daemon has not met yet; beyond that, commands wait for a moment."""

MOST_CONNECTIONS = 1024
"""Of one user: each program that waits or starts has one."""

MOST_JOBS = 512
"""Of one user: those that wait and those that hold slices, each member of a gang counted."""

_DESCRIPTORS_EACH = 4
"""A connection, and what watches the process behind it."""

_DESCRIPTORS_KEPT = 256
"""For files, for root's connections, and for those that are being refused."""


class TooMany(FenkaError):
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
        self._all = max((descriptors - _DESCRIPTORS_KEPT) // _DESCRIPTORS_EACH, 8)
        self._each = min(MOST_CONNECTIONS, self._all // 4)
        self._here: Counter[int] = Counter()
        self._turns: dict[int, asyncio.Lock] = {}

    def enter(self, uid: int) -> None:
        """One connection more, to be given back by :meth:`leave`. Raises TooMany."""
        if uid != 0 and self._here.total() >= self._all:
            raise TooMany("the fenka daemon has no room for more connections: try again later")
        if uid not in self._exempt and self._here[uid] >= self._each:
            raise TooMany(
                f"{user_name(uid)} has {self._here[uid]} connections to the fenka daemon, more than which no "
                "user may have: end some of the commands that wait"
            )
        self._here[uid] += 1

    def leave(self, uid: int) -> None:
        """One connection less."""
        self._here[uid] -= 1
        if not self._here[uid]:
            del self._here[uid]
            self._turns.pop(uid, None)

    def check_jobs(self, uid: int, more: int, here: Iterable[Job]) -> None:
        """Raises TooMany if the user would have too many jobs with so many more."""
        if uid in self._exempt:
            return
        have = sum(job.uid == uid for job in here)
        if have + more > MOST_JOBS:
            raise TooMany(
                f"{user_name(uid)} has {have} jobs here, and {more} more are beyond the {MOST_JOBS} that one "
                "user may have: wait until some have ended"
            )

    @contextlib.asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """One request of each user at a time, and at most half of the daemon's time for each user."""
        if uid in self._exempt:
            yield
            return
        async with self._turns.setdefault(uid, asyncio.Lock()):
            began = time.monotonic()
            try:
                yield
            finally:
                await asyncio.sleep(time.monotonic() - began)
