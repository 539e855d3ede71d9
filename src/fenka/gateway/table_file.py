"""Follows the file that a routing table is in. It is replaced by rename, so it is always complete.

An invalid table is reported, and the last valid one stays: a gateway goes on with what it has.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from fenka.isolation.files import open_regular_file
from fenka.jobs.routing_table import InvalidTable, RoutingTable, decode

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks at the file."""
MAX_BYTES = 4 * 1024 * 1024


class TableFile:
    """The table in a file.

    Attributes:
        error: Why the newest table is not used; None if it is.
    """

    def __init__(self, path: Path, apply: Callable[[RoutingTable], None]) -> None:
        """apply: gets each table that is new."""
        self._path, self._apply = path, apply
        self._seen: tuple[int, int, int] | None = None
        self.error: str | None = None

    def read(self) -> None:
        """Apply the table if it has changed. Raises InvalidTable and OSError, once for each change."""
        with open_regular_file(self._path, follow_link=True) as file:
            status = os.fstat(file.fileno())
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            if seen == self._seen:
                return
            self._seen = seen
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InvalidTable(f"the routing table exceeds {MAX_BYTES // 2**20} MiB")
        self._apply(decode(text))
        self.error = None

    async def follow(self) -> None:
        """Apply each new table until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self.read()
            except (InvalidTable, OSError) as error:
                if str(error) != self.error:
                    log.warning("the last routing table stays in use: %s: %s", self._path, error)
                self.error = str(error)
