"""`fenka scheduler`: serves a replica until the process is told to stop."""

import asyncio
import contextlib
import ctypes
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fenka.cluster.objects import Pod, seconds
from fenka.core.units import MIB
from fenka.kubernetes.api_client import Api
from fenka.scheduler.leader_proxy import Credentials
from fenka.scheduler.metrics import SchedulerMetrics
from fenka.scheduler.replica import SchedulerReplica, Settings
from fenka.scheduler.server import KEEP_ALIVE_S, Access, BodyLimits, Server
from fenka.server.listener import MAX_READERS, HttpListener, listening_socket, serve_app
from fenka.server.pod_spans import ROOT, PodSpans, Traces, pod_attributes, sent_to
from fenka.server.program import Kubeconfig, LogLevel, identity, stop_requests, working_until

OLDEST_GENERATION = 2
YOUNG = 50_000
"""New objects between two collections of the youngest. An answer of 5,000 nodes has some 10,000, none of
them in a cycle; Python's own 700 would visit them a dozen times."""
COMPLETE_EVERY = 1000
"""One of this many full collections visits everything: once a day or so."""


@contextlib.contextmanager
def short_gc_pauses(
    is_starting: Callable[[], bool] = lambda: False, complete_every: int = COMPLETE_EVERY
) -> Iterator[None]:
    """Freeze what survives full collections while the block runs.

    A full collection visits every object that may be in a cycle: with 5,000 nodes and 80,000 pods for a
    second. Nearly all of them live for hours, and are freed by their reference counts. So what survives a
    full collection is frozen, and the next one visits only what is new.

    A cycle that becomes garbage after it was frozen, such as a closed connection, is freed by the next full
    collection that visits everything.

    is_starting: whether all that is made now lasts, so that it is frozen by the first collection of any kind.
    """
    number = count(1)

    def on_collection(phase: str, info: dict[str, Any]) -> None:
        oldest = info["generation"] == OLDEST_GENERATION
        if phase == "stop":
            if oldest or is_starting():
                gc.freeze()
        elif oldest and not next(number) % complete_every:
            gc.unfreeze()

    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG, *thresholds[1:])
    gc.callbacks.append(on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(on_collection)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3)."""
RETURNED_BYTES = 4 << 20
"""Blocks of at least this size are mapped on their own, and so much is kept free at the end of the heap."""
TRIM_S = 1.0
"""Between looks for free pages inside the heap. A look that finds none takes 0.02 ms, the longest 4 ms."""


@contextlib.asynccontextmanager
async def returned_memory(
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[None]:
    """Return freed memory while the block runs. Other C libraries than glibc are left as they are.

    With 5,000 nodes the first pass over the queue frees tens of MiB of small arrays, and later ones replace
    arrays of several MiB. By default glibc would keep all of that.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_TRIM_THRESHOLD, RETURNED_BYTES)
    library.mallopt(_MMAP_THRESHOLD, RETURNED_BYTES)
    trimming = asyncio.create_task(_trim(library, sleep))
    try:
        yield
    finally:
        trimming.cancel()


async def _trim(library: ctypes.CDLL, sleep: Callable[[float], Awaitable[None]]) -> None:
    while True:
        await sleep(TRIM_S)
        library.malloc_trim(0)


class ServerOptions(msgspec.Struct, frozen=True):
    """Where to serve which cluster, and to whom: options of `fenka scheduler`."""

    address: Annotated[str, Meta(description="address to listen on")] = "0.0.0.0"
    port: Annotated[int, Meta(description="port to listen on", extra={"envvar": "PORT"})] = 12345
    tls: Annotated[
        Path | None,
        Meta(
            title="DIRECTORY",
            description="serve HTTPS with these certificates, to callers with one of the same authority",
        ),
    ] = None
    read_port: Annotated[
        int | None,
        Meta(title="PORT", description="serve read-only requests over HTTP to everybody"),
    ] = None
    inspect: Annotated[bool, Meta(description="allocations can be read without a certificate")] = (
        True
    )
    metrics: Annotated[bool, Meta(description="metrics can be read without a certificate")] = True
    largest_body: Annotated[int, Meta(title="MIB", description="limit of one request")] = 8
    bodies: Annotated[int, Meta(title="MIB", description="limit of concurrent requests")] = 64
    kubeconfig: Kubeconfig = None
    traces: Traces = ""
    log_level: LogLevel = "info"

    def access(self) -> Access:
        """Return who may do what. Raises InvalidCredentials."""
        credentials = Credentials(self.tls) if self.tls else None
        bounds = BodyLimits(self.largest_body * MIB, self.bodies * MIB)
        return Access(bounds, self.inspect, self.metrics, credentials)


def url(address: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a server at this IP address."""
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def http_server(replica: SchedulerReplica, access: Access, spans: PodSpans | None = None) -> Server:
    """Return the HTTP server of a replica. spans: gets spans of pods; None: nobody does."""
    credentials, leadership = access.credentials, replica.leadership
    metrics = SchedulerMetrics(
        replica.cluster,
        replica.informers,
        replica.queue,
        replica.binder.outcomes,
        lambda: leadership.leading,
        (lambda: credentials.expires_at) if credentials else dict,
    )

    def on_bound(pod: Pod) -> None:
        metrics.observe_bound(pod)
        if spans is not None:
            meta, now = pod.metadata, time.time()
            created_ns = int((seconds(meta.creation_timestamp) or now) * 1e9)
            spans.add(meta.uid, ROOT, created_ns, pod_attributes(meta.namespace, meta.name))

    replica.binder.on_bound = on_bound
    parts = replica.cluster, replica.queue, replica.extender, replica.binder
    pods = replica.informers.pods
    groups = replica.informers.pod_groups
    return Server(
        *(*parts, leadership, metrics, access),
        lambda: list(pods.objects.values()),
        spans,
        lambda: groups.by_name,
    )


async def serve(options: ServerOptions, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ApiUnreachable, InvalidTraces, OSError if a port is in use."""
    access = options.access()
    scheme = "https" if access.credentials else "http"
    address = url(settings.advertise, options.port, scheme) if settings.advertise else ""
    stop = stop_requests()
    credentials = access.credentials
    async with await Api.connect(options.kubeconfig) as api, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(returned_memory())
        replica = SchedulerReplica(api, settings, identity(settings.name), address)
        stack.enter_context(short_gc_pauses(lambda: not replica.informers.synced))
        spans = await stack.enter_async_context(sent_to(options.traces, "fenka-scheduler"))
        server = http_server(replica, access, spans)
        listener = HttpListener((lambda: credentials.server) if credentials else lambda: None)
        listening = listening_socket(options.address, options.port)
        await stack.enter_async_context(
            serve_app(server.app(), listening, listener, keep_alive_s=KEEP_ALIVE_S)
        )
        if options.read_port is not None:
            readers = HttpListener(max_connections=MAX_READERS)
            listening = listening_socket(options.address, options.read_port)
            await stack.enter_async_context(serve_app(server.readable(), listening, readers))
        renewing = (credentials.run(),) if credentials else ()
        async with working_until(stop, replica.run(), *renewing):
            await replica.stop()
