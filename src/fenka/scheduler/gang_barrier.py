"""Holds the bindings of a gang's members back until all of them may be sent."""

import asyncio
import contextlib

from fenka.cluster.gang_reservations import GangScheduler
from fenka.cluster.objects import Pod


class GangBarrier:
    """Waits for what a `GangScheduler` decides."""

    def __init__(self, gangs: GangScheduler) -> None:
        self._gangs = gangs
        self._settled: dict[str, asyncio.Event] = {}
        gangs.on_settled = self._release

    async def wait_for_members(self, pod: Pod, node: str) -> bool:
        """Return whether the pod may be bound to this node, once that is decided."""
        decision = self._gangs.arrive(pod, node)
        if isinstance(decision, bool):
            return decision
        settled = self._settled.setdefault(decision.gang, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(decision.timeout_s):
                await settled.wait()
        self._gangs.expire()
        return self._gangs.may_bind(pod, node)

    def _release(self, gang: str) -> None:
        settled = self._settled.pop(gang, None)
        if settled is not None:
            settled.set()
