"""Resolves a token to the pod that holds it and to the lease that the scheduler's record gives it.

Pure functions: the scheduler has decided, and nothing is decided again. An error is the sentence that the
pod's user sees.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.cluster.objects import Pod
from fenka.core.inventory import Card
from fenka.core.request import Placement, Slice
from fenka.dialects.base import Dialect, InvalidRecord, SharedNode, SliceRequest, find_container
from fenka.dialects.registry import DIALECTS
from fenka.node.kubelet.client import Claim
from fenka.node.kubelet.plugin import StartDenied
from fenka.node.lease.store import Lease, Token

_MIRROR = "kubernetes.io/config.mirror"
_FOREIGN_KERNELS = ("gvisor", "runsc", "kata")


class LeaseDenied(StartDenied):
    """The container gets no lease now."""


class Misplaced(LeaseDenied):
    """The pod could start elsewhere, or with another record."""


class LeasePending(LeaseDenied):
    """The token's pod is not known yet; a retry in a moment may succeed."""


def claim_of(token: Token, claims: Iterable[Claim], pods: Collection[Pod]) -> Claim | None:
    """The claim that says whose this token is; None if none does.

    The kubelet may give ids to a new pod while an old token with the same ids is still remembered: what
    names the token itself counts first, then what names a UID. A token that has an owner has no other.
    """
    mine = [it for it in claims if it.resource == token.resource and it.ids == set(token.ids)]
    exact = [it for it in mine if it.token == token.name]
    # Where the kubelet repeats tokens, a claim with another token is somebody else's.
    loose = [it for it in mine if not it.token]
    if any(it.token for it in mine) and not exact:
        named = {(it.uid, it.container) for it in mine if it.token}
        loose = [it for it in loose if not _covered(it, named, pods)]
    found = sorted(exact or loose, key=lambda it: not it.uid)
    if token.lease is not None:
        found = [it for it in found if _same_pod(it, token.lease, pods)]
    return found[0] if found else None


def _covered(claim: Claim, named: set[tuple[str, str]], pods: Collection[Pod]) -> bool:
    pod = pod_of(claim, pods)
    return pod is not None and (pod.metadata.uid, claim.container) in named


def _same_pod(claim: Claim, lease: Lease, pods: Collection[Pod]) -> bool:
    if claim.uid:
        return claim.uid == lease.uid
    pod = pod_of(claim, pods)
    return (claim.namespace, claim.pod) == (lease.namespace, lease.pod) and (
        pod is None or pod.metadata.uid == lease.uid
    )


def pod_of(claim: Claim, pods: Collection[Pod]) -> Pod | None:
    """The pod that a claim speaks of, if the API server has shown it."""
    if not claim.uid:
        named = claim.namespace, claim.pod
        return next((it for it in pods if (it.metadata.namespace, it.metadata.name) == named), None)
    found = next((it for it in pods if it.metadata.uid == claim.uid), None)
    if found is not None:
        return found
    # A static pod's. Anybody can write that annotation on their own pod, so the UID itself comes first.
    return next((it for it in pods if it.metadata.annotations.get(_MIRROR) == claim.uid), None)


def check_pod(pod: Pod, handler: str) -> None:
    """Raises LeaseDenied for a pod that cannot hold a lease. handler: of its runtime class, or empty."""
    if _MIRROR in pod.metadata.annotations:
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


def share_lease(
    share: SharedNode,
    pod: Pod,
    container: str,
    resource: str,
    amount: int,
    dialects: tuple[Dialect, ...] = DIALECTS,
) -> Lease:
    """What a container with so much of the resource holds, as its pod's record says. Raises LeaseDenied."""
    manifest = pod.request
    try:
        demand = pod.demand(dialects)
        parts, dialect = demand.parts(share.unit_mib), demand.dialect
        placements = dialect.decode(manifest, share) if dialect else None
    except InvalidRecord as why:
        raise Misplaced(f"fenka: {why}: delete the pod, so that it is placed again") from None
    if dialect is None or placements is None:
        by = pod.spec.scheduler_name or "nobody"
        raise LeaseDenied(
            f"fenka: no record says on which card this pod is, so it was not placed by fenka's scheduler "
            f"extender (schedulerName {by}; nodeName set by hand?): delete it and let a scheduler that "
            f"asks fenka place it"
        )
    asked = next((it.amount(resource) for it in manifest.containers if it.name == container), None)
    if asked != amount:
        raise LeaseDenied(
            f"fenka: container {container} of the pod asks for {asked} of {resource}, the kubelet gives "
            f"{amount}: delete the pod, so that it is placed again"
        )
    try:
        slices = dialect.container_slices(manifest, share, placements, container)
        environment = dialect.environment(manifest, share, placements, container)
    except InvalidRecord as why:
        raise Misplaced(f"fenka: {why}: delete the pod, so that it is placed again") from None
    own = find_container(parts, placements, container)
    holds = _together(piece for placement in placements for piece in placement.slices)
    meta = pod.metadata
    return Lease(
        meta.uid,
        meta.namespace,
        meta.name,
        container,
        [_unlimited_if_whole(piece, own) for piece in slices],
        holds,
        environment,
        ceiling=(own[0].burst_percent or 0) if own else 0,
    )


def _together(slices: Iterable[Slice]) -> list[Slice]:
    """One a card."""
    cards: dict[int, Slice] = {}
    for it in slices:
        known = cards.get(it.card)
        cards[it.card] = (
            it
            if known is None
            else replace(
                known,
                memory_mib=known.memory_mib + it.memory_mib,
                compute=known.compute + it.compute,
            )
        )
    return [cards[index] for index in sorted(cards)]


def _unlimited_if_whole(piece: Slice, own: tuple[SliceRequest, Placement] | None) -> Slice:
    """Who has a card for itself is not held back."""
    return replace(piece, compute=0) if own and own[1].whole else piece


def unlimited(lease: Lease, cards: Collection[Card]) -> Lease:
    """The same without limits but the cards' own, and with what tells the program so: cGPU's word for it.

    What the pod has booked stays as it is.
    """
    memory = {card.uuid: card.memory_mib for card in cards}
    return msgspec.structs.replace(
        lease,
        slices=[replace(piece, compute=0) for piece in lease.slices],
        ceiling=0,
        limits_mib={piece.uuid: memory[piece.uuid] for piece in lease.slices},
        environment={**lease.environment, "CGPU_DISABLE": "true"},
    )


def whole_lease(cards: Collection[Card], pod: Pod, container: str, ids: Iterable[str]) -> Lease:
    """What a container holds that was given these cards, named by UUID. Raises LeaseDenied."""
    by_uuid: dict[str, Card] = {card.uuid: card for card in cards}
    wanted = sorted(set(ids))
    if missing := [one for one in wanted if one not in by_uuid]:
        raise LeaseDenied(f"fenka: card {missing[0]} is not on this node any more")
    chosen = sorted((by_uuid[one] for one in wanted), key=lambda card: card.index)
    slices = [Slice(card.index, card.uuid, card.memory_mib, 0) for card in chosen]
    holds = [replace(it, compute=card.compute) for it, card in zip(slices, chosen, strict=True)]
    environment = {"NVIDIA_VISIBLE_DEVICES": ",".join(card.uuid for card in chosen)}
    meta = pod.metadata
    return Lease(meta.uid, meta.namespace, meta.name, container, slices, holds, environment)


def check_siblings(lease: Lease, siblings: Iterable[Lease]) -> None:
    """Raises Misplaced where the pod's record has changed since another of its containers got its slice.

    Else a pod could hold cards by several records, on each of them all that it asks for.
    """
    for other in siblings:
        had = {it.uuid: it for it in other.holds}
        for piece in lease.holds:
            before = had.get(piece.uuid)
            if before is None or (not other.resized and before.memory_mib < piece.memory_mib):
                raise Misplaced(
                    f"fenka: the pod's record was changed after its container {other.container} got its "
                    f"slice: delete the pod, so that it is placed again"
                )


def check_capacity(
    lease: Lease,
    others: Mapping[str, Sequence[Slice]],
    cards: Collection[Card],
    names: Mapping[str, str],
) -> None:
    """The node's last word: what lives on a card and this lease must fit it. Raises LeaseDenied.

    others: what other pods hold here, by their UID, as long as anything of them lives. names: how to call
    them. So neither a pod that was deleted by force and still runs, nor two schedulers that decide at
    once, can overcommit a card.
    """
    known = {card.uuid: card for card in cards}
    mine = {uid: slices for uid, slices in others.items() if uid != lease.uid}
    for piece in lease.holds:
        card = known.get(piece.uuid)
        if card is None or not card.healthy:
            raise Misplaced(
                f"fenka: card {piece.card} ({piece.uuid}) of this node does not work now"
            )
        for it in shortages(piece, card, mine, names):
            raise Misplaced(
                f"fenka: card {piece.card} has {it.total} {it.of}, of which {it.held} {it.of} are still "
                f"held by {', '.join(it.by)}: these {it.wanted} must wait until they end"
            )


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a card has not left. of: its measure, as people write it. by: who holds of it."""

    of: str
    total: int
    held: int
    wanted: int
    by: list[str]


MEMORY, COMPUTE = "MiB", "% of its time"


def shortages(
    piece: Slice, card: Card, others: Mapping[str, Sequence[Slice]], names: Mapping[str, str]
) -> Iterator[Shortage]:
    """Of memory and compute, beside what others hold of the card. others: by UID; names: how to call them."""
    there = [
        (names.get(uid, uid), it)
        for uid, slices in others.items()
        for it in slices
        if it.uuid == piece.uuid
    ]
    for of, total, wanted, held in (
        (MEMORY, card.memory_mib, piece.memory_mib, [(by, it.memory_mib) for by, it in there]),
        (COMPUTE, card.compute, piece.compute, [(by, it.compute) for by, it in there]),
    ):
        taken = sum(amount for _, amount in held)
        if taken + wanted > total:
            yield Shortage(of, total, taken, wanted, sorted({by for by, some in held if some}))
