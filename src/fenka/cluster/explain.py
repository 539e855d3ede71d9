"""Explains the state of one pod: why it is pending, where it is, and what would help.

Explains which new node a pending pod waits for, or why no node is bought for it.

Explains for each node why a pod does not fit there, and what would make room.

Cards are evaluated as the scheduler does. Of kube-scheduler's own rules those are repeated that concern nodes
as such (cordons, taints, selectors) and GPU resources. For all others its message on the pod stands.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from fenka.cluster.autoscaling import AutoscalerStatus, OrderRecord, Slot
from fenka.cluster.gang_explanations import explain_gang
from fenka.cluster.node_admission import Infeasible, ineligibility_reasons
from fenka.cluster.objects import QUEUE_GATE, Event, Node, ObjectMeta, Pod, seconds
from fenka.cluster.placement import Feasible, PodEvaluator, never_fits_instances
from fenka.cluster.pod_groups import group_name
from fenka.cluster.state import ClusterSnapshot, PodAllocation
from fenka.cluster.unoffered_nodes import UNOFFERED
from fenka.cluster.unstarted_pods import unstarted
from fenka.core.evaluate import never_fits
from fenka.core.inventory import Node as CoreNode
from fenka.core.mig.instances import GANG_IN_INSTANCES
from fenka.core.policies.scores import CHOICES
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable
from fenka.core.request import ANY_INSTANCE, ComputeMode, Request, Slice
from fenka.core.units import MIB, card_units, format_units, mib_to_units
from fenka.dialects import ack, base, gpushare, nodes, pod_records
from fenka.dialects.base import InvalidRecord, SharedNode, driver_uuid
from fenka.dialects.card_records import card_at
from fenka.dialects.registry import DIALECTS

ASKED_EVENT, REFUSED_EVENT = "FenkaScaleOut", "FenkaNoScaleOut"
"""Reasons of the autoscaler's events on pods."""


@dataclass(frozen=True, slots=True)
class ScaleOutVerdict:
    """The autoscaler's action for a pending pod.

    Attributes:
        sentence: its end, after the pod's name.
        coming: whether a node comes for the pod.
    """

    sentence: str
    coming: bool


def explain_scale_out(
    pod: Pod, status: AutoscalerStatus, orders: Mapping[str, OrderRecord], now: float
) -> ScaleOutVerdict | None:
    """Return what is done for a pending pod; None if the autoscaler has not decided yet."""
    for order in orders.values():
        for slot in order.slots:
            if pod.metadata.uid in slot.pods and (sentence := _waits(order, slot, now)):
                return ScaleOutVerdict(sentence, coming=True)
    refused = (why for why, pods in status.unserved.items() if pod.full_name in pods)
    return next((_refused(why) for why in refused), None)


def explain_by_events(events: Iterable[Event], now: float) -> ScaleOutVerdict | None:
    """Return the same from the pod's own events, for users who may not read what the autoscaler publishes."""
    decisions = [event for event in events if event.reason in (ASKED_EVENT, REFUSED_EVENT)]
    newest = max(decisions, key=lambda event: event.at, default=None)
    if newest is None:
        return None
    if newest.reason == REFUSED_EVENT:
        return _refused(newest.message)
    ago = _ago(seconds(newest.at), now)
    return ScaleOutVerdict(f"waits for new nodes: {newest.message}, {ago}", coming=True)


def _refused(why: str) -> ScaleOutVerdict:
    return ScaleOutVerdict(f"gets no new node: {why}", coming=False)


def _waits(order: OrderRecord, slot: Slot, now: float) -> str:
    """Return what a pod planned for the slot waits for; empty if the slot is over."""
    match slot.state:
        case "written":
            return f"waits for a node of {order.group}, which is being asked for"
        case "asked" | "known":
            return f"waits for a node of {order.group}, asked for {_ago(order.asked_at, now)}"
        case "joined":
            return (
                f"waits for node {slot.node} of {order.group}, which has joined and does not offer its "
                "cards yet"
            )
        case "offering":
            return f"waits for kube-scheduler to place it on node {slot.node} of {order.group}"
        case _:
            return ""


def _ago(moment: float | None, now: float) -> str:
    if moment is None:
        return "just now"
    past = max(int(now - moment), 0)
    return f"{past} s ago" if past < 120 else f"{past // 60} min ago"


POLICY = "binpack"
"""Only whether a card fits matters here, not which one comes first."""

TEMPLATE_HASH = "pod-template-hash"
"""Label by which a Deployment tells the pods of its versions apart."""

CHANGE_REQUEST = (
    "change the request where the pod is made, in its Deployment, Job or file: a pod that exists keeps its "
    "own"
)
ADD_CARDS = "or add a node whose cards can hold it"
DIVIDE_CARDS = (
    "or have cards divided into instances that can hold it: label fenka.io/mig=on-demand of a node"
)
"""Hints for a pod that can never start as it is."""

MAX_HINTS = 3
"""Pods to name whose end would make room."""

COUNTED = tuple(name for dialect in DIALECTS for name in dialect.RESOURCES)
"""The resources that kube-scheduler counts by itself."""


class NodeVerdict(msgspec.Struct):
    """Why a pod does not fit a node; no reason if it does."""

    node: str
    fits: bool
    reasons: list[str]
    gpu: bool
    """Whether the node has what the pod requests at all."""


@dataclass(slots=True)
class NodeVerdicts:
    """The verdicts on all nodes, by name.

    Attributes:
        sentence: the counts over all cards, where no node fits by its cards.
        notes: records of the cluster that are wrong.
        hints: what would make room.
        never: why the pod could not start if nothing ran in the cluster; empty if it could.
    """

    nodes: list[NodeVerdict] = field(default_factory=list)
    sentence: str = ""
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    never: str = ""


def explain_nodes(pod: Pod, snapshot: ClusterSnapshot) -> NodeVerdicts:
    """Return the verdict on each node, and what would help. Raises InvalidRecord."""
    whole = pod.amount(base.NVIDIA_GPU)
    if whole and not any(_gives_both(node) for node in snapshot.nodes):
        return _WholeCards(pod, whole, snapshot).verdicts()
    return _SharedCards(pod, snapshot).verdicts()


def _gives_both(node: Node) -> bool:
    """Return whether the node gives its cards both whole and in slices."""
    try:
        mode = nodes.node_mode(node.metadata.labels)
    except InvalidRecord:
        return False
    return mode.whole and mode.memory


class _Evaluation:
    """A pod against the nodes of a cluster, by the rules that concern nodes as such."""

    def __init__(self, pod: Pod, snapshot: ClusterSnapshot) -> None:
        self._pod, self._snapshot = pod, snapshot
        self._pods_by_node = Counter(placed.spec.node_name for placed in snapshot.pods)

    def _node_reasons(self, node: Node) -> list[str]:
        reasons = ineligibility_reasons(self._pod, node)
        limit, pods = _units(node, "pods"), self._pods_by_node[node.metadata.name]
        if 0 < limit <= pods:
            reasons.append(f"has {pods} of {limit} pods")
        return reasons


class _WholeCards(_Evaluation):
    """Whole cards of nodes that do not share: the kubelet chooses them."""

    def __init__(self, pod: Pod, count: int, snapshot: ClusterSnapshot) -> None:
        super().__init__(pod, snapshot)
        self._count, self._nodes = count, snapshot.nodes
        self._holders: dict[str, list[tuple[str, int]]] = {}
        """Pods that hold whole cards and how many, by node."""
        for holder in snapshot.pods:
            if held := holder.amount(base.NVIDIA_GPU):
                of_node = self._holders.setdefault(holder.spec.node_name, [])
                of_node.append((holder.full_name, held))

    def verdicts(self) -> NodeVerdicts:
        never = self._never()
        return NodeVerdicts(
            [self._verdict(node) for node in self._nodes],
            hints=[CHANGE_REQUEST, ADD_CARDS] if never else self._hints(),
            never=never,
        )

    def _never(self) -> str:
        most = max((_units(node, base.NVIDIA_GPU) for node in self._nodes), default=0)
        if most >= self._count:
            return ""
        return f"no node has more than {most} cards to give whole"

    def _verdict(self, node: Node) -> NodeVerdict:
        reasons, total = self._node_reasons(node), _units(node, base.NVIDIA_GPU)
        free = max(self._free(node), 0)
        if total < 1:
            reasons.append(f"offers no {base.NVIDIA_GPU}")
        elif self._count > free:
            reasons.append(f"whole cards: {self._count} asked, {free} of {total} free")
        return NodeVerdict(node.metadata.name, not reasons, reasons, gpu=total > 0)

    def _held(self, node: Node) -> list[tuple[str, int]]:
        return self._holders.get(node.metadata.name, [])

    def _free(self, node: Node) -> int:
        return _units(node, base.NVIDIA_GPU) - sum(count for _, count in self._held(node))

    def _hints(self) -> list[str]:
        hints = [
            (count, f"it starts when {holder} ends ({count} whole cards of {node.metadata.name})")
            for node in self._nodes
            for holder, count in self._held(node)
            if self._free(node) < self._count <= self._free(node) + count
        ]
        return [hint for _, hint in sorted(hints)[:MAX_HINTS]]


class _SharedCards(_Evaluation):
    """Cards of nodes that share, as the scheduler evaluates them."""

    def __init__(self, pod: Pod, snapshot: ClusterSnapshot) -> None:
        super().__init__(pod, snapshot)
        self._state = snapshot.state
        self._evaluator = _Evaluator(self._state, POLICY)
        self._rejections: dict[str, NodeRejection] = {}
        """By node, of the nodes whose cards do not fit."""
        self._without_instance: set[str] = set()
        """Nodes on which no instance is free for the pod."""
        self._held = {
            shared.node.name: self._state.allocations(shared.node.name)
            for shared in self._state.shared_nodes()
        }

    def verdicts(self) -> NodeVerdicts:
        verdicts = NodeVerdicts([self._verdict(node) for node in self._snapshot.nodes])
        shared = self._state.shared_nodes()
        if shared and len(self._rejections) == len(shared):
            verdicts.sentence = Unschedulable(self._rejections.values()).sentence()
        verdicts.notes = [note for node in shared for note in self._wrong_records(node)]
        verdicts.never = (shared and self._never()) or ""
        verdicts.hints = self._changes() if verdicts.never else self._hints(verdicts.nodes)
        return verdicts

    def _verdict(self, node: Node) -> NodeVerdict:
        reasons, name = self._node_reasons(node), node.metadata.name
        shared = self._state.shared_node(name)
        if shared is None:
            reasons.append(self._nothing_shared(node))
            return NodeVerdict(name, fits=False, reasons=reasons, gpu=False)
        ((_, verdict),) = self._evaluator.evaluate(self._pod, (name,))
        rejection = verdict.rejection if isinstance(verdict, Infeasible) else None
        if rejection is not None:
            # A card's reason is better than the kubelet's sum.
            reasons += _card_reasons(shared, rejection.reasons)
            reasons += _unleased_reasons(node, rejection.reasons)
            self._rejections[name] = rejection
        elif isinstance(verdict, Infeasible):
            in_instances = self._state.demand_on(name, self._pod).in_instances
            if not (reasons or verdict.unresolvable) and in_instances:
                self._without_instance.add(name)
            reasons.append(verdict.sentence)
        else:
            reasons += self._too_few_units(node)
        return NodeVerdict(name, not reasons, reasons, gpu=True)

    def _nothing_shared(self, node: Node) -> str:
        error = self._state.node_error(node.metadata.name)
        if error:
            return error
        try:
            labelled = nodes.node_mode(node.metadata.labels).memory
        except InvalidRecord as why:
            return str(why)
        if labelled:
            return f"is labelled to share, but {UNOFFERED}"
        return f"shares no GPU ({gpushare.MEMORY} is 0)"

    def _too_few_units(self, node: Node) -> list[str]:
        """kube-scheduler's NodeResourcesFit counts sums of units, no cards."""
        reasons = []
        for resource, needed in self._pod.demand().amounts.items():
            total, held = _units(node, resource), self._state.allocations(node.metadata.name)
            used = sum(allocation.pod.demand().amount(resource) for allocation in held)
            free = max(total - used, 0)
            if needed > free:
                reasons.append(
                    f"{resource}: {needed} asked, {free} of {total} free by the kubelet's count"
                )
        return reasons

    def _wrong_records(self, node: SharedNode) -> list[str]:
        """Return a sentence for each record of this node that is impossible or cannot be read."""
        name = node.node.name
        notes = [
            f"{held.pod.full_name} on {name}: {held.error}; until it ends what it asks for "
            "counts on the first cards of the node"
            for held in self._held[name]
            if held.error
        ]
        known = self._state.node(name)
        cordoned = known.metadata.annotations.get(nodes.CORDONED, "") if known else ""
        cards = {card.index for card in node.physical_cards}
        if unknown := nodes.unknown_cards(nodes.CORDONED, cordoned, cards):
            notes.append(f"{name}: {unknown}")
            return notes
        # A pod whose card is unknown may fill a card twice although nothing was overcommitted.
        if not notes:
            notes = [
                f"card {card.index} of {name} is overcommitted: {used} of {card.memory_mib} MiB"
                for card in node.node.cards
                if (used := self._state.card_usage(name, card.uuid).memory_mib) > card.memory_mib
            ]
        return notes

    # ---- what would help ----

    def _changes(self) -> list[str]:
        """Return what helps if the pod could not start if nothing ran in the cluster."""
        demand = self._pod.demand()
        if demand.invalid is not None:
            return [CHANGE_REQUEST]
        return [CHANGE_REQUEST, DIVIDE_CARDS if demand.in_instances else ADD_CARDS]

    def _hints(self, verdicts: Sequence[NodeVerdict]) -> list[str]:
        if not self._state.shared_nodes():
            labels = " or ".join(f"{label}=true" for label in ("gpushare", "cgpu"))
            return [f"no node shares its GPUs: label one {labels}"]
        fitting = [verdict.node for verdict in verdicts if verdict.fits]
        if fitting:
            return [
                f"{fitting[0]} has room by what fenka knows: if the pod is not placed within a minute, "
                "kube-scheduler's message above, or its log, has the reason"
            ]
        full = {verdict.node for verdict in verdicts if _only_full(verdict)}
        full |= self._without_instance
        ending = self._ends_that_make_room(full)
        ending = ending or ["no single pod's end makes room: free cards, or add a node"]
        return [*ending, *self._predecessors(full)]

    def _predecessors(self, names: set[str]) -> list[str]:
        """Return what helps if the pod is a Deployment's new one, and an old one of it holds a card."""
        meta = self._pod.metadata
        for name in sorted(names if TEMPLATE_HASH in meta.labels else ()):
            for held in self._held.get(name, ()):
                other = held.pod.metadata
                if other.namespace == meta.namespace and _is_version_of(meta, other):
                    return [
                        f"it replaces {held.pod.full_name}, which runs until it is ready: with "
                        "strategy.rollingUpdate.maxSurge: 0 its Deployment ends the old pod first"
                    ]
        return []

    def _never(self) -> str | None:
        """Return the core's hint if the pod cannot be placed even on empty cards."""
        shared = self._state.shared_nodes()
        if shared and (suffixed := suffixed_amount(self._pod, shared[0].unit_mib)):
            return suffixed
        if self._pod.demand().invalid is not None:
            return self._pod.demand().invalid
        names = self._state.instance_nodes(
            self._pod, (shared_node.node.name for shared_node in shared)
        )
        on_cards = [shared_node for shared_node in shared if shared_node.node.name not in names]
        divided = [shared_node for shared_node in shared if shared_node.node.name in names]
        of_cards = self._never_on_cards(on_cards) if on_cards else ""
        of_instances = self._never_in_instances(divided) if divided else ""
        return None if None in (of_cards, of_instances) else of_cards or of_instances

    def _never_in_instances(self, shared_nodes: list[SharedNode]) -> str | None:
        # Nodes with divided cards say more.
        shared_nodes.sort(key=lambda shared_node: not shared_node.division.geometries)
        reasons = []
        for shared_node in shared_nodes:
            parts = self._state.demand_on(shared_node.node.name, self._pod).parts
            reasons.append(never_fits_instances(shared_node, [part.request for part in parts]))
        if group_name(self._pod) is not None:
            reasons = [GANG_IN_INSTANCES]
        return reasons[0] if all(reasons) else None

    def _never_on_cards(self, shared_nodes: Iterable[SharedNode]) -> str | None:
        nodes = [self._state.card_node(node.node.name) for node in shared_nodes]
        for part in self._pod.demand().parts:
            never = never_fits(part.request, nodes)
            if never is not None:
                return never.hint or "no card here is what it asks for"
        return None

    def _ends_that_make_room(self, names: set[str]) -> list[str]:
        """Name pods each of which would make room by ending alone, those that hold least first."""
        holders = [
            (held.pod.demand().units(shared), held.pod.full_name, held)
            for shared in self._state.shared_nodes()
            if shared.node.name in names
            for held in self._may_make_room(shared.node.name)
        ]
        holders.sort(key=lambda holder: holder[:2])
        helpful = (holder for holder in holders if self._fits_without(holder[2]))
        hints = []
        for units, name, held in islice(helpful, MAX_HINTS):
            cards = ",".join(str(piece.card) for piece in held.slices)
            amount = f"{format_units(units)} units on card {cards}"
            if held.pod.demand().in_instances:
                amount = ", ".join(map(of_instance, held.slices))
            hints.append(
                f"it starts when {name} ends ({amount} of {held.node}){unstarted(held.pod)}"
            )
        return hints

    def _may_make_room(self, name: str) -> list[PodAllocation]:
        """Return the pods of a node that hold enough of what its cards lack.

        It is necessary, not sufficient. Most pods of a large cluster need no evaluation because of it.
        """
        parts, rejection = self._pod.demand().parts, self._rejections.get(name)
        if rejection is None or len(parts) > 1:
            return self._held[name]
        lacking, reasons = parts[0].request.cards, dict[int, Reason]()
        for reason in rejection.reasons:
            if reason.code is ReasonCode.TOO_FEW:
                lacking -= 1
            else:
                reasons[reason.card] = reason
        return [
            held
            for held in self._held[name]
            if len(held.slices) >= lacking and _frees(held.slices, reasons) >= lacking
        ]

    def _fits_without(self, held: PodAllocation) -> bool:
        """Return whether the pod fits the node of another pod once that has ended."""
        node = self._state.node(held.node)
        self._state.forget_pod(held.pod.metadata.uid)
        ((_, verdict),) = self._evaluator.evaluate(self._pod, (held.node,))
        fits = isinstance(verdict, Feasible) and node is not None and not self._too_few_units(node)
        self._state.set_pod(held.pod)
        return fits


def suffixed_amount(pod: Pod, unit_mib: int) -> str:
    """Return how to write an amount of units that was written with a suffix of bytes; empty without one."""
    for container in pod.request.containers:
        text = str(container.resources.get(gpushare.MEMORY, ""))
        if text.endswith(("Ki", "Mi", "Gi", "Ti")):
            units = max(math.ceil(base.parse_quantity(text) / (unit_mib * MIB)), 1)
            unit = "GiB" if unit_mib == base.GIB_MIB else f"{unit_mib} MiB"
            return (
                f"{gpushare.MEMORY}: {text} is {base.parse_quantity(text)} units; units are {unit} here: "
                f"write {units}"
            )
    return ""


def _is_version_of(meta: ObjectMeta, other: ObjectMeta) -> bool:
    """Return whether two pods are of different versions of one Deployment.

    A Deployment names its pods DEPLOYMENT-HASH-SUFFIX. Very long names are cut, and then equal labels tell.
    """
    hashes = meta.labels.get(TEMPLATE_HASH), other.labels.get(TEMPLATE_HASH)
    if None in hashes or hashes[0] == hashes[1]:
        return False
    own, _, suffix = meta.name.rpartition(f"-{hashes[0]}-")
    its, _, other_suffix = other.name.rpartition(f"-{hashes[1]}-")
    if suffix and other_suffix and own and its:
        return own == its
    return dict(meta.labels.items() ^ other.labels.items()).keys() == {TEMPLATE_HASH}


class _Evaluator(PodEvaluator):
    """Finds the reasons of cards, without the sentence on each node that only kube-scheduler is given."""

    def _infeasible(
        self,
        requests: tuple[Request, ...],  # noqa: ARG002
        node: CoreNode,  # noqa: ARG002
        rejection: NodeRejection,
    ) -> Infeasible:
        return Infeasible("", unresolvable=False, rejection=rejection)


def of_instance(piece: Slice) -> str:
    """Return what a slice is of an instance; empty for a slice of a card."""
    instance = piece.instance
    if instance is None:
        return ""
    return (
        f"{piece.memory_mib} MiB of the instance {instance.profile} at {instance.start} of card "
        f"{piece.card}"
    )


def _frees(slices: Sequence[Slice], reasons: Mapping[int, Reason]) -> int:
    """Return how many cards would have enough without these slices. reasons: what cards lack, by index."""
    memory, compute = Counter[int](), Counter[int]()
    for piece in slices:
        memory[piece.card] += piece.memory_mib
        compute[piece.card] += piece.compute
    return sum(
        (compute if reason.code is ReasonCode.COMPUTE else memory)[card]
        >= reason.needed - reason.available
        for card, reason in reasons.items()
        if card in memory
    )


def _only_full(verdict: NodeVerdict) -> bool:
    """Return whether the pod would be admitted if there were room."""
    return (
        verdict.gpu
        and not verdict.fits
        and all(reason.startswith(("card", *COUNTED)) for reason in verdict.reasons)
    )


def _units(node: Node, resource: str) -> int:
    return base.readable_quantity(node.status.allocatable, resource)


def _card_reasons(node: SharedNode, reasons: Iterable[Reason]) -> list[str]:
    """Return one sentence for all cards that have the same reason, in the node's units."""
    grouped: dict[str, list[int]] = {}
    for reason in reasons:
        grouped.setdefault(_sentence(node, reason), []).append(reason.card)
    return [
        f"card{'s' if len(cards) > 1 else ''} {','.join(map(str, cards))}: {sentence}"
        for sentence, cards in grouped.items()
    ]


def _unleased_reasons(node: Node, reasons: Iterable[Reason]) -> list[str]:
    """Return a sentence for each card whose memory is too little and in use by no lease."""
    lacking = {reason.card for reason in reasons if reason.code is ReasonCode.MEMORY}
    unleased = nodes.unleased_memory(node.metadata.annotations)
    return [f"card {index}: {who}" for index, who in unleased.items() if index in lacking]


def _sentence(node: SharedNode, reason: Reason) -> str:
    if reason.code is ReasonCode.TOO_FEW:
        return f"{reason.code.value}: {reason.needed} cards asked, {reason.available} fit"
    if reason.code is not ReasonCode.MEMORY:
        return reason.code.value
    size = card_at(node.node, reason.card).memory_mib
    free = int(mib_to_units(reason.available, size, node.unit_mib))
    total = card_units(size, node.unit_mib)
    return f"{reason.code.value} ({free} of {total} units free)"


MAX_EVENTS = 5
"""The newest warnings to show."""

SCHEDULING = ("FailedScheduling", "FenkaUnschedulable")
"""Reasons of events that are outdated once the pod is on a node."""

NOT_READ = (
    "nodes and other users' pods may not be read without the ClusterRole fenka-viewer, so their cards "
    "are not explained"
)

_NOT_ADMITTED = "UnexpectedAdmissionError"
"""The reason of pods that the kubelet failed when they arrived, because a resource was not there."""
EXTENDER_PHRASES = (
    "no GPU fits",
    "GPUs fit",
    "Insufficient GPU Memory in one device",
    "is not for GPU share",
)
"""Words that fenka's extender, an earlier one, or gpushare's writes into kube-scheduler's message."""


class PodExplanation(msgspec.Struct):
    """A pod with the facts that explain its state.

    Attributes:
        scale_out: the new node that it waits for, or why none is bought; empty without an autoscaler.
        state: gated, pending, starting, running, succeeded, failed or terminating.
        message: the scheduler's own.
        extender: whether the extender was called, as far as the message shows.
        slices: what the pod holds.
        containers: why containers wait.
        sentence: the counts over all cards.
        hints: what would help.
        never: why the pod could not start if nothing ran in the cluster; empty if it could.
    """

    namespace: str
    pod: str
    state: str
    summary: str
    scale_out: str = ""
    scheduler: str = ""
    message: str = ""
    extender: str = ""
    slices: list[str] = []
    containers: list[str] = []
    nodes: list[NodeVerdict] = []
    sentence: str = ""
    notes: list[str] = []
    events: list[str] = []
    hints: list[str] = []
    never: str = ""


def explain(pod: Pod, snapshot: ClusterSnapshot | None, events: Iterable[Event]) -> PodExplanation:
    """Explain a pod from the cluster and from its own events. snapshot: None if it may not be read."""
    state = _state(pod)
    result = PodExplanation(
        pod.metadata.namespace,
        pod.metadata.name,
        state,
        f"{pod.full_name} is {state}: it asks for {_request(pod)}.",
        scheduler=pod.spec.scheduler_name,
        containers=_waiting_containers(pod),
        events=_warnings(events, placed=bool(pod.spec.node_name)),
    )
    if pod.finished:
        reason = " ".join(filter(None, (pod.status.reason, pod.status.message)))
        result.notes = [reason] if reason else []
        if pod.status.reason == _NOT_ADMITTED:
            result.hints = [
                "its node refused the pod when it arrived, and does not try again: if no controller made "
                "another pod, delete it and create it again"
            ]
    elif pod.spec.node_name:
        _explain_placed(result, pod, snapshot or ClusterSnapshot.of([], []))
    else:
        _explain_pending(result, pod, snapshot)
    if snapshot is None:
        result.notes.append(NOT_READ)
    return result


def _state(pod: Pod) -> str:
    if pod.metadata.deletion_timestamp:
        return "terminating"
    if pod.spec.node_name or pod.finished:
        return "starting" if pod.status.phase == "Pending" else pod.status.phase.lower()
    gates = {gate.name for gate in pod.spec.scheduling_gates}
    return "gated" if gates - {QUEUE_GATE} else "pending"


_MODES: dict[ComputeMode, str] = {"soft": "soft share", "weight": "weight"}


def _request(pod: Pod) -> str:
    mode = pod.demand().core_mode
    return _amounts(pod) if mode == "hard" else f"{_amounts(pod)}, as a {_MODES[mode]}"


def _amounts(pod: Pod) -> str:
    try:
        amounts, cards = pod.demand().amounts, gpushare.card_count(pod.metadata.labels)
    except InvalidRecord:
        # The hints say why.
        return "cards in a way that cannot be read"
    whole = amounts.get(base.NVIDIA_GPU)
    if whole and len(amounts) == 1:
        return f"{whole} whole card{'s' if whole > 1 else ''} ({base.NVIDIA_GPU})"
    if not amounts:
        return f"no GPU ({gpushare.MEMORY} in no container's limits)"
    if gpushare.MEMORY not in amounts:
        return " and ".join(f"{amount} of {name}" for name, amount in amounts.items())
    where = "one card" if cards == 1 else f"{cards} cards of one node"
    if instance := pod.demand().instance:
        kind = "a MIG instance" if instance == ANY_INSTANCE else f"an instance {instance}"
        where = f"{kind} of {where}"
    core = amounts.get(ack.CORE)
    percent = f", and {core} of {ack.CORE}" if core else ""
    return f"{amounts[gpushare.MEMORY]} units of {gpushare.MEMORY} on {where}{percent}"


def _waiting_containers(pod: Pod) -> list[str]:
    return [
        ": ".join(filter(None, (status.name, waiting.reason, waiting.message)))
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
        if (waiting := status.state.waiting) is not None
    ]


def _warnings(events: Iterable[Event], *, placed: bool) -> list[str]:
    """Return the newest of each reason, the newest first; a placed pod's scheduling is over."""
    newest: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event.at):
        if event.type == "Warning" and not (placed and event.reason in SCHEDULING):
            newest[event.reason] = event
    ordered = sorted(newest.values(), key=lambda event: event.at, reverse=True)
    return [f"{event.reason}: {event.message}" for event in ordered[:MAX_EVENTS]]


def _explain_placed(result: PodExplanation, pod: Pod, snapshot: ClusterSnapshot) -> None:
    shared = snapshot.state.shared_node(pod.spec.node_name)
    held = snapshot.state.allocation(pod.metadata.uid)
    if shared is not None and held is not None:
        if held.error:
            result.notes.append(held.error)
            result.hints.append(
                "delete the pod once kube-scheduler asks the extender (docs/do/install.md): its "
                "successor gets a card"
            )
        else:
            units = gpushare.shown_units(shared, held.slices)
            result.slices = [
                (
                    of_instance(piece)
                    or f"{units[piece.card]:g} units ({piece.memory_mib} MiB) of card {piece.card}"
                )
                + f" on {held.node}"
                + (f", {uuid}" if (uuid := driver_uuid(piece.uuid)) else "")
                for piece in held.slices
            ]
    chosen_by = pod.metadata.annotations.get(pod_records.CHOSEN_BY, "")
    if result.slices and chosen_by in CHOICES:
        result.notes.append(f"its card was chosen by {chosen_by}: {CHOICES[chosen_by]}")
    _explain_refusals(result, pod, snapshot)
    if not result.slices:
        result.notes.insert(0, f"it is on node {pod.spec.node_name}")
    if result.containers and result.state == "starting":
        result.hints.append("it starts by itself once what its containers wait for is there")


def _explain_refusals(result: PodExplanation, pod: Pod, snapshot: ClusterSnapshot) -> None:
    """Add what the node reports of pods that it does not start: this one, and those that it blocks."""
    refusals = snapshot.state.refusals(pod.spec.node_name)
    own = refusals.get(pod.metadata.uid)
    if own is not None:
        result.notes.append(f"its node has refused it for more than a minute: {own.sentence}")
        if own.movable:
            result.hints.append(
                "it is evicted if a controller makes another; else delete it and create it again"
            )
    mentions_pod = re.compile(rf"(?<![\w./-]){re.escape(pod.full_name)}(?![\w./-])")
    names = {other.metadata.uid: other.full_name for other in snapshot.pods}
    result.notes += [
        f"{names[uid]} was placed on the same card and does not start: {refusal.sentence}"
        for uid, refusal in sorted(refusals.items())
        if uid in names and uid != pod.metadata.uid and mentions_pod.search(refusal.sentence)
    ]


def _explain_pending(result: PodExplanation, pod: Pod, snapshot: ClusterSnapshot | None) -> None:
    scheduled = pod.condition("PodScheduled")
    queued = pod.gated_by(QUEUE_GATE)
    result.message = scheduled.message if scheduled and not queued else ""
    if result.message:
        result.events = [event for event in result.events if not event.endswith(result.message)]
    if result.state == "gated":
        gates = (gate.name for gate in pod.spec.scheduling_gates if gate.name != QUEUE_GATE)
        result.hints = [f"its scheduling gates must be removed by their owner: {', '.join(gates)}"]
        return
    if queued:
        result.notes.append(
            f"the scheduling gate {QUEUE_GATE} keeps it from kube-scheduler until its turn comes: "
            "fenka queue shows its position"
        )
    elif not result.message:
        result.notes.append(
            f"{pod.spec.scheduler_name or 'the scheduler'} has not reported on it yet: it has "
            "just been created, or no scheduler of that name runs"
        )
    result.extender = _extender(result.message)
    try:
        if not pod.demand().amounts:
            result.hints = ["nothing of fenka's keeps it: the scheduler's message has the reason"]
            return
        if snapshot is None:
            return
        verdicts = explain_nodes(pod, snapshot)
    except InvalidRecord as why:
        result.never, result.hints = str(why), [CHANGE_REQUEST]
        return
    result.nodes, result.sentence = verdicts.nodes, verdicts.sentence
    result.notes += verdicts.notes
    result.hints, result.never = verdicts.hints, verdicts.never
    gang = explain_gang(pod, snapshot, lambda member: explain_nodes(member, snapshot).never)
    if gang is not None:
        result.notes.insert(0, gang.sentence)
        result.hints, result.never = gang.hints, ""


def _extender(message: str) -> str:
    if any(phrase in message for phrase in EXTENDER_PHRASES):
        return "the extender was asked, and says no"
    if any(f"Insufficient {name}" in message for name in COUNTED):
        return (
            "kube-scheduler says no by itself, from the units of whole nodes; for those nodes the extender "
            "was not asked"
        )
    return ""
