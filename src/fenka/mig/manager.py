"""The MIG instances of a program's cards: which cards are divided, and what is on them.

The workstation's daemon and the node program each have one manager.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.mig.instances import Division, instance_card
from fenka.dialects.mig_records import TAKEN, InstanceState
from fenka.hardware import nvml_mig
from fenka.hardware.nvml import Hardware
from fenka.hardware.nvml_mig import CardLost, GpuInstance, MigError, device_files
from fenka.mig.keeper import GpuInstanceRecord, InstanceKeeper
from fenka.procfs import users_of


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances on the divided cards.

    Attributes:
        cards: fenka's instances that programs can use, or that a job still names.
        division: the rest.
    """

    cards: tuple[Card, ...] = ()
    division: Division = field(default_factory=Division)


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance on a card.

    Attributes:
        record: fenka's; None for a foreign instance.
        gpu: the driver's; None if it does not exist, or its card is lost.
    """

    place: Place
    state: InstanceState
    record: GpuInstanceRecord | None = None
    gpu: GpuInstance | None = None

    @property
    def uuid(self) -> str:
        """The device's; empty without a compute instance."""
        if self.record is not None:
            return self.record.uuid
        return self.gpu.compute[0].uuid if self.gpu and self.gpu.compute else ""


@dataclass(eq=False)
class InstanceManager:
    """The instances of one program.

    Attributes:
        hardware: The driver.
        keeper: Its records.
        on_demand: Whether instances are created for jobs.
    """

    hardware: Hardware
    keeper: InstanceKeeper
    on_demand: bool = True
    library_dir: Path | None = None
    """Of a simulated driver."""
    pci_ids: Mapping[str, str] = field(default_factory=dict)
    """Each card's model as layouts name it, by UUID; a lost card does not tell it any more."""
    _measured: set[str] = field(default_factory=set)

    def divided(self, node: Node) -> Node:
        """Return the node with the cards marked that are in MIG mode now. Raises DriverLost."""
        return replace(node, cards=tuple(map(self._marked, node.cards)))

    def _marked(self, card: Card) -> Card:
        if card.parent is None and card.uuid in self.keeper.geometries:
            # A lost card stays what it was.
            with contextlib.suppress(CardLost):
                return replace(card, divided=is_enabled(card.uuid))
        return card

    def create(self, node: Node, planned: Iterable[Card]) -> dict[DeviceId, DeviceId]:
        """Create planned instances, all or none. Return their devices' UUIDs. Raises MigError, OSError."""
        uuids: dict[DeviceId, DeviceId] = {}
        made: list[GpuInstanceRecord] = []
        parents = {card.uuid: card for card in node.cards}
        try:
            for card in planned:
                assert card.parent is not None
                profile = self.keeper.geometries[card.parent].by_name[card.profile]
                record = self.keeper.create(card.parent, Place(profile, card.start))
                made.append(record)
                uuids[card.uuid] = DeviceId(record.uuid)
                self.learn_context(parents[card.parent], record.uuid)
                self.capabilities(record.uuid)  # raises now, and not when the lease is granted
        except (MigError, OSError):
            for record in made:
                self.keeper.destroy(record)
            raise
        return uuids

    def capabilities(self, uuid: str) -> list[Path]:
        """Return the device files of an instance; none for a card. Raises NoCapability."""
        record = self.keeper.find(uuid)
        if record is None or record.gpu_instance is None or self.hardware.driver.simulated:
            return []
        geometry = self.keeper.geometries[record.card]
        compute = [
            device.id
            for gpu in nvml_mig.instances(record.card, geometry)
            if gpu.id == record.gpu_instance
            for device in gpu.compute
        ]
        minor = self.hardware.driver.minor(record.card)
        return device_files(minor, record.gpu_instance, compute)

    def settle(self, node: Node, leased: Collection[str]) -> Instances:
        """Destroy the instances that no lease names, and return what there is. Raises OSError, DriverLost."""
        self.keeper.settle(leased)
        return self.view(node, leased)

    def view(
        self, node: Node, leased: Collection[str], leaving: Collection[GpuInstanceRecord] = ()
    ) -> Instances:
        """Return what there is. Raises DriverLost.

        Args:
            node: The node, with its divided cards marked.
            leased: UUIDs of the devices that jobs name.
            leaving: The instances that are about to be destroyed.
        """
        divided = [card for card in node.cards if card.divided]
        cards, taken = list[Card](), dict[DeviceId, dict[Place, str]]()
        for parent in divided:
            geometry, taken[parent.uuid] = self.keeper.geometries[parent.uuid], {}
            for status in self.statuses(parent.uuid, leased, leaving):
                if status.state == "own" and status.record is not None:
                    record = status.record
                    card = instance_card(parent, geometry, status.place, record.uuid)
                    healthy = parent.healthy and record.stage == "ready"
                    # Of a card whose layout waits, instances of the layout may be used.
                    cordoned = parent.cordoned and not record.kept
                    cards.append(replace(card, healthy=healthy, cordoned=cordoned))
                    self.learn_context(parent, record.uuid)
                else:
                    taken[parent.uuid].setdefault(status.place, TAKEN[status.state])
        geometries = {card.uuid: self.keeper.geometries[card.uuid] for card in divided}
        fixed = frozenset() if self.on_demand else frozenset(geometries)
        return Instances(tuple(cards), Division(geometries, taken, fixed))

    def statuses(
        self, card: str, leased: Collection[str], leaving: Collection[GpuInstanceRecord] = ()
    ) -> Iterator[InstanceStatus]:
        """Yield what there is on a card, fenka's first; of a lost card only that. Raises DriverLost.

        leased, leaving: as for `view`.
        """
        geometry, foreign = self.keeper.geometries[card], dict[int, GpuInstance]()
        with contextlib.suppress(CardLost):
            foreign = {gpu.id: gpu for gpu in nvml_mig.instances(card, geometry)}
        for record in self.keeper.records:
            if record.card == card:
                place = Place(geometry.by_name[record.profile], record.start)
                usable = record.stage == "ready" and record not in leaving
                own = usable or record.uuid in leased
                gpu = self.keeper.existing(record, foreign.values())
                yield InstanceStatus(place, "own" if own else "leaving", record, gpu)
                if gpu is not None:
                    del foreign[gpu.id]
        for gpu in foreign.values():
            yield InstanceStatus(Place(gpu.profile, gpu.start), "foreign", gpu=gpu)

    def users(self, card: DeviceId) -> set[int]:
        """Return the other processes that have a context on a card, or its device file open."""
        driver = self.hardware.driver
        found = {process.pid for process in driver.processes() if process.uuid == card}
        if not driver.simulated:
            found |= users_of(Path(f"/dev/nvidia{driver.minor(card)}"))
        return found - {os.getpid()}

    def learn_context(self, parent: Card, uuid: str) -> None:
        """Learn what a process's context takes on an instance: as on its card, or on the first instance."""
        contexts = self.hardware.context_mib
        if (
            uuid not in contexts
            and parent.uuid not in contexts
            and parent.model not in self._measured
        ):
            self._measured.add(parent.model)
            instance = replace(parent, uuid=DeviceId(uuid))
            self.hardware.measure((instance,), self.library_dir)
        known = contexts.get(uuid, contexts.get(parent.uuid))
        if known is not None:
            contexts[uuid] = contexts[parent.uuid] = known


def geometries(hardware: Hardware, cards: Iterable[Card]) -> dict[str, Geometry]:
    """Return what each card that has MIG can be divided into. Raises DriverLost."""
    described = {card.uuid: hardware.driver.geometry(card.uuid) for card in cards}
    return {uuid: geometry for uuid, geometry in described.items() if geometry is not None}


def is_enabled(card: str) -> bool:
    """Return whether a card is in MIG mode now. Raises CardLost."""
    mode = nvml_mig.mig_mode(card)
    return mode is not None and mode.enabled
