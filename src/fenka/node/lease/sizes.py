"""Sizes of a pod's slices: what a request asks for, the pod's peak, and whether a card has room. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from fenka.cluster.objects import Pod
from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.core.request import Slice
from fenka.dialects import gpushare
from fenka.dialects.base import ContainerKind, ContainerUnits
from fenka.dialects.resize import ResizeRequest
from fenka.isolation.resize_plan import larger
from fenka.node.lease.capacity import MEMORY, shortages
from fenka.node.lease.store import Lease, Token

MAX_NAMES = 3
"""Pods that an error names of those that hold a card."""


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
    if lease is None or token.resource == gpushare.MEMORY:
        return False
    return all(
        piece.memory_mib >= sizes.get(piece.uuid, 0) and piece.compute in (0, 100)
        for piece in lease.slices
    )


def requested_tokens(
    requests: Iterable[str], tokens: Collection[Token], pod: Pod
) -> dict[str, Token]:
    """Return the token that each request is for, by the container's name in the request.

    A request without a name is for the only container that has a lease. Init containers, which have ended by
    then, count only if there is no other. Raises ResizeRejected.
    """
    by_container = {token.lease.container: token for token in tokens if token.lease}
    kinds = _container_kinds(pod)
    running = [name for name in by_container if kinds.get(name) is not ContainerKind.INIT]
    running = running or list(by_container)
    requested = {}
    for name in requests:
        if not name and len(running) > 1:
            raise ResizeRejected(
                f"the pod has {len(running)} containers with a slice ({', '.join(running)}): name one, "
                f"as in {running[0]}: gpu-mem=6"
            )
        if name and name not in by_container:
            raise ResizeRejected(f"the pod has no container {name} with a slice of a card")
        requested[name] = by_container[name or running[0]]
    return requested


def resized(
    slices: Sequence[Slice], request: ResizeRequest, cards: Collection[Card]
) -> list[Slice]:
    """Return the slices in the requested sizes. Raises ResizeRejected."""
    sizes = {card.uuid: card.memory_mib for card in cards}

    def resize(piece: Slice) -> Slice:
        memory_mib = piece.memory_mib
        if request.memory is not None:
            size = sizes.get(piece.uuid, 0)
            mib = request.memory.mib_on(size, 1)
            if mib is None:
                raise ResizeRejected(
                    f"card {piece.card} has {size} MiB: {request.memory.nominal_mib(1)} MiB are more than "
                    f"all of it"
                )
            memory_mib = mib
        compute = piece.compute if request.compute is None else request.compute
        return replace(piece, memory_mib=memory_mib, compute=compute)

    return [resize(piece) for piece in slices]


def with_peak(lease: Lease, siblings: Iterable[Lease], pod: Pod) -> Lease:
    """Return the lease, whose pod holds at least what its containers may use at its peak."""
    containers: dict[str, Sequence[Slice]] = {other.container: other.slices for other in siblings}
    needed = peak({**containers, lease.container: lease.slices}, pod)
    holds = {piece.uuid: piece for piece in lease.holds}
    for piece in needed:
        holds[piece.uuid] = larger(holds.get(piece.uuid, piece), piece)
    return msgspec.structs.replace(
        lease, holds=sorted(holds.values(), key=lambda piece: piece.card)
    )


def peak(containers: Mapping[str, Sequence[Slice]], pod: Pod) -> list[Slice]:
    """Return what a pod holds of each card at its peak. containers: slices by container."""
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
    inits = {
        container.name: ContainerKind.SIDECAR
        if container.restart_policy == "Always"
        else ContainerKind.INIT
        for container in pod.spec.init_containers
    }
    return inits | dict.fromkeys(
        (container.name for container in pod.spec.containers), ContainerKind.APP
    )


def check_growth(
    before: Sequence[Slice],
    after: Sequence[Slice],
    others: Mapping[str, Sequence[Slice]],
    cards: Collection[Card],
    names: Mapping[str, str],
) -> None:
    """Check that a pod may grow beside others.

    Args:
        before: What the pod holds now.
        after: What it is to hold.
        others: Slices of the other pods by UID.
        cards: The node's cards.
        names: The other pods' names by UID.

    Raises:
        ResizeRejected: A card has no room for it, or is unhealthy.
    """
    known = {card.uuid: card for card in cards}
    former_by_card = {piece.uuid: piece for piece in before}
    for piece in after:
        card, former = known.get(piece.uuid), former_by_card.get(piece.uuid)
        if former == piece:
            continue
        if card is None or not card.healthy:
            raise ResizeRejected(
                f"card {piece.card} is unhealthy now: nothing grows on it", "unhealthy"
            )
        for shortage in shortages(piece, card, others, names):
            measure = shortage.measure
            if former is None or _amount(piece, measure) > _amount(former, measure):
                held = f" hold {shortage.held}"
                holders = f", of which {_listed(shortage.holders)}{held}" if shortage.held else ""
                raise ResizeRejected(
                    f"card {piece.card} has {shortage.total} {measure}{holders}: {shortage.requested} do "
                    f"not fit",
                    f"room {measure}",
                )


def _amount(piece: Slice, measure: str) -> int:
    return piece.memory_mib if measure == MEMORY else piece.compute


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
