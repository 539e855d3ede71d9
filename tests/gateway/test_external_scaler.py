"""KEDA's questions to a gateway, asked by a real client of gRPC; and what others may do at that port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from fenka.gateway import external_scaler
from fenka.gateway import external_scaler_pb2 as api
from fenka.gateway.external_scaler import serve_scaler
from fenka.gateway.figures import SOME_LOAD, FiguresReader, GatewayFigures, LoadReading
from tests.waiting import until

BERT = api.ScaledObjectRef(
    name="bert-v1",
    namespace="team",
    metadata={"version": "v1", "target": "4", "scalerAddress": "x"},
)


@dataclass
class Figures:
    """The figures of a service's gateways."""

    reading: LoadReading = field(default_factory=LoadReading)
    reads: int = 0

    async def read(self) -> LoadReading:
        """Return them."""
        self.reads += 1
        return self.reading

    def report(
        self, in_flight: float, idle_s: float = 99.0, missing: dict[str, str] | None = None
    ) -> None:
        """Let one gateway report these requests of version v1."""
        figures = GatewayFigures({"v1": in_flight}, {"v1": 100}, {"v1": 1}, {"v1": idle_s}, 0)
        self.reading = LoadReading((figures,), missing or {})


@dataclass
class Keda:
    """A client with KEDA's names of methods and numbers of fields."""

    channel: grpc.aio.Channel

    async def call(self, method: str, request: Any, kind: Any) -> Any:
        """Call a method with one answer."""
        path = f"/externalscaler.ExternalScaler/{method}"
        call = self.channel.unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return await call(request, timeout=30)

    async def is_active(self) -> bool:
        """Ask whether the version has any load."""
        return bool((await self.call("IsActive", BERT, api.IsActiveResponse)).active)

    async def value(self) -> tuple[int, float]:
        """Return the load, as whole number and exactly."""
        request = api.GetMetricsRequest(scaled_object=BERT, name="requests")
        (value,) = (await self.call("GetMetrics", request, api.GetMetricsResponse)).values
        assert value.name == "requests"
        return value.value, value.precise_value

    def stream(self) -> Any:
        """Ask to be told whenever the version becomes active or idle."""
        return self.channel.unary_stream(
            "/externalscaler.ExternalScaler/StreamIsActive",
            request_serializer=api.ScaledObjectRef.SerializeToString,
            response_deserializer=api.IsActiveResponse.FromString,
        )(BERT)


@contextlib.asynccontextmanager
async def client(port: int) -> AsyncIterator[Keda]:
    """Connect to a gateway."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Keda(channel)


@contextlib.asynccontextmanager
async def scaler() -> AsyncIterator[tuple[Figures, Keda]]:
    """Serve a gateway's figures to KEDA."""
    figures = Figures()
    async with (
        serve_scaler("127.0.0.1:0", cast(FiguresReader, figures)) as port,
        client(port) as keda,
    ):
        yield figures, keda


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the code and the sentence of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


def test_messages_are_those_of_keda_on_the_wire() -> None:
    """Numbers and types of the fields, written out."""
    assert BERT.SerializeToString(deterministic=True) == (
        b"\n\x07bert-v1\x12\x04team"
        b"\x1a\x12\n\rscalerAddress\x12\x01x\x1a\x0b\n\x06target\x12\x014\x1a\r\n\x07version\x12\x02v1"
    )
    assert api.IsActiveResponse(active=True).SerializeToString() == b"\x08\x01"
    spec = api.MetricSpec(name="r", target=4, precise_target=4)
    assert api.GetMetricSpecResponse(specs=[spec]).SerializeToString() == (
        b"\n\x0e\n\x01r\x10\x04\x19\0\0\0\0\0\0\x10@"
    )
    value = api.MetricValue(name="r", value=1, precise_value=1.5)
    assert api.GetMetricsResponse(values=[value]).SerializeToString() == (
        b"\n\x0e\n\x01r\x10\x01\x19\0\0\0\0\0\0\xf8?"
    )
    request = api.GetMetricsRequest(scaled_object=api.ScaledObjectRef(name="x"), name="r")
    assert request.SerializeToString() == b"\n\x03\n\x01x\x12\x01r"


async def test_load_is_told_exactly() -> None:
    """As a whole number, too, for old releases of KEDA."""
    async with scaler() as (figures, keda):
        figures.report(7)
        assert await keda.value() == (7, 7.0)
        assert await keda.is_active()
        figures.report(0)
        assert await keda.value() == (0, 0.0)
        assert not await keda.is_active()
        figures.report(0, idle_s=3)
        assert await keda.value() == (0, SOME_LOAD)
        assert await keda.is_active()


async def test_target_is_that_of_the_scaled_object() -> None:
    """KEDA hands it over; what it cannot be is refused."""
    async with scaler() as (_, keda):
        (spec,) = (await keda.call("GetMetricSpec", BERT, api.GetMetricSpecResponse)).specs
        assert (spec.name, spec.target, spec.precise_target) == ("requests", 4, 4.0)
        for text in ("", "0", "-1", "1.5", "٣", "9" * 30, "many"):
            request = api.ScaledObjectRef(metadata={"target": text})
            call = keda.call("GetMetricSpec", request, api.GetMetricSpecResponse)
            assert await failure(call) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "metadata.target of the trigger must be from 1 to 1000000",
            )


async def test_value_is_an_error_when_a_gateway_does_not_answer() -> None:
    """Too low a value would end replicas in use. One that is active is told to be: that ends none."""
    async with scaler() as (figures, keda):
        figures.report(3, missing={"bert-gateway-b": "does not answer within 2 s"})
        assert await failure(keda.value()) == (
            grpc.StatusCode.UNAVAILABLE,
            "gateway bert-gateway-b does not answer within 2 s",
        )
        assert await keda.is_active()
        figures.report(0, missing={"bert-gateway-b": "does not answer within 2 s"})
        assert (await failure(keda.is_active()))[0] is grpc.StatusCode.UNAVAILABLE
        figures.reading = LoadReading()
        assert await failure(keda.value()) == (
            grpc.StatusCode.UNAVAILABLE,
            "no gateway knows the version yet",
        )


async def test_stream_tells_of_changes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing while figures are missing that could change the answer."""
    monkeypatch.setattr(external_scaler, "LOOK_S", 0.001)
    async with scaler() as (figures, keda):
        figures.report(0)
        stream = keda.stream()
        assert not (await stream.read()).active
        figures.report(2)
        assert (await stream.read()).active
        figures.report(0, missing={"b": "?"})
        told = asyncio.create_task(stream.read())
        reads = figures.reads
        await until(lambda: figures.reads > reads + 3)
        assert not told.done()
        figures.report(0)
        assert not (await told).active


async def test_streams_end_in_order_when_the_gateway_does() -> None:
    """After a broken stream KEDA waits longer each time."""
    figures = Figures()
    figures.report(1)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(
            serve_scaler("127.0.0.1:0", cast(FiguresReader, figures))
        )
        async with client(port) as keda:
            stream = keda.stream()
            assert (await stream.read()).active
            await stack.aclose()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK


# ---- hostile clients ----


async def test_client_has_a_bounded_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones are refused, until others end."""
    monkeypatch.setattr(external_scaler, "MAX_STREAMS_OF_CLIENT", 3)
    async with scaler() as (figures, keda):
        figures.report(1)
        streams = [keda.stream() for _ in range(3)]
        for stream in streams:
            assert (await stream.read()).active
        refused = keda.stream()
        assert await failure(refused.read()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too many streams",
        )
        assert await keda.is_active()
        streams[0].cancel()
        again: list[bool] = []

        async def read() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                again.append((await keda.stream().read()).active)

        while not again:
            await read()


async def test_long_messages_are_refused() -> None:
    """Nobody's KEDA sends any."""
    async with scaler() as (figures, keda):
        figures.report(1)
        long = api.ScaledObjectRef(metadata={"version": "v" * 100_000})
        call = keda.call("IsActive", long, api.IsActiveResponse)
        assert (await failure(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        longer_name = api.ScaledObjectRef(metadata={"version": "v1" + "x" * 70})
        call = keda.call("IsActive", longer_name, api.IsActiveResponse)
        assert (await failure(call))[0] is grpc.StatusCode.UNAVAILABLE
        assert await keda.is_active()


async def test_other_methods_and_bytes_that_are_no_message_are_refused() -> None:
    """The port stays usable."""
    async with scaler() as (figures, keda):
        figures.report(1)
        call = keda.call("StreamMetricSpec", BERT, api.GetMetricSpecResponse)
        assert (await failure(call))[0] is grpc.StatusCode.UNIMPLEMENTED
        raw: Any = keda.channel.unary_unary("/externalscaler.ExternalScaler/IsActive")
        assert (await failure(raw(b"\xff\xff\xff", timeout=30)))[0] is not grpc.StatusCode.OK
        assert await keda.is_active()


async def test_connections_are_bounded() -> None:
    """Idle ones beyond the limit are closed, so they take no descriptors from requests of the service."""
    figures = Figures()
    figures.report(1)
    async with serve_scaler("127.0.0.1:0", cast(FiguresReader, figures)) as port:
        opened = list[socket.socket]()
        try:
            for _ in range(300):
                opened.append(socket.create_connection(("127.0.0.1", port)))
                opened[-1].setblocking(False)
                await asyncio.sleep(0)

            def closed() -> bool:
                ended = 0
                for connection in opened:
                    with contextlib.suppress(BlockingIOError):
                        try:
                            ended += connection.recv(1, socket.MSG_PEEK) == b""
                        except ConnectionError:
                            ended += 1
                return ended >= 300 - 256

            await until(closed)
        finally:
            for connection in opened:
                connection.close()


async def test_port_in_use_is_an_error() -> None:
    """The gateway says so and ends."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen at {address} for KEDA"):
            async with serve_scaler(address, cast(FiguresReader, Figures())):
                pass
