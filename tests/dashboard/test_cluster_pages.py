"""The page's server for a cluster: what a browser gets of programs, nodes and questions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fenka.dashboard.cluster_live import ClusterLive
from fenka.dashboard.cluster_pages import NO_PROMETHEUS, ClusterPages
from fenka.dashboard.guard import LOOPBACK_NAMES, Guard
from fenka.server.listener import LISTENER, HttpListener
from fenka.views.board import CardTile, HistoryAnswer, ProgramDetail, WhatIfAnswer, World
from tests.builders import T4_MIB, Json, node_json, pod_json
from tests.dashboard.test_cluster_live import UID, notebook
from tests.fakes.api_server import FakeApiServer, api_server
from tests.fakes.queue import UNSCHEDULABLE
from tests.scheduler.harness import briefly
from tests.waiting import until

TOKEN = "a" * 43
HEADERS = {"Authorization": f"Bearer {TOKEN}"}

Client = TestClient[web.Request, web.Application]


def waiting(name: str, units: int) -> Json:
    """Return a pod of ben that waits."""
    pod = pod_json(name, units)
    pod["metadata"] |= {"namespace": "ben", "creationTimestamp": "2026-01-01T00:00:00Z"}
    pod["status"] |= UNSCHEDULABLE
    return pod


@asynccontextmanager
async def served(server: FakeApiServer, token: str = TOKEN) -> AsyncIterator[Client]:
    """Yield a client of a page of this cluster."""
    async with server.api() as api:
        live = ClusterLive(api, "lab", sleep=briefly)
        app = ClusterPages(live, {}).app(Guard(token, LOOPBACK_NAMES))
        app[LISTENER] = HttpListener()
        following = asyncio.create_task(live.run())
        try:
            await until(lambda: live.encoded is not None)
            async with TestClient(TestServer(app)) as client:
                yield client
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def cluster() -> AsyncIterator[FakeApiServer]:
    """One node with one T4: a notebook holds 4 of 14 units, and 12 wait."""
    async with api_server() as server:
        server.put("nodes", node_json("n", T4_MIB))
        server.put("pods", notebook())
        server.put("pods", waiting("next", 12))
        yield server


async def read(client: Client, path: str, kind: type, **query: str) -> object:
    """Return the answer to a question."""
    answer = await client.get(f"/api/{path}", headers=HEADERS, params=query)
    body = await answer.read()
    assert answer.status == 200, body
    return msgspec.json.decode(body, type=kind)


async def test_waiting_pod_is_explained_as_by_fenka_why() -> None:
    """With the verdict of its node, and what helps."""
    async with cluster() as server, served(server) as client:
        detail = await read(client, "program/ben%2Fnext", ProgramDetail)
        assert isinstance(detail, ProgramDetail)
        assert detail.program is None
        assert detail.explanation[0] == (
            "ben/next is pending: it asks for 12 units of aliyun.com/gpu-mem on one card."
        )
        assert "What helps:" in detail.explanation


async def test_running_pod_has_its_line_and_events() -> None:
    """By its UID."""
    event = {
        "metadata": {"name": "e", "namespace": "ada"},
        "involvedObject": {"uid": UID},
        "type": "Normal",
        "reason": "Started",
        "message": "Started container main",
        "lastTimestamp": "2026-01-01T00:00:01Z",
    }
    async with cluster() as server, served(server) as client:
        server.put("events", event)
        detail = await read(client, f"program/{UID}", ProgramDetail)
        assert isinstance(detail, ProgramDetail)
        assert detail.program is not None
        assert (detail.program.name, detail.program.user) == ("notebook", "ada")
        assert [sentence for _, sentence in detail.events] == ["Started: Started container main"]


async def test_stream_has_the_cards_of_the_node_that_is_looked_at() -> None:
    """Beside what all viewers get."""
    async with cluster() as server, served(server) as client:
        answer = await client.get("/api/live", headers=HEADERS, params={"node": "n"})
        seen = dict[str, bytes]()
        while "node" not in seen or "world" not in seen:
            event = (await answer.content.readuntil(b"\n\n")).decode()
            if event.startswith("event: "):
                name, _, data = event.removeprefix("event: ").partition("\ndata: ")
                seen[name] = data.encode()
        (card,) = msgspec.json.decode(seen["node"], type=list[CardTile])
        assert card.id == "n/0"
        assert msgspec.json.decode(seen["world"], type=World).place == "cluster"
        answer.close()


async def test_what_if_answers_for_the_cluster() -> None:
    """One more T4 has room for 12 units; a model that nobody has does not."""
    async with cluster() as server, served(server) as client:
        body = {"end": [], "add": {"Tesla T4": 1}}
        answer = await client.post("/api/what-if", headers=HEADERS, json=body)
        said = msgspec.json.decode(await answer.read(), type=WhatIfAnswer)
        assert said.starts == ["next"]
        refused = await client.post("/api/what-if", headers=HEADERS, json={"add": {"A1": 1}})
        assert refused.status == 400
        assert "no node has a card 'A1': here are Tesla T4" in await refused.text()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "stop/x", 405),
        ("POST", "resize/x", 405),
        ("GET", "program/nobody", 404),
        ("GET", f"logs/{UID}", 403),
        ("GET", "history", 400),
        ("GET", "history?card=n/0&program=x", 400),
        ("GET", "history?card=n/0&span=0", 400),
        ("GET", f"history?card=n/0&span=000000001{9:0>5000}", 400),
    ],
)
async def test_nothing_is_changed_and_no_log_is_read(method: str, path: str, status: int) -> None:
    """The page has no right to either."""
    async with cluster() as server, served(server) as client:
        answer = await client.request(
            method, f"/api/{path}", headers=HEADERS, json={} if method == "POST" else None
        )
        assert answer.status == status
        assert not server.writes


async def test_history_without_prometheus_says_what_to_do() -> None:
    """The charts have a sentence instead of lines."""
    async with cluster() as server, served(server) as client:
        for query in ({"program": UID}, {"card": "n/0"}):
            shown = await read(client, "history", HistoryAnswer, **query)
            assert isinstance(shown, HistoryAnswer)
            assert shown.problem == NO_PROMETHEUS


async def test_page_without_token_is_for_whoever_reaches_it() -> None:
    """With one it is not; a foreign Host is refused in any case."""
    async with cluster() as server, served(server, token="") as client:
        assert (await client.get("/api/world")).status == 200
        foreign = await client.get("/api/world", headers={"Host": "evil.example"})
        assert foreign.status == 421
    async with cluster() as server, served(server) as client:
        assert (await client.get("/api/world")).status == 401
