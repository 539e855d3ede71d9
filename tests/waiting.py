"""How tests wait for what other processes and tasks do."""

import asyncio
import time
from collections.abc import Awaitable, Callable

WAIT_S = 90.0
"""The limit of each wait, in seconds.

It costs a wait that succeeds nothing, so it is generous enough for a machine that is busy with other work.
It is less than pytest's limit of 120 s per test, so that a failed test names the wait.
"""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"the condition does not hold after {WAIT_S:.0f} s"
        time.sleep(0.005)


async def until(condition: Callable[[], object]) -> None:
    """Give the event loop turns until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Ask until a condition holds that is asked of another process."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(0.01)
