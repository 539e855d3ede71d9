"""Clients of HTTP/2 that break the rules or flood: their connections end, and others are answered."""

import asyncio
import contextlib

import pytest
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.gateway.harness import (
    ANSWER,
    FakeReplica,
    HeldReplica,
    Installation,
    installation,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = SettingsFrame(0).serialize()
BLOCK = b"\x83\x86\x84\x41\x01a"
"""POST http / of authority `a`, by HPACK's static table."""
MOST_BYTES = 64 << 20
"""What a flood may send until its connection ends."""


def frames(*parts: Frame) -> bytes:
    """Return the bytes of frames."""
    return b"".join(part.serialize() for part in parts)


def head(stream: int, block: bytes = BLOCK, *flags: str) -> HeadersFrame:
    """Return the begin of a request."""
    return HeadersFrame(stream, block, flags=list(flags))


async def flood(served: Installation, first: bytes, repeated: bytes) -> bool:
    """Send without end on a connection whose answers are not read. Return whether the gateway ended it."""
    async with served.client() as client:
        client.writer.transport.set_write_buffer_limits(0)
        with contextlib.suppress(ConnectionError):
            await client.send(PREFACE + SETTINGS + first)
            for _ in range(MOST_BYTES // len(repeated)):
                await client.send(repeated)
                await asyncio.sleep(0)
            return False
        return True


OPEN = frames(head(1, BLOCK, "END_HEADERS"))
FLOODS = {
    "pings": (OPEN, frames(PingFrame(0, b"12345678")) * 500),
    "settings": (OPEN, SETTINGS * 1000),
    "empty data": (OPEN, frames(DataFrame(1, b"")) * 1000),
    "priority": (OPEN, frames(PriorityFrame(1, stream_weight=1)) * 1000),
    "window updates": (OPEN, frames(WindowUpdateFrame(1, window_increment=1)) * 1000),
    "continuation": (frames(head(1)), frames(ContinuationFrame(1, b"")) * 1000),
    "large continuation": (frames(head(1)), frames(ContinuationFrame(1, b"\0" * 16_000)) * 4),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_flood_of_control_frames_ends_its_connection(name: str) -> None:
    """Frames that flow control does not bound. Another client gets all its answers meanwhile."""
    async with installation(FakeReplica()) as served, served.client() as client:
        first, repeated = FLOODS[name]
        floods = [asyncio.create_task(flood(served, first, repeated)) for _ in range(4)]
        while not all(task.done() for task in floods):
            assert await client.fetch() == ANSWER
        assert all(task.result() for task in floods)
        assert await client.fetch() == ANSWER
        await served.until_metric("connections", 1)
        assert await served.envoy_memory_kib() < 320 * 1024


async def test_rapid_reset_ends_its_connection() -> None:
    """Requests that are reset at once, with and without a replica."""
    for replicas in ([HeldReplica()], []):
        async with installation(*replicas) as served:
            pairs = b"".join(
                frames(
                    head(stream, BLOCK, "END_HEADERS", "END_STREAM"),
                    RstStreamFrame(stream, error_code=8),
                )
                for stream in range(1, 40_001, 2)
            )
            async with served.client() as client:
                with contextlib.suppress(ConnectionError):
                    await client.send(PREFACE + SETTINGS + pairs)
                await client.rest()
            await served.until_metric("requests", 0)
            await served.until_metric("connections", 0)


async def test_others_are_answered_under_rapid_reset() -> None:
    """Floods that connect again and again."""
    ended = 0

    async def reset(served: Installation) -> None:
        nonlocal ended
        pairs = b"".join(
            frames(
                head(stream, BLOCK, "END_HEADERS", "END_STREAM"),
                RstStreamFrame(stream, error_code=8),
            )
            for stream in range(1, 4001, 2)
        )
        while True:
            with contextlib.suppress(ConnectionError):
                async with served.client() as client:
                    await client.send(PREFACE + SETTINGS + pairs)
                    await client.rest()
            ended += 1

    async with installation(FakeReplica()) as served, served.client() as client:
        floods = [asyncio.create_task(reset(served)) for _ in range(4)]
        while ended < 20:
            assert await client.fetch() == ANSWER
        for task in floods:
            task.cancel()
        assert await client.fetch() == ANSWER


async def test_head_bomb_is_refused() -> None:
    """A few bytes of HPACK that stand for megabytes, in the first request or in many."""
    encoder = Encoder()
    large = encoder.encode([("x-large", "y" * 3900)])
    # Each byte is the field of 3,900 bytes, by the dynamic table.
    bomb = BLOCK + large + b"\xbe" * 16_000
    small = BLOCK + b"\xbe" * 10
    async with installation(FakeReplica()) as served, served.client() as client:
        memory = await served.envoy_memory_kib()
        async with served.client() as hostile:
            with contextlib.suppress(ConnectionError):
                await hostile.send(
                    PREFACE + SETTINGS + frames(head(1, bomb, "END_HEADERS", "END_STREAM"))
                )
                for stream in range(3, 401, 2):
                    await hostile.send(frames(head(stream, small, "END_HEADERS", "END_STREAM")))
            assert await client.fetch() == ANSWER
        await served.until_metric("connections", 1)
        await served.until_metric("requests", 0)
        assert await served.envoy_memory_kib() - memory < 32 * 1024
        assert await served.metric("responses_total", version="v1", status="200") == 1


@pytest.mark.parametrize(
    "data",
    [
        PREFACE + b"\0\0\0\1\0\0\0\0\0",
        PREFACE + b"\xff\xff\xff\0\0\0\0\0\1",
        PREFACE[:-1] + b"x" * 100,
        PREFACE + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        PREFACE + SETTINGS + frames(head(2, BLOCK, "END_HEADERS", "END_STREAM")),
        PREFACE + SETTINGS + frames(head(1, b"\xff\xff\xff\xff\xff\x0f", "END_HEADERS")),
        PREFACE + SETTINGS + frames(DataFrame(1, b"x")),
        PREFACE + SETTINGS + frames(WindowUpdateFrame(0, window_increment=2**31 - 1)) * 2,
    ],
)
async def test_connection_ends_when_client_breaks_the_protocol(data: bytes) -> None:
    """A connection that is no HTTP/2 ends, and leaves nothing behind."""
    replica = FakeReplica()
    async with installation(replica) as served:
        await served.send(data)
        await served.until_metric("connections", 0)
        await served.until_metric("requests", 0)
    assert not replica.heads


UNUSUAL = {
    "upper case": [("Upper", "a")],
    "connection": [("connection", "close")],
    "chunked": [("transfer-encoding", "chunked")],
    "line feed in a value": [("x", "a\r\nHost: b")],
    "line feed in a name": [("x: a\r\ny", "b")],
    "length of more than the body": [("content-length", "5")],
    "two lengths": [("content-length", "0"), ("content-length", "5")],
    "space in the path": [(":path", "/ HTTP/1.1\r\nx: y")],
    "pseudo field behind": [("x", "a"), (":path", "/b")],
}


@pytest.mark.parametrize("name", UNUSUAL)
async def test_fields_that_http1_would_read_otherwise_are_refused(name: str) -> None:
    """A replica gets no request, and the stream or the connection ends."""
    model = FakeReplica()
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), *UNUSUAL[name]]
    if ":path" not in dict(UNUSUAL[name]) or name == "pseudo field behind":
        fields.insert(0, (":path", "/"))
    block = Encoder().encode(fields)
    async with installation(model) as served, served.client() as client:
        await client.send(
            PREFACE
            + SETTINGS
            + frames(head(1, block, "END_HEADERS", "END_STREAM"), PingFrame(0, b"endofall"))
        )
        received = b""
        # A client that is answered has had its error before, a connection that ends has none.
        while b"endofall" not in received and (part := await client.reader.read(65536)):
            received += part
        await served.until_metric("requests", 0)
    assert not model.heads
