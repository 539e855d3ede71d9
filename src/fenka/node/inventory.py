"""The node's cards as the cluster sees them: health from the driver, cordons and resets from annotations."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

from fenka.core.inventory import Card, Node
from fenka.core.request import Slice
from fenka.dialects import base, mig_records, node_inventory
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import with_division
from fenka.isolation.unleased_memory import UnleasedTracker
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.health import CardHealth
from fenka.node.instances import NodeInstances
from fenka.node.node_api import RESET, NodeApi

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
        self._published = False
        """Whether the Node had the inventory's annotation in the last pass."""

    @property
    def by_uuid(self) -> dict[str, Card]:
        """All known cards by UUID, without their present health."""
        return {card.uuid: card for card in self._health.known}

    def cards(self) -> tuple[Card, ...]:
        """Return the cards with health and unleased memory, cordoned as the node's annotation says."""
        cordoned = self._annotations.get(node_inventory.CORDONED, "")
        return tuple(
            replace(card, unleased_mib=unleased.total_mib, drawn_mib=unleased.drawn_mib)
            for card in self._health.cards(node_inventory.parse_indexes(cordoned))
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
        if RESET in annotations:
            _LOG.info("annotation %s=%s: these cards are used again", RESET, annotations[RESET])
            indexes = node_inventory.parse_indexes(annotations[RESET])
            await asyncio.to_thread(self._health.reset, indexes)
            with contextlib.suppress(ApiError, ApiUnreachable):
                await self._api.clear_reset()

    async def publish(self, *, shared: bool, schedulable: bool) -> None:
        """Write the cards on the Node.

        Args:
            shared: Whether the node shares its cards; otherwise it shows a card count of 0.
            schedulable: False shows all cards as unhealthy, so that the extender sends no pod here.
        """
        cards = self.cards()
        shown = cards if schedulable else tuple(replace(card, healthy=False) for card in cards)
        unleased = {card.uuid: self.unleased.shown(card.uuid).sentence() for card in cards}
        inventory = node_inventory.encode_inventory(shown, self._unit_mib, unleased)
        divided = self._instances.published()
        instances = mig_records.encode_instances(divided) if divided else None
        try:
            await self._api.publish_inventory(inventory, instances, len(cards) if shared else 0)
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("the node's cards could not be written: %s", error)
