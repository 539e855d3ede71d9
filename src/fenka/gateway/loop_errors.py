"""Logs what the event loop reports, without filling the log: of each kind a line in a while."""

import asyncio
import errno
import logging
import os
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Between two lines of one kind."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LoopErrors:
    """An event loop's exception handler.

    asyncio reports each connection that cannot be accepted, with a traceback, and tries again in a second.
    """

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}
        self._suppressed = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log an error, or count it if one of its kind was logged just now."""
        why = context.get("exception")
        exhausted = isinstance(why, OSError) and why.errno in _EXHAUSTED
        kind = f"{type(why).__name__} {getattr(why, 'errno', '')}"
        now = loop.time()
        if now < self._logged_at.get(kind, -INTERVAL_S) + INTERVAL_S:
            self._suppressed += 1
            return
        self._logged_at[kind] = now
        more = f" ({self._suppressed} more errors were not logged)" if self._suppressed else ""
        self._suppressed = 0
        if exhausted:
            assert isinstance(why, OSError)
            reason = os.strerror(why.errno or 0)
            log.error("clients have to wait: no connection can be accepted: %s%s", reason, more)
        else:
            log.error("%s%s", context.get("message", "error"), more, exc_info=why)
