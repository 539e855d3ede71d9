"""Ends the pins of nodes that were bought: when their time is over, or none of their pods waits any more.

Every replica measures the time itself, from when it first saw the cards, so a change of leaders does not
renew it. A replica that starts later does not know that time, but the autoscaler removes old pins.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from fenka.cluster.node_pins import Pin
from fenka.cluster.objects import Pod
from fenka.cluster.pending_queue import is_open
from fenka.cluster.state import ClusterState
from fenka.dialects.base import readable_quantity
from fenka.dialects.registry import resource_names

INTERVAL_S = 0.25


class PinTimer:
    """Ends pins. `run` is its task."""

    def __init__(
        self,
        cluster: ClusterState,
        pods: Callable[[], Mapping[str, Pod]],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        cluster: the nodes.
        pods: returns all pods, by UID.
        clock: seconds, monotonic.
        sleep: waits for a number of seconds.
        """
        self._cluster, self._pods = cluster, pods
        self._clock, self._sleep = clock, sleep
        self._offered_at: dict[tuple[str, str], float] = {}
        """When the cards of a pinned node were first seen, by node and order."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            self.end_due()

    def end_due(self) -> None:
        """End the pins that are due."""
        now, pins = self._clock(), dict(self._cluster.pins)
        current = {(name, pin.order) for name, pin in pins.items()}
        self._offered_at = {key: at for key, at in self._offered_at.items() if key in current}
        for name, pin in pins.items():
            if self._offers_cards(name):
                self._offered_at.setdefault((name, pin.order), now)
            offered_at = self._offered_at.get((name, pin.order))
            if offered_at is not None and (
                now - offered_at >= pin.seconds or not self._is_awaited(pin)
            ):
                self._cluster.end_pin(name)

    def _offers_cards(self, name: str) -> bool:
        """Return whether the node offers cards, whole or in slices."""
        node, placed = self._cluster.node(name), resource_names(self._cluster.dialects)
        return node is not None and any(
            resource in placed and readable_quantity(node.status.allocatable, resource) > 0
            for resource in node.status.allocatable
        )

    def _is_awaited(self, pin: Pin) -> bool:
        """Return whether a planned pod still has no node."""
        pods = self._pods()
        return any(uid in pods and is_open(pods[uid]) for uid in pin.pods)
