"""The one evaluator of nodes for pods: the extender, `fenka why` and events show its verdicts. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fenka.cluster.instance_placement import (
    InstanceFit,
    instance_holders,
    never_fits_instances,
    place_in_instances,
)
from fenka.cluster.instance_placement import fits_when_empty as instances_fit_when_empty
from fenka.cluster.node_admission import (
    Infeasible,
    admission_rule,
    exclusion,
    fits_when_empty,
    node_kind,
)
from fenka.cluster.objects import Pod
from fenka.cluster.pod_demand import PodDemand
from fenka.cluster.queue_constraints import NO_CONSTRAINTS, QueueConstraints
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy, evaluate, fits_card, never_fits
from fenka.core.gangs import place_gang
from fenka.core.inventory import DeviceId, Node
from fenka.core.reasons import (
    NodeRejection,
    Reason,
    ReasonCode,
    Unschedulable,
    counts_sentence,
)
from fenka.core.request import Placement, Request
from fenka.core.usage import UsageOverlay, UsageView
from fenka.dialects.base import SharedNode, SliceRequest
from fenka.dialects.mig_records import with_instances

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


Verdict = Feasible | Infeasible


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
            if not isinstance(verdict, Infeasible):
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
    ) -> tuple[Placement, ...] | Infeasible:
        """Return where the pod goes on this node; nothing if it requests nothing."""
        ((_, verdict),) = self.evaluate(pod, (name,), constraints)
        return verdict.placements if isinstance(verdict, Feasible) else verdict or ()

    def evaluate(
        self, pod: Pod, names: Iterable[str], constraints: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, Verdict | None]]:
        """Return the verdict on each node; None if the pod requests nothing there that fenka places."""
        names = tuple(names)
        planned = self._planned_node(pod, names, constraints)
        elsewhere = Infeasible(f"the pod is planned for the node {planned}", unresolvable=False)
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
            return Infeasible(demand.invalid, unresolvable=True)
        parts = demand.parts
        rejected = admission_rule(self._cluster, name).rejection_of(
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
        for it in held:
            usage.add(it.placement)
            shared = with_instances(shared, (piece.uuid for piece in it.placement.slices))
        reserved = constraints.reserved if node.name in constraints.nodes else frozenset()
        place = partial(
            place_in_instances,
            *(shared, usage, requests, self._policy, holders, pod.metadata.namespace),
        )
        fit = place(reserved)
        if isinstance(fit, InstanceFit):
            return Feasible(fit.score, fit.placements)
        if reserved and isinstance(place(), InstanceFit):
            return Infeasible("what is free is reserved for requests before it", unresolvable=False)
        never = never_fits_instances(shared, requests)
        unresolvable = bool(never) or not instances_fit_when_empty(shared, requests)
        return Infeasible(never or fit.sentence(), unresolvable)

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
        infeasible = [verdict for _, verdict in verdicts if isinstance(verdict, Infeasible)]
        if len(infeasible) < len(verdicts):
            return None
        rejections = tuple(it.rejection for it in infeasible if it.rejection is not None)
        if infeasible and not rejections:
            return infeasible[0].sentence
        hint = self._hint(pod) if all(it.unresolvable for it in infeasible) else ""
        return Unschedulable(rejections, hint).sentence()

    def _explain_instances(self, pod: Pod, names: Sequence[str]) -> str | None:
        """Return what holds the instances of one node, rather of one that will have room when pods end.

        None if a node fits.
        """
        verdicts = PodEvaluator.evaluate(self, pod, names)
        rejected = [(name, it) for name, it in verdicts if isinstance(it, Infeasible)]
        if len(rejected) < len(verdicts):
            return None

        def order(rejection: tuple[str, Infeasible]) -> tuple[bool, bool]:
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
                (node_kind(node, repaired=True), node.unit_mib): node
                for it in cluster.shared_nodes()
                if not cluster.node_error(it.node.name)
                for node in [cluster.card_node(it.node.name)]
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
        return None if isinstance(verdict, Infeasible) else name

    def _without_cards(self, pod: Pod, demand: PodDemand, name: str) -> Infeasible | None:
        """Return the verdict on a node that shares no cards, or for a pod that requests none."""
        if demand.error is None and demand.dialect is None:
            return None
        error = demand.error or self._cluster.node_error(name)
        if error is None and self._cluster.node(name) is None:
            error = f'node "{name}" not found'
        if error is None and demand.served_by_kubelet:
            # The kubelet chooses whole cards and instances of nodes that do not share.
            excluded = exclusion(self._cluster, name, pod)
            return Infeasible(excluded, unresolvable=True) if excluded else None
        error = error or f"The node {name} is not for GPU share, need skip"
        return Infeasible(error, unresolvable=True)

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
        return Infeasible(sentence(rejection), unresolvable=False, rejection=rejection)

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
    ) -> Infeasible:
        return Infeasible(sentence(rejection), not fits_when_empty(requests, node), rejection)


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
