"""The one way in which tests run coroutines: `async def test_…` runs here, on one event loop."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any

TEST_S = 110.0
"""Seconds that one test may take; less than pytest's limit, so that the event loop stays usable."""

_RUNNER = asyncio.Runner()
"""One event loop for all tests, since grpc.aio's poller does not work reliably on a second one."""


async def _alone(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, then cancel the tasks that it has left behind."""
    try:
        async with asyncio.timeout(TEST_S):
            return await coroutine
    finally:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def synchronous(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a function that runs the coroutine of this one to its end."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return _RUNNER.run(_alone(test(*args, **kwargs)))
        except BaseException:
            _abandon()
            raise

    return run


def _abandon() -> None:
    """Cancel what runs on if a signal has ended a test, so that it does not break the next one."""
    loop = _RUNNER.get_loop()
    if rest := asyncio.all_tasks(loop):
        for task in rest:
            task.cancel()
        # One of them may cancel this, too.
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(asyncio.wait(rest, timeout=1))
