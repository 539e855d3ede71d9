"""Test what hostile pods can do to the adapter: nothing to others, and no lower number."""

import asyncio
import gzip

import pytest

from fenka.core.units import MIB
from fenka.metrics_adapter.exposition import NoValue
from fenka.metrics_adapter.scraper import Bounds, Ended, Scraper
from tests.metrics_adapter.harness import (
    PATIENT,
    Serve,
    Stage,
    endless,
    endpoint,
    response,
    silence,
    stage,
)
from tests.waiting import until

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
WANTED = {"waiting": ()}


async def read(area: Stage, serve: Serve, scraper: Scraper | None = None) -> float:
    """Return a pod's value."""
    place = endpoint(await area.listen(serve))
    sums = await (scraper or Scraper(PATIENT)).sums(place, WANTED)
    return sums["waiting"][()]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: keep-alive\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: identity\r\n\r\n",
    ],
)
async def test_value_is_read_when_a_pod_answers(head: bytes) -> None:
    """With a length or until the end of the connection."""
    async with stage() as area:
        assert await read(area, response(b"waiting 7\n", head)) == 7


async def test_value_is_read_when_a_pod_answers_in_chunks() -> None:
    """uvicorn does, though it was not asked for."""
    parts = [b"wait", b"ing", b" 4\nwaiting", b"{} 3\n"]
    chunks = b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in parts)
    async with stage() as area:
        assert await read(area, response(chunks + b"0\r\n\r\n", CHUNKED)) == 7


@pytest.mark.parametrize(
    ("head", "body", "sentence"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", b"", "with 302"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", b"", "with 404, expected 200"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
            gzip.compress(b"waiting 1\n", mtime=0),
            "with an encoding",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", b"", "an encoding"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", b"", "an encoding"),
        (CHUNKED, b"1\r\n#\r\n" * 10_000, "in more than 10000 chunks"),
        (CHUNKED, b"ffffffff\r\n" + b"x\n" * 3 * MIB, "more than 4 MiB"),
        (CHUNKED, b"a\r\nwaiting 1\n\r\n", "ended early"),
        (CHUNKED, b"a\r\nwaiting", "ended early"),
        (CHUNKED, b"a\r\nwaiting 1\nXX0\r\n\r\n", "an invalid chunk"),
        (CHUNKED, b"-1\r\n", "an invalid chunk"),
        (CHUNKED, b"1;" + b"x" * 99999 + b"\r\n", "an invalid chunk"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n", b"waiting 1\n", "ended early"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"", "invalid Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"", "invalid"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", b"x\n" * 3 * MIB, "4 MiB"),
        (b"HTTP/1.1 200 OK\r\n", b"", "ended early"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", b"", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 99999 + b"\r\n\r\n", b"", "head of more than 64 KiB"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"waiting NaN\n", "pod p has 'NaN' as waiting"),
        (b"", b"", "ended early"),
    ],
)
async def test_value_is_an_error_when_the_answer_is_unusable(
    head: bytes, body: bytes, sentence: str
) -> None:
    """Redirects are not followed, and compressed bodies are not read."""
    async with stage() as area:
        with pytest.raises(NoValue, match=sentence):
            await read(area, response(body, head))


async def test_reading_ends_when_a_body_has_no_end() -> None:
    """After the limit in bytes, not in time."""
    async with stage() as area:
        with pytest.raises(NoValue, match="answers more than 4 MiB"):
            await read(area, endless)


async def test_value_is_an_error_when_a_pod_is_silent() -> None:
    """The pod is not asked again at once, since each question costs time."""
    bounds = Bounds(within_s=0.05, timeout_hold_s=1e6)
    async with stage() as area:
        port = await area.listen(silence)
        scraper = Scraper(bounds)
        for _ in range(3):
            with pytest.raises(
                NoValue, match=r"does not answer within 0\.05 s on port http-metrics"
            ):
                await scraper.sums(endpoint(port), WANTED)
        assert area.connections[port] == 1


async def test_failure_keeps_no_buffers_while_it_is_kept() -> None:
    """Thousands of failures are kept at a time if tenants want it so."""
    async with stage() as area:
        with pytest.raises(NoValue) as caught:
            await read(area, endless)
        assert caught.value.__context__ is None
        frames = [entry.name for entry in caught.traceback]
        assert "_fetch" not in frames


async def test_pod_is_asked_once_when_several_want_the_same() -> None:
    """Each version of a service needs the same gateways."""
    async with stage() as area:
        port = await area.listen(response(b"waiting 7\n"))
        scraper = Scraper(Bounds(within_s=60, queue_s=60, hold_s=0))
        questions = [scraper.sums(endpoint(port), WANTED) for _ in range(5)]
        assert [sums["waiting"][()] for sums in await asyncio.gather(*questions)] == [7] * 5
        assert area.connections[port] == 1
        await asyncio.sleep(0)
        while area.connections[port] == 1:
            await scraper.sums(endpoint(port), WANTED)


@pytest.mark.parametrize(("ending", "kind"), [(True, Ended), (False, NoValue)])
async def test_refused_connection_means_the_end_only_when_the_pod_is_terminating(
    ending: bool, kind: type[NoValue]
) -> None:
    """A running pod that refuses connections is an error."""
    async with stage() as area:
        port = await area.listen(silence)
        await area.stack.aclose()
        with pytest.raises(NoValue, match="refuses connections") as caught:
            await Scraper(PATIENT).sums(endpoint(port, ending=ending), WANTED)
        assert type(caught.value) is kind


async def test_namespace_does_not_wait_when_anothers_pods_are_slow() -> None:
    """Each has its own connections."""
    scraper = Scraper(Bounds(within_s=60, queue_s=60, connections=2))
    async with stage() as area:
        slow = [endpoint(await area.listen(silence), "slow") for _ in range(6)]
        waiting = [asyncio.create_task(scraper.sums(place, WANTED)) for place in slow]
        await until(lambda: sum(area.connections.values()) == 2)
        other = endpoint(await area.listen(response(b"waiting 7\n")), "other")
        assert (await scraper.sums(other, WANTED))["waiting"] == {(): 7}
        assert sum(area.connections.values()) == 2 + 1
        for task in waiting:
            task.cancel()


async def test_question_fails_when_its_namespaces_connections_stay_in_use() -> None:
    """It does not wait in a queue without an end."""
    scraper = Scraper(Bounds(within_s=60, queue_s=0.01, connections=1))
    async with stage() as area:
        places = [endpoint(await area.listen(silence)) for _ in range(2)]
        first = asyncio.create_task(scraper.sums(places[0], WANTED))
        await until(lambda: area.connections[places[0].port])
        with pytest.raises(NoValue, match="too many pods of namespace default are slow"):
            await scraper.sums(places[1], WANTED)
        first.cancel()
