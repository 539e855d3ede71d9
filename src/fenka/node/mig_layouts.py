"""Divides the node's cards as its labels say: fenka.io/mig, and nvidia.com/mig.config=NAME for fixed layouts.

A card on which a layout waits takes no new pods. One that is to be divided on demand, or to be whole, is used
as it is until nobody holds it. Before its mode changes it is closed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from fenka.core.inventory import Card, DeviceId, InstanceId
from fenka.core.mig.layout_changes import ImpossibleLayout
from fenka.core.mig.layouts import Layout
from fenka.dialects.base import InvalidRecord
from fenka.dialects.nodes import MIG_LABEL, NodeMigMode, mig_mode
from fenka.formats import mig_parted
from fenka.formats.mig_parted import CardTarget, ConfigEntry, InvalidFile
from fenka.hardware.nvml import NoDriver
from fenka.hardware.nvml_mig import MigError
from fenka.isolation.lease_files import describe_os_error, open_regular_file
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.mig.instance_driver import sentence
from fenka.mig.layouts import CardPlan, LayoutFollower, marks, plan_card, present_instances
from fenka.mig.manager import InstanceStatus
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import Allocations
from fenka.node.mig_instances import ClosedCards, NodeInstances
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

CONFIG = "nvidia.com/mig.config"
STATE = "nvidia.com/mig.config.state"
"""Node labels of NVIDIA's mig-manager: the layout's name, written by people, and how far it has come."""

IN_USE_RETRY_S = 5.0
"""After a program without a lease kept a step of a layout from being made."""

RETRY_S = 60.0
"""After the driver refused a step, or did not switch a card that is used as it is meanwhile."""

NO_INSTANCES: Layout = frozenset()


class _Status(NamedTuple):
    """The state of the node's layout. reason: why it is not reached yet."""

    state: Literal["pending", "success", "failed"] | None
    reason: str = ""


@dataclass(eq=False)
class NodeLayouts:
    """Brings the cards to what the labels say. clock: seconds since the epoch.

    file: the layouts, as a file of mig-parted; None if there are none.
    """

    _api: NodeApi
    _instances: NodeInstances
    _inventory: NodeInventory
    _allocations: Allocations
    _closed: ClosedCards
    _clock: Callable[[], float]
    _file: Path | None
    _decoded: tuple[bytes, str, list[ConfigEntry] | str] = (b"", "", [])
    """The last content of the file, a name, and its entries or what is wrong."""
    _holders: Mapping[DeviceId, Sequence[str]] = field(default_factory=dict)
    """Names of the holders of each card and each instance."""
    _task: "asyncio.Task[None] | None" = None
    _static: bool = False
    """Whether the labels name a layout. Its cards take no new pods while it waits."""
    _reported: _Status | None = None
    _follower: LayoutFollower = field(init=False)

    def __post_init__(self) -> None:
        self._follower = LayoutFollower(self._clock, IN_USE_RETRY_S, RETRY_S)

    async def reconcile(self, claims: Sequence[Claim]) -> None:
        """Begin the changes that are possible now, and report those that are not."""
        self._instances.on_recovered()
        labels = self._api.node.metadata.labels if self._api.node else {}
        try:
            mode = mig_mode(labels)
        except InvalidRecord as error:
            self._api.node_event("FenkaLabels", f"{error}; no card is switched")
            return
        self._select(mode)
        self._static = mode.kind == "static"
        self._follower.in_use_retry_s = IN_USE_RETRY_S if self._static else RETRY_S
        self._holders = self._allocations.holders(claims)
        if self._static:
            await self._report(self._advance_layout(labels.get(CONFIG)), labels.get(STATE))
        elif not mode.labelled:  # The mode of a card is an administrator's.
            self._leave_alone()
        elif self._task is None and (reasons := self._switch_idle()):
            self._api.node_event("FenkaMig", "; ".join(reasons))

    # --- decision -----------------------------------------------------------------------------------

    def _select(self, mode: NodeMigMode) -> None:
        """Note on which cards instances are created for pods."""
        capable = self._capable()
        unfit = sorted((mode.indexes or frozenset()) - {card.index for card in capable})
        if unfit and capable:
            self._api.node_event(
                "FenkaLabels",
                f"its label {MIG_LABEL} names card {unfit[0]}, which has no MIG: leave it out",
            )
        selected = frozenset(
            card.uuid
            for card in capable
            if mode.kind == "on-demand" and (mode.indexes is None or card.index in mode.indexes)
        )
        if selected != self._instances.on_demand:
            self._instances.on_demand = selected
            self._instances.changed()

    def _capable(self) -> list[Card]:
        cards = self._inventory.by_uuid.values()
        return [card for card in cards if card.uuid in self._instances.geometries]

    def _switch_idle(self) -> list[str]:
        """Divide the selected cards that nobody holds, and make the others whole. Return why cards wait."""
        wanted = {card.uuid: card.uuid in self._instances.on_demand for card in self._capable()}
        targets: dict[str, CardTarget] = {
            uuid: CardTarget(enabled, {})
            for uuid, enabled in wanted.items()
            if enabled != (uuid in self._instances.observed)
        }
        self._follower.follow(targets)
        plans = [self._plan(uuid) for uuid in wanted]
        self._begin(plans)
        return [*self._failures(), *(reason for plan in plans for reason in self._waiting(plan))]

    def _advance_layout(self, name: str | None) -> _Status:
        """Bring the cards nearer to a layout. Return how far it has come."""
        if name is None:
            self._leave_alone()
            return _Status(None)
        try:
            self._follower.follow(self._read_targets(name))
            plans = [self._plan(DeviceId(uuid)) for uuid in self._follower.targets]
        except (InvalidFile, ImpossibleLayout, MigError) as error:
            self._leave_alone()
            return _Status("failed", str(error))
        if self._task is None:
            self._begin(plans)
        if failures := self._failures():
            return _Status("failed", "; ".join(failures))
        if all(plan.complete for plan in plans) and self._task is None:
            return _Status("success")
        waiting = [reason for plan in plans for reason in self._waiting(plan)]
        return _Status("pending", "; ".join(dict.fromkeys(waiting)))

    def _failures(self) -> list[str]:
        return [attempt.failure for attempt in self._follower.attempts.values() if attempt.failure]

    def _waiting(self, plan: CardPlan) -> list[str]:
        return self._follower.waiting(plan)

    def _read_targets(self, name: str) -> dict[str, CardTarget]:
        """Return the cards' targets. Raises InvalidFile."""
        if self._file is None:
            raise InvalidFile("no layouts are installed: name their ConfigMap in node.mig.config")
        try:
            with open_regular_file(self._file, follow_link=True) as file:
                data = file.read(mig_parted.MAX_BYTES + 1)
        except OSError as error:
            raise InvalidFile(
                f"{describe_os_error(error)}; the ConfigMap that node.mig.config names must have it"
            ) from None
        if self._decoded[:2] != (data, name):
            self._decoded = data, name, _decode(data, name)
        entries = self._decoded[2]
        if isinstance(entries, str):
            raise InvalidFile(entries)
        cards = {card.index: card for card in self._inventory.by_uuid.values()}
        pci_ids = self._instances.manager.pci_ids
        targets = mig_parted.targets(
            entries, {index: pci_ids.get(card.uuid, "") for index, card in cards.items()}
        )
        return {cards[index].uuid: target for index, target in targets.items()}

    def _plan(self, uuid: DeviceId) -> CardPlan:
        """Return what to change on a card now. Raises ImpossibleLayout, MigError."""
        card, held = self._inventory.by_uuid[uuid], self._instances.held()
        if uuid not in self._follower.targets:
            return CardPlan(card, NO_INSTANCES)

        def names(status: InstanceStatus) -> Sequence[str]:
            instance = status.place.on(uuid)
            return self._holders.get(instance.device) or ["a pod"] * (instance in held)

        plan = plan_card(
            replace(card, divided=uuid in self._instances.observed),
            self._instances.geometries.get(uuid),
            present_instances(self._instances.observed.get(uuid, ()), names),
            self._holders.get(uuid, ()),
            self._follower.targets[uuid],
        )
        if plan.waiting and not self._static:
            return CardPlan(card, NO_INSTANCES, (), plan.waiting)
        return plan

    # --- changes ------------------------------------------------------------------------------------

    def _begin(self, plans: Sequence[CardPlan]) -> None:
        """Keep pods from what is to go, and begin the changes for which that has been so for long enough."""
        leaving = {instance for plan in plans for instance in self._leaving(plan)}
        self._withdraw(leaving if self._static else ())
        ready = list[DeviceId]()
        for plan in plans:
            card = plan.card
            if plan.complete:
                self._follower.attempts.pop(card.uuid, None)
                self._closed.open(card)
            elif not self._static and (plan.waiting or not self._follower.is_due(card.uuid)):
                self._closed.open(card)
            elif not self._closed.close(card):
                continue
            wanted = plan.steps or marks(self._instances.manager.keeper, plan)
            if wanted and self._follower.is_due(card.uuid):
                ready.append(card.uuid)
        if ready:
            self._task = self._instances.spawn(self._carry_out(ready))

    def _leaving(self, plan: CardPlan) -> list[InstanceId]:
        uuid, layout = plan.card.uuid, plan.layout
        return [
            status.place.on(uuid)
            for status in self._instances.observed.get(uuid, ())
            if layout is not None and status.place not in layout
        ]

    async def _carry_out(self, cards: Sequence[DeviceId]) -> None:
        try:
            for uuid in cards:
                await self._change(uuid)
        finally:
            self._task = None
            self._instances.changed()

    async def _change(self, uuid: DeviceId) -> None:
        try:
            driver = self._instances.driver
            progress = await driver.run(driver.carry_out(lambda: self._plan(uuid)))
        except (ImpossibleLayout, MigError, NoDriver, OSError) as error:
            self._follower.on_failure(uuid, sentence(error))
            return
        for step in progress.done:
            _LOG.info("layout: %s", step)
        self._follower.on_progress(uuid, progress)

    def _withdraw(self, instances: Collection[InstanceId]) -> None:
        if self._instances.withdrawn != frozenset(instances):
            self._instances.withdrawn = frozenset(instances)
            self._instances.changed()

    def _leave_alone(self) -> None:
        """Have all cards used as they are, once nothing changes."""
        if self._task is not None:
            return
        self._withdraw(())
        for card in self._inventory.by_uuid.values():
            self._closed.open(card)

    # --- status -------------------------------------------------------------------------------------

    async def _report(self, status: _Status, labelled: str | None) -> None:
        if status != self._reported:
            if status.reason:
                self._api.node_event("FenkaMigConfig", f"{CONFIG} {status.state}: {status.reason}")
            self._reported = status
        if labelled != status.state:
            with contextlib.suppress(ApiError, ApiUnreachable):
                await self._api.label_node({STATE: status.state})


def _decode(data: bytes, name: str) -> list[ConfigEntry] | str:
    try:
        return mig_parted.decode(data, name)
    except InvalidFile as error:
        return str(error)
