"""Closes cards whose division is about to change, so that no pod comes meanwhile.

The scheduler is shown a divided card on which nothing is created. What it decided before arrives here soon
after the Node shows that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from fenka.core.inventory import Card
from fenka.dialects.base import InvalidRecord
from fenka.dialects.mig_records import decode_instances
from fenka.node.instances import NodeInstances
from fenka.node.node_api import NodeApi

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
        return any(each.uuid == card.uuid and not each.on_demand for each in shown)
