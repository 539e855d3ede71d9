"""Whether this replica may write: it holds the lease, and has read the cluster since it got it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from fenka.kubernetes.election import Election, Term

log = logging.getLogger(__name__)


LINGER_S = 3.0
"""A replica that ends forwards calls for this long: by then every node's proxy knows that it is not ready."""


OBSERVE_INTERVAL_S = 0.25
"""Meanwhile it reads at this interval who leads."""


class Knowledge(Protocol):
    """A replica's knowledge of the cluster."""

    @property
    def synced(self) -> bool:
        """Return whether every collection has been read."""

    @property
    def errors(self) -> list[str]:
        """Return why collections are not up to date."""

    async def relist(self) -> None:
        """Read again, as of now, what a former leader may have changed."""


class Leadership:
    """Follows the election. `run` is its task."""

    def __init__(
        self,
        election: Election,
        informers: Knowledge,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.election, self._informers, self._sleep = election, informers, sleep
        self.ending = False
        """Whether the replica ends soon."""
        self._fresh_term: Term | None = None
        """The term in which the cluster was read."""
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def leading(self) -> bool:
        """Return whether this replica decides: it holds the lease, and knows all that was written before."""
        return self.time_left_s > 0 and self._informers.synced

    @property
    def time_left_s(self) -> float:
        """Return within how many seconds a write must have ended; 0 if none may begin."""
        return self.election.time_left_s if self._fresh and not self.ending else 0.0

    @property
    def _fresh(self) -> bool:
        return self._fresh_term is not None and self._fresh_term == self.election.term

    @property
    def ready(self) -> bool:
        """Return whether callers may use this replica: it could lead, and knows which one does."""
        return self._informers.synced and self.election.has_leader and not self.ending

    @property
    def leader(self) -> str:
        """Return the identity of the leader; empty if there is none."""
        return self.election.leader

    @property
    def other_leader(self) -> str:
        """Return the identity of the leader if that is another replica, else an empty string."""
        return "" if self.leader == self.election.identity else self.leader

    @property
    def problem(self) -> str:
        """Return why the replica is not ready, empty if it is."""
        if self.ready:
            return ""
        if self.ending:
            return "it is ending"
        reason = "; ".join(self._informers.errors) or self.election.last_error
        if not self._informers.synced:
            return reason or "the cluster is being read"
        return reason or "the leader is not known"

    async def run(self) -> None:
        """Run until cancelled. The lease is renewed however long reading the cluster takes."""
        election = self.election
        async with asyncio.TaskGroup() as group:
            while not self.ending:
                led, error = election.leading, election.last_error
                await election.acquire_or_renew()
                if election.leading != led:
                    log.info("leading" if election.leading else "not leading any more")
                if election.last_error not in (None, error):
                    log.warning("lease: %s", election.last_error)
                if election.leading and not self._fresh and self._refreshing is None:
                    self._refreshing = group.create_task(self._refresh())
                await self._sleep(election.pause_s)

    def end(self) -> None:
        """Begin no write from now on."""
        self.ending = True

    async def resign(self, *, release: bool) -> None:
        """Let another replica lead, and follow which one does for LINGER_S.

        Args:
            release: give the lease up. Without it another replica leads once the lease has expired.
        """
        if release:
            await self.election.release()
        for _ in range(round(LINGER_S / OBSERVE_INTERVAL_S)):
            await self._sleep(OBSERVE_INTERVAL_S)
            await self.election.observe()

    async def _refresh(self) -> None:
        """Read the cluster: the informers may not have brought yet what the former leader bound last."""
        term = self.election.term
        try:
            await self._informers.relist()
            self._fresh_term = term
        finally:
            self._refreshing = None
