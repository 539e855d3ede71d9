"""Quotas of connections, jobs and the daemon's time, so that no user can exclude others.

Only the number of descriptors limits root and the daemon's own user.
"""

import asyncio
import contextlib
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence

import msgspec

from fenka.core.errors import FenkaError
from fenka.hardware.peer_credentials import user_name
from fenka.workstation.job import Job

HELLO_TIMEOUT_S = 10.0
"""Until a client has sent its Hello."""

IDLE_TIMEOUT_S = 60.0
"""Between the messages of a client that is not waiting for a lease."""

WRITE_TIMEOUT_S = 10.0
"""Until a client has read its answer; then the connection is closed."""

MAX_LINE_BYTES = 1 << 16
"""Of one message. Commands are shortened before they are sent."""

MAX_UNREAD_BYTES_PER_USER = 64 << 20
"""Of answers that a user's programs have not read. A snapshot of many jobs has two megabytes."""

_SMALL_UNREAD_BYTES = 1 << 16
"""Of one connection; it does not count."""

BACKLOG = 1024
"""Connections that the daemon has not accepted yet. Further commands wait for a moment."""

MAX_CONNECTIONS_PER_USER = 1024
"""Each program that waits or starts has one connection."""

MAX_JOBS_PER_USER = 512
"""Pending and running jobs; each member of a gang counts."""

MAX_RECORDED_BYTES_PER_USER = 2 << 20
"""Of a user's jobs in the state file, which is written with each change. Ordinary jobs take 1 KiB each."""

MAX_RECORDED_BYTES = 64 << 20
"""Of all jobs, root's too. The next daemon reads four times as much: records grow when jobs are granted."""

_DESCRIPTORS_PER_CONNECTION = 4
"""The connection itself, and what watches the client's process."""

_RESERVED_DESCRIPTORS = 256
"""For files, for root's connections, and for connections that are being rejected."""


class QuotaExceeded(FenkaError):
    """The user has reached a limit."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors to the hard limit, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Admission:
    """Counts connections, and divides the daemon's time between users. exempt: users without quotas."""

    def __init__(self, descriptors: int, exempt: Collection[int]) -> None:
        self._exempt = exempt
        self._max_total = max(
            (descriptors - _RESERVED_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION, 8
        )
        self._max_per_user = min(MAX_CONNECTIONS_PER_USER, self._max_total // 4)
        self._connections: Counter[int] = Counter()
        self._locks: dict[int, asyncio.Lock] = {}
        self._unread: dict[int, set[asyncio.WriteTransport]] = {}

    def check_connections(self, uid: int) -> None:
        """Raise QuotaExceeded if one connection more would be too many, for the user or for all."""
        if uid != 0 and self._connections.total() >= self._max_total:
            raise QuotaExceeded(
                "the fenka daemon has no room for more connections: try again later"
            )
        if uid not in self._exempt and self._connections[uid] >= self._max_per_user:
            # To look up the user's name may take long.
            raise QuotaExceeded(
                f"you have {self._connections[uid]} connections to the fenka daemon, the limit for one user: "
                "end some of the waiting commands"
            )

    def add_connection(self, uid: int) -> None:
        """One connection more, to be given back by :meth:`remove_connection`. Raises QuotaExceeded."""
        self.check_connections(uid)
        self._connections[uid] += 1

    def remove_connection(self, uid: int) -> None:
        """Count one connection less."""
        self._connections[uid] -= 1
        if not self._connections[uid]:
            del self._connections[uid]
            self._locks.pop(uid, None)
            self._unread.pop(uid, None)

    def check_unread(self, uid: int, connection: asyncio.WriteTransport) -> None:
        """End a connection that was just written to if its user leaves too much unread."""
        if uid in self._exempt or connection.get_write_buffer_size() <= _SMALL_UNREAD_BYTES:
            return
        unread = {*self._unread.get(uid, ()), connection}
        sizes = {other: other.get_write_buffer_size() for other in unread}
        if sum(sizes.values()) > MAX_UNREAD_BYTES_PER_USER:
            connection.abort()
        self._unread[uid] = {other for other, size in sizes.items() if size}

    def check_jobs(self, uid: int, more: int, jobs: Iterable[Job]) -> None:
        """Raise QuotaExceeded if `more` jobs would be too many for the user."""
        if uid in self._exempt:
            return
        count = sum(job.account == uid for job in jobs)
        if count + more > MAX_JOBS_PER_USER:
            raise QuotaExceeded(
                f"{user_name(uid)} has {count} jobs here; {more} more exceed the limit of "
                f"{MAX_JOBS_PER_USER} for one user: wait until some have ended"
            )

    def check_records(self, uid: int, more: Sequence[Job], jobs: Collection[Job]) -> None:
        """Raise QuotaExceeded if the records of `more` jobs would be too large, for the user or for all."""
        new = sum(map(_recorded_bytes, more))
        own = sum(_recorded_bytes(job) for job in jobs if job.account == uid)
        if uid not in self._exempt and own + new > MAX_RECORDED_BYTES_PER_USER:
            raise QuotaExceeded(
                f"the jobs of {user_name(uid)} take {own >> 10} KiB of the daemon's records; {new >> 10} KiB "
                f"more exceed the limit of {MAX_RECORDED_BYTES_PER_USER >> 10} KiB for one user: shorten "
                "the command, start fewer at once, or wait until some have ended"
            )
        if sum(map(_recorded_bytes, jobs)) + new > MAX_RECORDED_BYTES:
            raise QuotaExceeded(
                "the fenka daemon has no room to record more jobs: wait until some have ended"
            )

    @contextlib.asynccontextmanager
    async def time_share(self, uid: int) -> AsyncIterator[None]:
        """Admit one request of each user at a time, and give each user at most half of the daemon's time."""
        if uid in self._exempt:
            yield
            return
        async with self._locks.setdefault(uid, asyncio.Lock()):
            started_at = time.monotonic()
            try:
                yield
            finally:
                await asyncio.sleep(time.monotonic() - started_at)


def _recorded_bytes(job: Job) -> int:
    return len(msgspec.json.encode(job))
