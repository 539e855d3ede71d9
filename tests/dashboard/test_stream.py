"""All viewers get each message, encoded once, and a slow one holds up nobody."""

import asyncio
import json
from contextlib import aclosing

import pytest

from fenka.dashboard import stream
from fenka.dashboard.stream import END, PING, QUEUED, Fanout
from tests.dashboard.machines import machine, program, served


async def test_viewer_gets_the_last_message_at_once() -> None:
    """One that comes later needs not wait for the next."""
    fanout = Fanout()
    fanout.publish("world", b"1")
    fanout.publish("world", b"2")
    async with aclosing(fanout.frames()) as frames:
        assert await anext(frames) == PING
        assert await anext(frames) == b"event: world\ndata: 2\n\n"


async def test_message_is_one_object_for_all_viewers() -> None:
    """Twenty viewers cost one encoding: each gets the same bytes, not equal ones."""
    fanout = Fanout()
    viewers = [fanout.frames() for _ in range(20)]
    for frames in viewers:
        assert await anext(frames) == PING
    assert fanout.viewers == 20
    fanout.publish("world", b"{}")
    got = [await anext(frames) for frames in viewers]
    assert len({id(frame) for frame in got}) == 1
    for frames in viewers:
        await frames.aclose()
    assert fanout.viewers == 0


async def test_older_messages_are_dropped_when_a_viewer_is_slow() -> None:
    """It gets the last few when it reads again."""
    fanout = Fanout()
    async with aclosing(fanout.frames()) as frames:
        await anext(frames)
        for number in range(100):
            fanout.publish("world", b"%d" % number)
        got = [await anext(frames) for _ in range(QUEUED)]
        assert got[-1] == b"event: world\ndata: 99\n\n"
        fanout.publish("world", b"100")
        assert await anext(frames) == b"event: world\ndata: 100\n\n"


async def test_viewer_is_pinged_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies would close the connection."""
    monkeypatch.setattr(stream, "PING_S", 0.01)
    async with aclosing(Fanout().frames()) as frames:
        assert [await anext(frames) for _ in range(3)] == [PING] * 3


async def test_streams_end_when_the_server_does() -> None:
    """A viewer that waits is ended, too, and told so first: its page then asks nobody at this address."""
    fanout = Fanout()
    async with aclosing(fanout.frames()) as frames:
        await anext(frames)
        waiting = asyncio.create_task(anext(frames))
        await asyncio.sleep(0)
        fanout.close()
        assert await waiting == END
        with pytest.raises(StopAsyncIteration):
            await anext(frames)


async def test_stream_is_read_as_events_of_a_browser() -> None:
    """Each event has a name and one line of JSON."""
    async with served(machine(program("a"))) as page:
        url = f"http://127.0.0.1:{page.port}/api/live"
        async with page.session.get(url, headers={"Authorization": "Bearer " + "t" * 43}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            lines = [await answer.content.readline() for _ in range(5)]
            assert lines[0] == b": ping\n"
            assert lines[2] == b"event: world\n"
            world = json.loads(lines[3].removeprefix(b"data: "))
            assert world["cards"][0]["slices"][0]["used_mib"] == 4307
            page.live.show(machine(program("a"), program("b")))
            assert await answer.content.readline() == b"event: world\n"
            world = json.loads((await answer.content.readline()).removeprefix(b"data: "))
            assert [line["name"] for line in world["programs"]] == ["a", "b"]
