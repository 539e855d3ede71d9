"""Replicas of the extender over HTTP, beside an API server that stands in."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from fenka.scheduler.main import http_server
from fenka.scheduler.replica import SchedulerReplica, Settings
from fenka.scheduler.server import PREFIX, Access
from fenka.server.listener import HttpListener, serve_app
from fenka.server.pod_spans import PodSpans
from tests.builders import Json, pod_json
from tests.core.builders import device
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.clock import Clock
from tests.waiting import until

OPEN = Access()
"""Plain HTTP, for everybody."""


async def briefly(_: float) -> None:
    """Instead of waiting for seconds."""
    await asyncio.sleep(0.002)


@dataclass
class SchedulerHarness:
    """One replica, and a client of it as kube-scheduler is one."""

    replica: SchedulerReplica
    session: aiohttp.ClientSession
    url: str
    clock: Clock
    task: asyncio.Task[None]
    served: contextlib.AsyncExitStack

    async def post(self, verb: str, body: Any) -> Any:
        """The answer to a verb, which is always 200."""
        async with self.session.post(f"{self.url}{PREFIX}/{verb}", json=body) as answer:
            assert answer.status == 200
            return await answer.json()

    async def filter(self, pod: Json, *nodes: str) -> Json:
        """As kube-scheduler asks it."""
        found: Json = await self.post("filter", {"Pod": pod, "Nodes": None, "NodeNames": nodes})
        return found

    async def bind(self, pod: Json, node: str) -> str:
        """The error, empty if it is bound."""
        meta = pod["metadata"]
        body = {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": meta["uid"],
            "Node": node,
        }
        error: str = (await self.post("bind", body))["Error"]
        return error

    def held(self, node: str, card: int = 0) -> int:
        """MiB, by this replica's world."""
        return self.replica.cluster.card_usage(node, device(card, node)).memory_mib

    def knows(self, *pods: Json) -> bool:
        """Whether the watch has brought them."""
        there = self.replica.informers.pods.objects
        return all(it["metadata"]["uid"] in there for it in pods)

    async def takes_over(self) -> None:
        """Time passes until it leads: the lease lasts from when this one last saw it renewed."""

        def leads() -> bool:
            self.clock.now += 0.2
            return self.replica.leadership.leading

        await until(leads)

    async def die(self) -> None:
        """Without a word."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.served.aclose()


def connector(access: Access) -> aiohttp.TCPConnector:
    """As kube-scheduler connects."""
    return aiohttp.TCPConnector(ssl=access.credentials.client if access.credentials else True)


@contextlib.asynccontextmanager
async def extender(
    server: FakeApiServer,
    name: str = "one",
    clock: Clock | None = None,
    *,
    told: bool = True,
    access: Access = OPEN,
    settings: Settings | None = None,
    spans: PodSpans | None = None,
) -> AsyncIterator[SchedulerHarness]:
    """A replica that runs while the block does. told: it says in the lease where it is."""
    clock = clock or Clock()
    listening = socket.create_server(("127.0.0.1", 0))
    scheme = "https" if access.credentials else "http"
    url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
    async with (
        server.api() as api,
        aiohttp.ClientSession(connector=connector(access)) as session,
        contextlib.AsyncExitStack() as served,
    ):
        address = url if told else ""
        replica = SchedulerReplica(
            api, settings or Settings(), name, address, clock=clock, sleep=briefly
        )
        credentials = access.credentials
        listener = HttpListener((lambda: credentials.server) if credentials else lambda: None)
        app = http_server(replica, access, spans).app()
        await served.enter_async_context(serve_app(app, listening, listener))
        task = asyncio.create_task(replica.run())
        try:
            yield SchedulerHarness(replica, session, url, clock, task, served)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def scheduler(
    *nodes: Json, access: Access = OPEN, settings: Settings | None = None
) -> AsyncIterator[tuple[FakeApiServer, SchedulerHarness]]:
    """Yield a server that has these nodes, and one replica that leads."""
    async with api_server() as server:
        for node in nodes:
            server.put("nodes", node)
        async with extender(server, access=access, settings=settings) as one:
            await until(lambda: one.replica.leadership.leading)
            yield server, one


def put_pod(server: FakeApiServer, name: str, *units: int | str, **rest: Any) -> Json:
    """A pod that the server has."""
    return server.put("pods", pod_json(name, *units, **rest))
