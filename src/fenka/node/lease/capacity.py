"""Pods' shares of a node's cards, the sizes of their slices, and whether a lease or its growth fits."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.cluster.objects import Pod
from fenka.cluster.state import read_allocation
from fenka.core.errors import FenkaError, listed
from fenka.core.inventory import MAX_STARTS, WHOLE_COMPUTE, Card, DeviceId, InstanceId
from fenka.core.request import Slice
from fenka.core.units import MIB
from fenka.dialects import base, gpushare
from fenka.dialects.base import ContainerKind, ContainerUnits, SharedNode
from fenka.dialects.mig_records import with_instances
from fenka.dialects.nodes import MIG_TENANCY
from fenka.isolation.lease_control import InvalidControl, Limit
from fenka.isolation.lease_files import card_limits
from fenka.isolation.limit_changes import larger
from fenka.node.inventory import NodeInventory, whole_slice
from fenka.node.kubelet.client import Claim
from fenka.node.lease.resolve import Misplaced
from fenka.node.lease.store import Lease, LeaseStore, Token
from fenka.node.node_api import NodeApi


class ResizeRejected(FenkaError):
    """The resize is not possible now, and nothing has changed. The message is a sentence for the pod's user.

    kind: a name of the reason that stays the same while only its numbers change.
    final: whether the same request can never be granted to this pod.
    """

    def __init__(self, sentence: str, kind: str = "", *, final: bool = False) -> None:
        super().__init__(sentence)
        self.kind, self.final = kind or sentence, final


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
    needed = peak(
        {sibling.container: sibling.reserved(sibling.slices) for sibling in (*siblings, lease)}, pod
    )
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


MEMORY, COMPUTE = "MiB", "% of its time"
MAX_NAMES = 3
"""Pods that a rejected resize names of those that hold a card."""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """The node, and what pods hold of it as long as any of their processes lives.

    held: by UID. names: of the pods, by UID.
    """

    share: SharedNode
    held: Mapping[str, Sequence[Slice]]
    names: Mapping[str, str]

    def healthy_card(self, piece: Slice) -> Card | None:
        """Return the card or instance of a slice; None if it is unhealthy or gone.

        An instance need not exist yet.
        """
        cards = with_instances(self.share, [piece.uuid]).node.cards
        return next((card for card in cards if card.uuid == piece.uuid and card.healthy), None)


@dataclass(frozen=True, slots=True)
class Shortage:
    """The amounts that a card lacks. measure: as users write it. holders: pods that hold part of the card."""

    measure: str
    total: int
    held: int
    requested: int
    holders: list[str]


def check_capacity(lease: Lease, capacity: NodeCapacity, *, share_instances: bool = True) -> None:
    """Check that a lease fits on its cards beside what other pods hold.

    So a card is not overcommitted by a pod that was deleted by force and still runs, or by two schedulers
    that decide at once. share_instances: whether two namespaces may share an instance. Raises Misplaced.
    """
    for piece in lease.holds:
        card = capacity.healthy_card(piece)
        if card is None:
            or_whole = ", or its card is not divided now" if piece.instance else " now"
            raise Misplaced(
                f"fenka: {device_name(piece)} ({piece.uuid}) of this node is unhealthy{or_whole}"
            )
        if card.divided:
            raise Misplaced(f"fenka: {device_name(piece)} is divided into MIG instances now")
        for shortage in _shortages(lease.uid, piece, card, capacity):
            measure = shortage.measure
            raise Misplaced(
                f"fenka: {device_name(piece)} has {shortage.total} {measure}, of which {shortage.held} "
                f"{measure} are still held by {', '.join(shortage.holders)}: these {shortage.requested} "
                f"must wait until they end"
            )
        if card.parent is not None:
            _check_instance(lease, piece, capacity, share_instances)


def _check_instance(
    lease: Lease, piece: Slice, capacity: NodeCapacity, share_instances: bool
) -> None:
    """Check that an instance's place is free, and that it is only for those who may share it."""
    others = {
        (capacity.names.get(uid, uid), other)
        for uid, slices in capacity.held.items()
        for other in slices
        if uid != lease.uid
    }
    for name, other in sorted(others, key=lambda held: held[0]):
        if other.uuid == piece.uuid:
            if not share_instances and name.partition("/")[0] != lease.namespace:
                raise Misplaced(
                    f"fenka: {device_name(piece)} has programs of another namespace, and the node's label "
                    f"{MIG_TENANCY} does not let namespaces share instances"
                )
        elif _mask(piece, capacity) & _mask(other, capacity):
            raise Misplaced(
                f"fenka: {device_name(piece)} has the place of {device_name(other)}, which is still held "
                f"by {name}"
            )


def _mask(piece: Slice, capacity: NodeCapacity) -> int:
    """Return the slices of its card's memory axis that an instance has, as bits by card; 0 for a card."""
    instance = piece.instance
    geometry = capacity.share.division.geometries.get(instance.card) if instance else None
    place = geometry.place_of(instance) if instance and geometry else None
    return place.mask << (piece.card * MAX_STARTS) if place else 0


def device_name(piece: Slice) -> str:
    """Return what people call the card or instance of a slice."""
    instance = piece.instance
    if instance is None:
        return f"card {piece.card}"
    return f"instance {piece.card}/{instance.start} {instance.profile}"


def check_growth(
    uid: str, before: Sequence[Slice], after: Sequence[Slice], capacity: NodeCapacity
) -> None:
    """Check that a pod may grow from one size to another beside others. Raises ResizeRejected."""
    former_by_card = {piece.uuid: piece for piece in before}
    for piece in after:
        former = former_by_card.get(piece.uuid)
        if former == piece:
            continue
        card = capacity.healthy_card(piece)
        if card is None:
            raise ResizeRejected(
                f"{device_name(piece)} is unhealthy now: nothing grows on it", "unhealthy"
            )
        for shortage in _shortages(uid, piece, card, capacity):
            measure = shortage.measure
            if former is None or _amount(piece, measure) > _amount(former, measure):
                names = listed(shortage.holders, MAX_NAMES)
                holders = f", of which {names} hold {shortage.held}" if shortage.held else ""
                raise ResizeRejected(
                    f"{device_name(piece)} has {shortage.total} {measure}{holders}: {shortage.requested} do "
                    f"not fit",
                    f"room {measure}",
                )


def _shortages(uid: str, piece: Slice, card: Card, capacity: NodeCapacity) -> Iterator[Shortage]:
    """Yield what a card lacks of memory and compute for a slice of a pod, beside what others hold."""
    on_card = [
        (capacity.names.get(holder, holder), other)
        for holder, slices in capacity.held.items()
        for other in slices
        if holder != uid and other.uuid == piece.uuid
    ]
    for measure, total in ((MEMORY, card.memory_mib), (COMPUTE, card.compute)):
        amounts = [(name, _amount(other, measure)) for name, other in on_card]
        held, requested = sum(amount for _, amount in amounts), _amount(piece, measure)
        if held + requested > total:
            holders = sorted({name for name, amount in amounts if amount})
            yield Shortage(measure, total, held, requested, holders)


def _amount(piece: Slice, measure: str) -> int:
    return piece.memory_mib if measure == MEMORY else piece.compute


class Allocations:
    """Views of the store. The kubelet's claims add whole cards that another plugin has given away."""

    def __init__(self, api: NodeApi, store: LeaseStore, inventory: NodeInventory) -> None:
        self._api, self._store, self._inventory = api, store, inventory

    def is_exclusive(self, token: Token) -> bool:
        """Return whether the kubelet chose whole cards by UUID, on a node that does not share."""
        return token.resource == base.NVIDIA_GPU and not self._inventory.by_uuid.keys().isdisjoint(
            token.ids
        )

    def sharing_tokens(self) -> list[Token]:
        """Return the tokens of slices."""
        return [token for token in self._store.tokens.values() if not self.is_exclusive(token)]

    def exclusive_cards(self, claims: Iterable[Claim]) -> set[str]:
        """Return the UUIDs of cards that the kubelet has allocated by UUID."""
        ids = {
            device
            for token in self._store.tokens.values()
            if self.is_exclusive(token)
            for device in token.ids
        }
        for claim in claims:
            if claim.resource == base.NVIDIA_GPU:
                ids |= claim.ids
        return ids & self._inventory.by_uuid.keys()

    def pod_names(self) -> dict[str, str]:
        """Return the names of the pods that hold a lease, by UID."""
        return {lease.uid: lease.pod_name for lease in self._store.leases.values()}

    def slices_of(self, claim: Claim) -> tuple[Slice, ...]:
        """Return the slices of the container that a claim names; none while it has no lease."""
        for lease in self._store.leases.values():
            same_pod = lease.uid == claim.uid or (
                (lease.namespace, lease.pod) == (claim.namespace, claim.pod)
            )
            if same_pod and lease.container == claim.container:
                return tuple(lease.slices)
        return ()

    def slices_by_pod(self, claims: Sequence[Claim]) -> dict[str, list[Slice]]:
        """Return what each pod holds, by UID; for whole cards of another plugin by the pod's name."""
        pods: dict[str, dict[str, Slice]] = {}
        for lease in self._store.leases.values():
            # All leases of a pod repeat its slices, and add different whole cards. While a pod is
            # resized they differ: then the larger ones count.
            slices = pods.setdefault(lease.uid, {})
            for piece in lease.holds:
                slices[piece.uuid] = larger(slices.get(piece.uuid, piece), piece)
        ours = {device for token in self._store.tokens.values() for device in token.ids}
        cards = self._inventory.by_uuid
        for claim in claims:
            if claim.resource != base.NVIDIA_GPU or not claim.pod:
                continue
            for uuid in (claim.ids - ours) & cards.keys():
                slices = pods.setdefault(f"{claim.namespace}/{claim.pod}", {})
                slices[uuid] = whole_slice(cards[uuid])
        return {uid: list(slices.values()) for uid, slices in pods.items()}

    def capacity(self, claims: Sequence[Claim]) -> NodeCapacity:
        """Return the node with all that its pods hold."""
        share = with_instances(
            self._inventory.shared_node(), [instance.device for instance in self.held_places()]
        )
        return NodeCapacity(share, self.slices_by_pod(claims), self.pod_names())

    def expected(self, claims: Sequence[Claim]) -> NodeCapacity:
        """Return the same with what pods hold that are placed here and have no lease yet."""
        capacity = self.capacity(claims)
        held, names = dict(capacity.held), dict(capacity.names)
        for uid, pod in self._api.pods.items():
            if uid in held or pod.finished:
                continue
            allocation = read_allocation(capacity.share, pod)
            if allocation is not None and allocation.error is None:
                held[uid], names[uid] = allocation.slices, pod.full_name
        return NodeCapacity(capacity.share, held, names)

    def holders(self, claims: Sequence[Claim]) -> dict[DeviceId, list[str]]:
        """Return the pods that hold each card itself and each instance, also those without a lease yet."""
        capacity = self.expected(claims)
        holders: dict[DeviceId, set[str]] = {}
        for uid, slices in capacity.held.items():
            for piece in slices:
                holders.setdefault(piece.uuid, set()).add(capacity.names.get(uid, uid))
        for uuid in self.exclusive_cards(claims):
            holders.setdefault(DeviceId(uuid), {"a pod"})
        return {device: sorted(names) for device, names in holders.items()}

    def held_places(self) -> frozenset[InstanceId]:
        """Return the MIG instances that leases name, whether or not they exist."""
        return frozenset(
            instance
            for lease in self._store.leases.values()
            for piece in (*lease.slices, *lease.holds)
            if (instance := piece.instance)
        )
