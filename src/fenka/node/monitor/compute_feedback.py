"""Tells programs how much of their cards' time they have had and may have, and which namespaces have ended.

See :mod:`fenka.isolation.compute_feedback` and :mod:`fenka.isolation.pid_namespaces`. Each round
looks at the tokens that there are, so nothing has to be said when a lease is made, ends, or is found by the
next agent. A round runs in a thread of its own, so that a slow driver delays nobody else.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fenka.hardware.nvml import NoDriver
from fenka.isolation import pid_namespaces
from fenka.isolation.compute_feedback import PERIOD_S, ComputeFeedback, Samples
from fenka.node.agent import Agent
from fenka.node.lease.files import LeaseFiles
from fenka.node.lease.pod_processes import Owners
from fenka.node.lease.store import Token

_LOG = logging.getLogger(__name__)


class Telling:
    """Rounds, one after the other. make: a Teller, by a test its own."""

    def __init__(
        self,
        samples: Samples,
        leases: LeaseFiles,
        proc: Path = Path("/proc"),
        make: Callable[[Samples, Callable[[int], str | None]], ComputeFeedback] = ComputeFeedback,
    ) -> None:
        self._leases, self._proc = leases, proc
        self._teller = make(samples, self._lease_of)
        self._owners = Owners((), {}, proc)
        self._watched: dict[str, int] = {}
        """Tokens, and which file their page was."""
        self._judge = pid_namespaces.NamespaceReaper()
        self._silent = False

    async def run(self, agent: Agent) -> None:
        """A round ten times a second, until cancelled."""
        while True:
            tokens = list(agent.store.tokens.values())
            await asyncio.to_thread(self.round, tokens, agent.containers())
            await asyncio.sleep(PERIOD_S)

    def round(self, tokens: Sequence[Token], names: Mapping[str, str]) -> None:
        """Once. Takes as long as the driver takes; one that is lost is asked again in the next round."""
        bound = [it for it in tokens if it.lease is not None]
        self._owners = Owners(bound, names, self._proc)
        for name in self._watched.keys() - {it.name for it in bound}:
            self._forget(name)
        for token in bound:
            self._watch(token)
        self._judge.run_once(self._leases.slots(token.name) for token in bound)
        try:
            self._teller.update()
            self._silent = False
        except NoDriver as why:
            if not self._silent:
                _LOG.warning("programs are told nothing of their cards' time: %s", why)
            self._silent = True

    def _watch(self, token: Token) -> None:
        page = self._leases.control(token.name)
        assert token.lease is not None
        # It is not made yet, or taken away already.
        with contextlib.suppress(OSError, ValueError):
            file = page.stat().st_ino
            if self._watched.get(token.name, file) != file:
                self._forget(token.name)
            self._teller.add_lease(token.name, page, token.lease.ceiling or 100)
            self._watched[token.name] = file

    def _forget(self, name: str) -> None:
        self._watched.pop(name, None)
        self._teller.remove_lease(name)

    def _lease_of(self, pid: int) -> str | None:
        found = self._owners.of(pid)
        return found[0].name if len(found) == 1 else None
