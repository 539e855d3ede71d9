"""Places what a pod requests of MIG instances on one node. Pure.

An instance in use is for its holder, or for further slices of the same namespace. Idle instances of the
requested profile come next, then new ones. Idle instances count as free: the node destroys one in whose place
another is created.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fenka.cluster.queue_constraints import HeldPlacement
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Fit, Policy, evaluate, place
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.mig.geometry import Geometry, Place, Profile
from fenka.core.mig.instances import (
    Division,
    InstanceOption,
    InstancePlacer,
    NoInstance,
    layout_of,
    never_fits_instance,
    option_at,
)
from fenka.core.reasons import NodeRejection, Unschedulable
from fenka.core.request import ANY_INSTANCE, Placement, Request, Slice
from fenka.core.usage import EmptyUsage, UsageOverlay, UsageView
from fenka.dialects.base import SharedNode
from fenka.dialects.mig_records import TAKEN, with_instances
from fenka.dialects.node_modes import mig_shared


@dataclass(frozen=True, slots=True)
class InstanceHolders:
    """Who holds which instance of a node.

    Attributes:
        names: the pods, for reasons.
        namespaces: their namespaces.
        shared: whether slices of several namespaces may be in one instance.
    """

    names: Mapping[DeviceId, Sequence[str]] = field(default_factory=dict)
    namespaces: Mapping[DeviceId, Collection[str]] = field(default_factory=dict)
    shared: bool = False


NO_HOLDERS = InstanceHolders()


def instance_holders(
    cluster: ClusterState, name: str, held: Iterable[HeldPlacement]
) -> InstanceHolders:
    """Return who holds which instance of a node. held: what entries of the queue get there."""
    names: dict[DeviceId, list[str]] = {}
    namespaces: dict[DeviceId, set[str]] = {}
    for allocation in cluster.allocations(name):
        for piece in allocation.slices:
            names.setdefault(piece.uuid, []).append(allocation.pod.full_name)
            namespaces.setdefault(piece.uuid, set()).add(allocation.pod.metadata.namespace)
    for it in held:
        for piece in it.placement.slices:
            names.setdefault(piece.uuid, []).append("a pod before it")
            namespaces.setdefault(piece.uuid, set()).add(it.namespace)
    node = cluster.node(name)
    return InstanceHolders(
        names,
        namespaces,
        node is not None and mig_shared(node.metadata.labels),
    )


@dataclass(frozen=True, slots=True)
class InstanceFit:
    """Placements in instances of a node. The smallest score is the best, compared with other nodes."""

    score: tuple[float, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """An instance for one request. The smallest cost is the best."""

    cost: tuple[float, ...]
    instance: Card
    slice: Slice


def place_in_instances(  # noqa: PLR0913, PLR0917
    shared: SharedNode,
    usage: UsageView,
    requests: Sequence[Request],
    policy: Policy = "binpack",
    holders: InstanceHolders = NO_HOLDERS,
    namespace: str = "",
    reserved: Collection[DeviceId] = (),
) -> InstanceFit | NoInstance:
    """Place all requests of a pod, or none of them.

    Args:
        shared: the node.
        usage: what is allocated of it, also of instances that it has not created yet.
        requests: for instances, or for slices in them.
        policy: the policy by which slices are placed on instances in use.
        holders: who holds its instances.
        namespace: the pod's.
        reserved: instances that are kept for others: nothing is created in their places.
    """

    def place_in(order: Callable[[Request], tuple[int, ...]]) -> InstanceFit | NoInstance:
        placing = _Placing(shared, usage, policy, holders, namespace, reserved)
        placements: dict[int, Placement] = {}
        for number in sorted(range(len(requests)), key=lambda it: order(requests[it])):
            placed = placing.place(requests[number])
            if isinstance(placed, NoInstance):
                return placed
            placements[number] = placed
        return InstanceFit(placing.score, tuple(placements[it] for it in range(len(requests))))

    # The largest first: it has the fewest places. Of media engines a card has one set, however free it is.
    fit = place_in(lambda request: _size(shared, request))
    if isinstance(fit, NoInstance) and len(requests) > 1:
        again = place_in(lambda request: (_is_plain(shared, request), *_size(shared, request)))
        return again if isinstance(again, InstanceFit) else fit
    return fit


def reserve_instances(
    shared: SharedNode,
    usage: UsageView,
    requests: Sequence[Request],
    reserved: Collection[DeviceId],
) -> tuple[tuple[int, ...], frozenset[DeviceId]] | None:
    """Return the instances whose places are to be kept free for requests that do not fit now.

    Returns:
        A cost, the smaller the better compared with other nodes, and the instances. None without any place.
    """
    placing = _Placing(shared, usage, "binpack", NO_HOLDERS, "", reserved)
    placer = placing.placer()
    singles = [request for request in requests for _ in range(request.cards)]
    kept = [
        placer.keep_free(request) for request in sorted(singles, key=lambda it: _size(shared, it))
    ]
    found = [option for option in kept if option is not None]
    if len(found) < len(kept):
        return None
    return tuple(map(sum, zip(*(cost for cost, _ in found), strict=True))), frozenset(
        card.uuid for _, card in found
    )


def never_fits_instances(shared: SharedNode, requests: Iterable[Request]) -> str:
    """Return why the requests could not be served even if nothing were held; empty if each of them could."""
    cards = replace(shared.node, cards=tuple(shared.physical_cards))
    reasons = (never_fits_instance(request, cards, shared.division) for request in requests)
    return next(filter(None, reasons), "")


def fits_when_empty(shared: SharedNode, requests: Sequence[Request]) -> bool:
    """Return whether the requests would fit the node if pods held nothing of it."""
    division = shared.division
    taken = {
        card: {it: why for it, why in places.items() if why != TAKEN["leaving"]}
        for card, places in division.taken.items()
    }
    emptied = replace(shared, division=replace(division, taken=taken))
    return isinstance(place_in_instances(emptied, EmptyUsage(), requests), InstanceFit)


class _Placing:
    """The placing of one pod's requests, one after the other."""

    def __init__(
        self,
        shared: SharedNode,
        usage: UsageView,
        policy: Policy,
        holders: InstanceHolders,
        namespace: str,
        reserved: Collection[DeviceId],
    ) -> None:
        self._policy, self._holders, self._namespace = policy, holders, namespace
        self._usage = UsageOverlay(usage)
        self._division = shared.division
        instances = [card for card in shared.node.cards if card.parent is not None]
        self._parents = {card.uuid: card for card in shared.physical_cards}
        used = [card for card in instances if self._stays(shared.node, card)]
        self._node = replace(shared.node, cards=(*self._parents.values(), *used))
        """The cards, and the instances that are in use or unhealthy."""
        self._kept_free = _masks(shared, reserved)
        self._idle = [card for card in instances if card not in used and self._is_usable(card)]
        self._costs: list[tuple[float, ...]] = []

    @property
    def score(self) -> tuple[float, ...]:
        """Return the sum of the costs of all placements."""
        return tuple(map(sum, zip(*self._costs, strict=True)))

    def place(self, request: Request) -> Placement | NoInstance:
        """Place a request: of several whole instances, or of a slice."""
        slices, single = list[Slice](), replace(request, cards=1)
        for _ in range(request.cards):
            option = self._best(single)
            if option is None:
                return self._rejection(request)
            self._take(request, option)
            slices.append(option.slice)
        ranks = {card.uuid: card.rank for card in self._node.cards}
        return Placement(
            self._node.name,
            tuple(sorted(slices, key=lambda piece: ranks[piece.uuid])),
            request.cpu_milli,
            request.host_memory_mib,
            whole=request.whole,
        )

    def _take(self, request: Request, option: _Option) -> None:
        instance = option.instance
        placement = Placement(self._node.name, (option.slice,), whole=request.whole)
        self._usage.add(placement)
        self._costs.append(option.cost)
        if all(card.uuid != instance.uuid for card in self._node.cards):
            self._node = replace(self._node, cards=(*self._node.cards, instance))
            self._idle = [card for card in self._idle if self._is_usable(card)]

    def _best(self, request: Request) -> _Option | None:
        """Return the best instance for one slice, or for one whole instance."""
        if not request.whole:
            used = self._in_use(request)
            if used is not None:
                return used
        options = [
            option
            for card in self._idle
            if (option := self._option(request, self._option_of(card), created=False)) is not None
        ]
        if not options or not request.whole:
            new = self.placer().best_instance(request)
            created = new and self._option(request, new, created=True)
            options += [created] if created else []
        return min(options, key=lambda option: option.cost) if options else None

    def _in_use(self, request: Request) -> _Option | None:
        """Return a slice of an instance in use, one that the namespace holds already before others."""
        used = [card for card in self._used() if not self._is_kept_free(card)]
        own = [card for card in used if self._namespaces(card) == {self._namespace}]
        others = [card for card in used if card not in own] if self._holders.shared else []
        for rank, cards in enumerate((own, others)):
            node = replace(self._node, cards=tuple(cards))
            placed = place(self._usage, request, self._policy, (node,))
            if isinstance(placed, Placement):
                piece = placed.slices[0]
                card = next(card for card in cards if card.uuid == piece.uuid)
                free = card.available_mib - self._usage.card_usage(node.name, card.uuid).memory_mib
                return _Option((0, 0, rank, 0, free), card, piece)
        return None

    def _option(self, request: Request, option: InstanceOption, *, created: bool) -> _Option | None:
        """Return what the request would have of an instance that nobody uses; None if it does not fit."""
        node = replace(self._node, cards=(option.card,))
        placed = place(self._usage, request, self._policy, (node,))
        if isinstance(placed, Unschedulable):
            return None
        # To create an instance takes a second. Slices rather wait for it than fill a large instance.
        lost = float(option.lost)
        first = (created, lost) if request.whole else (lost, created)
        cost = *first, 0, -option.filled, option.card.memory_mib
        return _Option(cost, option.card, placed.slices[0])

    def _option_of(self, card: Card) -> InstanceOption:
        parent, geometry, taken = self._place_of(card)
        layout = layout_of(self._node, self._division, parent.uuid)
        return option_at(parent, geometry, layout - {taken}, taken)

    def placer(self) -> InstancePlacer:
        """Return what creates instances beside those in use."""
        names = self._holders.names
        return InstancePlacer(self._node, self._usage, self._division, names, self._kept_free)

    def _rejection(self, request: Request) -> NoInstance:
        placer = self.placer()
        if request.whole:
            (verdict,) = evaluate(self._usage, request, self._policy, (self._node,))
            rejections = (verdict,) if isinstance(verdict, NodeRejection) else ()
            return NoInstance((), placer.reason(request, Unschedulable(rejections)))
        kind = "no instance" if request.instance == ANY_INSTANCE else f"no {request.instance}"
        held = "; ".join(filter(None, map(placer.held, self._parents.values())))
        reason = f"{kind} has room for the slice, and none can be created{': ' * bool(held)}{held}"
        node = replace(self._node, cards=tuple(self._used()))
        (verdict,) = evaluate(self._usage, request, self._policy, (node,))
        if isinstance(verdict, Fit):
            reason += "; instances with room hold slices of other namespaces"
        return NoInstance((), reason)

    def _used(self) -> list[Card]:
        return [card for card in self._node.cards if card.parent is not None]

    def _is_usable(self, card: Card) -> bool:
        """Return whether an idle instance can be used beside those in use, and is not in a reserved place."""
        if card.parent not in self._parents or card.parent not in self._division.geometries:
            return False
        if self._is_kept_free(card):
            return False
        parent, geometry, taken = self._place_of(card)
        used = layout_of(self._node, Division(self._division.geometries), parent.uuid)
        return not geometry.conflict(used, taken)

    def _is_kept_free(self, card: Card) -> bool:
        parent, _, taken = self._place_of(card)
        return bool(taken.mask & self._kept_free.get(parent.uuid, 0))

    def _place_of(self, card: Card) -> tuple[Card, Geometry, Place]:
        assert card.parent is not None
        geometry = self._division.geometries[card.parent]
        taken = Place(geometry.by_name[card.profile], card.start)
        return self._parents[card.parent], geometry, taken

    def _stays(self, node: Node, card: Card) -> bool:
        """Return whether nothing else may be created in an instance's place."""
        parent = self._parents.get(card.parent) if card.parent else None
        broken = parent is not None and parent.healthy and not card.healthy
        return broken or self._usage.card_usage(node.name, card.uuid).holders > 0

    def _namespaces(self, card: Card) -> frozenset[str]:
        # Nobody else is in an instance that this pod has got just now.
        return frozenset(self._holders.namespaces.get(card.uuid, (self._namespace,)))


def _profile(shared: SharedNode, request: Request) -> Profile | None:
    geometries = shared.division.geometries.values()
    profiles = (geometry.by_name.get(request.instance) for geometry in geometries)
    return next(filter(None, profiles), None)


def _size(shared: SharedNode, request: Request) -> tuple[int, ...]:
    """Return what sorts requests: the largest first."""
    profile = _profile(shared, request)
    nominal = request.memory.nominal_mib(shared.unit_mib) if request.memory else 0
    of_profile = (-profile.size, -profile.compute) if profile else (0, 0)
    return *of_profile, -request.cards, -nominal, -request.compute


def _is_plain(shared: SharedNode, request: Request) -> bool:
    profile = _profile(shared, request)
    return profile is None or not profile.exclusive


def _masks(shared: SharedNode, reserved: Collection[DeviceId]) -> dict[DeviceId, int]:
    """Return the slices of cards' memory axes that are reserved, as bits."""
    masks: dict[DeviceId, int] = {}
    for card in with_instances(shared, sorted(reserved)).node.cards if reserved else ():
        if card.uuid in reserved and card.parent is not None:
            profile = shared.division.geometries[card.parent].by_name[card.profile]
            mask = Place(profile, card.start).mask
            masks[card.parent] = masks.get(card.parent, 0) | mask
    return masks
