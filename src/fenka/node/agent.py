"""The node's control loop.

Everything is level-triggered: a pass looks at what exists (the store, the kubelet, the API server, the cards)
and does what is missing, in any order of events and after any crash. The next pass does what fails now.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fenka.isolation.control import InvalidControl
from fenka.node.advertiser import DeviceAdvertiser
from fenka.node.kubelet.client import Claim, Kubelet, KubeletUnavailable
from fenka.node.lease.cdi import NoDriverFiles
from fenka.node.mode import ModeSelector
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

RECONCILE_S = 5.0
DRAIN_S = 10.0
"""The chart gives the program 15 s to end."""
ADMISSION_S = 3.0
"""From the scheduler's decision to the kubelet's call of Allocate."""


Phase = Callable[[Sequence[Claim]], Awaitable[None]]
"""A part of a pass, given what the kubelet says of device IDs."""


@dataclass(eq=False)
class Agent:
    """Makes passes. phases: called in order. wanted: set to request a pass."""

    _api: NodeApi
    _kubelet: Kubelet
    _mode: ModeSelector
    _advertiser: DeviceAdvertiser
    _phases: Sequence[Phase]
    _wanted: asyncio.Event
    _draining: bool = False

    async def run(self) -> None:
        """Make a pass on every change, and every few seconds, until cancelled."""
        while True:
            self._wanted.clear()
            try:
                await self.reconcile()
            except (OSError, InvalidControl, NoDriverFiles) as error:
                _LOG.error("the pass failed and is repeated: %s", error)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: Python 3.11's may swallow a cancellation.
                async with asyncio.timeout(RECONCILE_S):
                    await self._wanted.wait()

    async def reconcile(self) -> None:
        """Make one pass. Raises OSError, InvalidControl, NoDriverFiles."""
        self._mode.select()
        await self._advertiser.update_inventory(draining=self._draining)
        claims: Sequence[Claim] = ()
        with contextlib.suppress(KubeletUnavailable):
            claims = await self._kubelet.claims()
            if self._api.synced:
                for phase in self._phases:
                    await phase(claims)
        await self._advertiser.update_devices(claims)

    @property
    def ready(self) -> bool:
        """Whether the kubelet knows all devices that the node has to advertise, if any."""
        return self._mode.sharing is not None and self._advertiser.registered

    async def drain(self) -> None:
        """Stop the scheduler from sending pods, and serve those that it sent; `run` continues meanwhile.

        The kubelet fails a pod that arrives while there is no plugin, and tells the scheduler only with its
        next status. The extender reads the inventory at once.
        """
        self._draining = True
        if self._mode.sharing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._advertiser.update_inventory(draining=True)
                    await asyncio.sleep(ADMISSION_S)
