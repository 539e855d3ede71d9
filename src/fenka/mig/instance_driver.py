"""Changes the instances of one program's cards: one change after the other, each in a thread.

NVML takes about a second for a change, and up to ten for a reading under load. The node program and the
workstation's daemon connect this to their leases.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from fenka.core.inventory import InstanceId
from fenka.isolation.lease_files import describe_os_error
from fenka.mig.keeper import GpuInstanceRecord
from fenka.mig.layouts import CardPlan, Progress, carry_out
from fenka.mig.manager import InstanceManager

_Result = TypeVar("_Result")


@dataclass(eq=False)
class InstanceDriver:
    """The changes of one program's instances.

    Attributes:
        manager: The instances. Its records change only in a turn, or while there is none.
        leased: Returns the UUIDs of the devices that leases name.
        show: Shows what there is to the part that places requests. Its argument is about to be destroyed.
        idle: Called when no change is under way any more.
        changing: Instances that are being created or destroyed.
    """

    manager: InstanceManager
    leased: Callable[[], Collection[str]]
    show: Callable[[Collection[GpuInstanceRecord]], Awaitable[None]]
    idle: Callable[[], object] = lambda: None
    changing: frozenset[InstanceId] = frozenset()
    _turns: int = 0
    """Changes that are under way or wait for their turn."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def busy(self) -> bool:
        """Whether a change is under way or waits for its turn."""
        return self._turns > 0

    async def finish(self) -> None:
        """Wait until no change is under way."""
        while self.busy:
            await self._finished.wait()

    def run(self, change: Coroutine[None, None, _Result]) -> Coroutine[None, None, _Result]:
        """Return a coroutine that carries out a change in its turn."""
        self._turns += 1
        self._finished.clear()
        return self._run(change)

    async def _run(self, change: Coroutine[None, None, _Result]) -> _Result:
        try:
            async with self._turn:
                return await change
        finally:
            change.close()  # It has not begun if this was cancelled before its turn.
            self._turns -= 1
            if not self.busy:
                self._finished.set()
                self.idle()

    async def in_thread(self, step: Callable[..., _Result], *arguments: object) -> _Result:
        """Call the driver, while the program answers others."""

        def call() -> _Result:
            with self.manager.hardware.in_use():
                return step(*arguments)

        return await asyncio.to_thread(call)

    # --- in a turn ----------------------------------------------------------------------------------

    async def destroy_unused(self) -> list[GpuInstanceRecord]:
        """Destroy the instances that no lease names. Return those that are still in use.

        Raises MigError, NoDriver, OSError.
        """
        unused = await self.in_thread(self.manager.keeper.unused, self.leased())
        # Leases may have come meanwhile.
        leased = self.leased()
        unused = [record for record in unused if record.uuid not in leased]
        if not unused:
            return []
        self.changing = frozenset(record.instance for record in unused)
        try:
            # Their places are used again only after they have gone.
            await self.show(unused)
            return await self.in_thread(self.manager.keeper.destroy_all, unused)
        finally:
            self.changing = frozenset()

    async def create(
        self,
        instances: Collection[InstanceId],
        step: Callable[[Collection[str], Collection[GpuInstanceRecord]], _Result],
        created: Callable[[_Result], object] = lambda _: None,
    ) -> None:
        """Create instances, after unused ones were destroyed, which may be in their way.

        Args:
            instances: Their ids.
            step: Creates them in a thread. Its arguments: what is leased, and what could not be destroyed.
            created: Called with the step's result, before anything is shown.

        Raises:
            MigError, NoDriver, OSError: They were not created.
        """
        lingering: Collection[GpuInstanceRecord] = ()
        try:
            lingering = await self.destroy_unused()
            self.changing = frozenset(instances)
            created(await self.in_thread(step, self.leased(), lingering))
        finally:
            self.changing = frozenset()
            await self.show(lingering)

    async def carry_out(self, plan: Callable[[], CardPlan]) -> Progress:
        """Change a card as a plan says. It is made when nothing else changes.

        Raises:
            ImpossibleLayout: By the plan.
            MigError, NoDriver, OSError: The rest is not done.
        """
        await self.show(())
        made = plan()
        self.changing = frozenset(
            step.place.on(made.card.uuid) for step in made.steps if step.place is not None
        )
        try:
            return await self.in_thread(carry_out, self.manager, made)
        finally:
            self.changing = frozenset()
            await self.show(())


def sentence(error: Exception) -> str:
    """Return what people are told of an error of a change."""
    return describe_os_error(error) if isinstance(error, OSError) else str(error)
