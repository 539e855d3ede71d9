"""`fenka scheduler`: serves a replica until the process is told to stop."""

import asyncio
import contextlib
import socket
import uuid
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fenka.kubernetes.client import Api
from fenka.kubernetes.http_listener import MAX_READERS, HttpListener, listening_socket, serve_app
from fenka.kubernetes.program_lifetime import stop_requests, working_until
from fenka.scheduler.credentials import Credentials
from fenka.scheduler.gc_pauses import short_gc_pauses
from fenka.scheduler.malloc import returned_memory
from fenka.scheduler.metrics import Metrics
from fenka.scheduler.replica import Replica, Settings
from fenka.scheduler.request_bodies import MIB, BodyLimits
from fenka.scheduler.server import KEEP_ALIVE_S, Access, Server


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
    kubeconfig: Annotated[
        Path | None,
        Meta(
            description="default: the pod's service account, then $KUBECONFIG, then ~/.kube/config"
        ),
    ] = None

    def access(self) -> Access:
        """Return who may do what. Raises InvalidCredentials."""
        credentials = Credentials(self.tls) if self.tls else None
        bounds = BodyLimits(self.largest_body * MIB, self.bodies * MIB)
        return Access(bounds, self.inspect, self.metrics, credentials)


def url(address: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a server at this IP address."""
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def http_server(replica: Replica, access: Access) -> Server:
    """Return the HTTP server of a replica."""
    credentials, leadership = access.credentials, replica.leadership
    metrics = Metrics(
        replica.cluster,
        replica.informers,
        replica.queue,
        replica.binder.outcomes,
        lambda: leadership.leading,
        (lambda: credentials.expires_at) if credentials else dict,
    )
    parts = replica.cluster, replica.queue, replica.extender, replica.binder
    pods = replica.informers.pods
    return Server(*parts, leadership, metrics, access, lambda: list(pods.objects.values()))


async def serve(options: ServerOptions, settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ApiUnreachable, and OSError if a port is in use."""
    access = options.access()
    # Never the same twice: a new process must not mistake its predecessor's Lease for its own.
    identity = f"{settings.name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    scheme = "https" if access.credentials else "http"
    address = url(settings.advertise, options.port, scheme) if settings.advertise else ""
    stop = stop_requests()
    credentials = access.credentials
    async with await Api.connect(options.kubeconfig) as api, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(returned_memory())
        replica = Replica(api, settings, identity, address)
        stack.enter_context(short_gc_pauses(lambda: not replica.informers.synced))
        server = http_server(replica, access)
        listener = HttpListener((lambda: credentials.server) if credentials else lambda: None)
        listening = listening_socket(options.address, options.port)
        await stack.enter_async_context(
            serve_app(server.app(), listening, listener, keep_alive_s=KEEP_ALIVE_S)
        )
        if options.read_port is not None:
            readers = HttpListener(max_connections=MAX_READERS)
            listening = listening_socket(options.address, options.read_port)
            await stack.enter_async_context(serve_app(server.readable(), listening, readers))
        if credentials is not None:
            renewing = asyncio.create_task(credentials.run())
            stack.callback(renewing.cancel)
        async with working_until(stop, replica.run()):
            await replica.stop()
