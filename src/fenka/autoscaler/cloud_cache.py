"""Keeps what the cloud said last. Clouds limit calls, so few are made."""

import asyncio
from collections.abc import Callable

from fenka.cloud import port

BUSY_S, QUIET_S = 5.0, 60.0
"""Between two lists of instances: while nodes come or go, and else."""


OFFERS_S = 60.0
"""Between two looks at prices and stock, unless the cloud says until when they hold."""


NOTICES_S = 10.0


RETRY_S = 5.0
"""After an error that says nothing else."""


TIMEOUT_S = 20.0
"""Of all that is read at once. Until then nothing is done for nodes that are taken back."""


class CloudCache:
    """Instances, offers and notices. Attributes: problem: why the last call failed, empty if it did not."""

    def __init__(self, provider: port.Provider, now: Callable[[], float]) -> None:
        self._provider, self._now = provider, now
        self.instances: dict[str, port.Instance] = {}
        self.instances_at: float | None = None
        self.offers: dict[port.OfferKey, port.Offer] = {}
        self.notices: tuple[port.ReclaimNotice, ...] = ()
        self._offers_until = self._notices_until = self._paused_until = 0.0
        self._stale = True
        self.problem = ""

    def forget(self) -> None:
        """Read all again before anything is decided: another replica may have bought some."""
        self.instances_at = None
        self._offers_until = self._notices_until = self._paused_until = 0.0

    def expect_change(self) -> None:
        """Read instances again at the next call: something was asked for or ended."""
        self._stale = True

    async def refresh(self, *, busy: bool, spot: bool) -> None:
        """Read what is due. An error is remembered as `problem`, and what was known stays.

        Args:
            busy: whether nodes are coming or going.
            spot: whether any instance may be taken back.
        """
        now = self._now()
        if now < self._paused_until:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._read(now, busy=busy, spot=spot)
            self.problem = ""
        except TimeoutError:
            self.problem = f"the cloud does not answer within {TIMEOUT_S:g} s"
            self._paused_until = now + RETRY_S
        except port.ProviderError as why:
            self.problem = str(why)
            pause = why.after_s if isinstance(why, port.Throttled) else RETRY_S
            self._paused_until = now + pause

    async def _read(self, now: float, *, busy: bool, spot: bool) -> None:
        interval = BUSY_S if busy else QUIET_S
        if self._stale or self.instances_at is None or now >= self.instances_at + interval:
            listed = await self._provider.instances()
            self.instances = {instance.id: instance for instance in listed}
            self.instances_at, self._stale = self._now(), False
        if now >= self._offers_until:
            offers = await self._provider.offers()
            self.offers = {offer.key: offer for offer in offers}
            ends = [max(offer.until, now + 1) for offer in offers if offer.until is not None]
            self._offers_until = min([now + OFFERS_S, *ends])
        if spot and now >= self._notices_until:
            self.notices = tuple(await self._provider.notices())
            self._notices_until = now + NOTICES_S
