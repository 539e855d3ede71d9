"""Resolves a token to the pod that holds it and to the lease that the scheduler's record gives it.

Pure functions: the scheduler has decided, and nothing is decided again. An error is the sentence that the
pod's user sees.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from fenka.cluster.objects import MIRROR, Pod
from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.dialects import pod_records
from fenka.dialects.base import Dialect, InvalidRecord, SharedNode
from fenka.dialects.card_records import find_container
from fenka.dialects.mig_records import decode_places, with_instances
from fenka.dialects.registry import DIALECTS
from fenka.hardware import unlimited_drivers
from fenka.node.inventory import whole_slice
from fenka.node.kubelet.client import Claim
from fenka.node.kubelet.plugin import StartDenied
from fenka.node.lease.store import Lease, Token

_FOREIGN_KERNELS = ("gvisor", "runsc", "kata")


class LeaseDenied(StartDenied):
    """The container gets no lease now."""


class Misplaced(LeaseDenied):
    """The pod could start elsewhere, or with another record."""


class LeasePending(LeaseDenied):
    """The token's pod is not known yet; a retry in a moment may succeed."""


class InstancePending(LeasePending):
    """The lease's MIG instances do not exist yet; that may take some seconds."""


class CardInUse(Misplaced, LeasePending):
    """A pod that has ended for the API server still holds the card; its programs may end in a moment."""


def claim_of(token: Token, claims: Iterable[Claim], pods: Mapping[str, Pod]) -> Claim | None:
    """Return the claim of the container that holds a token, if there is one.

    The kubelet may give IDs to a new pod while an old token with the same IDs still exists. So a claim with
    the token's name takes precedence, then one with a UID. A token with a lease belongs to its pod only.
    """
    same_ids = [
        claim
        for claim in claims
        if claim.resource == token.resource and claim.ids == set(token.ids)
    ]
    exact = [claim for claim in same_ids if claim.token == token.name]
    # Where the checkpoint has tokens, a claim with another token is another container's.
    unnamed = [claim for claim in same_ids if not claim.token]
    if any(claim.token for claim in same_ids) and not exact:
        named = {(claim.uid, claim.container) for claim in same_ids if claim.token}
        unnamed = [claim for claim in unnamed if not _is_one_of(claim, named, pods)]
    candidates = sorted(exact or unnamed, key=lambda claim: not claim.uid)
    if token.lease is not None:
        candidates = [claim for claim in candidates if _is_of_pod(claim, token.lease, pods)]
    return candidates[0] if candidates else None


def _is_one_of(claim: Claim, containers: set[tuple[str, str]], pods: Mapping[str, Pod]) -> bool:
    pod = pod_of(claim, pods)
    return pod is not None and (pod.metadata.uid, claim.container) in containers


def _is_of_pod(claim: Claim, lease: Lease, pods: Mapping[str, Pod]) -> bool:
    if claim.uid:
        return claim.uid == lease.uid
    pod = pod_of(claim, pods)
    return (claim.namespace, claim.pod) == (lease.namespace, lease.pod) and (
        pod is None or pod.metadata.uid == lease.uid
    )


def pod_of(claim: Claim, pods: Mapping[str, Pod]) -> Pod | None:
    """Return the pod of a claim, if the API server has shown it. pods: by UID."""
    if not claim.uid:
        full_name = f"{claim.namespace}/{claim.pod}"
        return next((pod for pod in pods.values() if pod.full_name == full_name), None)
    if claim.uid in pods:
        return pods[claim.uid]
    # A static pod's. Any user can write this annotation on a pod, so the UID takes precedence.
    mirrors = (pod for pod in pods.values() if pod.metadata.annotations.get(MIRROR) == claim.uid)
    return next(mirrors, None)


def check_pod(pod: Pod, handler: str) -> None:
    """Check that a pod can hold a lease. handler: of its runtime class, or empty. Raises LeaseDenied."""
    if MIRROR in pod.metadata.annotations:
        raise LeaseDenied(
            "fenka: a static pod cannot have a GPU, since no scheduler places it: "
            "make it an ordinary pod, a DaemonSet's for example"
        )
    runtime = f"{pod.spec.runtime_class_name or ''} {handler}".casefold()
    if any(kernel in runtime for kernel in _FOREIGN_KERNELS):
        raise LeaseDenied(
            f"fenka: programs of runtime class {pod.spec.runtime_class_name} run on another kernel, where "
            f"a slice cannot be enforced: leave runtimeClassName out"
        )


def with_own_instances(share: SharedNode, pod: Pod) -> SharedNode:
    """Return the node with the instances of the pod's record, which may not exist yet. Raises Misplaced."""
    try:
        return with_instances(share, decode_places(pod.metadata.annotations))
    except InvalidRecord as error:
        raise Misplaced(f"fenka: {error}: delete the pod, so that it is placed again") from None


def share_lease(
    share: SharedNode,
    pod: Pod,
    container: str,
    resource: str,
    amount: int,
    dialects: tuple[Dialect, ...] = DIALECTS,
) -> Lease:
    """Return the lease of a container with this amount of a resource, by its pod's record.

    Raises LeaseDenied.
    """
    manifest, demand = pod.request, pod.demand(dialects)
    try:
        parts, dialect = demand.parts, demand.dialect
        placements = pod_records.decode(dialect, manifest, parts, share) if dialect else None
        if dialect is None or placements is None:
            scheduler = pod.spec.scheduler_name or "none"
            raise LeaseDenied(
                f"fenka: no record says on which card this pod is, so it was not placed by fenka's scheduler "
                f"extender (schedulerName {scheduler}; nodeName set by hand?): delete it and let a scheduler "
                f"that asks fenka place it"
            )
        requested = {
            container.name: container.amount(resource) for container in manifest.containers
        }
        if requested.get(container) != amount:
            raise LeaseDenied(
                f"fenka: container {container} of the pod requests {requested.get(container)} of {resource}, "
                f"the kubelet gives {amount}: delete the pod, so that it is placed again"
            )
        slices = pod_records.container_slices(dialect, manifest, share, placements, container)
        environment = (
            pod_records.environment(dialect, manifest, share, slices, container) if slices else {}
        )
    except InvalidRecord as error:
        raise Misplaced(f"fenka: {error}: delete the pod, so that it is placed again") from None
    part, placement = find_container(parts, placements, container) or (None, None)
    if placement is not None and placement.whole:
        slices = tuple(replace(piece, compute=0) for piece in slices)
    meta = pod.metadata
    return Lease(
        meta.uid,
        meta.namespace,
        meta.name,
        container,
        list(slices),
        _merged(piece for placement in placements for piece in placement.slices),
        environment,
        burst_percent=(part.burst_percent or 0) if part else 0,
        weighted=part is not None and part.weight > 0,
        unlimited_drivers=(placement is not None and placement.whole)
        or _allows_unlimited_drivers(pod.metadata.annotations),
    )


def _allows_unlimited_drivers(annotations: Mapping[str, str]) -> bool:
    """Return whether slices of the pod may use them. Raises LeaseDenied for another value than a boolean."""
    text = annotations.get(unlimited_drivers.ALLOWED, "false")
    if text not in ("true", "false"):
        raise LeaseDenied(
            f"fenka: annotation {unlimited_drivers.ALLOWED} of the pod is {text[:40]!r}: write true or false"
        )
    return text == "true"


def _merged(slices: Iterable[Slice]) -> list[Slice]:
    """Return one slice per card or instance."""
    cards: dict[str, Slice] = {}
    for piece in slices:
        former = cards.get(piece.uuid)
        cards[piece.uuid] = (
            piece
            if former is None
            else replace(
                former,
                memory_mib=former.memory_mib + piece.memory_mib,
                compute=former.compute + piece.compute,
            )
        )
    return sorted(cards.values(), key=lambda piece: piece.card)


def unlimited(lease: Lease, cards: Collection[Card]) -> Lease:
    """Return the lease without limits but the cards' own, and with cGPU's variable that says so.

    The pod's allocation for the scheduler stays.
    """
    memory = {card.uuid: card.memory_mib for card in cards}
    return msgspec.structs.replace(
        lease,
        slices=[replace(piece, compute=0) for piece in lease.slices],
        burst_percent=0,
        weighted=False,
        limits_mib={piece.uuid: memory[piece.uuid] for piece in lease.slices},
        unlimited_drivers=True,
        environment={**lease.environment, "CGPU_DISABLE": "true"},
    )


def whole_lease(cards: Collection[Card], pod: Pod, container: str, ids: Iterable[str]) -> Lease:
    """Return the lease of a container that has these cards, named by UUID. Raises LeaseDenied."""
    by_uuid: dict[str, Card] = {card.uuid: card for card in cards}
    if missing := sorted(set(ids) - by_uuid.keys()):
        raise LeaseDenied(f"fenka: card {missing[0]} is no longer on this node")
    allocated = sorted((by_uuid[uuid] for uuid in set(ids)), key=lambda card: card.index)
    holds = [whole_slice(card) for card in allocated]
    slices = [replace(piece, compute=0) for piece in holds]
    environment = {"NVIDIA_VISIBLE_DEVICES": ",".join(card.uuid for card in allocated)}
    meta = pod.metadata
    return Lease(
        meta.uid,
        meta.namespace,
        meta.name,
        container,
        slices,
        holds,
        environment,
        unlimited_drivers=True,
    )


def check_siblings(lease: Lease, siblings: Iterable[Lease]) -> None:
    """Check that the pod's record is the same as when its other containers got their slices.

    Otherwise a pod could use several records, and hold all that it requests on the cards of each.
    Raises Misplaced.
    """
    for other in siblings:
        held = {piece.uuid: piece for piece in other.holds}
        for piece in lease.holds:
            before = held.get(piece.uuid)
            if before is None or (not other.resized and before.memory_mib < piece.memory_mib):
                raise Misplaced(
                    f"fenka: the pod's record was changed after its container {other.container} got its "
                    f"slice: delete the pod, so that it is placed again"
                )
