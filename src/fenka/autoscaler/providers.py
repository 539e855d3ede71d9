"""Opens the provider of a configuration. Its library is loaded only if it is used."""

import importlib
from collections.abc import Awaitable, Mapping, Sequence
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
