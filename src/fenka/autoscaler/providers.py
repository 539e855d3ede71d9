"""Opens the provider of a configuration, and keeps what the cloud said last.

A provider's library is loaded only if it is used. Clouds limit calls, so few are made.
"""

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from fenka.cloud import port
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.karpenter import NodeClaim
from fenka.cluster.objects import Event
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.installation import how_to_add_extra
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable, if_accepted

CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
EVENTS = "/api/v1/namespaces/default/events"
"""Events on objects without a namespace are in `default`."""

T = TypeVar("T")


class ApiNodeClaims:
    """The `NodeClaims` of one API server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self, selector: str) -> Sequence[NodeClaim]:
        """Return all claims with a label."""
        claims, _ = await _translated(self._api.list(CLAIMS, NodeClaim, labelSelector=selector))
        return claims

    async def create(self, body: Mapping[str, Any]) -> bool:
        """Create a claim. Return False if there is one with its name."""
        created = if_accepted(self._api.create(CLAIMS, NodeClaim, body), (409,))
        return await _translated(created) is not None

    async def delete(self, claim: NodeClaim) -> None:
        """Delete this claim."""
        preconditions = {"preconditions": {"uid": claim.metadata.uid}}
        deleted = self._api.delete(f"{CLAIMS}/{claim.metadata.name}", preconditions)
        await _translated(if_accepted(deleted, (404, 409)))

    async def events(self, name: str) -> Sequence[Event]:
        """Return the events on the claim with this name."""
        selector = f"involvedObject.kind=NodeClaim,involvedObject.name={name}"
        events, _ = await _translated(self._api.list(EVENTS, Event, fieldSelector=selector))
        return events


async def _translated(answer: Awaitable[T]) -> T:
    """Return an answer. Raises the port's errors for those of the API server."""
    try:
        return await answer
    except ApiUnreachable as why:
        raise port.Unknown(str(why)) from None
    except ApiError as why:
        if why.status == 429:
            raise port.Throttled() from None
        if why.status == 0 or why.status >= 500:
            raise port.Unknown(str(why)) from None
        if why.status == 404:
            raise port.Denied(
                "the API server has no NodeClaims: install Karpenter 1.14 or newer"
            ) from None
        raise port.Denied(f"the API server refuses: {why}") from None


MODULES = {
    "simulated": ("fenka.cloud.simulated_cloud", ""),
    "ess": ("fenka.cloud.alibaba.ess", "alibaba"),
    "aws": ("fenka.cloud.aws.provider", "aws"),
    "karpenter": ("fenka.cloud.karpenter", ""),
}
"""The module that has `open_provider`, and the extra with its library, by `provider.kind`."""


class ProviderMissing(FenkaError):
    """The provider cannot be loaded; the message says what to install."""

    exit_code = INVALID_INPUT


def open_provider(config: AutoscalerConfig, api: Api) -> AbstractAsyncContextManager[port.Provider]:
    """Return the provider of a configuration. Raises ProviderMissing.

    api: the API server, where a provider's objects are in the cluster.
    """
    kind = config.provider.kind
    module, extra = MODULES[kind]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as why:
        if not extra:
            raise
        raise ProviderMissing(
            f"provider.kind is {kind}, but {why.name} is not installed: {how_to_add_extra(extra)}"
        ) from None
    objects = (ApiNodeClaims(api),) if kind == "karpenter" else ()
    provider: AbstractAsyncContextManager[port.Provider] = loaded.open_provider(config, *objects)
    return provider


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
