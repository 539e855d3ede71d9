"""Keeps a taint on the Node while a card is free as a whole, so that pods without cards go elsewhere first.

kube-scheduler spreads pods without cards over all nodes, and calls no extender for them. They take the CPU
and the host memory that a later pod needs beside its card. By the effect PreferNoSchedule kube-scheduler
takes other nodes first, and this one if no other fits. docs/measurements/placement.md has the figures.

No other taint is written. If another client changes the Node in between, the write is refused and repeated.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.node.advertiser import Advertised, ModeSelector
from fenka.node.inventory import NodeInventory
from fenka.node.kubelet.client import Claim
from fenka.node.lease.capacity import Allocations
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

TAINT = "fenka.io/free-cards"
PREFER_NO_SCHEDULE = "PreferNoSchedule"

AGAIN_S = 0.2
"""How long the removal at the end waits after a refusal: the Node's next version is known by then."""

FREE_FOR_S = 5.0
"""A card must be free for this time: pods that wait take it at once, and each change is two requests."""


def has_free_card(
    cards: Iterable[Card], held: Iterable[Slice], exclusive: Collection[str] = ()
) -> bool:
    """Return whether a card that takes pods is free as a whole.

    Args:
        cards: the node's.
        held: what pods hold of them. A MIG instance counts as a part of its card.
        exclusive: UUIDs of cards that the kubelet has given away as a whole.
    """
    used = {piece.card for piece in held}
    return any(
        card.open and card.index not in used and card.uuid not in exclusive for card in cards
    )


class FreeCardsTaint:
    """Adds and removes the taint. `reconcile` is a phase of the agent's passes."""

    def __init__(
        self,
        api: NodeApi,
        mode: ModeSelector,
        inventory: NodeInventory,
        allocations: Allocations,
        advertised: Advertised,
        clock: Callable[[], float],
    ) -> None:
        """clock: seconds since the epoch."""
        self._api, self._mode, self._clock = api, mode, clock
        self._inventory, self._allocations = inventory, allocations
        self._advertised = advertised
        self._free_since: float | None = None
        self._ended = False

    async def reconcile(self, claims: Sequence[Claim]) -> None:
        """Have the Node say what is so. A failed write is repeated by the next pass."""
        free = not self._ended and self._offers_cards and self._has_free_card(claims)
        now = self._clock()
        if not free:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        settled = self._free_since is not None and now - self._free_since >= FREE_FOR_S
        if self._marked != free and (settled or not free):
            await self._write(PREFER_NO_SCHEDULE if free else None)

    async def end(self) -> None:
        """Remove the taint for good, since nobody keeps it from now on.

        No pass follows to repeat a refused write, and what ends the program may have given the Node another
        version: its label, for example. The caller bounds the time.
        """
        self._ended = True
        while self._marked and not await self._write(None):
            await asyncio.sleep(AGAIN_S)

    @property
    def _marked(self) -> bool:
        node = self._api.node
        return node is not None and any(taint.key == TAINT for taint in node.spec.taints)

    @property
    def _offers_cards(self) -> bool:
        offered, mode = self._advertised, self._mode
        exclusive = offered.exclusive and (mode.labelled or not offered.labelled_only)
        return offered.taint and (bool(mode.sharing) or exclusive)

    def _has_free_card(self, claims: Sequence[Claim]) -> bool:
        held = self._allocations.expected(claims).held.values()
        return has_free_card(
            self._inventory.cards(),
            (piece for slices in held for piece in slices),
            self._allocations.exclusive_cards(claims),
        )

    async def _write(self, effect: str | None) -> bool:
        """Return whether the Node has the taint as wanted."""
        try:
            await self._api.set_taint(TAINT, effect)
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("taint %s is written again: %s", TAINT, error)
            return False
        return True
