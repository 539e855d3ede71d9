"""What the extender answers, as functions of the world: filter, prioritize and preempt. No I/O, no clock."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fenka.cluster.objects import Pod
from fenka.cluster.pod_demand import PodDemand
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import Policy, evaluate, fits_card, never_fits
from fenka.core.gangs import place_gang
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.preemption import DisruptionBudget, Preemptor, VictimCandidate, cheapest_victims
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import EmptyUsage, UsageOverlay, UsageView
from fenka.dialects import node_modes, nvidia
from fenka.dialects.base import InvalidRecord, SharedNode, SliceRequest

BEST, REST = 10, 8
"""Scores that kube-scheduler takes are 0 to 10. The best node alone has 10, and two points before the next
outweigh all of kube-scheduler's own scores at the weight that the documentation names."""

INSUFFICIENT_MEMORY = "Insufficient GPU Memory in one device"
"""gpushare's words, which people search for."""

_MAX_SHAPES = 64
"""Requests of so many different sizes are remembered."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why a node does not do. hopeless: nor would it if nothing were held there."""

    sentence: str
    unresolvable: bool
    rejection: NodeRejection | None = None
    """Card by card, where that is the reason."""


@dataclass(frozen=True, slots=True)
class Feasible:
    """Where the pod would be, a placement for each of its parts. score: the smaller, the better."""

    score: tuple[float, ...]
    placements: tuple[Placement, ...]


Verdict = Feasible | Infeasible


@dataclass(frozen=True, slots=True)
class HeldPlacement:
    """What somebody who waits will get. id: whose it is."""

    id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class QueueConstraints:
    """Who is served before a pod, and what is kept for them.

    reserved: the cards that they have reserved. kept: by node, what fits for
    them now, though it has not come to that yet. nodes: where any of that is. position: the pod's own,
    of so many who wait, itself among them; 0 of 0 where nobody keeps an order.
    """

    reserved: frozenset[DeviceId] = frozenset()
    kept: Mapping[str, tuple[HeldPlacement, ...]] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    position: int = 0
    of: int = 0

    @property
    def all_cards(self) -> frozenset[DeviceId]:
        """Return the cards on which anything is held for others."""
        placements = (it.placement for held in self.kept.values() for it in held)
        return self.reserved.union(piece.uuid for it in placements for piece in it.slices)


NO_CONSTRAINTS = QueueConstraints()


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Nodes that fit, in the order in which they were named; and sentences for those that do not."""

    fitting: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreemptionResult:
    """UIDs of pods that must go, and how many of them no disruption budget allows."""

    uids: tuple[str, ...]
    violations: int = 0


class PodEvaluator:
    """Judges nodes for pods, and remembers the verdicts until the node changes.

    A cluster's pods come in few sizes: of a thousand nodes those few are judged again that changed.
    """

    def __init__(self, world: ClusterState, policy: Policy, view: UsageView | None = None) -> None:
        """view: what is held; more than the world says where plans hold something besides."""
        self._world, self._policy, self._view = world, policy, view or world
        self._memory: OrderedDict[tuple[SliceRequest, ...], dict[str, tuple[int, Verdict]]] = (
            OrderedDict()
        )

    def filter(
        self, pod: Pod, names: Iterable[str], ahead: QueueConstraints = NO_CONSTRAINTS
    ) -> FilterResult:
        """Which of the nodes the pod fits. Nothing is reserved: the pod may yet go nowhere."""
        answer = FilterResult()
        for name, verdict in self.evaluate(pod, names, ahead):
            if isinstance(verdict, Infeasible):
                (answer.unresolvable if verdict.unresolvable else answer.failed)[name] = (
                    verdict.sentence
                )
            else:
                answer.fitting.append(name)
        if not answer.fitting and ahead.of:
            stands = f"; position {ahead.position} of {ahead.of} in the queue"
            for name in answer.failed:
                answer.failed[name] += stands
        return answer

    def prioritize(
        self, pod: Pod, names: Sequence[str], ahead: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, int]]:
        """A score for each node, in the order given: 10 for the best one, 8 down to 0 for the others.

        Equal nodes: the first by name, so that it is certain. 0 for all where nothing is asked for.
        """
        fits = [
            (verdict.score, name)
            for name, verdict in self.evaluate(pod, names, ahead)
            if isinstance(verdict, Feasible)
        ]
        ranked = [name for _, name in sorted(fits)]
        scores = {
            name: BEST if rank == 0 else REST * (len(ranked) - 1 - rank) // max(len(ranked) - 2, 1)
            for rank, name in enumerate(ranked)
        }
        return [(name, scores.get(name, 0)) for name in names]

    def placements(
        self, pod: Pod, name: str, ahead: QueueConstraints = NO_CONSTRAINTS
    ) -> tuple[Placement, ...] | Infeasible:
        """Where on this node the pod goes; nothing if it asks for nothing."""
        ((_, verdict),) = self.evaluate(pod, (name,), ahead)
        return verdict.placements if isinstance(verdict, Feasible) else verdict or ()

    def evaluate(
        self, pod: Pod, names: Iterable[str], ahead: QueueConstraints = NO_CONSTRAINTS
    ) -> list[tuple[str, Verdict | None]]:
        """A verdict for each node; None where the pod asks for nothing that is fenka's to give.

        ahead: what is kept for others of the cards that are free. Only where it is, anything is judged anew.
        """
        world, wanted = self._world, pod.demand(self._world.dialects)
        parts, unreadable = self._parts(wanted)
        memory = self._of_shape(parts)
        verdicts: list[tuple[str, Verdict | None]] = []
        for name in names:
            share = world.shared_node(name)
            if share is None or wanted.error is not None or wanted.dialect is None:
                verdicts.append((name, self._without_request(wanted, name)))
                continue
            if unreadable is not None:
                verdicts.append((name, unreadable))
                continue
            generation = self._view.generation(name)
            remembered = memory.get(name)
            if remembered is None or remembered[0] != generation:
                remembered = memory[name] = (
                    generation,
                    self._evaluate_node(parts, share, self._view),
                )
            verdict = remembered[1]
            if name in ahead.nodes and isinstance(verdict, Feasible):
                verdict = self._evaluate_constrained(parts, share, ahead)
            verdicts.append((name, verdict))
        return verdicts

    def _parts(self, demand: PodDemand) -> tuple[tuple[SliceRequest, ...], Infeasible | None]:
        try:
            return demand.parts, None
        except InvalidRecord as why:
            return (), Infeasible(str(why), unresolvable=True)

    def shape(self, pod: Pod) -> tuple[SliceRequest, ...]:
        """What of a pod decides about its verdicts, apart from the node; empty for one that asks for nothing.

        Raises Unreadable.
        """
        return pod.demand(self._world.dialects).parts

    def explain(self, pod: Pod) -> str | None:
        """One sentence over all sharing nodes, for a pod that waits; None where one fits."""
        names = [share.node.name for share in self._world.shared_nodes()]
        verdicts = [verdict for _, verdict in self.evaluate(pod, names)]
        noes = [verdict for verdict in verdicts if isinstance(verdict, Infeasible)]
        if len(noes) < len(verdicts):
            return None
        rejections = tuple(no.rejection for no in noes if no.rejection is not None)
        if noes and not rejections:
            return noes[0].sentence
        hint = ""
        if all(no.unresolvable for no in noes):
            hint = self._hint(pod)
        return Unschedulable(rejections, hint).sentence()

    def _hint(self, pod: Pod) -> str:
        """Nothing that is held is to blame: what could ever be had."""
        parts = pod.demand(self._world.dialects).parts
        usable = [
            it.node for it in self._world.shared_nodes() if not self._world.node_error(it.node.name)
        ]
        never = never_fits(parts[0].request, usable) if len(parts) == 1 else None
        return never.hint if never else ""

    def preempt(  # noqa: PLR0913
        self,
        pod: Pod,
        node: str,
        victims: Collection[str],
        pods: Mapping[str, Pod],
        budgets: Callable[[Pod], frozenset[DisruptionBudget]] = lambda _: frozenset(),
        gang: Callable[[Pod], str | None] = lambda _: None,
        *,
        ahead: QueueConstraints = NO_CONSTRAINTS,
    ) -> PreemptionResult | None:
        """Who must go so that this one fits on the node's cards; None where nobody's going helps.

        victims: whom kube-scheduler would evict for its own reasons; they all stay victims. Others of lower
        priority are added where the cards need it, the cheapest set. pods: all, by UID. budgets: the
        disruption budgets that cover a pod. gang: the one that a pod is in: all of it goes, or none. ahead:
        nobody goes to make room on cards that others would get.
        """
        if any(uid in pods and _priority(pods[uid]) >= _priority(pod) for uid in victims):
            return None
        wanted = pod.demand(self._world.dialects)
        if wanted.dialect is None and wanted.error is None:
            return PreemptionResult(tuple(victims))
        share = self._world.shared_node(node)
        if share is None or wanted.error or self._world.node_error(node):
            return PreemptionResult(tuple(victims)) if _elsewhere(wanted) else None
        try:
            parts = wanted.parts
            node_modes.check_admission(self._labels(node), parts)
        except InvalidRecord:
            return None
        view, others = UsageOverlay(self._view), list[VictimCandidate]()
        for it in self._world.allocations(node):
            if it.lingering:
                # Nobody can evict it.
                continue
            going = it.pod.metadata.uid in victims
            for placement in it.placements:
                if going:
                    view.remove(placement)
                else:
                    others.append(_holder(it.pod, placement, budgets, gang))
        for kept in ahead.kept.get(node, ()):
            view.add(kept.placement)
        claim = Preemptor(tuple(part.request for part in parts), _priority(pod))
        closed = _cordoned(share.node, ahead.reserved)
        found = cheapest_victims(view, others, claim, (closed,), self._policy)
        if found is None:
            return None
        # Who has several slices is there several times.
        return PreemptionResult((*victims, *dict.fromkeys(found.ids)), found.violations)

    def _of_shape(self, parts: tuple[SliceRequest, ...]) -> dict[str, tuple[int, Verdict]]:
        memory = self._memory.setdefault(parts, {})
        self._memory.move_to_end(parts)
        if len(self._memory) > _MAX_SHAPES:
            self._memory.popitem(last=False)
        return memory

    def _without_request(self, wanted: PodDemand, name: str) -> Infeasible | None:
        if wanted.error is not None:
            return Infeasible(wanted.error, unresolvable=True)
        if wanted.dialect is None:
            return None
        trouble = self._world.node_error(name)
        if trouble is not None:
            return Infeasible(trouble, unresolvable=True)
        if self._world.node(name) is None:
            return Infeasible(f'node "{name}" not found', unresolvable=True)
        if _elsewhere(wanted):
            return None
        return Infeasible(f"The node {name} is not for GPU share, need skip", unresolvable=True)

    def _evaluate_constrained(
        self, parts: tuple[SliceRequest, ...], share: SharedNode, ahead: QueueConstraints
    ) -> Verdict:
        """On what those before it leave."""
        node, view = share.node, UsageOverlay(self._view)
        for it in ahead.kept.get(node.name, ()):
            view.add(it.placement)
        verdict = self._evaluate_node(parts, share, view, ahead.reserved)
        if isinstance(verdict, Feasible) or verdict.rejection is None:
            return verdict
        rejection = self._kept(parts[0].request, node, verdict.rejection)
        return Infeasible(sentence(rejection), unresolvable=False, rejection=rejection)

    def _kept(self, request: Request, node: Node, rejection: NodeRejection) -> NodeRejection:
        """A card that would do, were it not for others, is reserved for them, whatever is lacking then."""
        reasons = (
            Reason(ReasonCode.RESERVED, it.card)
            if fits_card(request, node, card, self._view.card_usage(node.name, card.uuid))
            else it
            for it, card in zip(rejection.reasons, node.cards, strict=True)
        )
        return replace(rejection, reasons=tuple(reasons))

    def _evaluate_node(
        self,
        parts: tuple[SliceRequest, ...],
        share: SharedNode,
        view: UsageView,
        reserved: Collection[DeviceId] = (),
    ) -> Verdict:
        node = share.node
        trouble = self._world.node_error(node.name)
        if trouble is not None:
            return Infeasible(trouble, unresolvable=True)
        turned_away = self._rejected_by_mode(parts, node.name)
        if turned_away is not None:
            return turned_away
        requests = tuple(part.request for part in parts)
        (verdict,) = evaluate(view, requests[0], self._policy, (node,), reserved)
        if isinstance(verdict, NodeRejection):
            return self._no(requests, node, verdict)
        policy = self._card_policy(node.name)
        if len(requests) == 1 and policy == self._policy:
            return Feasible(verdict.score, (verdict.placement,))
        # Nodes are compared by one policy, cards chosen by the node's own.
        found = place_gang(view, requests, policy, (node,), reserved)
        if isinstance(found, Unschedulable):
            return self._no(requests, node, found.rejections[0])
        return Feasible(verdict.score, found)

    def _rejected_by_mode(self, parts: tuple[SliceRequest, ...], name: str) -> Infeasible | None:
        """By the node's mode; by what its pods hold, only as long as they do."""
        labels = self._labels(name)
        try:
            node_modes.check_admission(labels, parts)
        except InvalidRecord as why:
            return Infeasible(str(why), unresolvable=True)
        try:
            node_modes.check_admission(labels, parts, resident_compute(self._world, name))
        except InvalidRecord as why:
            return Infeasible(str(why), unresolvable=False)
        return None

    def _no(
        self, requests: tuple[Request, ...], node: Node, rejection: NodeRejection
    ) -> Infeasible:
        unresolvable = _never_fits(requests, node.unit_mib, tuple(map(_kind, node.cards)))
        return Infeasible(sentence(rejection), unresolvable, rejection)

    def _labels(self, name: str) -> Mapping[str, str]:
        node = self._world.node(name)
        return node.metadata.labels if node else {}

    def _card_policy(self, name: str) -> Policy:
        asked = self._labels(name).get(node_modes.PLACEMENT_LABEL)
        return asked if asked in ("binpack", "spread") else self._policy


def resident_compute(world: ClusterState, name: str) -> set[bool]:
    """Of those who hold memory of the node, whether they hold compute; only some modes ask."""
    node = world.node(name)
    if node is None or node_modes.MODE_LABEL not in node.metadata.labels:
        return set()
    return {
        any(piece.compute for piece in it.slices)
        for it in world.allocations(name)
        if it.slices and not any(placement.whole for placement in it.placements)
    }


def admits(world: ClusterState, name: str, parts: Sequence[SliceRequest]) -> bool:
    """Return whether the node's mode admits such requests now."""
    node = world.node(name)
    labels = node.metadata.labels if node else {}
    try:
        node_modes.check_admission(labels, parts, resident_compute(world, name))
    except InvalidRecord:
        return False
    return True


def _cordoned(node: Node, reserved: Collection[DeviceId]) -> Node:
    """Return the node with these cards cordoned."""
    cards = (replace(it, cordoned=True) if it.uuid in reserved else it for it in node.cards)
    return replace(node, cards=tuple(cards)) if reserved else node


def sentence(rejection: NodeRejection) -> str:
    """gpushare's words where they are true, and the counts."""
    counts = Unschedulable((rejection,)).sentence()
    memory = any(reason.code is ReasonCode.MEMORY for reason in rejection.reasons)
    return f"{INSUFFICIENT_MEMORY}: {counts}" if memory else counts


_Kind = tuple[int, int, str, bool, bool]


def _kind(card: Card) -> _Kind:
    return card.memory_mib, card.compute, card.model, card.healthy, card.cordoned


def fits_when_empty(requests: tuple[Request, ...], node: Node) -> bool:
    """Whether the node would do if nothing were held there, and none of its cards were sick or cordoned."""
    kinds = (
        replace(card, healthy=True, cordoned=False) if card.cordoned or not card.healthy else card
        for card in node.cards
    )
    return not _never_fits(requests, node.unit_mib, tuple(map(_kind, kinds)))


@lru_cache(maxsize=1024)
def _never_fits(requests: tuple[Request, ...], unit_mib: int, kinds: tuple[_Kind, ...]) -> bool:
    """Whether a node with such cards would not do even if it were empty. A cluster has few kinds of nodes."""
    cards = (
        Card(
            index,
            DeviceId(str(index)),
            model,
            memory_mib,
            compute,
            healthy=healthy,
            cordoned=cordoned,
        )
        for index, (memory_mib, compute, model, healthy, cordoned) in enumerate(kinds)
    )
    node = Node("any", tuple(cards), unit_mib=unit_mib)
    return isinstance(place_gang(EmptyUsage(), requests, "binpack", (node,)), Unschedulable)


def _elsewhere(wanted: PodDemand) -> bool:
    """Whole cards are also had on nodes that do not share: there the kubelet chooses them."""
    return wanted.dialect is nvidia


def _priority(pod: Pod) -> int:
    return pod.spec.priority or 0


def _holder(
    pod: Pod,
    placement: Placement,
    budgets: Callable[[Pod], frozenset[DisruptionBudget]],
    gang: Callable[[Pod], str | None],
) -> VictimCandidate:
    uid = pod.metadata.uid
    # A pod that holds several slices goes with all of them.
    return VictimCandidate(
        uid, placement, _priority(pod), gang=gang(pod) or uid, budgets=budgets(pod)
    )
