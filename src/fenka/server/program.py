"""Options that programs share, how long programs run, and what identifies their processes."""

import asyncio
import contextlib
import logging
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from fenka.formats.printable import escape

Kubeconfig = Annotated[
    Path | None,
    Meta(
        title="FILE",
        description="default: $KUBECONFIG, then the pod's service account, then ~/.kube/config",
    ),
]
ReplicaName = Annotated[
    str, Meta(description="this replica's name; default: the host's", extra={"envvar": "POD_NAME"})
]
"""An option. By default it is the pod's name where the chart installs the program."""


LogLevel = Annotated[
    Literal["error", "warning", "info", "debug"],
    Meta(
        description="debug: also log each request and its answer",
        extra={"envvar": "FENKA_LOG_LEVEL"},
    ),
]


class _PrintableFormatter(logging.Formatter):
    """Escapes unprintable characters, line breaks of a message as well.

    A message may repeat what a tenant has written, or what another program says of it.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escape, super().formatException(ei).splitlines()))


def start_log(level: LogLevel, *, times: bool = True) -> None:
    """Log to standard error from now on. Libraries log from `info`, whatever the level."""
    form = "%(levelname)s %(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter(f"%(asctime)s {form}" if times else form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("fenka").setLevel(level.upper())


def identity(name: str = "") -> str:
    """Return what identifies this process, and no other, as the holder of a Lease.

    name: the replica's name; by default the host's. A new process must not mistake its predecessor's Lease
    for its own.
    """
    return f"{name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"


def stop_requests() -> asyncio.Event:
    """Return an event of the running loop that SIGTERM and SIGINT set from now on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def working_until(
    stop: asyncio.Event, *work: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Wait until a stop is requested while the work goes on; it is cancelled after the block.

    Raises what ends a part of the work: before the block if that happens before a stop is requested.
    """
    tasks = [asyncio.create_task(part) for part in work]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((*tasks, stopping), return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(tasks)
        yield
        _raise_failure(tasks)
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)


def end_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled before, for loops that survive failures.

    `asyncio.gather` raises the failure of one of its parts instead, if both happen at the same moment.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
