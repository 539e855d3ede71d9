"""Spans of a pod's way for an OpenTelemetry collector: filter, bind, lease and start. Off by default.

All spans of a pod are one trace, and its ID is the pod's UID. So the scheduler and the nodes need not tell
each other anything, and whoever knows the pod finds its trace. The libraries are imported only when spans
are sent.
"""

import asyncio
import hashlib
import importlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from fenka import __version__
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.installation import how_to_add_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Traces = Annotated[
    str,
    Meta(
        title="URL",
        description="OpenTelemetry collector of spans (OTLP over HTTP), as http://collector:4318",
        extra={"envvar": "FENKA_TRACES"},
    ),
]
"""An option; empty: nothing is sent."""

ROOT = "pod"
"""The span from a pod's creation to its binding, which is the parent of the others."""

CLOSE_S = 3.0
"""For the last spans, when a program ends."""

MAX_SENTENCE = 500
"""Characters of a reason."""


class InvalidTraces(FenkaError):
    """Spans cannot be sent with these options."""

    exit_code = INVALID_INPUT


def collector(url: str) -> tuple[str, str, int]:
    """Return the scheme, the host and the port of a collector's URL. Raises InvalidTraces."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 4318)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.query:
        raise InvalidTraces(
            f"invalid --traces {url[:80]!r}: expected a collector's URL, as http://collector:4318"
        )
    return parts.scheme, parts.hostname, port


def trace_id(uid: str) -> int:
    """Return the ID of a pod's trace: its UID, without dashes in viewers."""
    try:
        return uuid.UUID(uid).int or 1
    except ValueError:
        # Fakes and virtual pods have other UIDs.
        return _digest(uid, 16)


def root_id(uid: str) -> int:
    """Return the ID of a pod's first span, which every program knows."""
    return _digest(f"{ROOT} {uid}", 8)


def _digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1


def pod_attributes(namespace: str, name: str) -> dict[str, str | int]:
    """Return what a span says of its pod, by OpenTelemetry's names."""
    return {"k8s.namespace.name": namespace, "k8s.pod.name": name}


class PodSpans:
    """Sends spans of pods in a thread of its own. A collector that does not answer costs spans only."""

    def __init__(self, url: str, program: str) -> None:
        """Import the libraries.

        Args:
            url: Of the collector.
            program: The name under which it shows the spans.

        Raises:
            InvalidTraces: The libraries are not there, or the URL is none.
        """
        collector(url)
        try:
            api = importlib.import_module("opentelemetry.trace")
            context = importlib.import_module("opentelemetry.context")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError:
            raise InvalidTraces(
                f"--traces needs OpenTelemetry's libraries: {how_to_add_extra('traces')}"
            ) from None
        self._api, self._context = api, context
        self._ids = _Ids()
        resource = resources.Resource.create(
            {"service.name": program, "service.version": __version__}
        )
        self._provider: TracerProvider = sdk.TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._exporter = otlp.OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(export.BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("fenka")

    def add(
        self,
        uid: str,
        name: str,
        begun_ns: int,
        attributes: Mapping[str, str | int],
        error: str = "",
    ) -> None:
        """Send a span that ends now.

        Args:
            uid: The pod's.
            name: ROOT, or what was done for the pod.
            begun_ns: When that began, in nanoseconds since 1970.
            attributes: What there is to know of it.
            error: Why it failed, in a sentence; empty if it did not.
        """
        trace = trace_id(uid)
        if name == ROOT:
            self._ids.trace, self._ids.span = trace, root_id(uid)
            parent = self._context.Context()
        else:
            flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
            above = self._api.SpanContext(trace, root_id(uid), is_remote=True, trace_flags=flags)
            parent = self._api.set_span_in_context(self._api.NonRecordingSpan(above))
        known = {"k8s.pod.uid": uid, **attributes}
        span = self._tracer.start_span(name, parent, start_time=begun_ns, attributes=known)
        if error:
            code = self._api.StatusCode.ERROR
            span.set_status(self._api.Status(code, error[:MAX_SENTENCE]))
        span.end(max(time.time_ns(), begun_ns))

    def close(self) -> None:
        """Send what is left, for which a collector has CLOSE_S."""
        # Otherwise it is tried again for half a minute.
        limit = threading.Timer(CLOSE_S, self._exporter.shutdown)
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()


class _Ids:
    """Makes the IDs of spans: chosen ones for the next span, otherwise random ones."""

    def __init__(self) -> None:
        self.trace = self.span = 0

    def generate_span_id(self) -> int:
        """Return the ID of the next span."""
        chosen, self.span = self.span, 0
        return chosen or uuid.uuid4().int >> 64

    def generate_trace_id(self) -> int:
        """Return the ID of the next trace."""
        chosen, self.trace = self.trace, 0
        return chosen or uuid.uuid4().int

    def is_trace_id_random(self) -> bool:
        """Return that the ID of a trace says more than a random number."""
        return False


@asynccontextmanager
async def sent_to(url: str, program: str) -> AsyncIterator[PodSpans | None]:
    """Yield what sends spans while the block runs; None without a URL. Raises InvalidTraces."""
    if not url:
        yield None
        return
    spans = PodSpans(url, program)
    try:
        yield spans
    finally:
        await asyncio.to_thread(spans.close)
