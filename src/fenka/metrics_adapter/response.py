"""Reads an HTTP response that a tenant writes, in blocks and within bounds.

Requests are of HTTP/1.0, so most servers send a body in one piece. uvicorn, which serves vLLM, sends chunks
all the same. Chunks of a byte each would cost thousands of times their size, so their number is bounded.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fenka.metrics_adapter.exposition import InvalidExposition

KIB = 1024
MAX_HEAD = 64 * KIB
"""Bytes of a response's head, and the limit of the stream that it is read from."""
MAX_CHUNKS = 10_000
BLOCK = 16 * KIB
"""The most that is read of a body at a time."""

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})( .*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(;.*)?\r\n")


@dataclass(frozen=True, slots=True)
class _Framing:
    """How a body ends. length: in bytes; None if it ends with the connection, or is in chunks."""

    length: int | None
    chunked: bool


async def body(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the body of a response with status 200. Raises InvalidExposition, OSError and EOFError."""
    framing = await _read_head(stream)
    if framing.chunked:
        blocks = _chunks(stream)
    elif framing.length is not None:
        blocks = _exactly(stream, framing.length)
    else:
        blocks = _to_end(stream)
    async for block in blocks:
        yield block


async def _read_head(stream: asyncio.StreamReader) -> _Framing:
    try:
        head = await stream.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise InvalidExposition(f"answers with a head of more than {MAX_HEAD // KIB} KiB") from None
    first, *lines = head[:-4].split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise InvalidExposition("does not speak HTTP")
    if status[1] != b"200":
        raise InvalidExposition(f"answers /metrics with {status[1].decode()}, expected 200")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields.setdefault(name.strip().lower(), []).append(value.strip().lower())
    return _framing(fields)


def _framing(fields: dict[bytes, list[bytes]]) -> _Framing:
    transfer = fields.get(b"transfer-encoding", [])
    if fields.get(b"content-encoding", [b"identity"]) != [b"identity"] or transfer not in (
        [],
        [b"chunked"],
    ):
        raise InvalidExposition("answers /metrics with an encoding that was not asked for")
    lengths = [] if transfer else fields.get(b"content-length", [])
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise InvalidExposition("answers /metrics with an invalid Content-Length")
    return _Framing(int(lengths[0]) if lengths else None, bool(transfer))


async def _to_end(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while block := await stream.read(BLOCK):
        yield block


async def _exactly(stream: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        block = await stream.read(min(BLOCK, length))
        if not block:
            raise EOFError
        length -= len(block)
        yield block


async def _chunks(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    for _ in range(MAX_CHUNKS):
        try:
            match = _CHUNK.fullmatch(await stream.readuntil(b"\r\n"))
        except asyncio.LimitOverrunError:
            match = None
        if match is None:
            raise InvalidExposition("answers /metrics with an invalid chunk")
        length = int(match[1], 16)
        if not length:
            return
        async for block in _exactly(stream, length):
            yield block
        if await stream.readexactly(2) != b"\r\n":
            raise InvalidExposition("answers /metrics with an invalid chunk")
    raise InvalidExposition(f"answers /metrics in more than {MAX_CHUNKS} chunks")
