"""The collection in memory ends up as the server's, whatever happens on the way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import cast

from aiohttp import web

from fenka.cluster.objects import Pod
from fenka.kubernetes.api_client import Api, Page, WatchEvent
from fenka.kubernetes.informer import Backoff, Informer, newer
from tests.builders import a_pod
from tests.fakes.api_server import FakeApiServer, Json, api_server
from tests.waiting import WAIT_S, until


class Mirror:
    """What a listener knows: names by UID."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.resyncs = self.sets = 0

    def on_replace(self, objects: Sequence[Pod]) -> None:
        """All."""
        self.resyncs += 1
        self.names = {it.metadata.uid: it.metadata.name for it in objects}

    def on_upsert(self, obj: Pod) -> None:
        """One."""
        self.sets += 1
        self.names[obj.metadata.uid] = obj.metadata.name

    def on_delete(self, obj: Pod) -> None:
        """Gone."""
        del self.names[obj.metadata.uid]


def pod(name: str, node: str = "") -> Json:
    """As little as a pod can be."""
    return {
        "metadata": {"name": name, "namespace": "d"},
        "spec": {"nodeName": node, "containers": []},
    }


async def at_once(_: float) -> None:
    """Instead of waiting."""
    await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def watching(
    server: FakeApiServer, query: dict[str, str] | None = None
) -> AsyncIterator[tuple[Informer[Pod], Mirror]]:
    """A watch that runs and is synced."""
    mirror = Mirror()
    async with server.api() as api:
        watch = Informer(api, "/api/v1/pods", Pod, mirror, query=query, sleep=at_once)
        task = asyncio.create_task(watch.run())
        try:
            await asyncio.wait_for(watch.synced.wait(), WAIT_S)
            await until(lambda: server.watches)
            yield watch, mirror
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def agrees(server: FakeApiServer, mirror: Mirror) -> bool:
    """Whether the mirror shows what the server has."""
    return mirror.names == {
        it["metadata"]["uid"]: it["metadata"]["name"] for it in server.all("pods")
    }


async def test_listener_receives_objects_that_come_change_and_go() -> None:
    """One list is enough."""

    async with api_server() as server:
        server.put("pods", pod("a"))
        async with watching(server) as (watch, mirror):
            server.put("pods", pod("b"))
            server.put("pods", pod("a", "n"))
            server.remove("pods", "b", "d")
            await until(lambda: mirror.sets == 2 and agrees(server, mirror))
            assert mirror.resyncs == 1
            assert [it.spec.node_name for it in watch.objects.values()] == ["n"]
            assert watch.age_s < 60


async def test_list_is_complete_when_it_has_more_than_a_page() -> None:
    """Pages are of 500."""

    async with api_server() as server:
        for number in range(1203):
            server.put("pods", pod(f"p{number}"))
        async with watching(server) as (_, mirror):
            assert len(mirror.names) == 1203


async def test_informer_lists_again_when_its_version_is_gone() -> None:
    """410, after the server compacted its history."""

    async with api_server() as server:
        server.put("pods", pod("a"))
        async with watching(server) as (_, mirror):
            await server.stop()
            server.remove("pods", "a", "d")
            server.put("pods", pod("b"))
            server.compact()
            await server.start()
            await until(lambda: mirror.resyncs == 2 and agrees(server, mirror))


async def test_informer_lists_again_when_the_stream_has_an_error() -> None:
    """ERROR may come at any time."""

    async with api_server() as server, watching(server) as (_, mirror):
        server.send("pods", "ERROR", {"code": 500, "message": "etcd", "metadata": {}})
        await until(lambda: mirror.resyncs == 2)
        server.put("pods", pod("a"))
        await until(lambda: agrees(server, mirror))


async def test_watch_continues_when_the_server_restarts() -> None:
    """Without another list."""

    async with api_server() as server:
        server.put("pods", pod("a"))
        async with watching(server) as (watch, mirror):
            await server.stop()
            await until(lambda: watch.last_error)
            server.put("pods", pod("b"))
            server.remove("pods", "a", "d")
            await server.start()
            await until(lambda: agrees(server, mirror))
            assert mirror.resyncs == 1
            assert watch.last_error is None


async def test_watch_continues_from_its_last_bookmark_when_it_ends() -> None:
    """Though nothing had changed for long."""

    async with api_server() as server, watching(server) as (_, mirror):
        server.version = 500
        server.send("pods", "BOOKMARK", {"metadata": {"resourceVersion": "500"}})
        server.put("pods", pod("a"))
        await until(lambda: agrees(server, mirror))
        server.oldest = 400  # too new for the list's version
        server.end_watches()
        before = len(server.requests)
        await until(lambda: len(server.requests) > before and server.watches)
        server.put("pods", pod("b"))
        await until(lambda: agrees(server, mirror))
        assert mirror.resyncs == 1


async def test_listener_receives_nothing_when_an_event_is_old_or_repeated() -> None:
    """Nor bring back what was deleted."""

    async with api_server() as server, watching(server) as (watch, mirror):
        old = {**server.put("pods", pod("a"))}
        new = server.put("pods", pod("a", "n"))
        gone = server.put("pods", pod("gone"))
        server.remove("pods", "gone", "d")
        for obj in (old, new, old, gone):
            server.send("pods", "MODIFIED", obj)
        server.put("pods", pod("last"))
        await until(lambda: "last" in mirror.names.values())
        assert agrees(server, mirror)
        assert watch.objects[new["metadata"]["uid"]].spec.node_name == "n"


async def test_object_is_another_when_its_name_is_used_again() -> None:
    """Deletions are by UID."""

    async with api_server() as server:
        server.put("pods", pod("a"))
        async with watching(server) as (_, mirror):
            first = next(iter(mirror.names))
            server.remove("pods", "a", "d")
            server.put("pods", pod("a"))
            await until(lambda: agrees(server, mirror) and first not in mirror.names)
            # The first one's end, told again, does not end the second.
            dead = {"metadata": {"name": "a", "namespace": "d", "uid": first}}
            server.send("pods", "DELETED", dead)
            server.put("pods", pod("b"))
            await until(lambda: len(mirror.names) == 2)


async def test_list_and_watch_are_narrowed_when_there_is_a_selector() -> None:
    """As the node agent watches its own pods."""

    async with api_server() as server:
        server.put("pods", pod("elsewhere", "m"))
        server.put("pods", pod("here", "n"))
        async with watching(server, {"fieldSelector": "spec.nodeName=n"}) as (_, mirror):
            server.put("pods", pod("there", "m"))
            server.put("pods", pod("too", "n"))
            await until(lambda: len(mirror.names) == 2)
            assert set(mirror.names.values()) == {"here", "too"}


async def test_relist_reads_the_current_state_when_the_watch_is_mute() -> None:
    """Though the watch is deaf."""

    async with api_server() as server, watching(server) as (watch, mirror):
        server.mute = True
        server.put("pods", pod("a"))
        await asyncio.wait_for(watch.relist(), WAIT_S)
        assert agrees(server, mirror)


async def test_objects_stay_the_same_when_a_list_brings_the_same_versions() -> None:
    """Twice the memory of all pods would otherwise be needed for a moment."""
    async with api_server() as server:
        for name in "abcde":
            server.put("pods", pod(name))
        server.max_page = 2
        async with watching(server) as (watch, mirror):
            before = dict(watch.objects)
            server.mute = True
            changed = server.put("pods", pod("c", "n"))["metadata"]["uid"]
            server.remove("pods", "e", "d")
            await asyncio.wait_for(watch.relist(), WAIT_S)
            assert agrees(server, mirror)
            assert watch.objects[changed].spec.node_name == "n"
            assert all(watch.objects[uid] is before[uid] for uid in watch.objects if uid != changed)


async def test_relist_waits_for_the_next_list_when_one_runs() -> None:
    """That list may have been answered before."""

    async with api_server() as server:
        listing, go_on = asyncio.Event(), asyncio.Event()

        async def slow(_: web.Request) -> web.StreamResponse | None:
            listing.set()
            await go_on.wait()
            return None

        mirror = Mirror()
        async with server.api() as api:
            watch = Informer(api, "/api/v1/pods", Pod, mirror, sleep=at_once)
            server.after = slow  # the first list is answered from before
            task = asyncio.create_task(watch.run())
            await listing.wait()
            server.after = None
            again = asyncio.create_task(watch.relist())
            await asyncio.sleep(0)
            server.put("pods", pod("a"))
            go_on.set()
            await asyncio.wait_for(again, WAIT_S)
            assert mirror.resyncs == 2
            assert agrees(server, mirror)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class BurstApi:
    """Three events that arrive at once, and nothing more."""

    async def pages(self, *_: object, **__: object) -> AsyncIterator[Page[Pod]]:
        """An empty list."""
        yield Page([])

    async def watch(self, *_: object, **__: object) -> AsyncIterator[WatchEvent[Pod]]:
        """Without a pause."""
        for number in range(3):
            yield WatchEvent("ADDED", a_pod(f"p{number}", 1), str(number))
        await asyncio.Event().wait()


async def test_other_tasks_run_between_the_events_of_a_burst() -> None:
    """Otherwise nobody is answered while hundreds of pods are created."""
    turns, seconds = list[int](), count()

    class Burst(Mirror):
        """Counts how often the event loop has run something else before each event."""

        def on_upsert(self, obj: Pod) -> None:
            super().on_upsert(obj)
            turns.append(turn[0])

    turn = [0]

    async def other() -> None:
        while True:
            await asyncio.sleep(0)
            turn[0] += 1

    api = cast(Api, BurstApi())
    watch = Informer(api, "/api/v1/pods", Pod, Burst(), clock=lambda: float(next(seconds)))
    tasks = asyncio.create_task(watch.run()), asyncio.create_task(other())
    await until(lambda: len(turns) == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns[0] < turns[1] < turns[2]


def test_backoff_doubles_up_to_its_limit_and_starts_again_when_reset() -> None:
    """With jitter of a half."""
    backoff = Backoff(0.1, 5, draw=lambda _, most: most)
    assert [backoff.next_s() for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]
    backoff.reset()
    assert backoff.next_s() == 0.1
    assert all(0.05 <= Backoff().next_s() <= 0.1 for _ in range(100))


def test_versions_are_compared_as_numbers_when_they_are_numbers() -> None:
    """KEP-5504."""
    assert newer("10", "9")
    assert newer("9", "9")
    assert not newer("9", "10")
    assert newer("opaque", "10")
