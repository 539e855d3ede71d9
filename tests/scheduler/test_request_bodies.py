"""How much of its requests a replica reads: by size, in sum, and before anything is read."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from fenka.core.units import MIB
from fenka.scheduler.server import PREFIX, SMALL, Access, BodyLimits, BodyReader, BodyRejected
from tests.builders import T4_MIB, node_json, pod_json
from tests.scheduler.harness import SchedulerHarness, scheduler
from tests.waiting import until

NODE = node_json("n", T4_MIB)
FILTER = f"POST {PREFIX}/filter HTTP/1.1\r\nHost: n\r\n"


class Caller:
    """Speaks HTTP byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, one: SchedulerHarness) -> "Caller":
        """Connect."""
        host, port = one.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def answer(self) -> tuple[int, str]:
        """Return status and text."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1])
            for line in head.splitlines()
            if line.lower().startswith("content-length:")
        )
        return int(head.split()[1]), (await self.reader.readexactly(length)).decode()


def of_size(size: int) -> bytes:
    """Return a filter request of this number of bytes."""
    text = json.dumps({"Pod": pod_json("p", 4), "NodeNames": ["n"]})
    return text.encode().ljust(size)


async def test_body_is_not_read_when_its_length_is_over_the_limit() -> None:
    """Bodies of 200 MB at a time ended both replicas for lack of memory."""

    async with scheduler(NODE) as (_, one):
        caller = await Caller.of(one)
        caller.writer.write(f"{FILTER}Content-Length: {200 * MIB}\r\n\r\n".encode())
        status, text = await caller.answer()
        assert status == 200
        error = json.loads(text)["Error"]
        assert "more than 8 MiB" in error
        assert "nodeCacheCapable" in error
        # prioritize has no place for a sentence.
        caller = await Caller.of(one)
        head = FILTER.replace("filter", "prioritize")
        caller.writer.write(f"{head}Content-Length: {200 * MIB}\r\n\r\n".encode())
        assert (await caller.answer())[0] == 413


async def test_chunked_body_is_rejected_when_it_grows_over_the_limit() -> None:
    """No header has its size."""

    async with scheduler(NODE) as (_, one):

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(9 * 16):
                yield b" " * (MIB // 16)

        where = f"{one.url}{PREFIX}/filter"
        try:
            async with one.session.post(where, data=endless()) as answer:
                assert "more than 8 MiB" in (await answer.json())["Error"]
        except ConnectionError:
            pytest.fail("the connection ended before the answer")
        assert (await one.filter(pod_json("p", 4), "n"))["NodeNames"] == ["n"]


async def test_body_is_rejected_when_it_is_compressed() -> None:
    """A few bytes can expand to many."""

    async with scheduler(NODE) as (_, one):
        where = f"{one.url}{PREFIX}/filter"
        headers = {"Content-Encoding": "gzip"}
        async with one.session.post(where, data=b"\x1f\x8b", headers=headers) as answer:
            assert "compressed" in (await answer.json())["Error"]


async def test_body_is_answered_when_it_is_within_the_limit() -> None:
    """Requests with whole nodes need a higher limit."""

    async with scheduler(NODE, access=Access(BodyLimits(10 * MIB, 10 * MIB))) as (_, one):
        where = f"{one.url}{PREFIX}/filter"
        async with one.session.post(where, data=of_size(9 * MIB)) as answer:
            assert (await answer.json())["NodeNames"] == ["n"]


def bodies(*bounds: int) -> BodyReader:
    """Return a reader with these limits."""
    return BodyReader(BodyLimits(*bounds))


async def with_request(
    run: Callable[[web.Request, asyncio.StreamReader], Awaitable[None]], length: int | None
) -> None:
    """Call it with a request whose body the test feeds."""
    from aiohttp.test_utils import make_mocked_request

    payload = asyncio.StreamReader()
    stream: Any = payload
    stream.iter_any = lambda: _parts(payload)
    headers = {} if length is None else {"Content-Length": str(length)}
    request = make_mocked_request("POST", "/", headers=headers, payload=stream)
    await run(request, payload)


async def _parts(payload: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await payload.read(SMALL):
        yield part


async def test_large_body_waits_when_others_use_up_the_limit() -> None:
    """Small ones do not wait. Every reservation ends with its body."""

    held = bodies(4 * MIB, 6 * MIB)
    done: list[str] = []

    async def read(name: str, size: int, enough: asyncio.Event) -> None:
        async def run(request: web.Request, payload: asyncio.StreamReader) -> None:
            payload.feed_data(b" " * size)
            payload.feed_eof()
            async with held.reading(request) as body:
                assert len(body) == size
                done.append(name)
                await enough.wait()

        await with_request(run, size)

    first, rest = asyncio.Event(), asyncio.Event()
    rest.set()
    tasks = [asyncio.create_task(read("first", 4 * MIB, first))]
    await until(lambda: done == ["first"])
    tasks.append(asyncio.create_task(read("second", 4 * MIB, rest)))
    tasks.append(asyncio.create_task(read("small", SMALL, rest)))
    await until(lambda: "small" in done)
    assert done == ["first", "small"]
    assert held.held == 4 * MIB
    first.set()
    await asyncio.gather(*tasks)
    assert done == ["first", "small", "second"]
    assert held.held == 0


async def test_chunked_body_reserves_its_size_when_it_grows() -> None:
    """It reserves nothing after it was rejected."""

    held = bodies(2 * MIB, 2 * MIB)

    async def run(request: web.Request, payload: asyncio.StreamReader) -> None:
        async def read() -> None:
            async with held.reading(request):
                pass

        task = asyncio.create_task(read())
        payload.feed_data(b" " * MIB)
        await until(lambda: held.held == MIB)
        payload.feed_data(b" " * (MIB + 1))
        with pytest.raises(BodyRejected, match="more than 2 MiB"):
            await task

    await with_request(run, None)
    assert held.held == 0
