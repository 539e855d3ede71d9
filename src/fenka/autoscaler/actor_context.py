"""What the parts of a pass act with."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.stores import OrderStore
from fenka.cloud.port import Provider
from fenka.cluster.autoscaling import ElasticNodeStatus
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.events import EventRecorder

log = logging.getLogger(__name__)

MAX_WARNED = 1000


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


class Actor(Protocol):
    """A part of the pass. The leader calls each in turn; an error of API or cloud ends the pass."""

    async def act(self, context: ActorContext) -> Mapping[str, ElasticNodeStatus]:
        """Decide by a snapshot, and act. Return the states of nodes that this part decides about, by name."""
