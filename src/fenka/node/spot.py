"""Publishes when the cloud takes this machine back, as annotations of the Node.

The metadata service of the cloud knows. Pods are evicted by the autoscaler's leader, which reads the
annotation; a person may write it too. This program changes only what a service said before.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fenka.cluster.autoscaling import (
    CAPACITY,
    RECLAIM_AT,
    RECLAIM_SOURCE,
    decode_time,
    encode_time,
)
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.client import ApiError, ApiUnreachable
from fenka.node.config import SpotNotices
from fenka.node.node_api import NodeApi
from fenka.node.spot_metadata import AWS, MetadataClient, MetadataUnavailable

_LOG = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Alibaba Cloud gives 5 minutes, AWS 2."""
WITHDRAWN_AFTER = 3
"""Answers without a notice in a row, until one that was there counts as withdrawn."""
UNAVAILABLE_AFTER = 12
"""Passes in a row in which no service answers, until an event says so."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What a service says. at: when the machine is taken back; None for never, as far as is known."""

    source: str
    at: float | None


def annotations_to_write(
    current: Mapping[str, str], notices: Sequence[Notice], withdrawn: bool
) -> dict[str, str | None]:
    """Return what has to change of the Node's annotations; None removes one.

    Args:
        current: the Node's annotations.
        notices: what the services say that answered.
        withdrawn: whether the service that gave the published notice has none any more, for certain.
    """
    earliest = min(
        (notice for notice in notices if notice.at is not None),
        key=lambda notice: (notice.at, notice.source),
        default=None,
    )
    written, source = current.get(RECLAIM_AT), current.get(RECLAIM_SOURCE)
    if earliest is None or earliest.at is None:
        return {RECLAIM_AT: None, RECLAIM_SOURCE: None} if source and withdrawn else {}
    if written is not None and source is None and _earlier(written, earliest.at):
        return {}  # A person's.
    wanted = {RECLAIM_AT: encode_time(earliest.at), RECLAIM_SOURCE: earliest.source}
    return {name: value for name, value in wanted.items() if current.get(name) != value}


def _earlier(written: str, at: float) -> bool:
    try:
        return decode_time(written) <= at
    except InvalidRecord:
        return False


class SpotFollower:
    """Asks every few seconds. `run` is its task."""

    def __init__(self, api: NodeApi, clients: Sequence[MetadataClient], when: SpotNotices) -> None:
        """Args: when: `auto` asks while the Node's label says that it is a spot instance."""
        self._api, self._clients, self._when = api, clients, when
        self._without = 0
        self._unavailable = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Ask once, and write what has changed."""
        node = self._api.node
        if node is None or not self._enabled(node.metadata.labels):
            return
        notices = await self._ask(node.spec.provider_id)
        current = node.metadata.annotations
        published = next(
            (each for each in notices if each.source == current.get(RECLAIM_SOURCE)), None
        )
        if published is not None:
            # A single answer without the notice may be an error of a service that is busy.
            self._without = self._without + 1 if published.at is None else 0
        changes = annotations_to_write(current, notices, self._without >= WITHDRAWN_AFTER)
        if not changes:
            return
        try:
            await self._api.annotate_node(changes)
        except (ApiError, ApiUnreachable) as error:
            _LOG.warning("the spot notice is written again: %s", error)
            return
        _LOG.warning("spot notice: %s", changes.get(RECLAIM_AT) or "withdrawn")

    def _enabled(self, labels: Mapping[str, str]) -> bool:
        marked = self._when == "auto" and labels.get(CAPACITY) == "spot"
        return marked or self._when == "always"

    async def _ask(self, provider_id: str) -> list[Notice]:
        """Return what the services of this machine's cloud say; those that do not answer say nothing."""
        clients = [client for client in self._clients if _may_answer(client, provider_id)]
        answers = await asyncio.gather(*map(_notice, clients))
        notices = [answer for answer in answers if isinstance(answer, Notice)]
        failures = [str(answer) for answer in answers if isinstance(answer, MetadataUnavailable)]
        self._unavailable = 0 if notices else self._unavailable + 1
        if self._unavailable == UNAVAILABLE_AFTER:
            self._api.node_event(
                "FenkaSpotNotices",
                f"fenka: a take-back of this spot instance would come without notice: {'; '.join(failures)}",
            )
        return notices


async def _notice(client: MetadataClient) -> Notice | MetadataUnavailable:
    try:
        return Notice(client.service.name, await client.reclaim_at())
    except MetadataUnavailable as error:
        return error


def _may_answer(client: MetadataClient, provider_id: str) -> bool:
    """Return whether the service may be that of the machine's cloud. Without a providerID each may be."""
    return not provider_id or (client.service is AWS) == provider_id.startswith("aws:")
