"""Figures of a service's gateways: how they are read, within which bounds, and the load that they mean."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fenka.gateway.endpoints import GatewayPeer
from fenka.gateway.figures import (
    MAX_BODY_BYTES,
    MAX_LINE_BYTES,
    MAX_SAMPLES,
    SOME_LOAD,
    FiguresReader,
    GatewayFigures,
    InvalidFigures,
    LoadReading,
    parse_figures,
    requests_of,
)
from tests.gateway.test_metrics import FakeEnvoy, metrics

TEXT = """
# TYPE fenka_gateway_requests_waiting gauge
fenka_gateway_requests_waiting 2.0
fenka_gateway_waiting_bytes 17.0
fenka_gateway_requests_in_flight{version="v1"} 3.0
fenka_gateway_version_weight{version="v1"} 90.0
fenka_gateway_version_weight{version="v2"} 10.0
fenka_gateway_version_idle_seconds{version="v1"} 0.5
fenka_gateway_replicas{version="v1",state="ready"} 1.0
fenka_gateway_replicas{version="v1",state="terminating"} 4.0
fenka_gateway_responses_total{version="v1",status="200"} 7.0
"""
FIGURES = GatewayFigures({"v1": 3}, {"v1": 90, "v2": 10}, {"v1": 1}, {"v1": 0.5}, 2)


def test_figures_are_those_of_the_metrics() -> None:
    """Other metrics are left out."""
    assert parse_figures(TEXT.encode()) == FIGURES


async def test_gateway_shows_the_metrics_that_are_read() -> None:
    """Its own, of a table with two versions, of which one has a replica."""
    made = metrics(FakeEnvoy(), [0.0])
    await made.refresh()
    read = parse_figures(b"".join(made.text()))
    assert read.weights == {"v1": 90, "v2": 10}
    assert read.ready == {"v1": 1}
    assert read.in_flight.keys() == {"v1", "v2"}
    assert read.idle_s == {"v1": 0, "v2": 0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no gateway"),
        ("queue 5\n", "is no gateway"),
        ("fenka_gateway_requests_waiting NaN\n", "has nan as"),
        ("fenka_gateway_requests_waiting -1\n", "has -1 as"),
        ("fenka_gateway_requests_waiting 1e300\n", "has 1e+300 as"),
        ("fenka_gateway_requests_waiting many\n", "not Prometheus' text format"),
        ('fenka_gateway_version_weight{color="v1"} 1\n', "not Prometheus' text format"),
        ('fenka_gateway_requests_waiting 1\nfenka_gateway_replicas{version="v1\n', "not Prom"),
        ('fenka_gateway_version_weight{version="v1"} 1\n' * (MAX_SAMPLES + 1), "more metrics"),
        (f'fenka_gateway_version_weight{{version="{"v" * MAX_LINE_BYTES}"}} 1\n', "more metrics"),
    ],
)
def test_answer_is_refused_when_it_is_no_gateways(text: str, reason: str) -> None:
    """Nothing of it is used."""
    with pytest.raises(InvalidFigures, match=reason.replace("+", r"\+")):
        parse_figures(text.encode())


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from([line.encode() for line in TEXT.splitlines()]),
            st.text('{}"\\,= \t#eNaI+-.0123456789version', max_size=40).map(
                lambda text: f"fenka_gateway_replicas{text}".encode()
            ),
            st.text('{}"\\,= \tabc', max_size=40).map(
                lambda text: f"fenka_gateway_requests_waiting {text}".encode()
            ),
        )
    )
)
def test_no_answer_raises_anything_else(lines: list[bytes]) -> None:
    """A gateway must survive whatever another one says."""
    with contextlib.suppress(InvalidFigures):
        parse_figures(b"\n".join(lines))


def test_load_is_requests_and_the_share_of_those_that_wait() -> None:
    """Summed over all gateways; the share is by weight."""
    assert requests_of("v1", [FIGURES, FIGURES], 1.0) == pytest.approx(6 + 4 * 0.9)
    assert requests_of("v2", [FIGURES, FIGURES], 1.0) == pytest.approx(4 * 0.1)
    assert requests_of("v3", [FIGURES], 1.0) == 0
    assert requests_of("v1", [], 1.0) == 0


def test_waiting_request_starts_a_replica_of_each_version_when_none_serves() -> None:
    """The share of a small weight, too."""
    figures = GatewayFigures({"v1": 0, "v2": 0}, {"v1": 99, "v2": 1}, {}, {}, 1)
    assert [requests_of(version, [figures], 1.0) for version in ("v1", "v2")] == [1, 1]


@pytest.mark.parametrize(
    ("ready", "idle_s", "load"), [(1, 0.9, SOME_LOAD), (1, 1.1, 0), (0, 0.9, 0)]
)
def test_version_in_use_has_a_load_between_its_requests(
    ready: float, idle_s: float, load: float
) -> None:
    """Short requests are not seen by one who looks now and then. Without a replica nobody used it."""
    figures = GatewayFigures({"v1": 0}, {"v1": 1}, {"v1": ready}, {"v1": idle_s}, 0)
    assert requests_of("v1", [figures], 1.0) == load


def test_load_is_exact_when_every_gateway_has_answered_and_knows_the_version() -> None:
    """Otherwise it is a lower bound."""
    assert LoadReading((FIGURES,)).complete("v1")
    assert not LoadReading((FIGURES,)).complete("v3")
    assert not LoadReading((FIGURES,), {"b": "does not answer"}).complete("v1")
    assert not LoadReading().complete("v1")


# ---- over HTTP ----

Answer = Callable[[web.Request], AsyncIterator[bytes]]


@contextlib.asynccontextmanager
async def gateway_answering(handler: object) -> AsyncIterator[int]:
    """Serve `/metrics` by a handler. Yield the port."""
    app = web.Application()
    app.router.add_get("/metrics", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def reading_of(port: int, *peers: GatewayPeer, within_s: float = 60.0) -> LoadReading:
    """Read once."""
    async with FiguresReader(lambda: peers, port, within_s) as reader:
        return await reader.read()


PEER = GatewayPeer("a", "127.0.0.1", True)


async def well(_: web.Request) -> web.Response:
    """Answer as a gateway does."""
    return web.Response(text=TEXT)


async def test_gateways_are_read_and_failures_named() -> None:
    """By the name of the pod."""
    async with gateway_answering(well) as port:
        other = GatewayPeer("b", "127.0.0.9", True)
        assert await reading_of(port, PEER) == LoadReading((FIGURES,))
        reading = await reading_of(port, PEER, other)
        assert reading.gateways == (FIGURES,)
        assert reading.missing == {"b": "accepts no connection"}


async def test_gateway_has_no_requests_when_it_is_not_ready_and_nothing_listens() -> None:
    """It starts, or has ended. A ready one has failed."""
    async with gateway_answering(well) as port:
        pass
    assert await reading_of(port, GatewayPeer("a", "127.0.0.1", False)) == LoadReading()
    assert (await reading_of(port, PEER)).missing == {"a": "accepts no connection"}


async def endless(request: web.Request) -> web.StreamResponse:
    """Answer without an end."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await answer.write(b"x" * 65536)
    return answer


async def silent(_: web.Request) -> web.Response:
    """Answer never."""
    await asyncio.Event().wait()
    raise AssertionError


async def elsewhere(_: web.Request) -> web.Response:
    """Lead to another address."""
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/metrics"})


async def packed(_: web.Request) -> web.Response:
    """Answer with a small body that would become a large one."""
    answer = web.Response(text=TEXT * 100)
    answer.enable_compression(web.ContentCoding.gzip)
    return answer


@pytest.mark.parametrize(
    ("handler", "within_s", "reason"),
    [
        (endless, 60.0, f"answers more than {MAX_BODY_BYTES >> 20} MiB"),
        (silent, 0.05, "does not answer within 0.05 s"),
        (elsewhere, 60.0, "answers /metrics with 302, expected 200"),
        (packed, 60.0, "is no gateway: it does not have fenka_gateway_requests_waiting"),
    ],
)
async def test_gateway_is_missing_when_its_answer_is_hostile(
    handler: object, within_s: float, reason: str
) -> None:
    """Within bounds of bytes and time; redirects are not followed, and nothing is unpacked."""
    async with gateway_answering(handler) as port:
        reading = await reading_of(port, PEER, within_s=within_s)
        assert reading == LoadReading((), {"a": reason})


async def test_readers_share_one_reading() -> None:
    """However many clients ask, a gateway is asked once in a while."""
    asked, now = 0, 0.0

    async def count(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=TEXT)

    async with (
        gateway_answering(count) as port,
        FiguresReader(lambda: [PEER], port, clock=lambda: now) as reader,
    ):
        await asyncio.gather(*(reader.read() for _ in range(20)))
        await reader.read()
        assert asked == 1
        now = 1.0
        await reader.read()
        assert asked == 2
