"""Reports nodes that are labelled to share their cards and offer none for a while, by an event on the Node.

fenka's program on such a node may not run at all, so the scheduler's leader says so.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fenka.cluster.state import ClusterState
from fenka.cluster.unoffered_nodes import UNOFFERED, offers_nothing
from fenka.scheduler.event_reporter import NODE_UNAVAILABLE, Recorder

INTERVAL_S = 10.0
GRACE_S = 120.0
"""A node that has just been labelled needs its node pod, and that its image."""
REPEAT_S = 1800.0
"""Kubernetes forgets events after an hour."""


class SilentNodes:
    """Looks for such nodes while this replica leads. `run` is its task."""

    def __init__(
        self,
        cluster: ClusterState,
        recorder: Recorder,
        is_leading: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        cluster: the nodes.
        recorder: posts the events.
        is_leading: whether this replica leads.
        clock: seconds, monotonic.
        sleep: waits for a number of seconds.
        """
        self._cluster, self._recorder, self._is_leading = cluster, recorder, is_leading
        self._clock, self._sleep = clock, sleep
        self._report_at: dict[str, float] = {}
        """When the next event of a node is due, by its UID."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            self.report_due()

    def report_due(self) -> None:
        """Post the events that are due now."""
        now, known = self._clock(), self._report_at
        nodes = [node for node in self._cluster.nodes() if offers_nothing(node, self._cluster)]
        self._report_at = {
            node.metadata.uid: known.get(node.metadata.uid, now + GRACE_S) for node in nodes
        }
        for node in nodes if self._is_leading() else ():
            if now >= self._report_at[node.metadata.uid]:
                self._report_at[node.metadata.uid] = now + REPEAT_S
                note = f"fenka: the node is labelled to share its cards, and {UNOFFERED}"
                self._recorder.record_on_node(node, NODE_UNAVAILABLE, note)
