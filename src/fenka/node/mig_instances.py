"""Connects the MIG driver to the node: leases name instances, the Node shows what there is.

Everything but the driver's turns reads what was seen last, and never waits. A card whose division is about to
change is closed: the Node shows a divided card on which nothing is created, and earlier decisions of the
scheduler arrive meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fenka.core.inventory import Card, DeviceId, InstanceId, Node
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.mig.instances import instance_card
from fenka.dialects.base import InvalidRecord
from fenka.dialects.mig_records import TAKEN, DividedCard, InstanceState, decode_instances
from fenka.hardware.nvml import NoDriver
from fenka.hardware.nvml_mig import (
    CardLost,
    InstanceInUse,
    MigError,
    MigNotEnabled,
    NoRoomForInstance,
    NoSuchInstance,
)
from fenka.mig.instance_driver import InstanceDriver, sentence
from fenka.mig.keeper import GpuInstanceRecord
from fenka.mig.manager import InstanceManager, InstanceStatus, is_enabled
from fenka.node.instance_device import InstanceDevice
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

OBSERVE_S = 5.0
"""Between two readings, for what an administrator does."""

RETRY_S = 1.0
"""Between attempts to destroy what is in use: a driver frees a killed process's memory with some delay."""


@dataclass(frozen=True, slots=True)
class ObservedInstance:
    """An instance of a card, for metrics.

    Attributes:
        card: UUID of its card.
        uuid: the device's; empty without a compute instance.
        gpu_instance: the driver's number; empty if that was not seen.
        compute_instance: the same of its compute instance.
    """

    card: str
    profile: str
    memory_mib: int
    state: InstanceState
    uuid: str
    gpu_instance: str
    compute_instance: str


def error_key(record: GpuInstanceRecord) -> str:
    """Return the name under which errors of an instance are recorded. An instance made again has none."""
    return f"{record.instance}#{record.generation}"


@dataclass(eq=False)
class NodeInstances:
    """The instances of the node's cards.

    Attributes:
        manager: What there is.
        cards: Returns the node's cards.
        held: Returns the instances that leases name, whether or not they exist.
        changed: Called when something has changed.
        error: Returns why an instance is unhealthy, by its `error_key`; None if it is healthy.
        on_demand: Cards on which instances are created for pods.
        closed: Cards that admit nothing because their mode is about to change.
        withdrawn: Instances that take no new pods, because a layout does not have them.
        recovered: Whether the leases are known. Until then nothing is destroyed.
        observed: What was seen last on each card in MIG mode.
    """

    manager: InstanceManager
    cards: Callable[[], Sequence[Card]]
    held: Callable[[], Collection[InstanceId]] = frozenset
    changed: Callable[[], object] = lambda: None
    error: Callable[[str], str | None] = lambda _: None
    on_demand: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    withdrawn: frozenset[InstanceId] = frozenset()
    recovered: bool = False
    observed: Mapping[str, tuple[InstanceStatus, ...]] = field(default_factory=dict)
    driver: InstanceDriver = field(init=False)
    _files: dict[int, list[str]] = field(default_factory=dict)
    """Device files of instances by generation."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Read the cards. Raises NoDriver, OSError."""
        self.driver = InstanceDriver(self.manager, self._leased, self._observe)
        if self.geometries:
            self.manager.keeper.observe()
            self.observed = self._read(frozenset(), ())

    @property
    def geometries(self) -> Mapping[str, Geometry]:
        """The geometry of each card that has MIG, by UUID."""
        return self.manager.keeper.geometries

    # --- what there is ------------------------------------------------------------------------------

    def divided(self) -> tuple[DividedCard, ...]:
        """Return the cards in MIG mode."""
        return tuple(card for card in self.published() if card.uuid in self.observed)

    @property
    def withheld(self) -> frozenset[str]:
        """UUIDs of the cards in MIG mode, and of those that are about to be."""
        return self.closed | self.observed.keys()

    def published(self) -> tuple[DividedCard, ...]:
        """Return the cards in MIG mode, and those that are about to be, for the scheduler."""
        return tuple(
            DividedCard(
                card.uuid,
                self.geometries[card.uuid],
                card.uuid in self.on_demand - self.closed,
                {status.place: self._state(status) for status in self.observed.get(card.uuid, ())},
            )
            for card in self.cards()
            if card.uuid in self.withheld
        )

    def _state(self, status: InstanceStatus) -> InstanceState:
        record = status.record
        if status.state != "own" or record is None:
            return status.state
        broken = record.stage != "ready" or self.error(error_key(record)) is not None
        return "unhealthy" if broken or record.instance in self.withdrawn else "own"

    def listed(self) -> list[ObservedInstance]:
        """Return all instances of the cards in MIG mode."""
        return [
            ObservedInstance(
                *(card, status.place.profile.name, status.place.profile.memory_mib),
                *(self._state(status), status.uuid),
                str(status.gpu.id) if status.gpu else "",
                str(status.gpu.compute[0].id) if status.gpu and status.gpu.compute else "",
            )
            for card, statuses in self.observed.items()
            for status in statuses
        ]

    def device(self, instance: InstanceId) -> InstanceDevice | None:
        """Return an instance's device; None while it does not exist, or changes."""
        if instance in self.driver.changing:
            return None
        for record in self.manager.keeper.records:
            if record.stage == "ready" and record.instance == instance:
                geometry = self.geometries[record.card]
                compute = geometry.compute_percent(geometry.by_name[record.profile])
                files = self._files.get(record.generation)
                if files is not None:
                    return InstanceDevice(record.uuid, record.generation, compute, files)
        return None

    def unhealthy(self) -> list[tuple[GpuInstanceRecord, str]]:
        """Return the instances for which the driver has reported an error, each with it."""
        errors = ((record, self.error(error_key(record))) for record in self.manager.keeper.records)
        return [(record, error) for record, error in errors if error is not None]

    def unhealthy_places(self) -> list[str]:
        """Return the ids of these instances."""
        return [record.instance.device for record, _ in self.unhealthy()]

    def offered(self) -> tuple[DividedCard, ...]:
        """Return the cards that have, or may have, instances for pods, also before they are divided."""
        published = {card.uuid: card for card in self.published()}
        return tuple(
            published.get(uuid)
            or DividedCard(uuid, self.geometries[uuid], on_demand=True, instances={})
            for uuid in (card.uuid for card in self.cards())
            if uuid in published or uuid in self.on_demand
        )

    def record_of(self, card: str, gpu_instance: int) -> GpuInstanceRecord | None:
        """Return fenka's record of a GPU instance by the driver's number; None if it is not fenka's."""
        for record in self.manager.keeper.records:
            if (record.card, record.gpu_instance) == (card, gpu_instance):
                return record
        return None

    # --- changes ------------------------------------------------------------------------------------

    def trigger(self) -> None:
        """Have the cards read, and unused instances destroyed, soon."""
        self._wanted.set()

    def on_recovered(self) -> None:
        """Note that all leases are known: what none of them names may be destroyed."""
        if not self.recovered:
            self.recovered = True
            self.trigger()

    def spawn(self, change: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Make a change in the background, at most until `run` is cancelled."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self) -> None:
        """Read the cards and destroy unused instances until cancelled."""
        try:
            await self._run()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            lingering = True
            try:
                lingering = await self.settle()
            except (MigError, NoDriver, OSError) as error:
                _LOG.warning("MIG instances: %s", sentence(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if lingering else OBSERVE_S):
                    await self._wanted.wait()

    async def settle(self) -> bool:
        """Destroy unused instances, and read the cards. Return whether some are still in use.

        Raises NoDriver, OSError.
        """
        return bool(self.geometries and await self.driver.run(self._settle()))

    async def _settle(self) -> list[GpuInstanceRecord]:
        lingering = await self.driver.destroy_unused() if self.recovered else []
        await self._observe(lingering)
        return lingering

    async def create(self, instances: Collection[InstanceId]) -> None:
        """Create the instances that do not exist yet, all or none. Unused ones in their way are destroyed.

        Raises:
            InstanceInUse: One in the way is still in use. Repeat the call later.
            MigError: They cannot be created.
            NoDriver, OSError: Repeat the call later.
        """
        step = partial(self._create, instances)
        await self.driver.run(self.driver.create(instances, step))

    async def _observe(self, leaving: Collection[GpuInstanceRecord]) -> None:
        before = self.published()
        self.observed = await self.driver.in_thread(self._read, self._leased(), leaving)
        if self.published() != before:
            self.changed()

    def _leased(self) -> set[str]:
        """Return the devices that leases name. An instance whose creation is unfinished is none."""
        held = self.held()
        return {
            record.uuid
            for record in self.manager.keeper.records
            if record.uuid and record.instance in held
        }

    # --- in a thread, in a turn ---------------------------------------------------------------------

    def _read(
        self, leased: Collection[str], leaving: Collection[GpuInstanceRecord]
    ) -> Mapping[str, tuple[InstanceStatus, ...]]:
        observed = dict[str, tuple[InstanceStatus, ...]]()
        for card in self.cards():
            if card.uuid not in self.geometries:
                continue
            try:
                if not is_enabled(card.uuid):
                    continue
                observed[card.uuid] = tuple(self.manager.statuses(card.uuid, leased, leaving))
            except CardLost:  # It stays what it was.
                if card.uuid in self.observed:
                    observed[card.uuid] = self.observed[card.uuid]
                continue
            for record in self.manager.keeper.records:
                if record.card == card.uuid and record.stage == "ready":
                    self._learn(card, record)
        present = {record.generation for record in self.manager.keeper.records}
        self._files = {number: self._files[number] for number in self._files.keys() & present}
        return observed

    def _learn(self, card: Card, record: GpuInstanceRecord) -> None:
        if record.generation not in self._files:
            self.manager.learn_context(card, record.uuid)
            files = self.manager.capabilities(record.uuid)
            self._files[record.generation] = [str(file) for file in files]

    def _create(
        self,
        instances: Collection[InstanceId],
        leased: Collection[str],
        lingering: Collection[GpuInstanceRecord],
    ) -> None:
        cards = {card.uuid: card for card in self.cards()}
        planned = []
        for instance in instances:
            card, place = self._find(instance, cards)
            same = [rec for rec in self.manager.keeper.records if rec.instance == instance]
            if any(record.stage == "ready" for record in same):
                continue
            for record in same:  # Destroyed by somebody else, entirely or in part.
                self.manager.keeper.destroy(record)
            self._check_free(card, place, leased, lingering)
            planned.append(instance_card(card, self.geometries[card.uuid], place))
        self.manager.create(Node("", tuple(cards.values())), planned)

    def _find(self, instance: InstanceId, cards: Mapping[DeviceId, Card]) -> tuple[Card, Place]:
        """Return the card and the place of an instance. Raises MigError."""
        geometry, card = self.geometries.get(instance.card), cards.get(instance.card)
        place = geometry.place_of(instance) if geometry else None
        if card is None or place is None:
            raise NoSuchInstance(f"no card of this node can have the instance {instance}")
        if card.uuid not in self.on_demand - self.closed or not is_enabled(card.uuid):
            raise MigNotEnabled(f"card {card.index} is not divided on demand now")
        return card, place

    def _check_free(
        self,
        card: Card,
        place: Place,
        leased: Collection[str],
        lingering: Collection[GpuInstanceRecord],
    ) -> None:
        """Raise NoRoomForInstance or InstanceInUse with a sentence if a place is taken."""
        for other in self.manager.statuses(card.uuid, leased):
            if not other.place.mask & place.mask:
                continue
            name = other.place.name(card.index)
            wanted = f"{place.name(card.index)} cannot be created"
            if other.record in lingering:
                raise InstanceInUse(f"{wanted} yet: a program that has not ended still uses {name}")
            taken = TAKEN["foreign"]
            if other.record is not None:
                taken = "belongs to a layout" if other.record.kept else "is held by another pod"
            raise NoRoomForInstance(f"{wanted}: {name} {taken}")


CLOSED_S = 3.0
"""From the scheduler's decision to its arrival at this node."""


@dataclass(eq=False)
class ClosedCards:
    """The cards that are closed. clock: seconds since the epoch."""

    _api: NodeApi
    _instances: NodeInstances
    _clock: Callable[[], float]
    _since: dict[str, float] = field(default_factory=dict)
    """Since when the Node shows that a card is closed."""

    @property
    def published(self) -> set[str]:
        """UUIDs of the cards that the Node shows closed."""
        return set(self._since)

    def open(self, card: Card) -> None:
        """Have a card used again."""
        self._since.pop(card.uuid, None)
        if card.uuid in self._instances.closed:
            self._instances.closed -= {card.uuid}
            self._instances.changed()

    def close(self, card: Card) -> bool:
        """Close a card. Return whether the scheduler has known for long enough."""
        if card.uuid not in self._instances.closed:
            self._instances.closed |= {card.uuid}
            self._instances.changed()
        if card.uuid not in self._since:
            if self._is_published(card):
                self._since[card.uuid] = self._clock()
            return False
        return self._clock() - self._since[card.uuid] >= CLOSED_S

    def _is_published(self, card: Card) -> bool:
        node = self._api.node
        try:
            shown = decode_instances(node.metadata.annotations) if node else ()
        except InvalidRecord:  # somebody else's
            return False
        return any(divided.uuid == card.uuid and not divided.on_demand for divided in shown)
