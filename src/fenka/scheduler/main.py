"""`fenka scheduler`: the wiring, and the process's life."""

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from fenka.kubernetes.client import Api
from fenka.kubernetes.http_listener import MAX_READERS, HttpListener, listening_socket, serve_app
from fenka.scheduler.replica import Replica, Settings
from fenka.scheduler.server import KEEP_ALIVE_S, Access, Server


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to serve, and which cluster. read_port: for what changes nothing; None: not besides `port`."""

    address: str = "0.0.0.0"
    port: int = 12345
    read_port: int | None = None
    kubeconfig: Path | None = None


def url(address: str, port: int, scheme: str = "http") -> str:
    """Of a server at this IP address."""
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


async def serve(place: ServerOptions, settings: Settings, access: Access) -> None:
    """Until SIGTERM or SIGINT. Raises NoCluster, OSError if a port is taken."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    credentials = access.credentials
    async with await Api.connect(place.kubeconfig) as api, contextlib.AsyncExitStack() as stack:
        replica = Replica(api, settings)
        server = Server(replica, access)
        listener = HttpListener((lambda: credentials.server) if credentials else lambda: None)
        listening = listening_socket(place.address, place.port)
        await stack.enter_async_context(
            serve_app(server.app(), listening, listener, keep_alive_s=KEEP_ALIVE_S)
        )
        if place.read_port is not None:
            readers, listening = (
                HttpListener(most=MAX_READERS),
                listening_socket(place.address, place.read_port),
            )
            await stack.enter_async_context(serve_app(server.readable(), listening, readers))
        if credentials is not None:
            renewing = asyncio.create_task(credentials.run())
            stack.callback(renewing.cancel)
        await _until(stop, replica)


async def _until(stop: asyncio.Event, replica: Replica) -> None:
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
