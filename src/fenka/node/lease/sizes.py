"""Sizes of a pod's slices: what a request asks for, what a page limits, and the pod's peak. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from fenka.cluster.objects import Pod
from fenka.core.errors import FenkaError
from fenka.core.inventory import WHOLE_COMPUTE, Card
from fenka.core.request import Slice
from fenka.dialects import gpushare
from fenka.dialects.base import ContainerKind, ContainerUnits
from fenka.isolation.control import InvalidControl, Limit
from fenka.isolation.files import MIB, card_limits
from fenka.isolation.resize_plan import larger
from fenka.node.lease.store import Lease, Token


class ResizeRejected(FenkaError):
    """The resize is not possible now, and nothing has changed. The message is a sentence for the pod's user.

    kind: a name of the reason that stays the same while only its numbers change.
    """

    def __init__(self, sentence: str, kind: str = "") -> None:
        super().__init__(sentence)
        self.kind = kind or sentence


def has_whole_cards(token: Token, cards: Collection[Card]) -> bool:
    """Return whether a token has its cards for itself, because no part of a card was requested."""
    lease, sizes = token.lease, {card.uuid: card.memory_mib for card in cards}
    if lease is None or lease.weighted or token.resource == gpushare.MEMORY:
        return False
    return all(
        piece.memory_mib >= sizes.get(piece.uuid, 0) and piece.compute in (0, 100)
        for piece in lease.slices
    )


def requested_leases(
    requests: Iterable[str], leases: Mapping[str, Lease], pod: Pod
) -> dict[str, str]:
    """Return the token that each request is for, by the container's name in the request.

    A request without a name is for the only container that has a lease. Init containers, which have ended by
    then, count only if there is no other. leases: by token. Raises ResizeRejected.
    """
    tokens = {lease.container: token for token, lease in leases.items()}
    kinds = _container_kinds(pod)
    running = [name for name in tokens if kinds.get(name) is not ContainerKind.INIT]
    running = running or list(tokens)
    requested = {}
    for name in requests:
        if not name and len(running) > 1:
            raise ResizeRejected(
                f"the pod has {len(running)} containers with a slice ({', '.join(running)}): name one, "
                f"as in {running[0]}: gpu-mem=6"
            )
        if name and name not in tokens:
            raise ResizeRejected(f"the pod has no container {name} with a slice of a card")
        requested[name] = tokens[name or running[0]]
    return requested


def with_peak(lease: Lease, siblings: Iterable[Lease], pod: Pod) -> Lease:
    """Return the lease, whose pod holds at least what its containers may use at its peak."""
    needed = peak({each.container: each.reserved(each.slices) for each in (*siblings, lease)}, pod)
    holds = {piece.uuid: piece for piece in lease.holds}
    for piece in needed:
        holds[piece.uuid] = larger(holds.get(piece.uuid, piece), piece)
    return msgspec.structs.replace(
        lease, holds=sorted(holds.values(), key=lambda piece: piece.card)
    )


def peak(containers: Mapping[str, Sequence[Slice]], pod: Pod) -> list[Slice]:
    """Return what a pod holds of each card at its peak. containers: what is reserved, by container."""
    kinds = _container_kinds(pod)
    order = {name: number for number, name in enumerate(kinds)}
    of_card: dict[str, list[tuple[str, Slice]]] = {}
    for name in sorted(containers, key=lambda name: order.get(name, len(order))):
        for piece in containers[name]:
            of_card.setdefault(piece.uuid, []).append((name, piece))

    def most(parts: Sequence[tuple[str, Slice]], amount: Callable[[Slice], int]) -> int:
        return gpushare.peak_units(
            ContainerUnits(name, amount(piece), kinds.get(name, ContainerKind.APP))
            for name, piece in parts
        )

    peaks = (
        replace(
            parts[0][1],
            memory_mib=most(parts, lambda piece: piece.memory_mib),
            compute=most(parts, lambda piece: piece.compute),
        )
        for parts in of_card.values()
    )
    return sorted(peaks, key=lambda piece: piece.card)


def _container_kinds(pod: Pod) -> dict[str, ContainerKind]:
    """Return the kinds of the pod's containers, in the order in which they run."""
    return {container.name: container.kind for container in pod.request.containers}


def as_in_force(lease: Lease, limits: Sequence[Limit], cards: Collection[Card]) -> Lease:
    """Return a lease with the limits of its control page. Used when the store was lost.

    The page says what its programs may use; the pod's record, which its owner can write, does not.
    Raises InvalidControl.
    """
    placed: dict[str, Slice] = {piece.uuid: piece for piece in lease.slices}
    by_uuid: dict[str, Card] = {card.uuid: card for card in cards}
    slices = []
    for limit in limits:
        card = by_uuid.get(limit.uuid)
        if card is None:
            raise InvalidControl(
                f"the control page of {lease.pod} has card {limit.uuid}, which is not here"
            )
        piece = placed.get(limit.uuid, Slice(card.index, card.uuid, 0, 0))
        slices.append(with_limit(piece, limit))
    limited = {piece.uuid for piece in slices}
    return msgspec.structs.replace(
        lease,
        slices=slices,
        holds=[piece for piece in lease.holds if piece.uuid in limited],
        resized=slices != lease.slices,
        weighted=_weighted(lease, limits),
    )


def _weighted(lease: Lease, limits: Iterable[Limit]) -> bool:
    modes = {limit.compute_mode for limit in limits if not limit.unlimited}
    return "weight" in modes if modes else lease.weighted


def with_limit(piece: Slice, limit: Limit, device: int = WHOLE_COMPUTE) -> Slice:
    """Return a slice with the page's limit. There 100 % is either the slice's compute or no limit.

    device: the compute of its card or instance, in percent of the whole card. Weights are not of that.
    """
    device = WHOLE_COMPUTE if limit.compute_mode == "weight" else device
    (placed,) = card_limits((piece,), {}, compute_of=lambda _: device)
    same = limit.compute_percent == placed.compute_percent
    compute = piece.compute if same else round(limit.compute_percent % 100 * device / 100)
    return replace(piece, memory_mib=limit.memory_bytes // MIB, compute=compute)
