"""Does for many events at once what would be done for each, in at most half of the daemon's time.

A user's programs may all end in one moment. To record an end and to serve the queue after it takes longer the
more jobs there are.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass


@dataclass(slots=True)
class EventBatch:
    """The events of one kind that are still to be done.

    Attributes:
        carry_out: Does all of them. It must not raise.
        spawn: Runs a coroutine beside everything else.
    """

    carry_out: Callable[[], None]
    spawn: Callable[[Coroutine[None, None, object]], object]
    _waiting: bool = False
    _busy: bool = False

    def on_event(self) -> None:
        """Do it soon, with all other events until then."""
        self._waiting = True
        if not self._busy:
            self._busy = True
            self.spawn(self._run())

    def finish(self) -> None:
        """Do now what is to be done."""
        if self._waiting:
            self._waiting = False
            self.carry_out()

    async def _run(self) -> None:
        try:
            while self._waiting:
                started_at = time.monotonic()
                self.finish()
                await asyncio.sleep(time.monotonic() - started_at)
        finally:
            self._busy = False
