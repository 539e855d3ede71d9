"""`fenka scheduler`: the wiring, and the process's life."""

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from fenka.kubernetes.client import Api
from fenka.scheduler.replica import Replica, Settings
from fenka.scheduler.server import KEEP_ALIVE_S, Server


@dataclass(frozen=True, slots=True)
class Place:
    """Where to serve, and which cluster."""

    address: str = "0.0.0.0"
    port: int = 12345
    kubeconfig: Path | None = None


def url(address: str, port: int) -> str:
    """Of a server at this IP address."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


async def serve(place: Place, settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises NoCluster, OSError if the port is taken."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with await Api.connect(place.kubeconfig) as api:
        replica = Replica(api, settings)
        runner = web.AppRunner(
            Server(replica).app(),
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=1,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, place.address, place.port).start()
            await _until(stop, replica)
        finally:
            await runner.cleanup()


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
