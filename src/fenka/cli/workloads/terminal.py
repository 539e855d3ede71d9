"""Connects this terminal with a command in a container."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence

from fenka.cli import tables
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.pod_exec import STDERR, PodExec

_BLOCK = 65536


async def run_attached(api: Api, pod_path: str, container: str, command: Sequence[str]) -> int:
    """Run a command with this terminal's input and output. Return its exit code.

    Raises ApiError, ApiUnreachable.
    """
    terminal = sys.stdin.isatty()
    running = await PodExec.start(api, pod_path, container, command, tty=terminal)
    async with running:
        with _raw_terminal() if terminal else contextlib.nullcontext():
            tasks = [asyncio.create_task(_send_input(running))]
            tasks += [asyncio.create_task(_send_sizes(running))] if terminal else []
            try:
                async for channel, data in running.output():
                    tables.write_bytes(data, sys.stderr if channel == STDERR else sys.stdout)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return running.exit_code


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Pass all keys on, those that send signals too, while the block runs."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Keys that were typed in advance are kept.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _send_input(running: PodExec) -> None:
    """Send what is typed. A thread reads it, since files and terminals are read in different ways."""
    loop, blocks = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def read() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while data := os.read(descriptor, _BLOCK):
                loop.call_soon_threadsafe(blocks.put_nowait, data)
            loop.call_soon_threadsafe(blocks.put_nowait, b"")

    descriptor = sys.stdin.fileno()
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while data := await blocks.get():
            await running.send(data)
        await running.close_input()


async def _send_sizes(running: PodExec) -> None:
    """Send the size of the terminal now and whenever it changes."""
    changed = asyncio.Event()
    changed.set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, changed.set)
    with contextlib.suppress(ConnectionError):
        while await changed.wait():
            changed.clear()
            size = os.get_terminal_size(sys.stdin.fileno())
            await running.resize(size.columns, size.lines)
