"""The context in which the parts of a pass act: API server, cloud, orders, and refusals."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.stores import OrderStore
from fenka.cloud.port import Provider
from fenka.cluster.autoscaling import ElasticNodeStatus
from fenka.cluster.objects import Node, node_path
from fenka.kubernetes import eviction
from fenka.kubernetes.api_client import Api, if_accepted
from fenka.kubernetes.events import EventRecorder

log = logging.getLogger(__name__)

MAX_WARNED = 1000

GONE = (404, 409)
"""The object is gone, or another one has its name, or somebody else writes it: the next pass looks again."""


class Warnings:
    """Logs what is tried again in each pass: once for each change."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def warn(self, name: str, sentence: str) -> None:
        """Log the sentence, unless it was the last one about this name."""
        if self._known.get(name) != sentence:
            log.warning("%s: %s", name, sentence)
        self._known[name] = sentence
        self._known.move_to_end(name)
        if len(self._known) > MAX_WARNED:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class ActorContext:
    """Everything that changes anything.

    Attributes:
        leading: whether a write may begin now. Look again after every await.
        snapshot: returns what is known now. Take a new one after every await before deciding anything.
        warnings: logs what fails again and again.
    """

    api: Api
    provider: Provider
    recorder: EventRecorder
    orders: OrderStore
    leading: Callable[[], bool]
    snapshot: Callable[[], Snapshot]
    warnings: Warnings = field(default_factory=Warnings)

    async def add_taint(self, node: Node, key: str) -> bool:
        """Return whether the node has the taint now. Raises ApiError, ApiUnreachable."""
        return await _accepted(eviction.add_taint(self.api, node, key))

    async def remove_taint(self, node: Node, key: str) -> bool:
        """Return whether the node is without the taint now. Raises ApiError, ApiUnreachable."""
        return await _accepted(eviction.remove_taint(self.api, node, key))

    async def delete_node(self, node: Node) -> None:
        """Delete this Node, and no other of its name. Raises ApiError, ApiUnreachable."""
        body = {"preconditions": {"uid": node.metadata.uid}}
        await if_accepted(self.api.delete(node_path(node.metadata.name), body), GONE)


async def _accepted(request: Awaitable[None]) -> bool:
    async def answer() -> bool:
        await request
        return True

    return await if_accepted(answer(), GONE) is not None


class Actor(Protocol):
    """A part of the pass. The leader calls each in turn; an error of API or cloud ends the pass."""

    async def act(self, context: ActorContext) -> Mapping[str, ElasticNodeStatus]:
        """Decide by a snapshot, and act. Return the states of nodes that this part decides about, by name."""
