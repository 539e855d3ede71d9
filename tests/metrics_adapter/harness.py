"""Pods whose metrics real servers on loopback answer, and an API server that lists them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fenka.metrics_adapter.scraper import Bounds, ScrapedEndpoint, Scraper
from fenka.metrics_adapter.values import Values
from tests.fakes.api_server import FakeApiServer

Json = dict[str, Any]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

LOOPBACK = "127.0.0.1"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
OWN = "gpu"
PATIENT = Bounds(within_s=60, queue_s=60)
"""Bounds of time that a busy machine does not reach."""


def response(body: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Serve:
    """Return a server's behaviour: read a request, then send these bytes and hang up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()

    return serve


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    del writer
    while await reader.read(1000):
        pass


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send lines without an end."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"other 1\n" * 8192)
        await writer.drain()


@dataclass
class Stage:
    """The servers of one test.

    Attributes:
        connections: Their number by port, since the start.
    """

    stack: contextlib.AsyncExitStack
    api: FakeApiServer
    values: Values
    connections: dict[int, int] = field(default_factory=dict)

    async def listen(self, serve: Serve, host: str = LOOPBACK) -> int:
        """Start a server and return its port."""

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections[port] += 1
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await serve(reader, writer)
            writer.close()

        server = await asyncio.start_server(count, host, 0)
        self.stack.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        self.connections[port] = 0
        return port

    async def pod(self, name: str, serve: Serve, port_name: str, **labels: str) -> Json:
        """Create a running pod in namespace `default` with a port that is served so."""
        pod = pod_json(name, await self.listen(serve), port_name, **labels)
        return self.api.put("pods", pod)

    async def value(self, metric: str, selector: str, namespace: str = "default") -> float:
        """Return a value."""
        return await self.values.value(namespace, metric, selector)


def pod_json(
    name: str, port: int, port_name: str, namespace: str = "default", **labels: str
) -> Json:
    """Return a pod that runs at 127.0.0.1."""
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {key.replace("_", "/"): value for key, value in labels.items()},
        },
        "spec": {
            "nodeName": "n1",
            "containers": [
                {"name": "main", "ports": [{"name": port_name, "containerPort": port}]},
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": LOOPBACK,
            "hostIP": "192.0.2.1",
            "containerStatuses": [{"name": "main", "started": True}],
        },
    }


@contextlib.asynccontextmanager
async def stage(bounds: Bounds = PATIENT) -> AsyncIterator[Stage]:
    """Run an API server without pods."""
    async with contextlib.AsyncExitStack() as stack:
        server = FakeApiServer()
        await server.start()
        stack.push_async_callback(server.stop)
        api = await stack.enter_async_context(server.api())
        values = Values(api, Scraper(bounds), OWN, lambda: NOW)
        yield Stage(stack, server, values)


def endpoint(port: int, namespace: str = "default", *, ending: bool = False) -> ScrapedEndpoint:
    """Return where a pod at 127.0.0.1 is asked."""
    return ScrapedEndpoint(namespace, "p", f"uid-{port}", LOOPBACK, port, "http-metrics", ending)
