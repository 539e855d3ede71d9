"""An OpenTelemetry collector over HTTP that keeps the spans it gets."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class FakeCollector:
    """Attributes: url: where it is. spans: all that it got, with their program's names."""

    url: str = ""
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        """Return the spans of this name."""
        return [span for _, span in self.spans if span.name == name]

    async def _export(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.read())
        for part in message.resource_spans:
            program = attributes(part.resource)["service.name"]
            for scope in part.scope_spans:
                self.spans += [(program, span) for span in scope.spans]
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")


def attributes(of: object) -> dict[str, str]:
    """Return the attributes of a span or a resource as texts."""
    return {
        item.key: item.value.string_value or str(item.value.int_value)
        for item in of.attributes  # type: ignore[attr-defined]
    }


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[FakeCollector]:
    """Yield a collector that listens while the block runs."""
    fake = FakeCollector()
    app = web.Application()
    app.router.add_post("/v1/traces", fake._export)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()
