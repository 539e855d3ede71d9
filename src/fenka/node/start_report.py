"""Reports on the Node why this program cannot serve: nobody reads the log of a pod that they do not know.

The program has no watches then. Each report is a connection of its own, and one that fails is only logged.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from fenka.cluster.objects import Node, node_path
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable
from fenka.kubernetes.events import EventRecorder

_LOG = logging.getLogger(__name__)

NOT_SERVING = "FenkaNodeNotServing"
"""Reason of the events."""

PATIENCE_S = 60.0
"""A driver may be installed by a pod of its own, and the kubelet may start again."""

TIMEOUT_S = 10.0


def report(kubeconfig: Path | None, node: str, sentence: str) -> None:
    """Write an event on a node, where no event loop runs. Errors are logged."""
    asyncio.run(_report(kubeconfig, node, sentence))


async def _report(kubeconfig: Path | None, name: str, sentence: str) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S), await Api.connect(kubeconfig) as api:
            node = await api.get(node_path(name), Node)
            recorder = EventRecorder(api, "fenka-node", name)
            recorder.record_on_node(node, NOT_SERVING, f"fenka: no cards are offered: {sentence}")
            await recorder.flush()
    except (ApiError, ApiUnreachable, TimeoutError) as why:
        _LOG.warning("the node's event could not be written: %s", why)


class Patience:
    """Reports a reason that lasts for longer than PATIENCE_S, each reason once."""

    def __init__(
        self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
        report: receives the reason.
        clock: seconds, monotonic.
        """
        self._report, self._clock = report, clock
        self._reason, self._since, self._reported = "", 0.0, False

    def failed(self, reason: str) -> None:
        """Record that something fails at this moment; empty if nothing does."""
        if reason != self._reason:
            self._reason, self._since, self._reported = reason, self._clock(), False
        if reason and not self._reported and self._clock() - self._since >= PATIENCE_S:
            self._reported = True
            self._report(reason)
