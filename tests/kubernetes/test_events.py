"""Events are written once, counted after that, bounded, and never in the way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from fenka.kubernetes.events import BURST, MAX_NOTE, SERIES_S, EventRecorder
from tests.builders import a_node, a_pod
from tests.fakes.api_server import FakeApiServer, Json, api_server
from tests.fakes.clock import Clock
from tests.waiting import until


@contextlib.asynccontextmanager
async def recording() -> AsyncIterator[tuple[FakeApiServer, EventRecorder, Clock]]:
    """Yield a recorder that runs, with its server and its clock."""
    clock = Clock()
    async with api_server() as server, server.api() as api:
        recorder = EventRecorder(api, "fenka-scheduler", "replica", clock=clock)
        task = asyncio.create_task(recorder.run())
        yield server, recorder, clock
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def events(server: FakeApiServer) -> list[Json]:
    """Those that were written."""
    return server.all("events")


async def test_event_has_the_fields_that_kubectl_shows() -> None:
    """On pods in their namespace, on nodes in default."""

    async with recording() as (server, recorder, _):
        pod = a_pod("p", 4)
        recorder.record_on_pod(pod, "Why", "fenka: no GPU fits")
        recorder.record_on_node(a_node("n", 15079), "Node", "x" * 2000)
        await until(lambda: len(events(server)) == 2)
        first, second = events(server)
        assert first["regarding"] == {
            "kind": "Pod",
            "namespace": "default",
            "apiVersion": "v1",
            "name": "p",
            "uid": pod.metadata.uid,
        }
        assert (first["reason"], first["type"]) == ("Why", "Warning")
        assert first["note"] == "fenka: no GPU fits"
        assert second["metadata"]["namespace"] == "default"
        assert len(second["note"]) == MAX_NOTE


async def test_event_is_counted_when_it_is_repeated() -> None:
    """At most once a minute, with all that came between."""

    async with recording() as (server, recorder, clock):
        pod = a_pod("p", 4)
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: len(events(server)) == 1)
        await until(lambda: recorder.idle)
        for _ in range(9):
            recorder.record_on_pod(pod, "Why", "so")
        clock.now += SERIES_S
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: "series" in events(server)[0])
        assert events(server)[0]["series"]["count"] == 11
        assert len(events(server)) == 1
        assert len([it for it in server.requests if it.startswith("PATCH")]) == 1


async def test_events_are_dropped_when_there_are_too_many() -> None:
    """All at once: the burst is written, the rest is counted."""

    async with recording() as (server, recorder, clock):
        for number in range(200):
            recorder.record_on_pod(a_pod(f"p{number}", 4), "Why", "so")
        await until(lambda: len(events(server)) == BURST)
        assert recorder.dropped == 200 - BURST
        clock.now += 1
        for number in range(200):
            recorder.record_on_pod(a_pod(f"q{number}", 4), "Why", "so")
        await until(lambda: len(events(server)) == BURST + 5)


async def test_event_is_dropped_when_the_server_refuses_it() -> None:
    """And the next time it is written anew."""

    async with recording() as (server, recorder, _):

        async def refuse(_: web.Request) -> web.StreamResponse:
            return web.Response(status=403)

        server.before = refuse
        pod = a_pod("p", 4)
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: recorder.dropped == 1)
        server.before = None
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: len(events(server)) == 1)


async def test_event_is_written_again_when_it_has_expired() -> None:
    """The server keeps events for an hour."""

    async with recording() as (server, recorder, clock):
        pod = a_pod("p", 4)
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: len(events(server)) == 1 and recorder.idle)
        name = events(server)[0]["metadata"]["name"]
        server.remove("events", name, "default")
        clock.now += SERIES_S
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: recorder.dropped == 1)
        recorder.record_on_pod(pod, "Why", "so")
        await until(lambda: len(events(server)) == 1)
