"""Tells the cluster's state the time, by which the protection of spot nodes ends."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fenka.cluster.state import ClusterState

INTERVAL_S = 1.0


class SpotTimer:
    """Sets the time. `run` is its task."""

    def __init__(
        self,
        cluster: ClusterState,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        cluster: the nodes.
        now: seconds since 1970.
        sleep: waits for a number of seconds.
        """
        self._cluster, self._now, self._sleep = cluster, now, sleep

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._cluster.set_time(self._now())
            await self._sleep(INTERVAL_S)
