"""Connects the MIG driver to the daemon: jobs hold instances, and the broker knows what there is.

An instance that is being created stays planned, so that no job gets an instance that changes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field

from fenka.core.inventory import Card, InstanceId
from fenka.core.mig.instances import is_planned
from fenka.hardware.nvml import NoDriver
from fenka.hardware.nvml_mig import MigError, MigNotPermitted
from fenka.mig.instance_driver import InstanceDriver, sentence
from fenka.mig.keeper import GpuInstanceRecord
from fenka.mig.manager import InstanceManager
from fenka.workstation.broker import Broker, Effect, GrantLease, RejectJob
from fenka.workstation.job import Job
from fenka.workstation.lifetime import log

CREATE_RETRY_S = 1.0
"""Between attempts to create instances for a job."""

DESTROY_RETRY_S = 0.3
"""Between attempts to destroy what is in use: a driver frees a killed process's memory with some delay."""


@dataclass(eq=False)
class InstanceChanges:
    """Has instances created for jobs, and destroyed after them.

    Attributes:
        broker: The jobs that instances are for.
        manager: The instances.
        spawn: Runs a coroutine beside everything else.
        apply: Records what was decided, and applies it.
    """

    broker: Broker
    manager: InstanceManager
    spawn: Callable[[Coroutine[None, None, object]], None]
    apply: Callable[[Sequence[Effect]], None]
    settled: Callable[[], None] = lambda: None
    """Called when nothing changes, and nothing has to be destroyed."""
    driver: InstanceDriver = field(init=False)
    _retrying: bool = False
    """Whether what could not be destroyed is tried again soon."""
    _creating: set[str] = field(default_factory=set)
    """Jobs for which instances are created, or will be in a later turn."""

    def __post_init__(self) -> None:
        self.driver = InstanceDriver(
            self.manager, self.broker.held_devices, self._show, self.settle_later
        )

    async def _show(self, leaving: Collection[GpuInstanceRecord]) -> None:
        self.publish(leaving)

    # --- destruction --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Have the instances destroyed that no job holds, and grant what has become possible.

        Nothing is done during a change, since this follows each. Raises NoDriver.
        """
        if self.driver.busy or self._retrying:
            return
        try:
            unused = self.manager.keeper.unused(self.broker.held_devices())
        except OSError as why:
            log(f"MIG instances: {sentence(why)}")
            return
        if unused:
            self.spawn(self.driver.run(self._destroy()))
        self.publish(unused)
        if not unused:
            self.settled()

    def settle_later(self) -> None:
        """Do the same where nobody can be told an error."""
        with contextlib.suppress(NoDriver):  # the health loop opens the driver again
            self.settle()

    async def _destroy(self) -> None:
        try:
            failed = bool(await self.driver.destroy_unused())
        except (MigError, NoDriver, OSError) as why:
            log(f"MIG instances: {sentence(why)}")
            failed = True
        if failed:
            self._retrying = True
            asyncio.get_running_loop().call_later(DESTROY_RETRY_S, self._destroy_again)
            with contextlib.suppress(NoDriver):
                self.publish()

    def _destroy_again(self) -> None:
        self._retrying = False
        self.settle_later()

    def publish(self, leaving: Collection[GpuInstanceRecord] = ()) -> None:
        """Tell the broker what there is. leaving: what is about to be destroyed. Raises NoDriver."""
        instances = self.manager.view(self.broker.node, self.broker.held_devices(), leaving)
        self.apply(self.broker.update_instances(instances.division, instances.cards, time.time()))

    # --- creation -----------------------------------------------------------------------------------

    def planned(self, job: Job) -> list[Card]:
        """Return the instances of a job that do not exist yet."""
        uuids = {piece.uuid for piece in job.slices if is_planned(piece.uuid)}
        return [card for card in self.broker.node.cards if card.uuid in uuids]

    def create(self, job: Job) -> None:
        """Have the instances created that are planned for a job, and the job granted then."""
        if job.id not in self._creating:
            self._creating.add(job.id)
            self.spawn(self.driver.run(self._create(job)))

    async def _create(self, job: Job) -> None:
        try:
            # Another job of the same instance may have had them created, and this one may have ended.
            if self.broker.present([job]) and (planned := self.planned(job)):
                node = self.broker.node
                await self.driver.create(
                    [instance for card in planned if (instance := InstanceId.parse(card.uuid))],
                    lambda *_: self.manager.create(node, planned),
                    lambda uuids: self.broker.bind_instances(uuids, time.time()),
                )
        except (MigError, NoDriver, OSError) as why:
            self._on_refusal(job, sentence(why), final=isinstance(why, MigNotPermitted))
        finally:
            self._creating.discard(job.id)
        if self.broker.present([job]) and job.state == "starting":
            self.apply([GrantLease((job,))])

    def _on_refusal(self, job: Job, reason: str, *, final: bool) -> None:
        if not self.broker.present([job]):
            return
        now = time.time()
        effects = self.broker.requeue(job, f"{reason}; trying again", now)
        if final or not job.waits:
            effects = [RejectJob(job, reason, final), *self.broker.cancel(job.queue_id, now)]
        else:
            asyncio.get_running_loop().call_later(CREATE_RETRY_S, self._create_again)
        self.apply(effects)

    def _create_again(self) -> None:
        self.settle_later()
        self.apply(self.broker.reschedule(time.time()))
