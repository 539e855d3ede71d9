"""Writes on the node's own Node what its pods hold: dialects/leases.py says what for.

Best effort: while the API server is away, containers start all the same, and the node's own check of each
card's capacity protects who is there.
"""

import asyncio
import logging
from collections.abc import Callable

from fenka.dialects.base import InvalidRecord
from fenka.dialects.leases import REPORT, LeaseReport, encode_report
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.kubernetes.informer import newer
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

WITHIN_S = 1.0
"""The longest that a container's start waits for the write."""


class Reporter:
    """Writes one report at a time; changes that come meanwhile go with the next. make: what there is now."""

    def __init__(self, cluster: NodeApi, make: Callable[[], LeaseReport]) -> None:
        self._cluster, self._make = cluster, make
        self._lock = asyncio.Lock()
        self._text: str | None = None
        self._version = ""
        self._away = False

    async def tell(self) -> None:
        """Before a container starts. Does nothing while the API server is away."""
        if self._away:
            return
        try:
            async with asyncio.timeout(WITHIN_S):
                await self.keep_up()
        except TimeoutError:
            self._away = True

    async def keep_up(self) -> None:
        """Write the report unless it is there."""
        async with self._lock:
            node = self._cluster.node
            if node is None or not self._cluster.synced:
                return
            try:
                text = encode_report(self._make())
                if text != self._current(node.metadata.annotations.get(REPORT)):
                    self._version = await self._cluster.report(text)
                    self._text = text
                self._away = False
            except InvalidRecord as why:
                self._cluster.node_event(
                    "FenkaReport", f"{why}: the scheduler goes by pods' records"
                )
            except (ApiError, ApiUnreachable) as why:
                self._away = True
                _LOG.warning("what pods hold could not be reported: %s", why)

    def _current(self, shown: str | None) -> str | None:
        """What is on the Node: what was written last, until the watch shows that or something newer."""
        node = self._cluster.node
        visible = node is not None and newer(node.metadata.resource_version, self._version)
        return shown if visible else self._text
