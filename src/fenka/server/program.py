"""How long fenka's own programs run: until they are asked to stop, or their work ends."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine


def stop_requests() -> asyncio.Event:
    """Return an event of the running loop that SIGTERM and SIGINT set from now on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def working_until(
    stop: asyncio.Event, work: Coroutine[None, None, None]
) -> AsyncIterator[None]:
    """Wait until a stop is requested while work goes on; it is cancelled after the block.

    Raises what ends the work before.
    """
    running = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield
    finally:
        for task in (running, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
