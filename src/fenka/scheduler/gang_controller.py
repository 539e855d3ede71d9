"""Evicts the members of gangs that are incomplete for too long, so that each gang restarts completely."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from fenka.cluster.gang_reservations import GangScheduler
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.eviction import evict

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


class GangController:
    """Best effort: what fails is tried again. `run` is its task."""

    def __init__(
        self,
        api: Api,
        gangs: GangScheduler,
        is_leading: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._gangs, self._is_leading, self._sleep = api, gangs, is_leading, sleep

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(INTERVAL_S)
            self._gangs.expire()
            for pod in self._gangs.incomplete_gangs() if self._is_leading() else ():
                meta = pod.metadata
                log.warning("evicting %s: its gang has been incomplete for too long", pod.full_name)
                with contextlib.suppress(ApiError, ApiUnreachable):
                    await evict(self._api, meta.namespace, meta.name, meta.uid)
