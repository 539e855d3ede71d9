"""The node's cards as the cluster sees them: health from the driver, cordons and resets from annotations."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fenka.core.inventory import Card, Node
from fenka.core.request import Slice
from fenka.dialects import base, mig_records, nodes
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import with_division
from fenka.hardware.card_errors import FALLEN_OFF, NO_SIZE, CardErrors
from fenka.hardware.nvml import Hardware, NoDriver, Reading
from fenka.isolation.driver_usage import UnleasedTracker
from fenka.isolation.lease_files import decode_json, write_atomically
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.node.mig_instances import NodeInstances
from fenka.node.node_api import RESET, NodeApi


class CardHealth:
    """The cards that the driver shows, and those that the node is known to have had.

    A lost card stays known, and may return.
    """

    def __init__(
        self,
        hardware: Hardware,
        record: Path | None = None,
        on_return: Callable[[Sequence[Card]], None] = lambda _: None,
    ) -> None:
        """Read the cards.

        Args:
            hardware: The machine's driver.
            record: File of reported errors, for the next process. A reboot must empty its directory, since
                that resets every card.
            on_return: Called with lost cards that have returned. It may raise NoDriver.
        """
        self._hardware, self._record, self._on_return = hardware, record, on_return
        self._cards = hardware.driver.cards()
        self.links = hardware.driver.links()
        """How the cards are connected that the driver showed at the start, or when one returned."""
        self._errors = CardErrors(_read(record), self._save)
        self._lost: set[str] = set()
        self.readings: dict[str, Reading] = {}
        """By UUID, as of the last refresh."""
        self._driver_error: str | None = None

    @property
    def known(self) -> tuple[Card, ...]:
        """All cards as the driver described them when it last showed them."""
        return self._cards

    def cards(self, cordoned: Collection[int]) -> tuple[Card, ...]:
        """Return the cards with their health as of the last refresh. cordoned: indexes."""
        return tuple(
            replace(card, healthy=self.error(card.uuid) is None, cordoned=card.index in cordoned)
            for card in self._cards
        )

    def error(self, uuid: str) -> str | None:
        """Return why the card is unhealthy; None if it is healthy."""
        if uuid in self._lost:
            return self._driver_error or FALLEN_OFF
        sized = {card.uuid for card in self._cards if card.memory_mib}
        return self._errors.get(uuid) or (None if uuid in sized else NO_SIZE)

    def restore(self, published: Iterable[Card]) -> None:
        """Add the cards that the node published before. Those that the driver does not show are lost.

        Cards keep their published indexes, because pods' records use them, and a driver that starts with a
        card less counts the others differently. A new card at a lost card's index has replaced it.
        """
        former = {card.uuid: card for card in published}
        shown = {card.uuid for card in self._cards}
        lost = [card for card in former.values() if card.uuid not in shown]
        if not lost:
            return
        cards = [
            replace(card, index=former[card.uuid].index)
            for card in self._cards
            if card.uuid in former
        ]
        used = {card.index for card in cards}
        for card in self._cards:
            if card.uuid not in former:
                index = card.index if card.index not in used else _first_free(used)
                used.add(index)
                cards.append(replace(card, index=index))
        lost = [card for card in lost if card.index not in used]
        self._lost |= {card.uuid for card in lost}
        self._cards = tuple(sorted((*cards, *lost), key=lambda card: card.index))

    def forget_lost(self) -> None:
        """Remove the lost cards: they were taken out of the machine."""
        self._cards = tuple(card for card in self._cards if card.uuid not in self._lost)
        self._lost.clear()

    def report_xid(self, uuid: str | None, xid: int, instance: str = "") -> None:
        """Record an XID that the driver reports. Without a UUID it concerns all cards.

        instance: the key of the MIG instance that it concerns alone. It begins with its card's UUID.
        """
        affected: list[str] = [card.uuid for card in self._cards if uuid in (None, card.uuid)]
        self._errors.report_xid([instance] if instance else affected, xid)

    def instance_error(self, key: str) -> str | None:
        """Return why a MIG instance is unhealthy; None if it is healthy."""
        return self._errors.get(key)

    def reset(self, indexes: Collection[int]) -> None:
        """Clear the errors of cards that a user has reset, and of their instances."""
        self._errors.clear_reset({card.uuid for card in self._cards if card.index in indexes})

    def refresh(self) -> None:
        """Read the cards. Takes as long as the driver takes."""
        try:
            self.readings, self._driver_error = self._hardware.readings(), None
        except NoDriver as error:
            self.readings, self._driver_error = {}, str(error)
        lost: set[str] = {card.uuid for card in self._cards if card.uuid not in self.readings}
        # A lost card returns only by a reset.
        returned = self._lost - lost
        self._errors.clear_returned(returned)
        if returned:
            with contextlib.suppress(NoDriver):
                self.links = self._hardware.driver.links()
                self._on_return([card for card in self._cards if card.uuid in returned])
        self._lost = lost

    def _save(self, errors: Mapping[str, str]) -> None:
        if self._record is None:
            return
        try:
            write_atomically(self._record, msgspec.json.encode(errors))
        except OSError as error:
            _LOG.error("reported errors will be forgotten at the next start: %s", error)


def _first_free(used: Collection[int]) -> int:
    return next(index for index in range(len(used) + 1) if index not in used)


def _read(record: Path | None) -> dict[str, str]:
    """Return the recorded errors; none where the file is missing or invalid."""
    if record is None:
        return {}
    try:
        return decode_json(msgspec.json.Decoder(dict[str, str]), record.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}


_LOG = logging.getLogger(__name__)


def whole_slice(card: Card) -> Slice:
    """Return the slice that is the whole card."""
    return Slice(card.index, card.uuid, card.memory_mib, card.compute)


class NodeInventory:
    """Reads the annotations of the Node about its cards, and publishes the cards there."""

    def __init__(
        self, api: NodeApi, health: CardHealth, instances: NodeInstances, unit_mib: int
    ) -> None:
        self._api, self._health, self._unit_mib = api, health, unit_mib
        self._instances = instances
        self.unleased = UnleasedTracker()
        """Memory that no lease uses, as the monitor has measured it."""
        self._reported: dict[str, str] = {}
        """Values of annotations whose unknown cards were reported, by the annotation's name."""
        self._published = False
        """Whether the Node had the inventory's annotation in the last pass."""

    @property
    def by_uuid(self) -> dict[str, Card]:
        """All known cards by UUID, without their present health."""
        return {card.uuid: card for card in self._health.known}

    def cards(self) -> tuple[Card, ...]:
        """Return the cards with health and unleased memory, cordoned as the node's annotation says."""
        cordoned = self._annotations.get(nodes.CORDONED, "")
        return tuple(
            replace(card, unleased_mib=unleased.total_mib, drawn_mib=unleased.drawn_mib)
            for card in self._health.cards(nodes.parse_indexes(cordoned))
            for unleased in [self.unleased.counted(card.uuid)]
        )

    def shared_node(self) -> SharedNode:
        """Return the node as gpushare's dialect describes it, with the instances that exist."""
        node = SharedNode(Node(self._api.name, self.cards(), unit_mib=self._unit_mib))
        return with_division(node, self._instances.divided())

    @property
    def divided(self) -> frozenset[str]:
        """UUIDs of the cards that are given away neither whole nor in slices of the card itself."""
        return self._instances.withheld

    @property
    def _annotations(self) -> Mapping[str, str]:
        return self._api.node.metadata.annotations if self._api.node else {}

    async def apply_annotations(self) -> None:
        """Forget lost cards when the inventory was deleted, and reset cards that an annotation names."""
        if self._api.node is None:
            return
        annotations = self._annotations
        if self._published and base.CARDS not in annotations:
            _LOG.info("annotation %s was removed: lost cards are forgotten", base.CARDS)
            self._health.forget_lost()
        self._published = base.CARDS in annotations
        for name in (nodes.CORDONED, RESET):
            self._report_unknown(name, annotations.get(name, ""))
        if RESET in annotations:
            _LOG.info("annotation %s=%s: these cards are used again", RESET, annotations[RESET])
            indexes = nodes.parse_indexes(annotations[RESET])
            await asyncio.to_thread(self._health.reset, indexes)
            with contextlib.suppress(ApiError, ApiUnreachable):
                await self._api.clear_reset()

    def _report_unknown(self, name: str, text: str) -> None:
        """Write an event on the Node if an annotation names cards that it has not, once for each value."""
        if text == self._reported.get(name, ""):
            return
        self._reported[name] = text
        sentence = nodes.unknown_cards(name, text, {card.index for card in self._health.known})
        if sentence:
            self._api.node_event("FenkaCardIndexes", f"fenka: {sentence}")

    async def publish(self, *, shared: bool, schedulable: bool) -> None:
        """Write the cards on the Node.

        Args:
            shared: Whether the node shares its cards; otherwise it shows a card count of 0.
            schedulable: False shows all cards as unhealthy, so that the extender sends no pod here.
        """
        cards = self.cards()
        shown = cards if schedulable else tuple(replace(card, healthy=False) for card in cards)
        unleased = {card.uuid: self.unleased.shown(card.uuid).sentence() for card in cards}
        inventory = nodes.encode_inventory(shown, self._unit_mib, unleased, self._health.links)
        divided = self._instances.published()
        instances = mig_records.encode_instances(divided) if divided else None
        try:
            await self._api.publish_inventory(inventory, instances, len(cards) if shared else 0)
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("the node's cards could not be written: %s", error)
