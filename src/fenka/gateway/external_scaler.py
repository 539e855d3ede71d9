"""Serves the figures of a service's gateways to KEDA, as an external scaler: four methods of gRPC.

Any gateway answers for all. Callers are not authenticated: they get figures that `/metrics` shows, too, and
change nothing. Messages, streams and connections are bounded. A stream reports at once that a version without
replicas has requests. KEDA polls for the rest.

KEDA tries a broken stream again after a pause that grows to a minute, and after a stream that ends in order
after 2 s. So streams end in order when the gateway does.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from fenka.gateway import external_scaler_pb2 as api
from fenka.gateway.figures import FiguresReader

METRIC = "requests"
"""KEDA calls the metric `s0-requests`."""

LOOK_S = 1.0
"""Between two looks of a stream."""
RECENT_S = 10.0
"""A version that got a request within this time is active: KEDA polls every 5 s."""

MAX_TARGET = 1_000_000
MAX_STREAMS, MAX_CALLS = 64, 128
"""Streams, and calls with them, at one time. A service has one stream per version."""
MAX_STREAMS_OF_CLIENT = 16
"""Streams of one address: no client uses up those of the others."""
_MAX_NAME = 63
_END_S = 1.0
"""For calls that are being answered when the gateway ends."""

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.max_allowed_incoming_connections", 256),
    ("grpc.max_connection_idle_ms", 300_000),
    # A client that has gone without a word is noticed, and its streams end.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.so_reuseport", 0),
]

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class ExternalScaler:
    """The four methods."""

    reader: FiguresReader
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _streams: Counter[str] = field(default_factory=Counter)

    async def is_active(self, request: api.ScaledObjectRef, context: Any) -> api.IsActiveResponse:
        """Tell whether a version has any load."""
        active = await self._active(_version(request))
        if active is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, await self._why())
        return api.IsActiveResponse(active=active)

    async def stream_is_active(
        self, request: api.ScaledObjectRef, context: Any
    ) -> AsyncIterator[api.IsActiveResponse]:
        """Tell whether a version has any load, now and whenever that changes."""
        version, client, sent = _version(request), _address(context.peer()), None
        if self._streams.total() >= MAX_STREAMS or self._streams[client] >= MAX_STREAMS_OF_CLIENT:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams")
        self._streams[client] += 1
        try:
            while not self.ended.is_set():
                active = await self._active(version)
                if active is not None and active != sent:
                    yield api.IsActiveResponse(active=active)
                    sent = active
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self.ended.wait()
        finally:
            self._streams[client] -= 1
            self._streams += Counter()

    async def metric_spec(
        self, request: api.ScaledObjectRef, context: Any
    ) -> api.GetMetricSpecResponse:
        """Return the load that one replica is to have, as the ScaledObject says itself."""
        text = request.metadata["target"]
        target = int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0
        if not 1 <= target <= MAX_TARGET:
            sentence = f"metadata.target of the trigger must be from 1 to {MAX_TARGET}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        spec = api.MetricSpec(name=METRIC, target=target, precise_target=target)
        return api.GetMetricSpecResponse(specs=[spec])

    async def metrics(self, request: api.GetMetricsRequest, context: Any) -> api.GetMetricsResponse:
        """Return a version's load. It is exact or an error: one too low would end replicas in use."""
        version, reading = _version(request.scaled_object), await self.reader.read()
        if not reading.complete(version):
            await context.abort(grpc.StatusCode.UNAVAILABLE, await self._why())
        load = reading.load(version, RECENT_S)
        # KEDA reads the other field if this one is 0.
        value = api.MetricValue(name=METRIC, value=int(load), precise_value=load)
        return api.GetMetricsResponse(values=[value])

    async def _active(self, version: str) -> bool | None:
        """Return whether a version has any load; None if that is unknown."""
        reading = await self.reader.read()
        if reading.load(version, RECENT_S) > 0:
            return True
        return False if reading.complete(version) else None

    async def _why(self) -> str:
        missing = (await self.reader.read()).missing
        pod, reason = next(iter(missing.items()), ("", ""))
        return f"gateway {pod} {reason}" if pod else "no gateway knows the version yet"

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service as gRPC has it."""

        def unary(method: Any, kind: type[Message]) -> "grpc.RpcMethodHandler[Any, Any]":
            return grpc.unary_unary_rpc_method_handler(method, kind.FromString, _serialized)

        return grpc.method_handlers_generic_handler(
            "externalscaler.ExternalScaler",
            {
                "IsActive": unary(self.is_active, api.ScaledObjectRef),
                "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                    self.stream_is_active, api.ScaledObjectRef.FromString, _serialized
                ),
                "GetMetricSpec": unary(self.metric_spec, api.ScaledObjectRef),
                "GetMetrics": unary(self.metrics, api.GetMetricsRequest),
            },
        )


@contextlib.asynccontextmanager
async def serve_scaler(address: str, reader: FiguresReader) -> AsyncIterator[int]:
    """Serve at an address while the block runs. Return the port. Raises OSError if it is in use."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    scaler = ExternalScaler(reader)
    server.add_generic_rpc_handlers((scaler.handlers(),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        raise OSError(f"cannot listen at {address} for KEDA") from None
    await server.start()
    try:
        yield port
    finally:
        scaler.ended.set()
        await server.stop(_END_S)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _version(request: api.ScaledObjectRef) -> str:
    return request.metadata["version"][: _MAX_NAME + 1]


def _address(peer: str) -> str:
    """Return the address of `ipv4:10.0.0.1:34567`."""
    return peer.rpartition(":")[0]
