"""Divides the node's cards as its labels say: fenka.io/mig, and nvidia.com/mig.config=NAME for fixed layouts.

A layout is reached instance by instance: what is in use stays until it has ended. The label
nvidia.com/mig.config.state is `pending` until then. A card is closed before its mode changes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from fenka.core.inventory import Card, DeviceId, InstanceId, card_of
from fenka.core.mig.layouts import ImpossibleLayout, Layout
from fenka.dialects.base import InvalidRecord
from fenka.dialects.mig_records import TAKEN
from fenka.dialects.nodes import MIG_LABEL, NodeMigMode, mig_mode
from fenka.formats import mig_parted
from fenka.formats.mig_parted import CardTarget, ConfigEntry, InvalidFile
from fenka.hardware.nvml import NoDriver
from fenka.hardware.nvml_mig import InstanceInUse, MigError
from fenka.isolation.lease_files import describe_os_error, open_regular_file
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.mig.instance_driver import sentence
from fenka.mig.layouts import CardPlan, marks, plan_card, present_instances
from fenka.mig.manager import InstanceStatus
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import Allocations
from fenka.node.mig_instances import ClosedCards, NodeInstances
from fenka.node.node_api import NodeApi
from fenka.procfs import process_name

_LOG = logging.getLogger(__name__)

CONFIG = "nvidia.com/mig.config"
STATE = "nvidia.com/mig.config.state"
"""Node labels of NVIDIA's mig-manager: the layout's name, written by people, and how far it has come."""

IN_USE_RETRY_S = 5.0
"""After a program without a lease kept a step from being made."""

FAILURE_RETRY_S = 60.0
"""After the driver refused a step."""


NO_INSTANCES: Layout = frozenset()


class _Status(NamedTuple):
    """What the node says of its layout. reason: why it is not there yet."""

    state: Literal["pending", "success", "failed"] | None
    reason: str = ""


class _Attempt(NamedTuple):
    """The last change of a card. retry_at: seconds since the epoch."""

    retry_at: float
    waiting: Sequence[str]
    failure: str


@dataclass(eq=False)
class LayoutFollower:
    """Brings the cards to the layout that the labels name. clock: seconds since the epoch.

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
    _targets: Mapping[DeviceId, CardTarget] = field(default_factory=dict)
    _holders: Mapping[DeviceId, Sequence[str]] = field(default_factory=dict)
    """Names of what holds each card and each instance."""
    _attempts: dict[DeviceId, _Attempt] = field(default_factory=dict)
    _task: "asyncio.Task[None] | None" = None
    _static: bool = False
    """Whether the cards are divided by layouts, or were and may still be closed for that."""
    _reported: _Status | None = None

    async def reconcile(self, claims: Sequence[Claim]) -> None:
        """Begin what is possible now, and label the node."""
        labels = self._api.node.metadata.labels if self._api.node else {}
        try:
            mode = mig_mode(labels)
        except InvalidRecord:  # reported where cards are divided on demand
            return
        static = mode.kind == "static"
        if static:
            await self._report(self._advance(labels.get(CONFIG), claims), labels.get(STATE))
        else:
            if self._static:
                self._leave_alone()
            if mode.labelled:
                self._release()
        self._static = static or self._task is not None

    # --- decision -----------------------------------------------------------------------------------

    def _advance(self, name: str | None, claims: Sequence[Claim]) -> _Status:
        if name is None:
            self._leave_alone()
            return _Status(None)
        try:
            targets = self._read_targets(name)
            if targets != self._targets:
                self._targets = targets
                self._attempts.clear()
            self._holders = self._allocations.holders(claims)
            plans = [self._plan(uuid) for uuid in targets]
        except (InvalidFile, ImpossibleLayout, MigError) as error:
            self._leave_alone()
            return _Status("failed", str(error))
        if self._task is None:
            self._begin(plans)
        failures = [attempt.failure for attempt in self._attempts.values() if attempt.failure]
        if failures:
            return _Status("failed", "; ".join(failures))
        if all(plan.complete for plan in plans) and self._task is None:
            return _Status("success")
        waiting = [reason for plan in plans for reason in plan.waiting]
        waiting += [reason for attempt in self._attempts.values() for reason in attempt.waiting]
        return _Status("pending", "; ".join(dict.fromkeys(waiting)))

    def _read_targets(self, name: str) -> dict[DeviceId, CardTarget]:
        """Return what each card is to be. Raises InvalidFile."""
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
        if uuid not in self._targets:
            return CardPlan(card, NO_INSTANCES)

        def names(status: InstanceStatus) -> Sequence[str]:
            instance = status.place.on(uuid)
            return self._holders.get(instance.device) or ["a pod"] * (instance in held)

        return plan_card(
            replace(card, divided=uuid in self._instances.observed),
            self._instances.geometries.get(uuid),
            present_instances(self._instances.observed.get(uuid, ()), names),
            self._holders.get(uuid, ()),
            self._targets[uuid],
        )

    # --- changes ------------------------------------------------------------------------------------

    def _begin(self, plans: Sequence[CardPlan]) -> None:
        """Keep pods from what is to go, and begin the changes for which that has been so for long enough."""
        self._withdraw({instance for plan in plans for instance in self._leaving(plan)})
        now, ready = self._clock(), list[DeviceId]()
        for plan in plans:
            if plan.complete:
                self._attempts.pop(plan.card.uuid, None)
                self._closed.open(plan.card)
            elif not self._closed.close(plan.card):
                continue
            attempt = self._attempts.get(plan.card.uuid)
            wanted = plan.steps or marks(self._instances.manager.keeper, plan)
            if wanted and (attempt is None or attempt.retry_at <= now):
                ready.append(plan.card.uuid)
        if ready:
            self._task = self._instances.spawn(self._carry_out(ready))

    def _release(self) -> None:
        """Have the instances of an earlier layout go when nobody uses them."""
        self._targets = {}
        self._attempts.clear()
        plans = (CardPlan(card, NO_INSTANCES) for card in self._inventory.by_uuid.values())
        kept = [plan.card.uuid for plan in plans if marks(self._instances.manager.keeper, plan)]
        if kept and self._task is None:
            self._task = self._instances.spawn(self._carry_out(kept))

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
                self._attempts[uuid] = await self._attempt(uuid)
        finally:
            self._task = None
            self._instances.changed()

    async def _attempt(self, uuid: DeviceId) -> _Attempt:
        try:
            driver = self._instances.driver
            progress = await driver.run(driver.carry_out(lambda: self._plan(uuid)))
        except (ImpossibleLayout, MigError, NoDriver, OSError) as error:
            return _Attempt(self._clock() + FAILURE_RETRY_S, (), sentence(error))
        for step in progress.done:
            _LOG.info("layout: %s", step)
        if progress.in_use:
            return _Attempt(self._clock() + IN_USE_RETRY_S, progress.waiting, "")
        return _Attempt(self._clock(), (), "")

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


RETRY_S = 60.0
"""Between attempts to switch a card that the driver did not switch."""


@dataclass(eq=False)
class MigConverter:
    """Decides which cards are divided. clock: seconds since the epoch."""

    _api: NodeApi
    _instances: NodeInstances
    _inventory: NodeInventory
    _allocations: Allocations
    _closed: ClosedCards
    _clock: Callable[[], float]
    _failed: dict[str, tuple[float, str]] = field(default_factory=dict)
    """When and why the driver did not switch a card."""
    _switching: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    mode: NodeMigMode = field(default_factory=NodeMigMode)

    async def reconcile(self, claims: Sequence[Claim]) -> None:
        """Close, switch and open cards as far as that is possible now."""
        self._instances.on_recovered()
        if not self._instances.geometries or not self._read_mode():
            return
        selected = frozenset(card.uuid for card in self._capable() if self._is_selected(card))
        if selected != self._instances.on_demand:
            self._instances.on_demand = selected
            self._instances.changed()
        if self.mode.kind == "static":
            return
        holders = self._holders(claims)
        reasons = []
        for card in self._capable():
            if reason := self._reconcile_card(card, holders.get(card.uuid, [])):
                reasons.append(reason)
        if reasons:
            self._api.node_event("FenkaMig", "; ".join(reasons))

    def _read_mode(self) -> bool:
        try:
            self.mode = mig_mode(self._api.node.metadata.labels if self._api.node else {})
        except InvalidRecord as error:
            self._api.node_event("FenkaLabels", f"{error}; no card is switched")
            return False
        unfit = sorted(
            (self.mode.indexes or frozenset()) - {card.index for card in self._capable()}
        )
        if unfit:
            self._api.node_event(
                "FenkaLabels",
                f"its label {MIG_LABEL} names card {unfit[0]}, which has no MIG: leave it out",
            )
        return True

    def _capable(self) -> list[Card]:
        cards = self._inventory.by_uuid.values()
        return [card for card in cards if card.uuid in self._instances.geometries]

    def _is_selected(self, card: Card) -> bool:
        chosen = self.mode.indexes is None or card.index in self.mode.indexes
        return self.mode.kind == "on-demand" and chosen

    def _reconcile_card(self, card: Card, holders: Sequence[str]) -> str:
        """Return why the card stays what it is although the label says otherwise; empty if it does not."""
        divided = card.uuid in self._instances.observed
        wanted = self._is_selected(card)
        # Without a label the mode of a card is an administrator's.
        if wanted == divided or not self.mode.labelled:
            self._closed.open(card)
            self._failed.pop(card.uuid, None)
            return ""
        stays = f"card {card.index} stays {'divided' if divided else 'whole'}"
        at, reason = self._failed.get(card.uuid, (0.0, ""))
        if card.uuid in self._switching:
            return ""
        if holders or (reason and self._clock() - at < RETRY_S):
            self._closed.open(card)
            return f"{stays}: {reason if not holders else ', '.join(holders) + ' must end first'}"
        if not self._closed.close(card):
            return ""
        task = self._instances.spawn(self._switch(card, enabled=wanted))
        self._switching[card.uuid] = task
        task.add_done_callback(lambda _: self._switching.pop(card.uuid))
        return ""

    async def _switch(self, card: Card, *, enabled: bool) -> None:
        """Switch a card, or record why that failed, and open it again."""
        try:
            if enabled and (users := _open_by(await self._instances.users(card.uuid))):
                raise InstanceInUse(users)
            driver = self._instances.driver
            await driver.run(driver.switch(card.uuid, enabled=enabled))
            _LOG.info("card %d is %s now", card.index, "divided" if enabled else "whole")
        except (MigError, NoDriver, OSError) as error:
            users = ""
            with contextlib.suppress(NoDriver):
                users = _open_by(await self._instances.users(card.uuid, idle=True))
            self._failed[card.uuid] = self._clock(), users or sentence(error)
        self._closed.open(card)

    def _holders(self, claims: Sequence[Claim]) -> dict[str, list[str]]:
        """Return who holds each card or an instance on it, by UUID."""
        holders: dict[str, set[str]] = {}
        for device, names in self._allocations.holders(claims).items():
            holders.setdefault(card_of(device), set()).update(names)
        for uuid, statuses in self._instances.observed.items():
            index = self._inventory.by_uuid[uuid].index
            for status in statuses:
                if status.state in TAKEN:
                    name = status.place.name(index)
                    holders.setdefault(uuid, set()).add(f"{name}, which {TAKEN[status.state]},")
        return {uuid: sorted(names) for uuid, names in holders.items()}


def _open_by(pids: Collection[int]) -> str:
    named = [f"process {pid} ({process_name(pid)})" for pid in sorted(pids)]
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{', '.join(named[:3])}{' and others' * (len(named) > 3)} {verb} it open" if named else ""
    )
