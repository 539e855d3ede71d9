"""What keeps a pod from each node, and what would help: values in, values out. `why.py` asks and prints.

Cards are judged by `core.evaluate`, as the scheduler does. Of kube-scheduler's own rules those are repeated
that are about nodes as such (cordons, taints, selectors) and about GPU resources; for all others its
message on the pod stands.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from fenka.cli.cluster import Cluster
from fenka.cli.rows import demanded, whole_cards
from fenka.cluster import eligibility
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterState
from fenka.core.evaluate import never_fits
from fenka.core.gangs import place_gang
from fenka.core.inventory import Node as CoreNode
from fenka.core.reasons import NodeRejection, Reason, ReasonCode, Unschedulable
from fenka.core.request import Request
from fenka.core.units import card_units, format_units, mib_to_units
from fenka.dialects import base, gpushare, node_modes
from fenka.dialects.base import InvalidRecord, SharedNode, SliceRequest
from fenka.dialects.registry import DIALECTS, WITH_HAMI, detect

POLICY = "binpack"
"""Which card comes first is of no account here: only whether one fits."""

HELPERS = 3
"""Pods to name whose end would make room."""

COUNTED = tuple(name for dialect in DIALECTS for name in dialect.RESOURCES)
"""What kube-scheduler counts by itself."""


# ---- the pod, more of it than screens read ----


class FullPod(Pod):
    """A pod, as much of it as tells why it waits."""

    @property
    def whole(self) -> int:
        """Cards that it takes whole."""
        return whole_cards(self, base.NVIDIA_GPU)


def parts(pod: Pod, unit_mib: int) -> tuple[SliceRequest, ...]:
    """What the pod asks of a node that counts in this unit; nothing of a GPU. Raises InvalidRecord."""
    manifest = pod.manifest
    dialect = detect(manifest, WITH_HAMI)
    return dialect.parse(manifest, unit_mib) if dialect else ()


def requests(pod: Pod, unit_mib: int) -> tuple[Request, ...]:
    """The same, as the core has it. Raises InvalidRecord."""
    return tuple(part.request for part in parts(pod, unit_mib))


def rejection(
    world: ClusterState, wanted: Sequence[Request], node: CoreNode
) -> NodeRejection | None:
    """Why they do not fit this node together; None if they do."""
    found = place_gang(world, wanted, POLICY, (node,))
    return found.rejections[0] if isinstance(found, Unschedulable) else None


def amounts(pod: Pod) -> dict[str, int]:
    """What the pod needs of each of fenka's resources, as the kubelet counts it. Raises InvalidRecord."""
    manifest = pod.manifest
    dialect = detect(manifest, WITH_HAMI)
    names = manifest.requested_resources(dialect.RESOURCES) if dialect else ()
    return {name: gpushare.peak_units(manifest.container_units(name)) for name in names}


# ---- verdicts ----


class NodeVerdict(msgspec.Struct):
    """What keeps the pod from a node: nothing, or all of these."""

    node: str
    fits: bool
    reasons: list[str]
    gpu: bool
    """Whether it has what the pod asks for at all."""


@dataclass(slots=True)
class Judgement:
    """Of all nodes, by name."""

    nodes: list[NodeVerdict] = field(default_factory=list)
    sentence: str = ""
    """The core's, over all cards."""
    notes: list[str] = field(default_factory=list)
    """What is wrong in the cluster's records."""
    help: list[str] = field(default_factory=list)


def judge(pod: FullPod, cluster: Cluster) -> Judgement:
    """Node by node, and what would help."""
    judgement, world = Judgement(), cluster.world
    crowds = Counter(it.spec.node_name for it in cluster.pods)
    if pod.whole and not any(_gives_whole_cards(it) for it in cluster.nodes):
        holders = _whole_holders(cluster.pods)
        judgement.nodes = [_judge_whole(pod, it, holders, crowds) for it in cluster.nodes]
        judgement.help = _when_whole_cards_end(pod, cluster.nodes, holders)
        return judgement
    rejections: list[NodeRejection] = []
    for node in cluster.nodes:
        verdict, rejection = _judge_node(pod, node, world, crowds)
        judgement.nodes.append(verdict)
        rejections += [rejection] if rejection else []
    shares = world.shared_nodes()
    if rejections and len(rejections) == len(shares):
        judgement.sentence = Unschedulable(tuple(rejections)).sentence()
    judgement.notes = [note for share in shares for note in _wrong(share, world)]
    judgement.help = _help(pod, world, judgement.nodes)
    return judgement


def _gives_whole_cards(node: Node) -> bool:
    """A sharing node that gives its cards away whole too."""
    try:
        mode = node_modes.node_mode(node.metadata.labels)
    except InvalidRecord:
        return False
    return mode.whole and mode.memory


Holders = dict[str, list[tuple[str, int]]]
"""Pods that take cards whole and how many, by node."""


def _whole_holders(pods: Iterable[Pod]) -> Holders:
    holders: Holders = {}
    for pod in pods:
        if count := whole_cards(pod, base.NVIDIA_GPU):
            holders.setdefault(pod.spec.node_name, []).append((pod.full_name, count))
    return holders


def _judge_whole(pod: FullPod, node: Node, holders: Holders, crowds: Counter[str]) -> NodeVerdict:
    reasons, name = _as_a_node(pod, node, crowds), node.metadata.name
    total = _units(node, base.NVIDIA_GPU)
    free = max(total - sum(count for _, count in holders.get(name, ())), 0)
    if total < 1:
        reasons.append(f"offers no {base.NVIDIA_GPU}")
    elif pod.whole > free:
        reasons.append(f"whole cards: {pod.whole} asked, {free} of {total} free")
    return NodeVerdict(name, not reasons, reasons, gpu=total > 0)


def _judge_node(
    pod: FullPod, node: Node, world: ClusterState, crowds: Counter[str]
) -> tuple[NodeVerdict, NodeRejection | None]:
    reasons = _as_a_node(pod, node, crowds)
    name = node.metadata.name
    share = world.shared_node(name)
    if share is None:
        reasons.append(_nothing_to_share(node, world))
        return NodeVerdict(name, fits=False, reasons=reasons, gpu=False), None
    try:
        wanted = parts(pod, share.unit_mib)
        node_modes.check_admission(node.metadata.labels, wanted)
    except InvalidRecord as why:
        reasons.append(str(why))
        return NodeVerdict(name, fits=False, reasons=reasons, gpu=True), None
    refused = rejection(world, [part.request for part in wanted], share.node)
    # Where a card says no, it says it better than the kubelet's sum.
    reasons += (
        card_reasons(share, refused.reasons) if refused else _kubelets_units(pod, node, world)
    )
    return NodeVerdict(name, not reasons, reasons, gpu=True), refused


def _as_a_node(pod: FullPod, node: Node, crowds: Counter[str]) -> list[str]:
    """What keeps the pod out, whatever GPUs there are."""
    reasons = eligibility.ineligibility_reasons(pod, node)
    pods = _units(node, "pods")
    if 0 < pods <= crowds[node.metadata.name]:
        reasons.append(f"has {crowds[node.metadata.name]} of {pods} pods")
    return reasons


def _nothing_to_share(node: Node, world: ClusterState) -> str:
    trouble = world.node_error(node.metadata.name)
    if trouble:
        return trouble
    try:
        labelled = node_modes.node_mode(node.metadata.labels).memory
    except InvalidRecord as why:
        return str(why)
    if labelled:
        return f"is labelled to share, but its kubelet offers no {gpushare.MEMORY}: see fenka's node pod"
    return f"shares no GPU ({gpushare.MEMORY} is 0)"


def _kubelets_units(pod: FullPod, node: Node, world: ClusterState) -> list[str]:
    """kube-scheduler's NodeResourcesFit: it knows sums of units, no cards."""
    reasons = []
    for resource, needed in amounts(pod).items():
        total = _units(node, resource)
        free = max(_units_left(node, resource, world), 0)
        if needed > free:
            reasons.append(
                f"{resource}: {needed} asked, {free} of {total} free by the kubelet's count"
            )
    return reasons


def _units(node: Node, resource: str) -> int:
    try:
        return base.parse_quantity(node.status.allocatable.get(resource, 0))
    except InvalidRecord:
        return 0


def card_reasons(share: SharedNode, reasons: Iterable[Reason]) -> list[str]:
    """One sentence for the cards that have the same reason, in the node's units."""
    grouped: dict[str, list[int]] = {}
    for reason in reasons:
        grouped.setdefault(_sentence(share, reason), []).append(reason.card)
    return [
        f"card{'s' if len(cards) > 1 else ''} {','.join(map(str, cards))}: {sentence}"
        for sentence, cards in grouped.items()
    ]


def _sentence(share: SharedNode, reason: Reason) -> str:
    if reason.code is ReasonCode.TOO_FEW:
        return f"{reason.code.value}: {reason.needed} cards asked, {reason.available} fit"
    if reason.code is not ReasonCode.MEMORY:
        return reason.code.value
    size = next(it.memory_mib for it in share.node.cards if it.index == reason.card)
    free = int(mib_to_units(reason.available, size, share.unit_mib))
    total = card_units(size, share.unit_mib)
    return f"{reason.code.value} ({free} of {total} units free)"


def _wrong(share: SharedNode, world: ClusterState) -> list[str]:
    """Records of this node that cannot be, or that cannot be read."""
    notes = [
        f"{held.pod.full_name} on {share.node.name}: {held.error}; until it ends what it asks for "
        "counts on the first cards of the node"
        for held in world.allocations(share.node.name)
        if held.error
    ]
    # A pod whose card is not known may fill one twice without anybody's having overcommitted it.
    if not notes:
        notes = [
            f"card {card.index} of {share.node.name} is overcommitted: {used} of {card.memory_mib} MiB"
            for card in share.node.cards
            if (used := world.used(share.node.name, card.index).memory_mib) > card.memory_mib
        ]
    return notes


# ---- what would help ----


def _help(pod: FullPod, world: ClusterState, verdicts: Sequence[NodeVerdict]) -> list[str]:
    if not world.shared_nodes():
        labels = " or ".join(f"{label}=true" for label in ("gpushare", "cgpu"))
        return [f"no node shares its GPUs: label one {labels}"]
    never = _never(pod, world.shared_nodes())
    if never is not None:
        return [never]
    fitting = [it.node for it in verdicts if it.fits]
    if fitting:
        return [
            f"{fitting[0]} has room by what fenka knows: if the pod is not placed within a minute, "
            "kube-scheduler's message above, or its log, has the reason"
        ]
    ending = _when_pods_end(pod, world, {it.node for it in verdicts if _only_full(it)})
    return ending or ["no single pod's end makes room: free cards, or add a node"]


def _only_full(verdict: NodeVerdict) -> bool:
    """Whether the pod would be let in, were there room."""
    return (
        verdict.gpu
        and not verdict.fits
        and all(it.startswith(("card", *COUNTED)) for it in verdict.reasons)
    )


def _never(pod: FullPod, shares: Sequence[SharedNode]) -> str | None:
    """The core's hint where the pod cannot be placed even on empty cards."""
    hints = []
    for unit in sorted({share.unit_mib for share in shares}):
        nodes = [share.node for share in shares if share.unit_mib == unit]
        try:
            wanted = requests(pod, unit)
        except InvalidRecord as why:
            return str(why)
        never = next((it for one in wanted if (it := never_fits(one, nodes))), None)
        if never is None:
            return None
        hints.append(never.hint)
    said = next((hint for hint in hints if hint), "no card here is what it asks for")
    return f"it can never start as it is: {said}"


def _when_pods_end(pod: FullPod, world: ClusterState, nodes: set[str]) -> list[str]:
    """Pods each of which would make room by ending alone, those that hold least first."""
    found: list[tuple[float, str]] = []
    for share in world.shared_nodes():
        if share.node.name not in nodes:
            continue
        wanted = requests(pod, share.unit_mib)
        node = world.node(share.node.name)
        for held in world.allocations(share.node.name):
            uid, units = held.pod.metadata.uid, demanded(share, held.pod)
            world.forget_pod(uid)
            room = rejection(world, wanted, share.node) is None
            kubelet = node is not None and not _kubelets_units(pod, node, world)
            world.set_pod(held.pod)
            if room and kubelet:
                cards = ",".join(str(it.card) for it in held.slices)
                where = f"{format_units(units)} units on card {cards} of {share.node.name}"
                found.append((units, f"it starts when {held.pod.full_name} ends ({where})"))
    return [sentence for _, sentence in sorted(found)[:HELPERS]]


def _units_left(node: Node, resource: str, world: ClusterState) -> int:
    """Of a resource, as the kubelet counts it."""
    held = sum(_amount(it.pod, resource) for it in world.allocations(node.metadata.name))
    return _units(node, resource) - held


def _amount(pod: Pod, resource: str) -> int:
    try:
        return amounts(pod).get(resource, 0)
    except InvalidRecord:
        return 0


def _when_whole_cards_end(pod: FullPod, nodes: Sequence[Node], holders: Holders) -> list[str]:
    found: list[tuple[int, str]] = []
    most = 0
    for node in nodes:
        name, total = node.metadata.name, _units(node, base.NVIDIA_GPU)
        most = max(most, total)
        free = total - sum(count for _, count in holders.get(name, ()))
        found += [
            (count, f"it starts when {holder} ends ({count} whole cards of {name})")
            for holder, count in holders.get(name, ())
            if free < pod.whole <= free + count
        ]
    if most < pod.whole:
        return [f"it can never start as it is: no node has more than {most} cards to give whole"]
    return [sentence for _, sentence in sorted(found)[:HELPERS]]
