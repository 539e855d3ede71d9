"""The one evaluator of nodes for pods: the extender, `fenka why` and events show its verdicts. Pure.

The queue's constraints are an argument of a pod's evaluation.

Places what a pod requests of MIG instances on one node. Pure.

An instance in use is for its holder, or for further slices of the same namespace. Idle instances of the
requested profile come next, then new ones. Idle instances count as free: the node destroys one in whose place
another is created.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fenka.cluster import node_admission
from fenka.cluster.objects import Pod, PodDemand
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Fit, Policy, evaluate, fits_card, never_fits, place
from fenka.core.gangs import place_gang
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
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable, counts_sentence
from fenka.core.request import ANY_INSTANCE, Placement, Request, Slice
from fenka.core.usage import EmptyUsage, UsageOverlay, UsageView
from fenka.dialects.base import SharedNode, SliceRequest
from fenka.dialects.mig_records import TAKEN, with_instances
from fenka.dialects.nodes import mig_shared


@dataclass(frozen=True, slots=True)
class HeldPlacement:
    """The placement that an entry of the queue gets once kube-scheduler retries it. namespace: its pods'."""

    entry_id: str
    placement: Placement
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class QueueConstraints:
    """Cards that a pod cannot use, because entries before it in the queue have them or get them.

    Attributes:
        reserved: cards that are reserved until enough of them is free.
        held: what fits for others now, by node.
        nodes: the nodes of both.
        position: the pod's position in the queue.
        total: the number of entries, its own included; 0 if there is no queue.
    """

    reserved: frozenset[DeviceId] = frozenset()
    held: Mapping[str, tuple[HeldPlacement, ...]] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    position: int = 0
    total: int = 0

    @property
    def all_cards(self) -> frozenset[DeviceId]:
        """Return the cards on which anything is reserved or held."""
        placements = (hold.placement for held in self.held.values() for hold in held)
        return self.reserved.union(
            piece.uuid for placement in placements for piece in placement.slices
        )


NO_CONSTRAINTS = QueueConstraints()


@dataclass(frozen=True, slots=True)
class InstanceHolders:
    """The holders of a node's instances.

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
    for hold in held:
        for piece in hold.placement.slices:
            names.setdefault(piece.uuid, []).append("a pod before it")
            namespaces.setdefault(piece.uuid, set()).add(hold.namespace)
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
        for number in sorted(range(len(requests)), key=lambda index: order(requests[index])):
            placed = placing.place(requests[number])
            if isinstance(placed, NoInstance):
                return placed
            placements[number] = placed
        return InstanceFit(
            placing.score, tuple(placements[index] for index in range(len(requests)))
        )

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
        placer.keep_free(request)
        for request in sorted(singles, key=lambda single: _size(shared, single))
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


def instances_fit_when_empty(shared: SharedNode, requests: Sequence[Request]) -> bool:
    """Return whether the requests would fit the node if pods held nothing of it."""
    division = shared.division
    taken = {
        card: {place: why for place, why in places.items() if why != TAKEN["leaving"]}
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


BEST, REST = 10, 8
"""kube-scheduler accepts scores from 0 to 10. Only the best node has 10. Its two points of advantage outweigh
all of kube-scheduler's own scores at the weight that the documentation gives."""

INSUFFICIENT_MEMORY = "Insufficient GPU Memory in one device"
"""gpushare's sentence, which people search for."""


@dataclass(frozen=True, slots=True)
class Feasible:
    """Where the pod would be on a node: a placement for each of its parts. The smallest score is the best."""

    score: tuple[float, ...]
    placements: tuple[Placement, ...]


Verdict = Feasible | node_admission.Infeasible


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Nodes that fit, in the order in which they were given, and the reasons of the others."""

    fitting: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)


class PodEvaluator:
    """Evaluates nodes for pods, one after the other: the definition."""

    def __init__(
        self,
        cluster: ClusterState,
        policy: Policy,
        usage: UsageView | None = None,
        max_nodes: int = 0,
    ) -> None:
        """Args:
        cluster: the nodes.
        policy: the placement policy.
        usage: what is used of the cards, if that is more than the cluster's pods use.
        max_nodes: how many nodes `filter` returns at most, the best ones and nothing about the others; 0 for
            all that fit. kube-scheduler scores each of them, and sends all of them to prioritize.
        """
        self._cluster, self._policy, self._usage = cluster, policy, usage or cluster
        self._max_nodes = max_nodes
        self._kinds: tuple[int, tuple[Node, ...]] = -1, ()
        """The version of the nodes, and one of each kind: there may be thousands."""

    def filter(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> FilterResult:
        """Return which of the nodes fit the pod. Nothing is reserved.

        A pod without slices prefers no node, and has all that fit.
        """
        result = FilterResult()
        for name, verdict in self.evaluate(pod, names, constraints):
            if not isinstance(verdict, node_admission.Infeasible):
                result.fitting.append(name)
            elif verdict.unresolvable:
                result.unresolvable[name] = verdict.sentence
            else:
                result.failed[name] = verdict.sentence
        if 0 < self._max_nodes < len(result.fitting):
            best = self.ranked(pod, result.fitting, constraints)[: self._max_nodes]
            return FilterResult(best) if best else result
        return with_position(result, constraints)

    def prioritize(
        self, pod: Pod, names: Sequence[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, int]]:
        """Return a score for each node, in the order given: 10 for the best one, 8 down to 0 for the others.

        Of equal nodes the first by name is better. All scores are 0 if the pod requests nothing.
        """
        ranked = self.ranked(pod, names, constraints)
        last, most = len(ranked) - 1, max(len(ranked) - 2, 1)
        scores = {
            name: BEST if rank == 0 else REST * (last - rank) // most
            for rank, name in enumerate(ranked)
        }
        return [(name, scores.get(name, 0)) for name in names]

    def ranked(
        self, pod: Pod, names: Sequence[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[str]:
        """Return those of the nodes that fit the pod and share cards, the best first.

        Cards come before instances: to create one takes a second, and its neighbours may need it.
        """
        inside = self._cluster.instance_nodes(pod, names)
        fits = [
            (name in inside, verdict.score, name)
            for name, verdict in self.evaluate(pod, names, constraints)
            if isinstance(verdict, Feasible)
        ]
        return [name for _, _, name in sorted(fits)]

    def placements(
        self, pod: Pod, name: str, constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> tuple[Placement, ...] | node_admission.Infeasible:
        """Return where the pod goes on this node; nothing if it requests nothing."""
        ((_, verdict),) = self.evaluate(pod, (name,), constraints)
        return verdict.placements if isinstance(verdict, Feasible) else verdict or ()

    def evaluate(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, Verdict | None]]:
        """Return the verdict on each node; None if the pod requests nothing there that fenka places."""
        names = tuple(names)
        planned = self._planned_node(pod, names, constraints)
        elsewhere = node_admission.Infeasible(
            f"the pod is planned for the node {planned}", unresolvable=False
        )
        return [
            (
                name,
                self._verdict(pod, name, constraints) if planned in (None, name) else elsewhere,
            )
            for name in names
        ]

    def _verdict(self, pod: Pod, name: str, constraints: QueueConstraints) -> Verdict | None:
        """Return the verdict on one node, wherever else the pod could go."""
        shared, demand = self._cluster.shared_node(name), self._cluster.demand_on(name, pod)
        if shared is None or demand.dialect is None or not self._cluster.shares_with(name, demand):
            return self._without_cards(pod, demand, name)
        if demand.invalid is not None:
            return node_admission.Infeasible(demand.invalid, unresolvable=True)
        parts = demand.parts
        rejected = node_admission.admission_rule(self._cluster, name).rejection_of(
            pod, parts, self._cluster.spot.now
        )
        if rejected is not None:
            return rejected
        if demand.in_instances:
            return self._evaluate_instances(pod, parts, shared, constraints)
        return self._evaluate_cards(pod, parts, name, constraints)

    def _evaluate_cards(
        self,
        pod: Pod,
        parts: tuple[SliceRequest, ...],
        name: str,
        constraints: QueueConstraints,
    ) -> Verdict:
        """Return the verdict for a pod that requests cards, or slices of them."""
        node = self._cluster.card_node(name)
        cards = self._cluster.pins.planned_cards(name, pod.metadata.uid)
        if cards:
            # All pods there are planned together, so none of them reserves anything of another's cards.
            verdict = self._evaluate_node(parts, with_cards(node, cards), self._usage)
            if isinstance(verdict, Feasible):
                return verdict
        verdict = self._evaluate_node(parts, node, self._usage)
        if name in constraints.nodes and isinstance(verdict, Feasible):
            return self._evaluate_constrained(parts, node, constraints)
        return verdict

    def _evaluate_instances(
        self,
        pod: Pod,
        parts: tuple[SliceRequest, ...],
        shared: SharedNode,
        constraints: QueueConstraints,
    ) -> Verdict:
        """Return the verdict for a pod that requests instances, or slices in them."""
        requests, node = tuple(part.request for part in parts), shared.node
        held = constraints.held.get(node.name, ())
        holders = instance_holders(self._cluster, node.name, held)
        usage = UsageOverlay(self._usage)
        for hold in held:
            usage.add(hold.placement)
            shared = with_instances(shared, (piece.uuid for piece in hold.placement.slices))
        reserved = constraints.reserved if node.name in constraints.nodes else frozenset()
        place = partial(
            place_in_instances,
            *(shared, usage, requests, self._policy, holders, pod.metadata.namespace),
        )
        fit = place(reserved)
        if isinstance(fit, InstanceFit):
            return Feasible(fit.score, fit.placements)
        if reserved and isinstance(place(), InstanceFit):
            return node_admission.Infeasible(
                "what is free is reserved for requests before it", unresolvable=False
            )
        never = never_fits_instances(shared, requests)
        unresolvable = bool(never) or not instances_fit_when_empty(shared, requests)
        return node_admission.Infeasible(never or fit.sentence(), unresolvable)

    def explain(self, pod: Pod) -> str | None:
        """Return one sentence over all nodes that share cards, for a pending pod; None if a node fits."""
        demand = pod.demand(self._cluster.dialects)
        names = [shared.node.name for shared in self._cluster.shared_nodes()]
        divided = self._cluster.instance_nodes(pod, names)
        on_cards = [
            name
            for name in names
            if name not in divided and self._cluster.shares_with(name, demand)
        ]
        sentences = [self._explain_cards(pod, on_cards)] if on_cards or not divided else []
        if divided:
            sentences.append(self._explain_instances(pod, sorted(divided)))
        said = [sentence for sentence in sentences if sentence is not None]
        return "; ".join(filter(None, said)) if len(said) == len(sentences) else None

    def _explain_cards(self, pod: Pod, names: Sequence[str]) -> str | None:
        """Return one sentence over nodes on which the pod's slices are on cards; None if one fits."""
        verdicts = self.evaluate(pod, names)
        infeasible = [
            verdict for _, verdict in verdicts if isinstance(verdict, node_admission.Infeasible)
        ]
        if len(infeasible) < len(verdicts):
            return None
        rejections = tuple(
            verdict.rejection for verdict in infeasible if verdict.rejection is not None
        )
        if infeasible and not rejections:
            return infeasible[0].sentence
        hint = self._hint(pod) if all(verdict.unresolvable for verdict in infeasible) else ""
        return Unschedulable(rejections, hint).sentence()

    def _explain_instances(self, pod: Pod, names: Sequence[str]) -> str | None:
        """Return what holds the instances of one node, rather of one that will have room when pods end.

        None if a node fits.
        """
        verdicts = PodEvaluator.evaluate(self, pod, names)
        rejected = [
            (name, verdict)
            for name, verdict in verdicts
            if isinstance(verdict, node_admission.Infeasible)
        ]
        if len(rejected) < len(verdicts):
            return None

        def order(rejection: tuple[str, node_admission.Infeasible]) -> tuple[bool, bool]:
            shared = self._cluster.shared_node(rejection[0])
            return rejection[1].unresolvable, not (shared and shared.division.geometries)

        name, first = min(rejected, key=order)
        others = sum(not verdict.unresolvable for _, verdict in rejected) - 1
        if first.unresolvable or not others:
            return first.sentence
        return (
            f"{name}: {first.sentence}; {others} more node{'s' * (others > 1)} may have room later"
        )

    def _hint(self, pod: Pod) -> str:
        """Return what the pod could request instead, if it would not fit without any allocations."""
        parts, cluster = pod.demand(self._cluster.dialects).parts, self._cluster
        if self._kinds[0] != cluster.nodes_version:
            nodes = {
                (node_admission.node_kind(node, repaired=True), node.unit_mib): node
                for shared_node in cluster.shared_nodes()
                if not cluster.node_error(shared_node.node.name)
                for node in [cluster.card_node(shared_node.node.name)]
            }
            self._kinds = cluster.nodes_version, tuple(nodes.values())
        never = never_fits(parts[0].request, self._kinds[1]) if len(parts) == 1 else None
        return never.hint if never else ""

    def _planned_node(
        self, pod: Pod, names: Sequence[str], constraints: QueueConstraints
    ) -> str | None:
        """Return the node for which the pod is planned, if it is one of these and has room."""
        name = self._cluster.pins.node_of(pod.metadata.uid)
        if name is None or name not in names:
            return None
        verdict = self._verdict(pod, name, constraints)
        return None if isinstance(verdict, node_admission.Infeasible) else name

    def _without_cards(
        self, pod: Pod, demand: PodDemand, name: str
    ) -> node_admission.Infeasible | None:
        """Return the verdict on a node that shares no cards, or for a pod that requests none."""
        if demand.error is None and demand.dialect is None:
            return None
        error = demand.error or self._cluster.node_error(name)
        if error is None and self._cluster.node(name) is None:
            error = f'node "{name}" not found'
        if error is None and demand.served_by_kubelet:
            # The kubelet chooses whole cards and instances of nodes that do not share.
            excluded = node_admission.exclusion(self._cluster, name, pod)
            return node_admission.Infeasible(excluded, unresolvable=True) if excluded else None
        error = error or f"The node {name} is not for GPU share, need skip"
        return node_admission.Infeasible(error, unresolvable=True)

    def _evaluate_constrained(
        self, parts: tuple[SliceRequest, ...], node: Node, constraints: QueueConstraints
    ) -> Verdict:
        """Evaluate a node with what entries before the pod leave of it."""
        usage = UsageOverlay(self._usage)
        for held in constraints.held.get(node.name, ()):
            usage.add(held.placement)
        verdict = self._evaluate_node(parts, node, usage, constraints.reserved)
        if isinstance(verdict, Feasible) or verdict.rejection is None:
            return verdict
        rejection = self._with_reserved(parts[0].request, node, verdict.rejection)
        return node_admission.Infeasible(
            sentence(rejection), unresolvable=False, rejection=rejection
        )

    def _with_reserved(
        self, request: Request, node: Node, rejection: NodeRejection
    ) -> NodeRejection:
        """Give cards that would fit without the constraints the reason RESERVED."""
        reasons = (
            Reason(ReasonCode.RESERVED, reason.card)
            if fits_card(request, node, card, self._usage.card_usage(node.name, card.uuid))
            else reason
            for reason, card in zip(rejection.reasons, node.cards, strict=True)
        )
        return replace(rejection, reasons=tuple(reasons))

    def _evaluate_node(
        self,
        parts: tuple[SliceRequest, ...],
        node: Node,
        usage: UsageView,
        reserved: Collection[DeviceId] = (),
    ) -> Verdict:
        requests = tuple(part.request for part in parts)
        (verdict,) = evaluate(usage, requests[0], self._policy, (node,), reserved)
        if isinstance(verdict, NodeRejection):
            return self._infeasible(requests, node, verdict)
        if len(requests) == 1:
            return Feasible(verdict.score, (verdict.placement,))
        placements = place_gang(usage, requests, self._policy, (node,), reserved)
        if isinstance(placements, Unschedulable):
            return self._infeasible(requests, node, placements.rejections[0])
        return Feasible(verdict.score, placements)

    def _infeasible(
        self, requests: tuple[Request, ...], node: Node, rejection: NodeRejection
    ) -> node_admission.Infeasible:
        return node_admission.Infeasible(
            sentence(rejection), not node_admission.fits_when_empty(requests, node), rejection
        )


def with_cards(node: Node, indexes: Collection[int]) -> Node:
    """Return the node as if it had these cards only."""
    return replace(node, cards=tuple(card for card in node.cards if card.index in indexes))


def sentence(rejection: NodeRejection) -> str:
    """Return the counts over all cards, after gpushare's sentence if it is true."""
    return sentence_of_counts(Unschedulable((rejection,)).counts())


def sentence_of_counts(counts: Counter[ReasonCode]) -> str:
    """Return the counts, after gpushare's sentence if it is true."""
    text = counts_sentence(counts)
    return f"{INSUFFICIENT_MEMORY}: {text}" if ReasonCode.MEMORY in counts else text


def with_position(result: FilterResult, constraints: QueueConstraints) -> FilterResult:
    """Add the pod's position in the queue to the reasons, if no node fits."""
    if not result.fitting and constraints.total:
        position = f"; position {constraints.position} of {constraints.total} in the queue"
        for name in result.failed:
            result.failed[name] += position
    return result
