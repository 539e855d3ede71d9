"""Asks pods for their metrics, each within bounds of bytes, samples and time.

Wire facts: only nodes write a pod's status, so its addresses are its own, except in the host's network,
where they are the node's. `started` is false until a container runs and its startup probe has succeeded.
deletionTimestamp is when a terminating pod's grace period ends; the kubelet has killed it by then.
"""

import asyncio
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

import msgspec

from fenka.cluster.objects import Object, ObjectMeta
from fenka.core.units import MIB
from fenka.metrics_adapter import exposition

CLOCKS = timedelta(seconds=30)
"""The clocks of two machines may differ by this."""


class ScrapedPort(Object):
    """A port of a container."""

    name: str = ""
    container_port: int = 0


class ScrapedContainer(Object):
    """A container. Ports may be null."""

    name: str = ""
    ports: tuple[ScrapedPort, ...] | None = None


class ScrapedPodSpec(Object):
    """The spec of a pod."""

    node_name: str = ""
    host_network: bool = False
    containers: tuple[ScrapedContainer, ...] = ()


class ScrapedContainerStatus(Object):
    """A container as the kubelet reports it. started: null if it is unknown."""

    name: str = ""
    started: bool | None = None


class ScrapedPodStatus(Object):
    """The status of a pod."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    host_ip: str = msgspec.field(default="", name="hostIP")
    container_statuses: tuple[ScrapedContainerStatus, ...] | None = None


class ScrapedPod(Object):
    """A pod, with the fields that say whether and where it is asked."""

    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: ScrapedPodSpec = msgspec.field(default_factory=ScrapedPodSpec)
    status: ScrapedPodStatus = msgspec.field(default_factory=ScrapedPodStatus)

    @property
    def ending(self) -> bool:
        """Return whether the pod is terminating."""
        return self.metadata.deletion_timestamp is not None


@dataclass(frozen=True, slots=True)
class ScrapedEndpoint:
    """Where a pod is asked. ending: it is terminating, so it may refuse connections because it has ended."""

    namespace: str
    pod: str
    uid: str
    host: str
    port: int
    port_name: str
    ending: bool


def running(pods: Iterable[ScrapedPod], now: datetime) -> Iterator[ScrapedPod]:
    """Yield the pods that have begun and not ended. now: with its time zone."""
    for pod in pods:
        end = pod.metadata.deletion_timestamp
        over = end is not None and datetime.fromisoformat(end) + CLOCKS <= now
        if pod.status.phase not in {"Pending", "Succeeded", "Failed"} and not over:
            yield pod


def endpoints(
    pods: Iterable[ScrapedPod], port_name: str, now: datetime
) -> Iterator[ScrapedEndpoint]:
    """Yield where pods are asked: those whose container with this port has started and may not have ended.

    A container that has not started has no requests. Raises NoValue if a pod cannot be asked.
    """
    for pod in running(pods, now):
        name, (container, port) = pod.metadata.name, _port(pod, port_name)
        states = {state.name: state.started for state in pod.status.container_statuses or ()}
        if states.get(container) is False:
            continue
        if pod.spec.host_network or pod.status.pod_ip == pod.status.host_ip:
            raise exposition.NoValue(
                f"pod {name} uses its node's network, so it has no address of its own: run it without "
                "hostNetwork"
            )
        try:
            host = str(ipaddress.ip_address(pod.status.pod_ip))
        except ValueError:
            raise exposition.NoValue(f"pod {name} has no address yet") from None
        meta = pod.metadata
        yield ScrapedEndpoint(meta.namespace, name, meta.uid, host, port, port_name, pod.ending)


def _port(pod: ScrapedPod, port_name: str) -> tuple[str, int]:
    """Return the container with the port, and the port's number. Raises NoValue."""
    for container in pod.spec.containers:
        for port in container.ports or ():
            if port.name == port_name:
                return container.name, port.container_port
    raise exposition.NoValue(
        f"pod {pod.metadata.name} has no port named {port_name}: name the port of its metrics so"
    )


_REQUEST = (
    "GET /metrics HTTP/1.0\r\nHost: {host}\r\nUser-Agent: fenka-metrics-adapter\r\n"
    "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
)


class Ended(exposition.NoValue):
    """A terminating pod refuses connections, so its program has ended."""


class TimedOut(exposition.NoValue):
    """A pod has not answered in time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one pod's answer.

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
    """Asks pods; for one event loop.

    Redirects are not followed, and bodies are not decompressed. A pod's answer is kept for a moment for other
    callers. After a timeout it is left alone for longer.
    """

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self._bounds = bounds
        self._recent: dict[object, asyncio.Task[exposition.Sums | exposition.NoValue]] = {}
        # Each namespace has its own, so that one whose pods are slow delays no other.
        self._connections: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def sums(
        self,
        endpoint: ScrapedEndpoint,
        labels: Mapping[str, exposition.LabelValues],
        max_series: int = exposition.MAX_SERIES,
    ) -> exposition.Sums:
        """Return the sums of a pod's gauges, by the labels given with each name. Raises NoValue, Ended."""
        key = endpoint, tuple(labels.items())
        task = self._recent.get(key)
        if task is None:
            reader = exposition.SumReader(labels, max_series)
            task = self._recent[key] = asyncio.create_task(self._outcome(endpoint, reader, key))
        outcome = await asyncio.shield(task)
        if isinstance(outcome, exposition.NoValue):
            raise type(outcome)(str(outcome))
        return outcome

    async def _outcome(
        self, endpoint: ScrapedEndpoint, reader: exposition.SumReader, key: object
    ) -> exposition.Sums | exposition.NoValue:
        """Return what asking a pod results in, and forget it after some time."""
        hold_s = self._bounds.hold_s
        try:
            await self._ask(endpoint, reader)
        except exposition.NoValue as error:
            if isinstance(error, TimedOut):
                hold_s = self._bounds.timeout_hold_s
            # Without the traceback, whose frames have the connection's buffers.
            return type(error)(str(error))
        else:
            return reader.sums
        finally:
            asyncio.get_running_loop().call_later(hold_s, self._recent.pop, key, None)

    async def _ask(self, endpoint: ScrapedEndpoint, reader: exposition.SumReader) -> None:
        """Read an answer when a connection is free. Raises NoValue, Ended, TimedOut."""
        gate = self._connections.get(endpoint.namespace)
        if gate is None:
            gate = asyncio.Semaphore(self._bounds.connections)
            self._connections[endpoint.namespace] = gate
        try:
            async with asyncio.timeout(self._bounds.queue_s):
                await gate.acquire()
        except TimeoutError:
            raise exposition.NoValue(
                f"too many pods of namespace {endpoint.namespace} are slow"
            ) from None
        try:
            await self._read(endpoint, reader)
        finally:
            gate.release()

    async def _read(self, endpoint: ScrapedEndpoint, reader: exposition.SumReader) -> None:
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
            kind = Ended if endpoint.ending else exposition.NoValue
            raise kind(f"pod {name} refuses connections to port {port}") from None
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or "the connection ended early"
            raise exposition.NoValue(f"pod {name} does not answer on port {port}: {why}") from None
        except exposition.InvalidExposition as error:
            raise exposition.NoValue(f"pod {name} {error}") from None


async def _fetch(endpoint: ScrapedEndpoint, reader: exposition.SumReader, max_bytes: int) -> None:
    """Read an answer. Raises InvalidExposition, OSError and EOFError."""
    stream, writer = await asyncio.open_connection(
        endpoint.host, endpoint.port, limit=exposition.MAX_HEAD
    )
    try:
        writer.write(_REQUEST.format(host=_host_field(endpoint)).encode())
        received = 0
        async for block in exposition.body(stream):
            received += len(block)
            if received > max_bytes:
                raise exposition.InvalidExposition(f"answers more than {max_bytes // MIB} MiB")
            reader.feed(block)
            # A pod that sends without a pause must not delay others.
            await asyncio.sleep(0)
        reader.finish()
    finally:
        writer.transport.abort()


def _host_field(endpoint: ScrapedEndpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"
