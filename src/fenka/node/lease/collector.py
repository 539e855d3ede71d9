"""Garbage collection: removes leases of pods that have ended, files without a token, and old libraries."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fenka.node.kubelet.client import Claim
from fenka.node.lease import resolve
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.store import LeaseStore, Token
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)

UNCLAIMED_S = 30.0
"""A token that no container holds after this time was issued for a pod that was deleted or rejected."""


@dataclass(eq=False)
class GarbageCollector:
    """Removes what no pod holds any more.

    living: returns the UIDs of pods that have processes. clock: seconds since the epoch. removed: called
    when leases were removed.
    """

    _api: NodeApi
    _store: LeaseStore
    _files: LeaseFiles
    _living: Callable[[], set[str]]
    _clock: Callable[[], float]
    _removed: Callable[[], None] = lambda: None
    lingering: set[str] = field(default_factory=set)
    """UIDs of pods that have ended for the API server, but whose processes still hold cards."""

    async def collect(self, claims: Sequence[Claim]) -> None:
        """Remove all that can be removed now. Raises OSError."""
        ended = [
            token for token in self._store.tokens.values() if not self._is_claimed(token, claims)
        ]
        if ended:
            living = await asyncio.to_thread(self._living)
            for token in ended:
                if token.lease is None or token.lease.uid not in living:
                    await self._remove(token)
            self._removed()
        uids = {lease.uid for lease in self._store.leases.values()}
        self.lingering = {uid for uid in uids if not self._api.runs(uid)}
        async with self._store.lock:
            await asyncio.to_thread(self._remove_orphans, set(self._store.tokens))

    def _is_claimed(self, token: Token, claims: Sequence[Claim]) -> bool:
        """Return whether the kubelet or the API server still shows the container that holds a token."""
        claim = resolve.claim_of(token, claims, self._api.pods)
        if token.lease is None:
            if self._clock() - token.made_at < UNCLAIMED_S:
                return True
            return claim is not None and (not claim.uid or self._api.runs(claim.uid))
        if self._api.runs(token.lease.uid):
            return True
        # PodResources shows pods that are terminating; the checkpoint also those that have ended.
        return claim is not None and not claim.uid and token.lease.uid not in self._api.pods

    async def _remove(self, token: Token) -> None:
        async with self._store.lock:
            await asyncio.to_thread(self._files.remove, token.name)
            await asyncio.to_thread(self._store.drop, token.name)
        if token.lease is not None:
            _LOG.info("%s has ended", token.lease.pod_name)

    def _remove_orphans(self, tokens: Collection[str]) -> None:
        for name in self._files.orphans(tokens):
            self._files.remove(name)
        kept = {str(self._files.library), *self._files.libraries()}
        kept |= {lease.library for lease in self._store.leases.values()}
        for library in self._files.library.parent.iterdir():
            if str(library) not in kept:
                shutil.rmtree(library, ignore_errors=True)
