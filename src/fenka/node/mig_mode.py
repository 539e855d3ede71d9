"""Switches idle cards to MIG and back, as the node's label says (see dialects/node_modes.py).

A card is closed first: the scheduler is shown a divided card on which nothing is created. Its mode changes
when the scheduler's earlier decisions must have arrived here, if nobody holds the card then either.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fenka.core.inventory import Card
from fenka.dialects.base import InvalidRecord, split_instance
from fenka.dialects.mig_records import TAKEN
from fenka.dialects.node_modes import MIG_LABEL, MigMode, mig_mode
from fenka.hardware.mig_instances import InstanceInUse, MigError
from fenka.hardware.nvml import NoDriver
from fenka.node.closed_cards import ClosedCards
from fenka.node.instances import NodeInstances, sentence
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Claim
from fenka.node.lease.allocations import Allocations
from fenka.node.node_api import NodeApi
from fenka.procfs import process_name

_LOG = logging.getLogger(__name__)

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
    mode: MigMode = field(default_factory=MigMode)

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
            await self._instances.switch(card.uuid, enabled=enabled)
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
            place = split_instance(device)
            holders.setdefault(place[0] if place else device, set()).update(names)
        for uuid, statuses in self._instances.observed.items():
            index = self._inventory.by_uuid[uuid].index
            for status in statuses:
                if status.state in TAKEN:
                    name = f"{index}/{status.place.start} {status.place.profile.name}"
                    holders.setdefault(uuid, set()).add(f"{name}, which {TAKEN[status.state]},")
        return {uuid: sorted(names) for uuid, names in holders.items()}


def _open_by(pids: Collection[int]) -> str:
    named = [f"process {pid} ({process_name(pid)})" for pid in sorted(pids)]
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{', '.join(named[:3])}{' and others' * (len(named) > 3)} {verb} it open" if named else ""
    )
