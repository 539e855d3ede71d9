"""Watches the cards: refreshes their health, listens for XIDs, and reports unhealthy cards on the Node."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fenka.core.inventory import Card, DeviceId
from fenka.dialects.mig_records import DividedCard
from fenka.hardware.nvml import DriverLost, Reading, Xid, XidListener
from fenka.isolation.unleased_memory import UnleasedMemory
from fenka.node.health import APPLICATION_XIDS, INFO_XIDS, LOST_XID, CardHealth
from fenka.node.instances import NodeInstances, ObservedInstance, error_key
from fenka.node.inventory import NodeInventory
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

RETRY_S = 4.0
"""After the driver was lost."""
_LISTEN_MS = 1000


@dataclass(eq=False)
class CardMonitor:
    """Keeps the cards' health current. trigger: requests a pass of the agent."""

    _api: NodeApi
    _health: CardHealth
    _inventory: NodeInventory
    _instances: NodeInstances
    _trigger: Callable[[], None]

    async def refresh(self) -> tuple[tuple[Card, ...], Mapping[str, Reading]]:
        """Read the cards, and report what has changed. Return the cards, and readings by UUID."""
        before = self._inventory.cards()
        await asyncio.to_thread(self._health.refresh)
        cards = self._inventory.cards()
        if cards != before:
            self._report()
        return cards, self._health.readings

    def update_unleased(self, measured: Mapping[str, UnleasedMemory]) -> None:
        """Take what no lease uses of cards, and have it published if it has changed. measured: by UUID."""
        before = self._inventory.cards()
        for card in before:
            if card.uuid in measured:
                now = time.monotonic()
                self._inventory.unleased.update(
                    card.uuid, card.memory_mib, measured[card.uuid], now
                )
        if self._inventory.cards() != before:
            self._trigger()

    def divided(self) -> tuple[Sequence[DividedCard], Sequence[ObservedInstance]]:
        """Return the cards in MIG mode, and their instances."""
        return self._instances.divided(), self._instances.listed()

    async def listen(self, listener: Callable[[], XidListener]) -> None:
        """Record XIDs until cancelled. A driver that was lost is listened to again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                with await asyncio.to_thread(listener) as xids:
                    while True:
                        event = await loop.run_in_executor(None, xids.wait, _LISTEN_MS)
                        if event is not None:
                            await self._record(event)
            except DriverLost as error:
                _LOG.info("XIDs are not received now: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _record(self, event: Xid) -> None:
        uuid, xid, gpu = event.uuid, event.number, event.gpu_instance
        harmless = APPLICATION_XIDS.get(xid) or INFO_XIDS.get(xid)
        part = "" if gpu is None else f", GPU instance {gpu}"
        _LOG.warning("XID %d of %s%s%s", xid, uuid, part, f": {harmless}" if harmless else "")
        record = None if gpu is None else self._instances.record_of(uuid, gpu)
        if gpu is not None and record is None:  # An administrator's instance.
            return
        key = error_key(record) if record is not None else ""
        await asyncio.to_thread(self._health.report_xid, uuid, xid, key)
        if xid == LOST_XID:
            await asyncio.to_thread(self._health.refresh)
        if harmless is None:
            self._report()

    def _report(self) -> None:
        for record, reason in self._instances.unhealthy():
            index = self._inventory.by_uuid[DeviceId(record.card)].index
            note = f"instance {index}/{record.start} {record.profile} is not used: {reason}"
            self._api.node_event("FenkaInstanceUnhealthy", note)
        for card in self._inventory.cards():
            error = self._health.error(card.uuid)
            if error is not None:
                note = f"card {card.index} ({card.model}, {card.uuid}) is not used: {error}"
                self._api.node_event("FenkaCardUnhealthy", note)
        self._trigger()
