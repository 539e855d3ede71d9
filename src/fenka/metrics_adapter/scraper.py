"""Asks pods for their metrics, each within bounds of bytes, samples and time.

Redirects are not followed, and bodies are not decompressed. What a pod answered is kept for a moment for
others who want the same. After a timeout it is left alone for longer.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fenka.metrics_adapter.exposition import (
    MAX_SERIES,
    InvalidExposition,
    LabelValues,
    SumReader,
    Sums,
)
from fenka.metrics_adapter.pods import Endpoint
from fenka.metrics_adapter.response import MAX_HEAD, body
from fenka.metrics_adapter.wire import NoValue

MIB = 1024 * 1024
_REQUEST = (
    "GET /metrics HTTP/1.0\r\nHost: {host}\r\nUser-Agent: fenka-metrics-adapter\r\n"
    "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
)


class Ended(NoValue):
    """A terminating pod refuses connections, so its program has ended."""


class TimedOut(NoValue):
    """A pod has not answered in time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a pod may cost.

    Attributes:
        within_s: Seconds from connecting to the last byte.
        body_bytes: Bytes of an answer.
        hold_s: Seconds for which an answer, or a failure, is the answer to all.
        timeout_hold_s: Seconds for which a pod is not asked again that has not answered in time.
        connections: Connections to the pods of one namespace at a time.
        queue_s: Seconds that others of the namespace wait for one of them.
    """

    within_s: float = 2.0
    body_bytes: int = 4 * MIB
    hold_s: float = 1.0
    timeout_hold_s: float = 10.0
    connections: int = 16
    queue_s: float = 3.0


class Scraper:
    """Asks pods; for one event loop."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self._bounds = bounds
        self._recent: dict[object, asyncio.Task[Sums | NoValue]] = {}
        # Each namespace has its own, so that one whose pods are slow delays no other.
        self._connections: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def sums(
        self, endpoint: Endpoint, labels: Mapping[str, LabelValues], max_series: int = MAX_SERIES
    ) -> Sums:
        """Return the sums of a pod's gauges, by the labels given with each name. Raises NoValue, Ended."""
        key = endpoint, tuple(labels.items())
        task = self._recent.get(key)
        if task is None:
            reader = SumReader(labels, max_series)
            task = self._recent[key] = asyncio.create_task(self._outcome(endpoint, reader, key))
        outcome = await asyncio.shield(task)
        if isinstance(outcome, NoValue):
            raise type(outcome)(str(outcome))
        return outcome

    async def _outcome(self, endpoint: Endpoint, reader: SumReader, key: object) -> Sums | NoValue:
        """Return what asking a pod results in, and forget it after some time."""
        hold_s = self._bounds.hold_s
        try:
            await self._ask(endpoint, reader)
        except NoValue as error:
            if isinstance(error, TimedOut):
                hold_s = self._bounds.timeout_hold_s
            # Without the traceback, whose frames have the connection's buffers.
            return type(error)(str(error))
        else:
            return reader.sums
        finally:
            asyncio.get_running_loop().call_later(hold_s, self._recent.pop, key, None)

    async def _ask(self, endpoint: Endpoint, reader: SumReader) -> None:
        """Read an answer when a connection is free. Raises NoValue, Ended, TimedOut."""
        gate = self._connections.get(endpoint.namespace)
        if gate is None:
            gate = asyncio.Semaphore(self._bounds.connections)
            self._connections[endpoint.namespace] = gate
        try:
            async with asyncio.timeout(self._bounds.queue_s):
                await gate.acquire()
        except TimeoutError:
            raise NoValue(f"too many pods of namespace {endpoint.namespace} are slow") from None
        try:
            await self._read(endpoint, reader)
        finally:
            gate.release()

    async def _read(self, endpoint: Endpoint, reader: SumReader) -> None:
        """Read an answer. Raises NoValue, Ended, TimedOut."""
        name, port = endpoint.pod, endpoint.port_name
        try:
            async with asyncio.timeout(self._bounds.within_s):
                await _fetch(endpoint, reader, self._bounds.body_bytes)
        except TimeoutError:
            within = f"{self._bounds.within_s:g} s"
            reason = f"pod {name} does not answer within {within} on port {port}"
            raise TimedOut(reason) from None
        except ConnectionRefusedError:
            kind = Ended if endpoint.ending else NoValue
            raise kind(f"pod {name} refuses connections to port {port}") from None
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or "the connection ended early"
            raise NoValue(f"pod {name} does not answer on port {port}: {why}") from None
        except InvalidExposition as error:
            raise NoValue(f"pod {name} {error}") from None


async def _fetch(endpoint: Endpoint, reader: SumReader, max_bytes: int) -> None:
    """Read an answer. Raises InvalidExposition, OSError and EOFError."""
    stream, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=MAX_HEAD)
    try:
        writer.write(_REQUEST.format(host=_host_field(endpoint)).encode())
        received = 0
        async for block in body(stream):
            received += len(block)
            if received > max_bytes:
                raise InvalidExposition(f"answers more than {max_bytes // MIB} MiB")
            reader.feed(block)
            # A pod that sends without a pause must not delay others.
            await asyncio.sleep(0)
        reader.finish()
    finally:
        writer.transport.abort()


def _host_field(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"
