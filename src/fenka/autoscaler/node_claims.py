"""The access of the provider `karpenter` to NodeClaims, through the API server."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from fenka.cloud.karpenter.claims import NodeClaim
from fenka.cloud.port import Denied, Throttled, Unknown
from fenka.cluster.objects import Event
from fenka.kubernetes.client import Api, ApiError, ApiUnreachable, if_accepted

CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
EVENTS = "/api/v1/namespaces/default/events"
"""Events on objects without a namespace are in `default`."""

AFTER_S = 5.0

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
        raise Unknown(str(why)) from None
    except ApiError as why:
        if why.status == 429:
            raise Throttled(AFTER_S) from None
        if why.status == 0 or why.status >= 500:
            raise Unknown(str(why)) from None
        if why.status == 404:
            raise Denied(
                "the API server has no NodeClaims: install Karpenter 1.14 or newer"
            ) from None
        raise Denied(f"the API server refuses: {why}") from None
