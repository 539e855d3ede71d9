"""`fenka scheduler`: serves a replica until the process is told to stop."""

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from fenka.kubernetes.client import Api
from fenka.kubernetes.http_listener import MAX_READERS, HttpListener, listening_socket, serve_app
from fenka.scheduler.gc_pauses import short_gc_pauses
from fenka.scheduler.metrics import Metrics
from fenka.scheduler.replica import Replica, Settings
from fenka.scheduler.server import KEEP_ALIVE_S, Access, Server


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to serve, and which cluster.

    Attributes:
        address: the IP address to listen on.
        port: the port for kube-scheduler.
        read_port: another port, for what changes nothing; None for none.
        kubeconfig: the cluster; None for the pod's service account.
    """

    address: str = "0.0.0.0"
    port: int = 12345
    read_port: int | None = None
    kubeconfig: Path | None = None


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
    return Server(replica.cluster, replica.extender, replica.binder, leadership, metrics, access)


async def serve(options: ServerOptions, settings: Settings, access: Access) -> None:
    """Serve until SIGTERM or SIGINT. Raises ApiUnreachable, and OSError if a port is in use."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    credentials = access.credentials
    async with await Api.connect(options.kubeconfig) as api, contextlib.AsyncExitStack() as stack:
        stack.enter_context(short_gc_pauses())
        replica = Replica(api, settings)
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
        await _run_until(stop, replica)


async def _run_until(stop: asyncio.Event, replica: Replica) -> None:
    running = asyncio.create_task(replica.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        await replica.stop()
    finally:
        for task in (running, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
