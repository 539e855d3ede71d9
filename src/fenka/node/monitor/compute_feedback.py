"""Writes compute feedback to the control pages of all leases, and which PID namespaces have ended.

Each round reads the store, so that leases need not be registered or removed here. A round runs in a thread of
its own, so that a slow driver delays nothing else.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from fenka.hardware.nvml import NoDriver
from fenka.isolation import pid_namespaces
from fenka.isolation.compute_feedback import (
    PERIOD_S,
    ComputeFeedback,
    Samples,
    requested_compute,
)
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.pod_processes import ProcessOwners
from fenka.node.lease.store import Lease, LeaseStore
from fenka.node.node_api import NodeApi

_LOG = logging.getLogger(__name__)


class FeedbackLoop:
    """Writes feedback round by round."""

    def __init__(
        self,
        samples: Samples,
        files: LeaseFiles,
        proc: Path = Path("/proc"),
        make: Callable[[Samples, Callable[[int], str | None]], ComputeFeedback] = ComputeFeedback,
    ) -> None:
        self._files, self._proc = files, proc
        self._feedback = make(samples, self._lease_of)
        self._owners = ProcessOwners({}, {}, proc)
        self._watched: dict[str, int] = {}
        """Inode of each token's control page."""
        self._reaper = pid_namespaces.NamespaceReaper()
        self._silent = False

    async def run(self, store: LeaseStore, api: NodeApi) -> None:
        """Run ten rounds a second until cancelled."""
        while True:
            await asyncio.to_thread(self.round, store.leases, api.container_names())
            await asyncio.sleep(PERIOD_S)

    def round(self, leases: Mapping[str, Lease], names: Mapping[str, str]) -> None:
        """Run one round. Takes as long as the driver takes. leases: by token."""
        self._owners = ProcessOwners(leases, names, self._proc)
        for token in self._watched.keys() - leases.keys():
            self._forget(token)
        for token, lease in leases.items():
            self._watch(token, lease)
        self._reaper.run_once(self._files.slots(token) for token in leases)
        try:
            self._feedback.update()
            self._silent = False
        except NoDriver as error:
            if not self._silent:
                _LOG.warning("programs get no compute feedback: %s", error)
            self._silent = True

    def _watch(self, token: str, lease: Lease) -> None:
        page = self._files.control(token)
        # The page is not made yet, or already removed.
        with contextlib.suppress(OSError, ValueError):
            inode = page.stat().st_ino
            if self._watched.get(token, inode) != inode:
                self._forget(token)
            requested = None if lease.limits_mib else requested_compute(lease.slices)
            self._feedback.add_lease(token, page, lease.burst_percent or 100, requested)
            self._watched[token] = inode

    def _forget(self, token: str) -> None:
        self._watched.pop(token, None)
        self._feedback.remove_lease(token)

    def _lease_of(self, pid: int) -> str | None:
        tokens = self._owners.tokens_of(pid)
        return tokens[0] if len(tokens) == 1 else None
