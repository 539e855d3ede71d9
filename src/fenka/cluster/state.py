"""The cluster as the core sees it: sharing nodes, and what pods hold of their cards.

The API server has the truth. This state follows it by whole objects, in any order. It is keyed by UID: a pod
that was deleted and created again under the same name is another pod.

A pod's record is an annotation that its owner can write. So what a pod holds is taken from the first of these
that is known: its node's report, what this process wrote, the record, the last readable record. By any but
the first a pod counts for no more than it requests.

A pod's allocation on a sharing node comes from its own record or from its node's report.

A cluster as it was listed once, for screens and what-ifs.
"""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.cluster.node_pins import NodePins, read_pin
from fenka.cluster.objects import Node, ObjectMeta, Pod, PodDemand
from fenka.cluster.pod_groups import PodGroup, group_key, group_name
from fenka.cluster.spot_nodes import SpotNodes, read_spot_rule
from fenka.core.inventory import Card, DeviceId
from fenka.core.inventory import Node as CoreNode
from fenka.core.mig.geometry import Place
from fenka.core.policies.scores import SCORES
from fenka.core.request import Placement, Slice
from fenka.core.topology.domains import Topology
from fenka.core.usage import CardUsage, UsageTotals
from fenka.dialects import lease_records, nodes, pod_records
from fenka.dialects.base import Dialect, InvalidRecord, SharedNode, SliceRequest, driver_uuid
from fenka.dialects.card_records import fallback_placement
from fenka.dialects.lease_records import LeaseReport, Lingering, Refusal
from fenka.dialects.mig_records import with_instances
from fenka.dialects.registry import DIALECTS

_FOREIGN = "no record says on which card the pod is: it was not placed by fenka's scheduler"


class PodAllocation(msgspec.Struct, frozen=True, gc=False):
    """A pod's allocation on its node, in at least one placement.

    Attributes:
        error: why the pod's record cannot be read, if its node does not report what it holds.
        lingering: the API server no longer shows the pod, but its node reports that it still holds this.
    """

    pod: Pod
    placements: tuple[Placement, ...]
    error: str | None = None
    lingering: bool = False

    @property
    def node(self) -> str:
        """Return the node of all its placements."""
        return self.placements[0].node

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Return the slices of all its placements. Two of them may be on one card."""
        if len(self.placements) == 1:
            # Nearly all pods of a cluster.
            return self.placements[0].slices
        return tuple(piece for placement in self.placements for piece in placement.slices)


def read_allocation(
    shared: SharedNode, pod: Pod, dialects: tuple[Dialect, ...] = DIALECTS
) -> PodAllocation | None:
    """Return what a pod holds by its own record, at most what it requests; None if it requests nothing."""
    request = pod.request
    demand = pod.demand(dialects, request)
    if not demand.requests_gpu:
        return None
    parts: Sequence[SliceRequest] = ()
    placements: tuple[Placement, ...] | None = None
    reason: str | None = _FOREIGN
    try:
        # A pod whose request cannot be read gets nothing from any node.
        parts = demand.parts
        assert demand.dialect is not None
        placements = pod_records.decode(demand.dialect, request, parts, shared)
        if placements is not None:
            reason = None
    except InvalidRecord as error:
        reason = str(error)
    if placements is None:
        placements = fallback_placement(shared, parts)
    return PodAllocation(pod, placements or (Placement(shared.node.name, ()),), reason)


def reported_placements(shared: SharedNode, slices: Sequence[Slice]) -> tuple[Placement, ...]:
    """Return what a node reports of a pod: whole cards apart from slices."""
    shared = with_instances(shared, (piece.uuid for piece in slices))
    name, cards = shared.node.name, {card.uuid: card for card in shared.node.cards}

    def is_whole(piece: Slice) -> bool:
        card = cards[piece.uuid]
        return piece.memory_mib >= card.memory_mib and piece.compute >= card.compute

    present = on_present_cards(shared, Placement(name, tuple(slices))).slices
    whole = tuple(piece for piece in present if is_whole(piece))
    # Mostly none is whole: then the node's own tuple is kept, and no second one for each pod of a cluster.
    parts = tuple(piece for piece in present if not is_whole(piece)) if whole else present
    placements = [Placement(name, whole, whole=True)] if whole else []
    if parts or not whole:
        placements.append(Placement(name, parts))
    return tuple(placements)


def on_present_cards(shared: SharedNode, placement: Placement) -> Placement:
    """Return the placement without cards that the node no longer has.

    An index stands for a card only if no plugin has named the card, now or when the slice was recorded.
    """
    kept = list[Slice]()
    shared = with_instances(shared, (piece.uuid for piece in placement.slices))
    present = {(card.index, card.uuid) for card in shared.node.cards}
    # Instances have the index of the card that they are on.
    cards = {card.index: card for card in shared.node.cards if card.parent is None}
    for piece in placement.slices:
        card = cards.get(piece.card)
        if (piece.card, piece.uuid) in present:
            kept.append(piece)
        elif card and not (driver_uuid(card.uuid) and driver_uuid(piece.uuid)):
            kept.append(replace(piece, uuid=card.uuid))
    slices = tuple(kept)
    return placement if slices == placement.slices else replace(placement, slices=slices)


def with_held_instances(shared: SharedNode, held: Collection[DeviceId]) -> SharedNode:
    """Return the node with the instances that pods hold, and with those idle ones that may stay beside them.

    held: the devices that pods hold.
    """
    shared = with_instances(shared, sorted(held))
    node, geometries = shared.node, shared.division.geometries
    layouts: dict[DeviceId, list[Place]] = {}
    instances = list[Card]()
    parts = (card for card in node.cards if card.parent is not None)
    for card in sorted(parts, key=lambda card: (card.uuid not in held, card.rank)):
        assert card.parent is not None
        geometry, layout = geometries[card.parent], layouts.setdefault(card.parent, [])
        place = Place(geometry.by_name[card.profile], card.start)
        if card.uuid in held or not geometry.conflict(layout, place):
            layout.append(place)
            instances.append(card)
    instances.sort(key=lambda card: card.rank)
    return replace(shared, node=replace(node, cards=(*shared.physical_cards, *instances)))


def lingering_allocation(shared: SharedNode, uid: str, report: Lingering) -> PodAllocation:
    """Return what a pod still holds that the API server no longer shows."""
    namespace, _, name = report.name.rpartition("/")
    pod = Pod(metadata=ObjectMeta(name=name, namespace=namespace, uid=uid))
    return PodAllocation(pod, reported_placements(shared, report.slices), lingering=True)


class ClusterState:
    """Nodes, pods and allocations in memory; a `UsageView` for `evaluate`.

    Attributes:
        version: changes with anything that a verdict on any node depends on.
        nodes_version: changes with nodes themselves: their cards, and which pods may go there.
        topology_levels: node labels that name topology domains, the outermost first; set before it is used.
        pins: the nodes that admit only the pods for which they were bought. `end_pin` ends one.
        spot: the nodes that the cloud takes back, and the time by which these admit pods.
    """

    def __init__(
        self,
        nodes: Iterable[Node] = (),
        pods: Iterable[Pod] = (),
        dialects: tuple[Dialect, ...] = DIALECTS,
    ) -> None:
        self.dialects = dialects
        self._nodes: dict[str, Node] = {}
        self._published: dict[str, SharedNode] = {}
        """The sharing nodes as their own records describe them."""
        self._shared: dict[str, SharedNode] = {}
        """The same nodes with the instances that pods hold, but for those of `_stale`."""
        self._stale: set[str] = set()
        """Nodes whose allocations have changed since their instances were computed."""
        self._card_nodes: dict[str, CoreNode] = {}
        """Nodes with divided cards, without instances."""
        self._inside: dict[str, str] = {}
        """The profile of the instances that slices are in, by node, where the owner says so."""
        self._node_errors: dict[str, str] = {}
        self._unhealthy: dict[str, frozenset[int]] = {}
        self._bound: dict[str, Pod] = {}
        """Pods by UID that have a node, by the API server or by an assumption."""
        self._assumed: dict[str, tuple[Placement, ...]] = {}
        """The placements of assumptions, by UID."""
        self._uids_by_node: dict[str, list[str]] = {}
        self._allocations: dict[str, PodAllocation] = {}
        self._written: dict[str, tuple[Placement, ...]] = {}
        """Placements by this process, by UID, as long as the pod exists."""
        self._last_readable: dict[str, tuple[Placement, ...]] = {}
        """The last reading of each pod's record, by UID."""
        self._reports: dict[str, LeaseReport] = {}
        self._lingering: dict[str, dict[str, PodAllocation]] = {}
        """Allocations of pods that the API server no longer shows, by node and UID."""
        self._totals = UsageTotals()
        self._watching: list[set[str]] = []
        self._gang_nodes: dict[str, Counter[str]] = {}
        """The nodes of allocations, by gang."""
        self._gangs: dict[str, str] = {}
        """The gang of each allocation, by UID."""
        self._topology: Topology | None = None
        self._topology_version = -1
        self.topology_levels: tuple[str, ...] = ()
        self.version = 0
        self.nodes_version = 0
        self.pins = NodePins()
        self.spot = SpotNodes()
        for node in nodes:
            self.set_node(node)
        for pod in pods:
            self.set_pod(pod)

    # ---- a UsageView ----

    def card_usage(self, node: str, device: DeviceId) -> CardUsage:
        """Return what is held of this card."""
        return self._totals.card_usage(node, device)

    def host_usage(self, node: str) -> tuple[int, int]:
        """Return CPU and host memory; kube-scheduler itself counts those of pods."""
        return self._totals.host_usage(node)

    def watch(self, changed: set[str]) -> None:
        """Add to this set, from now on, each node of which anything changes that a verdict needs."""
        self._watching.append(changed)

    # ---- reading ----

    def shared_node(self, name: str) -> SharedNode | None:
        """Return the sharing node of that name."""
        if name in self._stale:
            self._stale.discard(name)
            self._set_instances(name)
        return self._shared.get(name)

    def card_node(self, name: str) -> CoreNode:
        """Return a sharing node with its cards only: instances are for requests of instances.

        It is the same object as long as the cards are equal.
        """
        return self._card_nodes.get(name) or self._published[name].node

    def instance_nodes(self, pod: Pod, names: Iterable[str]) -> frozenset[str]:
        """Return those of the nodes on which a pod requests instances, or slices inside them."""
        if pod.demand(self.dialects).in_instances:
            return frozenset(names)
        if not self._inside or not self._goes_inside(pod):
            return frozenset()
        return frozenset(names).intersection(self._inside)

    def demand_on(self, name: str, pod: Pod) -> PodDemand:
        """Return what a pod requests on a node: there its slices may be inside instances."""
        demand, profile = pod.demand(self.dialects), self._inside.get(name)
        return demand.inside(profile) if profile and self._goes_inside(pod) else demand

    def _goes_inside(self, pod: Pod) -> bool:
        """Return whether slices that a pod requests of cards are inside instances where a node says so."""
        return pod.demand(self.dialects).of_single_cards and group_name(pod) is None

    def shares_with(self, name: str, demand: PodDemand) -> bool:
        """Return whether the node shares what the pod requests: one may share its divided cards only."""
        shared = self._published.get(name)
        return shared is not None and (shared.shares_cards or demand.in_instances)

    def shared_nodes(self) -> list[SharedNode]:
        """Return all sharing nodes by name."""
        return [shared for name in sorted(self._shared) if (shared := self.shared_node(name))]

    def node(self, name: str) -> Node | None:
        """Return the node as the API server has it."""
        return self._nodes.get(name)

    def nodes(self) -> list[Node]:
        """Return all nodes by name."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    def topology(self) -> Topology | None:
        """Return the topology of all nodes; None without levels. It is the same object if no node changes."""
        if self.topology_levels and self._topology_version != self.nodes_version:
            labels = ((name, node.metadata.labels) for name, node in self._nodes.items())
            topology = Topology.of(self.topology_levels, labels)
            if self._topology is None or self._topology.domains != topology.domains:
                self._topology = topology
            self._topology_version = self.nodes_version
        return self._topology

    def gang_nodes(self, key: str) -> frozenset[str]:
        """Return the nodes on which pods of a gang hold cards. key: of the gang."""
        return frozenset(self._gang_nodes.get(key, ()))

    def node_error(self, name: str) -> str | None:
        """Return why a node that seems to share admits nothing new: its record, or its labels."""
        return self._node_errors.get(name)

    def is_assumed(self, uid: str) -> bool:
        """Return whether the pod's allocation is assumed, because the server has not shown it bound yet."""
        return uid in self._assumed

    def allocation(self, uid: str) -> PodAllocation | None:
        """Return what the pod with this UID holds of a sharing node."""
        return self._allocations.get(uid)

    def allocations(self, node: str) -> list[PodAllocation]:
        """Return the allocations of a sharing node, by namespace and name of the pod."""
        uids = self._uids_by_node.get(node, ())
        allocations = [self._allocations[uid] for uid in uids if uid in self._allocations]
        allocations += self._lingering.get(node, {}).values()
        return sorted(allocations, key=_by_name)

    def refusals(self, node: str) -> Mapping[str, Refusal]:
        """Return the pods, by UID, that the node reports to have refused for a minute."""
        report = self._reports.get(node)
        return report.refused if report else {}

    # ---- changes ----

    def set_node(self, node: Node) -> None:
        """Take a node that is new or has changed."""
        name = node.metadata.name
        known = self._nodes.get(name)
        self._nodes[name] = node
        self._set_report(name, node, known)
        if known is None or known.metadata.labels != node.metadata.labels:
            self._touch(name)
        if known is None or not _admit_alike(known, node):
            self._touch_nodes()
        self._set_inside(name, node.metadata.labels)
        repinned = self.pins.set(name, read_pin(node))
        if self.spot.set(name, read_spot_rule(node)) or repinned:
            self._touch(name)
            self._touch_nodes()
        self._decode_node(name)

    def forget_node(self, name: str) -> None:
        """Drop a node. Its pods' bindings stay until the pods go too."""
        self._nodes.pop(name, None)
        self._reports.pop(name, None)
        self._inside.pop(name, None)
        self.pins.forget(name)
        self.spot.set(name, None)
        self._touch_nodes()
        self._decode_node(name)

    def end_pin(self, node: str) -> None:
        """Let the node admit any pod from now on, whatever its annotations are."""
        if self.pins.end(node):
            self._touch(node)
            self._touch_nodes()

    def set_time(self, now: float) -> None:
        """Take the time, in seconds since 1970. With it ends the protection of spot nodes."""
        changed = self.spot.set_time(now)
        for name in changed:
            self._touch(name)
        if self.spot.is_recheck_due() or changed:
            self._touch_nodes()

    def set_unhealthy(self, node: str, indexes: frozenset[int]) -> None:
        """Take the cards that a health daemon other than fenka's calls unhealthy."""
        if indexes:
            self._unhealthy[node] = indexes
        else:
            self._unhealthy.pop(node, None)
        self._decode_node(node)

    def set_pod(self, pod: Pod) -> None:
        """Take a pod that is new or has changed. An assumption holds until the server shows the pod bound."""
        uid, known = pod.metadata.uid, self._bound.get(pod.metadata.uid)
        if pod.finished:
            self.forget_pod(uid)
        elif pod.spec.node_name:
            if known is not None and self._node_of(uid) != pod.spec.node_name:
                # It was bound elsewhere: nothing that was known applies to this node.
                self.forget_pod(uid)
            elif known is not None and uid in self._assumed:
                self._confirm(pod)
                return
            elif known is not None and _hold_alike(known, pod):
                self._renew(pod)
                return
            self._bind(pod)
        elif uid not in self._assumed:
            self.forget_pod(uid)

    def forget_pod(self, uid: str) -> None:
        """Drop a pod and everything that it holds."""
        self._written.pop(uid, None)
        self._last_readable.pop(uid, None)
        self._unbind(uid)

    def assume(self, pod: Pod, placements: tuple[Placement, ...]) -> None:
        """Count placements of a pod that is about to be bound. `forget_assumed` undoes it.

        Once the server shows the pod bound to this node, the placements still count, whatever its record is.
        """
        self._bind(pod, placements)
        self._written[pod.metadata.uid] = placements

    def forget_assumed(self, uid: str) -> None:
        """Drop an assumption, unless the server has shown the pod bound meanwhile."""
        if self.is_assumed(uid):
            self.forget_pod(uid)

    def replace_pods(self, pods: Iterable[Pod]) -> None:
        """Take these as all pods. Assumptions of pods that still exist stay."""
        pods = list(pods)
        uids = {pod.metadata.uid for pod in pods}
        for uid in [uid for uid in self._bound if uid not in uids]:
            self.forget_pod(uid)
        for pod in pods:
            if self._bound.get(pod.metadata.uid) is not pod:
                self.set_pod(pod)

    def replace_nodes(self, nodes: Iterable[Node]) -> None:
        """Take these as all nodes."""
        nodes = list(nodes)
        names = {node.metadata.name for node in nodes}
        for name in [name for name in self._nodes if name not in names]:
            self.forget_node(name)
        for node in nodes:
            if self._nodes.get(node.metadata.name) is not node:
                self.set_node(node)

    # ---- pods ----

    def _node_of(self, uid: str) -> str:
        assumed = self._assumed.get(uid)
        return assumed[0].node if assumed else self._bound[uid].spec.node_name

    def _bind(self, pod: Pod, assumed: tuple[Placement, ...] = ()) -> None:
        uid, node = pod.metadata.uid, pod.spec.node_name
        self._unbind(uid)
        self._bound[uid] = pod
        if assumed:
            self._assumed[uid] = assumed
            node = assumed[0].node
        self._uids_by_node.setdefault(node, []).append(uid)
        self._allocate(uid, node)
        self._count_lingering(node)

    def _confirm(self, pod: Pod) -> None:
        """Take a pod that is bound as was assumed. Mostly it holds just that, and no verdict changes."""
        uid = pod.metadata.uid
        before, assumed = self._bound[uid], self._assumed.pop(uid)
        self._bound[uid] = pod
        allocation = self._allocation_of(uid, pod.spec.node_name)
        alike = uid in self._allocations and _end_alike(before, pod)
        if alike and allocation is not None and allocation.placements == assumed:
            self._allocations[uid] = allocation
        else:
            self._reallocate(uid)

    def _renew(self, pod: Pod) -> None:
        """Take a version of a bound pod by which it holds what it held."""
        uid = pod.metadata.uid
        self._bound[uid] = pod
        if uid in self._allocations:
            self._allocations[uid] = msgspec.structs.replace(self._allocations[uid], pod=pod)

    def _unbind(self, uid: str) -> None:
        if uid in self._bound:
            node = self._node_of(uid)
            del self._bound[uid]
            self._assumed.pop(uid, None)
            self._uids_by_node[node].remove(uid)
            if not self._uids_by_node[node]:
                # Nodes come and go: nothing is kept of their names.
                del self._uids_by_node[node]
            self._release(uid)
            self._count_lingering(node)

    def _allocate(self, uid: str, node: str) -> None:
        allocation = self._allocation_of(uid, node)
        if allocation is not None:
            self._allocations[uid] = allocation
            for placement in allocation.placements:
                self._totals.add(placement)
            if gang := group_key(allocation.pod):
                self._gangs[uid] = gang
                self._gang_nodes.setdefault(gang, Counter())[node] += 1
            self._touch_allocations(node)

    def _release(self, uid: str) -> None:
        allocation = self._allocations.pop(uid, None)
        if allocation is not None:
            for placement in allocation.placements:
                self._totals.remove(placement)
            # Its labels may have changed since.
            if gang := self._gangs.pop(uid, None):
                self._leave_gang(gang, allocation.node)
            self._touch_allocations(allocation.node)

    def _leave_gang(self, gang: str, node: str) -> None:
        nodes = self._gang_nodes[gang]
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]
        if not nodes:
            del self._gang_nodes[gang]

    def _reallocate(self, uid: str) -> None:
        self._release(uid)
        self._allocate(uid, self._node_of(uid))

    def _allocation_of(self, uid: str, node: str) -> PodAllocation | None:
        pod = self._bound[uid]
        shared, report = self._published.get(node), self._reports.get(node)
        if shared is None:
            return None
        if uid in self._assumed:
            return PodAllocation(pod, self._assumed[uid])
        if report is not None and uid in report.pods:
            return PodAllocation(pod, reported_placements(shared, report.pods[uid]))
        allocation = read_allocation(shared, pod, self.dialects)
        if allocation is None:
            return None
        if allocation.error is None:
            self._last_readable[uid] = allocation.placements
        known = self._written.get(uid)
        if not known and allocation.error is not None:
            known = self._last_readable.get(uid)
        if not known:
            return allocation
        present = tuple(on_present_cards(shared, placement) for placement in known)
        return msgspec.structs.replace(allocation, placements=present)

    # ---- nodes ----

    def _set_report(self, name: str, node: Node, known: Node | None) -> None:
        text = node.metadata.annotations.get(lease_records.REPORT)
        if known is not None and known.metadata.annotations.get(lease_records.REPORT) == text:
            return
        before = self._reports.pop(name, lease_records.EMPTY_REPORT)
        try:
            report = lease_records.decode_report(node.metadata.annotations)
        except InvalidRecord:
            # It is of a newer version: the other sources remain.
            report = None
        if report is not None:
            self._reports[name] = report
        after = report or lease_records.EMPTY_REPORT
        for uid in self._uids_by_node.get(name, ()):
            if before.pods.get(uid) != after.pods.get(uid):
                self._reallocate(uid)
        if before.lingering != after.lingering:
            self._count_lingering(name)

    def _count_lingering(self, node: str) -> None:
        """Count what pods still hold that the API server no longer shows."""
        report, shared = self._reports.get(node), self._published.get(node)
        reported = report.lingering if report is not None else {}
        known = self._lingering.get(node, {})
        if not reported and not known:
            return
        uids = self._uids_by_node.get(node, ())
        lingering = {
            uid: lingering_allocation(shared, uid, entry)
            for uid, entry in reported.items()
            if uid not in uids and shared is not None
        }
        if lingering == known:
            return
        for allocations, count in ((known, self._totals.remove), (lingering, self._totals.add)):
            for allocation in allocations.values():
                for placement in allocation.placements:
                    count(placement)
        self._lingering[node] = lingering
        if not lingering:
            del self._lingering[node]
        self._touch_allocations(node)

    def _decode_node(self, name: str) -> None:
        """Read the node's cards again, and its pods' records if the cards or units have changed."""
        before, error = self._published.pop(name, None), self._node_errors.pop(name, None)
        node = self._nodes.get(name)
        if node is not None:
            try:
                self._share(name, node)
            except InvalidRecord as why:
                self._node_errors[name] = str(why)
        changed = self._published.get(name) != before
        if before is not None and not changed:
            # The same object as long as it is equal: that costs least to compare.
            self._published[name] = before
        if changed:
            self._set_cards(name)
        if changed or self._node_errors.get(name) != error:
            self._touch(name)
        moved = changed and not _same_cards(before, self._published.get(name))
        if moved or self._node_errors.get(name) != error:
            self._touch_nodes()
        if changed and _sizes(before) != _sizes(self._published.get(name)):
            for uid in self._uids_by_node.get(name, ()):
                self._reallocate(uid)
            self._count_lingering(name)

    def _set_cards(self, name: str) -> None:
        """Renew what follows from the node's own records."""
        published, before = self._published.get(name), self._card_nodes.pop(name, None)
        if published is None:
            self._shared.pop(name, None)
            self._stale.discard(name)
            return
        if published.division.geometries:
            cards = replace(
                published.node,
                cards=tuple(card for card in published.node.cards if card.parent is None),
            )
            self._card_nodes[name] = before if before == cards else cards
        self._set_instances(name)

    def _set_instances(self, name: str) -> None:
        """Show the node with the instances that its pods hold, which it may not have created yet.

        Its other instances are idle. One whose place overlaps that of a held one will be destroyed for it.
        """
        published = self._published[name]
        shared = published
        if name in self._card_nodes:
            held = (
                slice_.uuid for allocation in self.allocations(name) for slice_ in allocation.slices
            )
            shared = with_held_instances(published, frozenset(held))
            before = self._shared.get(name)
            shared = before if before is not None and before == shared else shared
        self._shared[name] = shared

    def _set_inside(self, name: str, labels: Mapping[str, str]) -> None:
        self._inside.pop(name, None)
        with contextlib.suppress(InvalidRecord):
            # With a label that is wrong the node admits no slices, and says why.
            if profile := nodes.slices_inside(labels):
                self._inside[name] = profile

    def _share(self, name: str, node: Node) -> None:
        labels = node.metadata.labels
        shared = nodes.decode_node(name, node.metadata.annotations, node.status.allocatable)
        if shared is None:
            return
        policy = labels.get(nodes.PLACEMENT_LABEL)
        if policy in SCORES:
            shared = replace(shared, node=replace(shared.node, card_policy=policy))
        unhealthy = self._unhealthy.get(name, frozenset())
        self._published[name] = nodes.with_unhealthy(shared, unhealthy)
        # Its labels may exclude new pods; what is held stays held.
        nodes.check_shared(labels)

    def _touch_allocations(self, node: str) -> None:
        if node in self._card_nodes:
            self._stale.add(node)
        self._touch(node)

    def _touch(self, node: str) -> None:
        for changed in self._watching:
            changed.add(node)
        self.version += 1

    def _touch_nodes(self) -> None:
        self.nodes_version += 1
        self.version += 1


def _by_name(held: PodAllocation) -> tuple[str, str]:
    meta = held.pod.metadata
    return meta.namespace, meta.name


def _same_cards(before: SharedNode | None, after: SharedNode | None) -> bool:
    """Return whether two versions of a node with divided cards differ in their instances only."""
    return (
        before is not None
        and after is not None
        and bool(after.division.geometries)
        and before.division.geometries == after.division.geometries
        and before.shares_cards == after.shares_cards
        and replace(before.node, cards=tuple(before.physical_cards))
        == replace(after.node, cards=tuple(after.physical_cards))
    )


def _sizes(shared: SharedNode | None) -> object:
    """Return the part of a node by which allocations are read; cards may be healthy and cordoned or not."""
    return shared and (
        shared.unit_mib,
        [(card.index, card.uuid, card.memory_mib, card.compute) for card in shared.node.cards],
        shared.division.geometries,
    )


def _hold_alike(before: Pod, after: Pod) -> bool:
    """Return whether two versions of a pod hold the same, and until the same time."""
    return (
        before.metadata.annotations == after.metadata.annotations
        and before.metadata.labels == after.metadata.labels
        and before.spec == after.spec
        and _end_alike(before, after)
    )


def _end_alike(before: Pod, after: Pod) -> bool:
    """Return whether two versions of a pod end at the same time, as far as that is known."""
    limit = after.spec.active_deadline_seconds
    return (
        before.metadata.deletion_timestamp == after.metadata.deletion_timestamp
        and before.spec.active_deadline_seconds == limit
        and (limit is None or before.status.start_time == after.status.start_time)
    )


def _admit_alike(before: Node, after: Node) -> bool:
    """Return whether the same pods may go to both, as far as nodes decide."""
    return (
        before.metadata.labels == after.metadata.labels
        and before.spec == after.spec
        and before.readiness == after.readiness
    )


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Nodes by name, pods by namespace and name, and the state that follows from them."""

    nodes: list[Node]
    pods: list[Pod]
    state: ClusterState
    groups: Mapping[str, PodGroup] | None = None
    """PodGroups by namespace/name; None if they were not read."""

    @classmethod
    def of(
        cls,
        nodes: Iterable[Node],
        pods: Iterable[Pod],
        unhealthy: Mapping[str, frozenset[int]] | None = None,
        dialects: tuple[Dialect, ...] = DIALECTS,
        state: ClusterState | None = None,
        groups: Mapping[str, PodGroup] | None = None,
    ) -> "ClusterSnapshot":
        """Build a snapshot.

        Args:
            nodes: all nodes.
            pods: all pods.
            unhealthy: indexes of cards that a health daemon names, by node.
            dialects: the names by which pods request cards.
            state: has the nodes and pods already, if they were added to it one by one.
            groups: PodGroups by namespace/name; None if they were not read.
        """
        nodes = sorted(nodes, key=lambda node: node.metadata.name)
        pods = sorted(pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
        state = state or ClusterState(nodes, pods, dialects)
        for name, indexes in (unhealthy or {}).items():
            state.set_unhealthy(name, indexes)
        return cls(nodes, pods, state, groups)
