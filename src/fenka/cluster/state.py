"""The cluster as the core sees it: sharing nodes, and what pods hold of their cards.

The truth is in the API server; this is a reading of it, kept up by whole objects in any order. It is keyed
by UID: a pod that was deleted and made again under the same name is another pod.

A pod's record is an annotation that its owner can write. So where a pod is, and what it holds there, is taken
from the first of these that is known: what its node reports, what this process wrote itself, the record, the
last record that was readable. By any of them but the first a pod counts for no more than its limits ask.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fenka.cluster.objects import Node, ObjectMeta, Pod
from fenka.core.evaluate import SCORES
from fenka.core.inventory import DeviceId
from fenka.core.request import Placement, Slice
from fenka.core.usage import CardUsage, UsageTotals
from fenka.dialects import leases, node_inventory, node_modes
from fenka.dialects.base import Dialect, InvalidRecord, SharedNode, driver_uuid, fallback_placement
from fenka.dialects.leases import LeaseReport, Lingering, Refusal
from fenka.dialects.registry import DIALECTS

_FOREIGN = "no record says on which card the pod is: it was not placed by fenka's scheduler"


@dataclass(frozen=True, slots=True)
class PodAllocation:
    """What a pod holds of its node, in at least one placement.

    error: why its record could not be read, where its node does not report what it holds. lingering: the
    API server shows the pod no longer, and its node reports that it still holds this.
    """

    pod: Pod
    placements: tuple[Placement, ...]
    error: str | None = None
    lingering: bool = False

    @property
    def node(self) -> str:
        """Of all its placements."""
        return self.placements[0].node

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Of all its placements; two of them may be on one card."""
        return tuple(piece for placement in self.placements for piece in placement.slices)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A pod on a node, as the API server or (assumed) the scheduler itself says."""

    pod: Pod
    node: str
    placements: tuple[Placement, ...] = ()
    """Of an assumption."""


class ClusterState:
    """A View for `evaluate`. Everything is in memory and nothing waits."""

    def __init__(
        self,
        nodes: Iterable[Node] = (),
        pods: Iterable[Pod] = (),
        dialects: tuple[Dialect, ...] = DIALECTS,
    ) -> None:
        self.dialects = dialects
        self._objects: dict[str, Node] = {}
        self._shares: dict[str, SharedNode] = {}
        self._troubles: dict[str, str] = {}
        self._sick: dict[str, frozenset[int]] = {}
        self._claims: dict[str, _Claim] = {}
        self._by_node: dict[str, set[str]] = {}
        self._holdings: dict[str, PodAllocation] = {}
        self._written: dict[str, tuple[Placement, ...]] = {}
        """What this process has placed itself, by UID, for as long as the pod is there."""
        self._last: dict[str, tuple[Placement, ...]] = {}
        """What was last read of a pod's record, by UID."""
        self._reports: dict[str, LeaseReport] = {}
        self._ghosts: dict[str, dict[str, PodAllocation]] = {}
        """By node and UID, what is held of it by pods that the API server shows no longer."""
        self._tally = UsageTotals()
        self._generations: dict[str, int] = {}
        self.version = 0
        """Changes whenever anything does that a judgement of any node depends on."""
        self.nodes_version = 0
        """Changes whenever nodes do, other than by what is held of them: their cards, who may go there."""
        for node in nodes:
            self.set_node(node)
        for pod in pods:
            self.set_pod(pod)

    # ---- a View ----

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """What is held of this card."""
        return self._tally.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """kube-scheduler counts CPU and host memory itself."""
        return self._tally.host_usage(node)

    # ---- what is there ----

    def shared_node(self, node: str) -> SharedNode | None:
        """The sharing node of that name."""
        return self._shares.get(node)

    def shared_nodes(self) -> list[SharedNode]:
        """All sharing nodes, by name."""
        return [self._shares[name] for name in sorted(self._shares)]

    def node(self, name: str) -> Node | None:
        """As the API server has it."""
        return self._objects.get(name)

    def nodes(self) -> list[Node]:
        """All nodes, by name."""
        return [self._objects[name] for name in sorted(self._objects)]

    def node_error(self, name: str) -> str | None:
        """Why nothing new may be placed on a node that seems to share: its record, or its labels."""
        return self._troubles.get(name)

    def generation(self, node: str) -> int:
        """Changes whenever anything does that a judgement of this node depends on."""
        return self._generations.get(node, 0)

    def is_assumed(self, uid: str) -> bool:
        """Whether the pod holds by an assumption that the server has not shown bound yet."""
        claim = self._claims.get(uid)
        return claim is not None and bool(claim.placements)

    def allocation(self, uid: str) -> PodAllocation | None:
        """What the pod with this UID holds of a sharing node."""
        return self._holdings.get(uid)

    def allocations(self, node: str) -> list[PodAllocation]:
        """Of this sharing node, by namespace and name of the pod."""
        found = [
            self._holdings[uid] for uid in self._by_node.get(node, ()) if uid in self._holdings
        ]
        found += self._ghosts.get(node, {}).values()
        return sorted(found, key=lambda it: (it.pod.metadata.namespace, it.pod.metadata.name))

    def refusals(self, node: str) -> Mapping[str, Refusal]:
        """Pods, by UID, that the node reports to have refused for a minute."""
        report = self._reports.get(node)
        return report.refused if report else {}

    # ---- what happens ----

    def set_node(self, node: Node) -> None:
        """The node is new, or is so now."""
        name = node.metadata.name
        known = self._objects.get(name)
        self._objects[name] = node
        self._set_report(name, node, known)
        if known is None or known.metadata.labels != node.metadata.labels:
            self._touch(name)
        if known is None or not _admits_alike(known, node):
            self._touch_nodes()
        self._reread(name)

    def forget_node(self, name: str) -> None:
        """The node is gone. Its pods' claims stay until they go too."""
        self._objects.pop(name, None)
        self._reports.pop(name, None)
        self._touch_nodes()
        self._reread(name)

    def set_unhealthy(self, node: str, indexes: frozenset[int]) -> None:
        """Cards that a health daemon other than fenka's has named."""
        if indexes:
            self._sick[node] = indexes
        else:
            self._sick.pop(node, None)
        self._reread(node)

    def set_pod(self, pod: Pod) -> None:
        """The pod is new, or is so now. What was assumed of it holds until the server shows it bound."""
        uid, known = pod.metadata.uid, self._claims.get(pod.metadata.uid)
        if pod.finished:
            self.forget_pod(uid)
        elif pod.spec.node_name:
            if known is not None and known.node != pod.spec.node_name:
                # Whoever bound it, nothing of what was known is of this node.
                self.forget_pod(uid)
            self._claim(_Claim(pod, pod.spec.node_name))
        elif known is None or not known.placements:
            self.forget_pod(uid)

    def forget_pod(self, uid: str) -> None:
        """The pod is gone, and all that it held."""
        self._written.pop(uid, None)
        self._last.pop(uid, None)
        self._let_go(uid)

    def _let_go(self, uid: str) -> None:
        claim = self._claims.pop(uid, None)
        if claim is not None:
            self._by_node[claim.node].discard(uid)
            self._drop(uid)
            self._hold_lingering(claim.node)

    def assume(self, pod: Pod, placements: tuple[Placement, ...]) -> None:
        """The pod will be bound so. Undone by `forget_assumed`.

        Once the server shows it bound to this node, this still says on which cards, whatever its record says.
        """
        self._claim(_Claim(pod, placements[0].node, placements))
        self._written[pod.metadata.uid] = placements

    def forget_assumed(self, uid: str) -> None:
        """The pod was not bound after all; nothing happens if the server has shown it bound meanwhile."""
        claim = self._claims.get(uid)
        if claim is not None and claim.placements:
            self.forget_pod(uid)

    def replace_pods(self, pods: Iterable[Pod]) -> None:
        """These are all pods there are: what others held is free. Assumptions of pods that are there stay."""
        pods = list(pods)
        there = {pod.metadata.uid for pod in pods}
        for uid in [uid for uid in self._claims if uid not in there]:
            self.forget_pod(uid)
        for pod in pods:
            self.set_pod(pod)

    def replace_nodes(self, nodes: Iterable[Node]) -> None:
        """These are all nodes there are."""
        nodes = list(nodes)
        there = {node.metadata.name for node in nodes}
        for name in [name for name in self._objects if name not in there]:
            self.forget_node(name)
        for node in nodes:
            self.set_node(node)

    def _claim(self, claim: _Claim) -> None:
        self._let_go(claim.pod.metadata.uid)
        self._claims[claim.pod.metadata.uid] = claim
        self._by_node.setdefault(claim.node, set()).add(claim.pod.metadata.uid)
        self._hold(claim)
        self._hold_lingering(claim.node)

    def _hold(self, claim: _Claim) -> None:
        holding = self._holding_of(claim)
        if holding is not None:
            self._holdings[claim.pod.metadata.uid] = holding
            for placement in holding.placements:
                self._tally.add(placement)
            self._touch(claim.node)

    def _drop(self, uid: str) -> None:
        holding = self._holdings.pop(uid, None)
        if holding is not None:
            for placement in holding.placements:
                self._tally.remove(placement)
            self._touch(holding.node)

    def _touch(self, node: str) -> None:
        self._generations[node] = self._generations.get(node, 0) + 1
        self.version += 1

    def _touch_nodes(self) -> None:
        self.nodes_version += 1
        self.version += 1

    def _holding_of(self, claim: _Claim) -> PodAllocation | None:
        share, uid = self._shares.get(claim.node), claim.pod.metadata.uid
        if share is None:
            return None
        if claim.placements:
            return PodAllocation(claim.pod, claim.placements)
        report = self._reports.get(claim.node)
        if report is not None and uid in report.pods:
            return PodAllocation(claim.pod, _reported(share, report.pods[uid]))
        holding = read_allocation(share, claim.pod, self.dialects)
        if holding is None:
            return None
        if holding.error is None:
            self._last[uid] = holding.placements
        known = self._written.get(uid) or (self._last.get(uid) if holding.error else None)
        if known:
            return replace(holding, placements=tuple(_there(share, it) for it in known))
        return holding

    def _set_report(self, name: str, node: Node, known: Node | None) -> None:
        text = node.metadata.annotations.get(leases.REPORT)
        if known is not None and known.metadata.annotations.get(leases.REPORT) == text:
            return
        before = self._reports.pop(name, leases.EMPTY_REPORT)
        try:
            report = leases.decode_report(node.metadata.annotations)
        except InvalidRecord:
            # Of a newer version: the other sources are left.
            report = None
        if report is not None:
            self._reports[name] = report
        after = report or leases.EMPTY_REPORT
        for uid in self._by_node.get(name, ()):
            if before.pods.get(uid) != after.pods.get(uid):
                self._drop(uid)
                self._hold(self._claims[uid])
        if before.lingering != after.lingering:
            self._hold_lingering(name)

    def _hold_lingering(self, node: str) -> None:
        """Count what pods hold that the API server no longer shows."""
        report, share = self._reports.get(node), self._shares.get(node)
        said = report.lingering if report is not None and share is not None else {}
        known = self._ghosts.get(node, {})
        if not said and not known:
            return
        there = self._by_node.get(node, ())
        wanted = {
            uid: PodAllocation(_ghost(uid, it), _reported(share, it.slices), lingering=True)
            for uid, it in said.items()
            if uid not in there and share is not None
        }
        if wanted == known:
            return
        for holdings, count in ((known, self._tally.remove), (wanted, self._tally.add)):
            for holding in holdings.values():
                for placement in holding.placements:
                    count(placement)
        self._ghosts[node] = wanted
        self._touch(node)

    def _reread(self, name: str) -> None:
        """The node's cards or units may be others now: read its pods' records again."""
        before, trouble = self._shares.pop(name, None), self._troubles.pop(name, None)
        node = self._objects.get(name)
        if node is not None:
            try:
                share = node_inventory.decode_node(
                    name, node.metadata.annotations, node.status.allocatable
                )
                if share is not None:
                    share = node_inventory.with_unhealthy(share, self._sick.get(name, frozenset()))
                    policy = node.metadata.labels.get(node_modes.PLACEMENT_LABEL)
                    if policy in SCORES:
                        share = replace(share, node=replace(share.node, card_policy=policy))
                    self._shares[name] = share
                    # Its labels may turn new pods away; what is held stays held.
                    node_modes.check_shared(node.metadata.labels)
            except InvalidRecord as why:
                self._troubles[name] = str(why)
        if self._shares.get(name) != before or self._troubles.get(name) != trouble:
            self._touch(name)
            self._touch_nodes()
        if self._shares.get(name) != before:
            for uid in self._by_node.get(name, ()):
                self._drop(uid)
                self._hold(self._claims[uid])
            self._hold_lingering(name)


def _admits_alike(one: Node, other: Node) -> bool:
    """Whether the same pods may go there, as far as nodes decide."""
    return (
        one.metadata.labels == other.metadata.labels
        and one.spec == other.spec
        and one.ready == other.ready
    )


def requests_gpu(pod: Pod) -> bool:
    """Whether the pod wants something of a card, in whatever dialect, understood or not."""
    return pod.demand().requests_gpu


def read_allocation(
    share: SharedNode, pod: Pod, dialects: tuple[Dialect, ...] = DIALECTS
) -> PodAllocation | None:
    """What a pod on a sharing node holds of it by its own record, for no more than its limits ask; None for a
    pod that asks for nothing there."""
    demand = pod.demand(dialects)
    if not demand.requests_gpu:
        return None
    try:
        parts = demand.parts
    except InvalidRecord as why:
        # No node gives such a pod anything.
        return PodAllocation(pod, (Placement(share.node.name, ()),), str(why))
    try:
        assert demand.dialect is not None
        placements = demand.dialect.decode(pod.request, share)
        trouble = _FOREIGN if placements is None else None
    except InvalidRecord as why:
        placements, trouble = None, str(why)
    if placements is None:
        placements = fallback_placement(share, parts)
    return PodAllocation(pod, placements or (Placement(share.node.name, ()),), trouble)


def _reported(share: SharedNode, slices: Sequence[Slice]) -> tuple[Placement, ...]:
    """What a node reports of a pod: whole cards apart from parts of cards."""
    cards = {card.uuid: card for card in share.node.cards}
    there = _there(share, Placement(share.node.name, tuple(slices))).slices

    def is_whole(piece: Slice) -> bool:
        card = cards[piece.uuid]
        return piece.memory_mib >= card.memory_mib and piece.compute >= card.compute

    whole = tuple(it for it in there if is_whole(it))
    parts = tuple(it for it in there if not is_whole(it))
    found = [Placement(share.node.name, whole, whole=True)] if whole else []
    if parts or not whole:
        found.append(Placement(share.node.name, parts))
    return tuple(found)


def _there(share: SharedNode, placement: Placement) -> Placement:
    """Return the placement without cards that the node no longer has.

    Only where no plugin has named a card, now or when the slice was recorded, its index stands for it.
    """
    kept = list[Slice]()
    cards = {card.index: card for card in share.node.cards}
    for piece in placement.slices:
        card = cards.get(piece.card)
        if card is None:
            continue
        if card.uuid == piece.uuid:
            kept.append(piece)
        elif not (driver_uuid(card.uuid) and driver_uuid(piece.uuid)):
            kept.append(replace(piece, uuid=card.uuid))
    slices = tuple(kept)
    return placement if slices == placement.slices else replace(placement, slices=slices)


def _ghost(uid: str, it: Lingering) -> Pod:
    namespace, _, name = it.name.rpartition("/")
    return Pod(metadata=ObjectMeta(name=name, namespace=namespace, uid=uid))
