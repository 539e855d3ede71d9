"""XIDs, the driver's error numbers: what they mean, and a loop that receives them."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

from fenka.hardware.nvml import DriverLost, Xid, XidListener

APPLICATION_XIDS: Mapping[int, str] = {
    13: "a program's kernel failed",
    31: "a program accessed memory that is not its own",
    43: "a program's channel was stopped",
    45: "channels were cleaned up after an earlier error",
    68: "a program's video decoding failed",
    69: "a program's kernel was refused",
    94: "a memory error was contained: only the program that hit it ends",
    109: "switching between programs took too long",
}
"""Errors of a program, or that concern only one program: the card is not affected."""

INFO_XIDS: Mapping[int, str] = {
    63: "a row of memory will be replaced at the next reset",
    92: "many corrected memory errors",
}
"""Logged; the card stays usable."""

LOST_XID = 79


XidKind = Literal["card", "program", "note"]
"""The meaning of an XID: the card is unusable, one program has failed, or nothing of consequence."""


def xid_kind(xid: int) -> XidKind:
    """Return what an XID says. Every XID that is not known to be harmless says that the card is unusable."""
    if xid in APPLICATION_XIDS:
        return "program"
    return "note" if xid in INFO_XIDS else "card"


def is_fatal_xid(xid: int) -> bool:
    """Return whether a card that reports this XID is unusable."""
    return xid_kind(xid) == "card"


_LOG = logging.getLogger(__name__)

RETRY_S = 4.0
"""After the driver was lost."""
_LISTEN_MS = 200
"""The end of a program waits so long for its listener."""


async def listen(
    listener: Callable[[], XidListener], record: Callable[[Xid], Awaitable[None]]
) -> None:
    """Call `record` with each XID until cancelled. A driver that was lost is listened to again."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            with await asyncio.to_thread(listener) as xids:
                while True:
                    event = await loop.run_in_executor(None, xids.wait, _LISTEN_MS)
                    if event is not None:
                        await record(event)
        except DriverLost as error:
            _LOG.info("XIDs are not received now: %s", error)
        await asyncio.sleep(RETRY_S)


_MEANINGS: Mapping[XidKind, str] = {
    "card": "the card is not used any more until it is reset",
    "program": "a program failed; the card stays usable",
    "note": "logged by the driver; the card stays usable",
}

REMEMBERED = 8
"""XIDs of a card that screens show."""


class XidLog:
    """Counts the XIDs of a machine's cards, and remembers the last ones of each.

    Attributes:
        counts: How many each card reported, by UUID and kind.
        on_xid: Called with the card's UUID and a sentence.
        on_event: Called with the XID itself before that.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """clock: Unix seconds."""
        self.counts = Counter[tuple[str, str]]()
        self.on_xid: Callable[[str, str], None] = lambda *_: None
        self.on_event: Callable[[Xid], None] = lambda _: None
        self._last: dict[str, deque[str]] = {}
        self._clock = clock

    async def listen(self, listener: Callable[[], XidListener]) -> None:
        """Record XIDs until cancelled."""
        await listen(listener, self.record)

    async def record(self, event: Xid) -> None:
        """Record an XID."""
        kind = xid_kind(event.number)
        self.counts[event.uuid, kind] += 1
        sentence = f"XID {event.number}: {_MEANINGS[kind]}"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock()))
        last = self._last.setdefault(event.uuid, deque(maxlen=REMEMBERED))
        last.appendleft(f"{at} {sentence}")
        self.on_event(event)
        self.on_xid(event.uuid, sentence)

    def last(self, uuid: str) -> list[str]:
        """Return the last XIDs of a card in sentences, the newest first."""
        return [*self._last.get(uuid, ())]
