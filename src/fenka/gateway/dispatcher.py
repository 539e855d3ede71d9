"""Gives each request a connection to a replica, and lets it wait while no replica accepts any.

A request is sent to a second replica if the first accepted no connection, so nothing was sent to it. An
idempotent request is also sent a second time if a connection that had been idle has ended. None of its body
was sent then, and no byte of the response came.
"""

import asyncio
import contextlib
import socket
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import msgspec

from fenka.core.units import MIB
from fenka.gateway.exchange import Exchange
from fenka.gateway.http1_replica import Http1Pool, Http1ReplicaConnection
from fenka.gateway.http2_replica import Http2Exchange, Http2Pool, Http2ReplicaConnection
from fenka.gateway.routing import Replica, Router
from fenka.hardware.peer_credentials import check_peer
from fenka.jobs.routing_table import RoutingTable

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
    """Requests without a replica, in the order of their arrival.

    In their order, and bounded in number, bytes and time.
    """

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


BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Durations:
    """A histogram of seconds. counts: one more than BUCKETS_S, for what exceeds all."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class Statistics:
    """Counters since the start of the program.

    Plain numbers, which cost a request less than a microsecond.

    Attributes:
        responses: The number of responses by version and status.
        durations: From a request's arrival to the end of its response, by version.
        rejected: The number of requests that got no complete response from a replica, by reason.
        buffered: The number of requests that waited for a replica.
        abandoned: The number of requests whose clients went before the response was complete.
        retries: The number of requests sent to a second connection.
        unreachable: The number of connections that replicas did not accept.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.durations: dict[str, Durations] = {}
        self.rejected: Counter[str] = Counter()
        self.buffered = self.abandoned = self.retries = self.unreachable = 0

    def observe(self, version: str, status: int, seconds: float) -> None:
        """Count a response."""
        self.responses[version, status] += 1
        durations = self.durations.get(version)
        if durations is None:
            durations = self.durations[version] = Durations()
        durations.add(seconds)

    def reject(self, reason: str) -> None:
        """Count a request without a complete response."""
        self.rejected[reason] += 1


TICK_S = 0.1
"""Between two looks at requests that wait and at connections that are idle."""
BUFFER_FULL = "no replica is ready, and too many requests wait for one: try again later"


class ReplicaTimeouts(msgspec.Struct, frozen=True):
    """How long replicas are waited for.

    Attributes:
        connect_s: Seconds for a connection; after that another replica is selected.
        response_s: Seconds from a request's arrival to the head of its response. Models may compute long.
        idle_s: Seconds for which an idle connection is used again. Common servers keep one for longer
            (gunicorn 2 s, uvicorn 5 s). A request that meets the end of its connection may be lost.
    """

    connect_s: float = 5.0
    response_s: float = 300.0
    idle_s: float = 1.5


class Dispatcher:
    """The way of each request from a client's connection to a replica's."""

    def __init__(
        self,
        limits: BufferLimits,
        timeouts: ReplicaTimeouts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router = Router()
        self.buffer: RequestBuffer[Exchange] = RequestBuffer(limits)
        self.statistics = Statistics()
        self.has_table = False
        """Whether it is known which replicas exist. Requests wait until then."""
        self.clock = clock
        self._timeouts = timeouts
        self._http1 = Http1Pool(self, timeouts.idle_s)
        self._http2 = Http2Pool(self)
        self._unanswered: set[Exchange] = set()
        """Requests at a replica."""
        self._connecting: set[asyncio.Task[None]] = set()

    # ---- called by clients' connections ----

    def submit(self, exchange: Exchange) -> None:
        """Send a request to a replica as soon as one accepts it."""
        now = self.clock()
        replica = self.router.acquire(exchange.client.port, now)
        if replica is not None:
            self._start(exchange, replica, now)
            return
        if self.buffer.add(exchange, exchange.size, exchange.began_at):
            self.statistics.buffered += 1
        else:
            self._reject(exchange, "buffer_full", 503, BUFFER_FULL)

    def on_body(self, exchange: Exchange) -> None:
        """Send what has come of a request's body, or count it while the request waits."""
        if exchange.upstream is not None:
            exchange.upstream.send_body()
        elif exchange in self.buffer and not self.buffer.resize(exchange, exchange.size):
            self.buffer.remove(exchange)
            self._reject(exchange, "buffer_full", 503, BUFFER_FULL)

    def abandon(self, exchange: Exchange) -> None:
        """End a request whose client has gone."""
        exchange.abandoned = True
        self.buffer.remove(exchange)
        upstream = exchange.upstream
        if exchange.status == 101 and upstream is not None:
            upstream.close()
        else:
            self.statistics.abandoned += 1
            if upstream is None:
                return  # A connection that is being made is closed once it is open.
            upstream.abort()
        self._end(exchange)

    # ---- called by replicas' connections ----

    def finish(self, exchange: Exchange) -> None:
        """Count a complete response, and let the client's connection go on."""
        self._end(exchange)
        exchange.client.on_finished()

    def on_failure(self, exchange: Exchange, sentence: str, *, begun: bool) -> None:
        """Send the request again if that is safe. Otherwise the client gets an error."""
        upstream = exchange.upstream
        reused = isinstance(upstream, Http1ReplicaConnection) and upstream.used
        if (
            reused
            and not begun
            and not exchange.retried
            and exchange.head.idempotent
            and not exchange.body_sent
        ):
            self._leave(exchange)
            exchange.retried = True
            self.statistics.retries += 1
            self.submit(exchange)
            return
        self._fail(exchange, "replica_failed", 502, sentence)

    def on_lost(self, connection: Http1ReplicaConnection) -> None:
        """Forget a connection that has ended."""
        self._http1.discard(connection)

    def on_reset(self, exchange: Exchange) -> None:
        """Count a stream that its replica has ended without a response."""
        self._end(exchange)
        self.statistics.reject("replica_failed")

    def on_unsent(self, exchange: Exchange) -> None:
        """Count a request as not in flight: its client hung up before it could be sent."""
        self._leave(exchange)

    def on_idle(self, connection: Http1ReplicaConnection) -> None:
        """Keep a connection for another request."""
        self._http1.put(connection, self.clock())

    # ---- called by the program ----

    def update(self, table: RoutingTable) -> None:
        """Replace the routing table."""
        self.has_table = True
        for replica in self.router.update(table):
            self._http1.close_idle(replica)
            self._http2.close_idle(replica)
        self._drain_buffer()

    def tick(self) -> None:
        """Look at what has waited or been idle for too long."""
        now = self.clock()
        self._drain_buffer()
        for exchange in self.buffer.expire(now):
            waited = f"no replica was ready within {self.buffer.limits.wait_s:g} s"
            self._reject(exchange, "buffer_timeout", 503, waited)
        overdue = now - self._timeouts.response_s
        for exchange in [late for late in self._unanswered if late.began_at < overdue]:
            if exchange.upstream is not None and not exchange.status:
                exchange.upstream.abort()
                waited = f"the replica did not answer within {self._timeouts.response_s:g} s"
                self._fail(exchange, "replica_timeout", 504, waited)
        self._http1.tick(now)

    def close(self) -> None:
        """End all connections to replicas that are idle or not open yet."""
        for task in self._connecting:
            task.cancel()
        self._http1.close()
        self._http2.close()

    # ---- one request ----

    def _start(self, exchange: Exchange, replica: Replica, now: float) -> None:
        exchange.replica = replica
        self._unanswered.add(exchange)
        pool = self._http2 if isinstance(exchange, Http2Exchange) else self._http1
        port = exchange.client.port
        connection = None if exchange.retried else pool.take(replica, port, now)
        if connection is not None:
            connection.start(exchange)
            return
        connection = pool.make(replica, port)
        connection.start(exchange)
        task = asyncio.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: Http1ReplicaConnection | Http2ReplicaConnection) -> None:
        """Open a connection, which then sends its first requests. If that fails, they go elsewhere."""
        replica = connection.replica
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                await open_connection(connection)
        except (OSError, TimeoutError):
            self.router.on_unreachable(replica, self.clock())
            for exchange in connection.give_up():
                self._leave(exchange)
                if not exchange.abandoned:
                    self.statistics.unreachable += 1
                    self.submit(exchange)
        else:
            self.router.on_reached(replica)

    def _drain_buffer(self) -> None:
        now = self.clock()
        unserved = set[str]()
        for exchange in list(self.buffer):
            port = exchange.client.port
            replica = None if port in unserved else self.router.acquire(port, now)
            if replica is None:
                unserved.add(port)
            else:
                self.buffer.remove(exchange)
                self._start(exchange, replica, now)

    def _leave(self, exchange: Exchange) -> None:
        """Count the request as no longer in flight at its replica."""
        replica, exchange.replica, exchange.upstream = exchange.replica, None, None
        self._unanswered.discard(exchange)
        if replica is not None:
            self.router.release(replica)

    def _end(self, exchange: Exchange) -> None:
        replica = exchange.replica
        self._leave(exchange)
        if replica is not None and exchange.status:
            elapsed_s = self.clock() - exchange.began_at
            self.statistics.observe(replica.version, exchange.status, elapsed_s)

    def _fail(self, exchange: Exchange, reason: str, status: int, sentence: str) -> None:
        if exchange.status:
            # The client knows the status already, and sees that the body is incomplete.
            self._end(exchange)
            self.statistics.reject("response_incomplete")
            exchange.client.abort()
            return
        exchange.status = status
        self._end(exchange)
        self._reject(exchange, reason, status, sentence)

    def _reject(self, exchange: Exchange, reason: str, status: int, sentence: str) -> None:
        self.statistics.reject(reason)
        exchange.status = status
        exchange.client.answer(status, sentence)


async def open_connection(connection: Http1ReplicaConnection | Http2ReplicaConnection) -> None:
    """Connect to a replica. Raises OSError, also if another user's program is there, which gets nothing."""
    replica, loop = connection.replica, asyncio.get_running_loop()
    address = replica.ports[connection.port]
    if replica.uid is None and isinstance(address, int):
        await loop.create_connection(lambda: connection, replica.host, address)
        return
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with contextlib.ExitStack() as unless_ours:
        trial = unless_ours.enter_context(socket.socket(family))
        trial.setblocking(False)
        if isinstance(address, str):
            # It never waits. asyncio takes a full queue for a connection.
            trial.connect(address)
        else:
            await loop.sock_connect(trial, (replica.host, address))
        if replica.uid is not None:
            check_peer(trial, replica.uid)
        unless_ours.pop_all()
    await loop.create_connection(lambda: connection, sock=trial)
