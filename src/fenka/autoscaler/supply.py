"""Converts existing nodes, ordered nodes and offers into nodes and groups of a planning case. Pure.

Ordered nodes count with their shape until they offer their cards. Pods planned for a node hold their room
there until they are bound. The room of pods that are being deleted counts as free. An offer that failed
pauses for `start.backoff`, twice as long after each further failure, up to `start.backoffMost`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fenka.autoscaler import demand
from fenka.autoscaler.new_nodes import machine_labels, shape_for
from fenka.autoscaler.snapshot import (
    Shape,
    Snapshot,
    UnknownShape,
    offer_of,
    planned_cards,
    without_daemons,
)
from fenka.autoscaler.watch import DaemonSet, ElasticPod, allocatable, bounded
from fenka.cloud.config import NOT_COUNTED, GroupConfig, StartTimes
from fenka.cloud.port import Instance, Offer, OfferKey
from fenka.cluster import autoscaling, spot_nodes
from fenka.cluster.objects import Node, seconds
from fenka.cluster.pending_queue import OVERDUE_TTL_S
from fenka.core.inventory import WHOLE_COMPUTE, Card
from fenka.core.nodes.case import (
    PRICE_DECIMALS,
    Capacity,
    CaseNode,
    CaseRequest,
    Held,
    HeldCard,
    NodeGroup,
    fields_of,
    node_of,
)
from fenka.core.nodes.problem import ZONE_LABEL
from fenka.core.usage import UsageOverlay
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord
from fenka.dialects.registry import WITH_HAMI, resource_names

FORGOTTEN_S = 3 * 3600.0
TOO_DEAR_S = 300.0
"""Between two looks at a market that was above the cap."""

OF_GROUP: frozenset[autoscaling.Failure] = frozenset({"quota", "denied"})
"""Failures that concern all offers of a group."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Until when an offer is not tried, and why."""

    until: float
    failure: autoscaling.Failure
    why: str


@dataclass(frozen=True, slots=True)
class _Failed:
    """An order that failed. at: when."""

    offer: OfferKey
    failure: autoscaling.Failure
    why: str
    at: float

    def concerns(self, key: OfferKey) -> bool:
        """Return whether the failure is a reason not to try this offer."""
        if self.failure in OF_GROUP:
            return self.offer.group == key.group
        return self.offer == key


def pauses(snapshot: Snapshot) -> dict[OfferKey, Pause]:
    """Return the offers that are not tried now."""
    failures = [
        _Failed(offer_of(record), record.failure, record.why, _failed_at(record))
        for record in snapshot.orders.values()
        if record.failure is not None and not is_forgotten(record, snapshot.now)
    ]
    failures.sort(key=lambda failure: failure.at)
    found: dict[OfferKey, Pause] = {}
    for key in snapshot.offers:
        own = [failure for failure in failures if failure.concerns(key)]
        ends = [_pause(snapshot.config.start, *numbered) for numbered in enumerate(own)]
        longest = max(ends, key=lambda pause: pause.until, default=None)
        if longest is not None and longest.until > snapshot.now:
            found[key] = longest
    return found


def is_forgotten(record: autoscaling.OrderRecord, now: float) -> bool:
    """Return whether a failed order is of no more use."""
    return record.failure is None or _failed_at(record) <= now - FORGOTTEN_S


def _pause(start: StartTimes, number: int, failed: _Failed) -> Pause:
    """Return the pause after a failure. number: of failures before it."""
    length = min(start.backoff * 2 ** min(number, 20), start.backoff_most)
    if failed.failure in OF_GROUP:
        length = start.backoff_most
    elif failed.failure == "too dear":
        length = TOO_DEAR_S
    return Pause(failed.at + length, failed.failure, failed.why)


def _failed_at(record: autoscaling.OrderRecord) -> float:
    return record.changed_at if record.changed_at is not None else record.written_at


def next_try(paused: Mapping[OfferKey, Pause]) -> float | None:
    """Return when the first of these offers is tried again."""
    return min((pause.until for pause in paused.values()), default=None)


@dataclass(frozen=True, slots=True)
class OfferedGroup:
    """An offer as a group of a case. labels: of its nodes, also those that a case implies."""

    offer: OfferKey
    group: NodeGroup
    labels: Mapping[str, str]


# ---- offers ----


def offered_groups(snapshot: Snapshot) -> list[OfferedGroup]:
    """Return the offers of all groups whose shape is known, without joint limits of groups."""
    paused = pauses(snapshot)
    groups = []
    for config in snapshot.config.groups:
        keys = [key for key in config.offers if key in snapshot.offers]
        for key in keys:
            try:
                shape = shape_for(snapshot, config, key.type)
            except UnknownShape:
                continue
            name = config.name if len(keys) == 1 else f"{config.name}:{key.type}:{key.zone}"
            groups.append(_offered(snapshot, config, snapshot.offers[key], name, shape, paused))
    return groups


def _offered(
    snapshot: Snapshot,
    config: GroupConfig,
    offer: Offer,
    name: str,
    shape: Shape,
    paused: Mapping[OfferKey, Pause],
) -> OfferedGroup:
    key = offer.key
    price = offer.price or config.price or 0.0
    stock = offer.stock
    if key in paused or (config.spot.cap is not None and price > config.spot.cap):
        stock = 0
    group = replace(
        _new_group(snapshot, config, key, shape),
        name=name,
        price=round(price, PRICE_DECIMALS),
        stock=stock,
    )
    return OfferedGroup(key, group, machine_labels(shape.labels, key))


def _new_group(snapshot: Snapshot, config: GroupConfig, key: OfferKey, shape: Shape) -> NodeGroup:
    """Return the new nodes of an offer, less the DaemonSets that run on them, without price and stock."""
    group = NodeGroup(
        name=config.name,
        zone=key.zone,
        capacity=key.capacity,
        price=0,
        protection_s=_protection(config, config.spot.protection - config.startup),
        **fields_of(shape, Shape),
    )
    return less_daemons(snapshot, group, machine_labels(shape.labels, key))


def less_daemons(snapshot: Snapshot, group: NodeGroup, labels: Mapping[str, str]) -> NodeGroup:
    """Return the group less the DaemonSets that run on nodes with these labels."""
    return without_daemons(group, _daemons(snapshot.daemons, labels))


def _daemons(daemons: Iterable[DaemonSet], labels: Mapping[str, str]) -> Iterable[CaseRequest]:
    for daemon in daemons:
        template = daemon.spec.template
        pod = ElasticPod(metadata=daemon.metadata, spec=template.spec)
        selector = template.spec.node_selector
        if any(labels.get(key) != value for key, value in selector.items()):
            continue
        if demand.affinity_rules(pod).admit(labels):
            host = pod.host_amounts()
            yield CaseRequest(
                name=pod.full_name,
                cards=0,
                cpu_milli=host.pop("cpu", 0),
                memory_mib=host.pop("memory", 0),
                resources={
                    name: amount
                    for name, amount in host.items()
                    if name not in NOT_COUNTED and name not in _PLACED
                },
                tolerations=demand.case_tolerations(template.spec),
            )


_PLACED = resource_names(WITH_HAMI)


def _protection(config: GroupConfig, seconds_left: float) -> float:
    if config.spot.admit == "all":
        return demand.UNLIMITED_S
    return max(seconds_left, 0.0)


# ---- nodes ----


def case_nodes(snapshot: Snapshot, *, without_cards: bool) -> list[CaseNode]:
    """Return the nodes that may be used, and those that are coming.

    without_cards: also nodes that have none, for requests of no cards.
    """
    arriving = {slot.node for *_, slot in snapshot.coming() if slot.node}
    nodes = [
        case_node(snapshot, node)
        for name, node in snapshot.nodes.items()
        if name not in arriving
        and _is_usable(node)
        and (without_cards or has_cards(snapshot, node))
    ]
    return [*nodes, *coming_nodes(snapshot)]


def has_cards(snapshot: Snapshot, node: Node) -> bool:
    """Return whether pods may request anything of a card there."""
    return snapshot.state.shared_node(node.metadata.name) is not None or has_whole_cards(node)


def has_whole_cards(node: Node) -> bool:
    """Return whether the kubelet gives away whole cards, or instances of them."""
    return any(
        amount > 0 and (name == NVIDIA_GPU or name.startswith("nvidia.com/mig-"))
        for name, amount in allocatable(node)
    )


def _is_usable(node: Node) -> bool:
    deleted = node.metadata.deletion_timestamp is not None
    return node.ready and not (node.spec.unschedulable or is_leaving(node) or deleted)


def is_leaving(node: Node) -> bool:
    """Return whether the node is about to be ended, or taken back."""
    return any(
        taint.key in (autoscaling.ENDING, autoscaling.RECLAIMED) for taint in node.spec.taints
    )


def case_node(snapshot: Snapshot, node: Node, leaving: frozenset[str] = frozenset()) -> CaseNode:
    """Return a node as it is. leaving: UIDs of pods that count as gone already."""
    name, labels = node.metadata.name, node.metadata.labels
    amounts = dict(allocatable(node))
    staying = [pod for pod in snapshot.pods_on.get(name, ()) if not _goes(snapshot, pod, leaving)]
    held = _held(staying)
    group = labels.get(autoscaling.GROUP, "")
    capacity: Capacity = "spot" if labels.get(autoscaling.CAPACITY) == "spot" else "on-demand"
    case = CaseNode(
        name=name,
        group=group,
        zone=labels.get(ZONE_LABEL, ""),
        capacity=capacity,
        protected_s=_protected(snapshot, node) if capacity == "spot" else 0.0,
        labels=labels,
        taints=node.spec.taints,
        cpu_milli=amounts.pop("cpu", 0),
        memory_mib=amounts.pop("memory", 0),
        pods=amounts.pop("pods", 110),
        resources=amounts,
        held=held,
        cards=_cards(snapshot, node, leaving),
    )
    return with_planned(snapshot, case, _slots_of(snapshot, name))


def _slots_of(snapshot: Snapshot, node: str) -> Iterable[autoscaling.Slot]:
    return (slot for *_, slot in snapshot.slots(("offering",)) if slot.node == node)


def coming_nodes(snapshot: Snapshot) -> list[CaseNode]:
    """Return the nodes that are asked for and do not offer their cards yet, with their planned pods."""
    nodes = []
    for name, number, record, slot in snapshot.coming():
        config = snapshot.group(record.group)
        if config is None:
            continue
        try:
            shape = shape_for(snapshot, config, record.type)
        except UnknownShape:
            continue
        group = _new_group(snapshot, config, offer_of(record), shape)
        node = node_of(group, coming_name(name, number))
        nodes.append(with_planned(snapshot, node, [slot]))
    return nodes


def coming_name(order: str, slot: int) -> str:
    """Return the name that a case has for a node that is on its way."""
    return f"coming:{order}:{slot}"


def _protected(snapshot: Snapshot, node: Node) -> float:
    """Return for how long a spot node is protected, as the scheduler reads it."""
    rule = spot_nodes.read_spot_rule(node)
    return demand.UNLIMITED_S if rule is None else rule.left_s(snapshot.now)


def protected_until(config: GroupConfig, instance: Instance) -> float | None:
    """Return until when a group's spot instance is certainly not taken back; None without protection."""
    if config.capacity != "spot" or not config.spot.protection:
        return None
    return instance.launched_at + config.spot.protection


def _goes(snapshot: Snapshot, pod: ElasticPod, leaving: frozenset[str]) -> bool:
    """Return whether the pod's room is free soon. One that should have ended long ago may never end."""
    if pod.metadata.uid in leaving:
        return True
    deleted = seconds(pod.metadata.deletion_timestamp or "")
    return deleted is not None and snapshot.now < deleted + OVERDUE_TTL_S


def _held(pods: Sequence[ElasticPod]) -> Held:
    sums: dict[str, int] = {}
    for pod in pods:
        for name, amount in pod.host_amounts().items():
            sums[name] = sums.get(name, 0) + amount
    cpu, memory = sums.pop("cpu", 0), sums.pop("memory", 0)
    return _bounded(Held(cpu_milli=cpu, memory_mib=memory, pods=len(pods), resources=sums))


def _bounded(held: Held) -> Held:
    return Held(
        cpu_milli=bounded(held.cpu_milli),
        memory_mib=bounded(held.memory_mib),
        pods=held.pods,
        resources={name: bounded(amount) for name, amount in held.resources.items()},
    )


def _cards(snapshot: Snapshot, node: Node, leaving: frozenset[str]) -> tuple[HeldCard, ...]:
    name = node.metadata.name
    shared = snapshot.state.shared_node(name)
    if shared is None or not shared.shares_cards:
        return _whole_cards(snapshot, node, leaving)
    usage = UsageOverlay(snapshot.state)
    pods = {pod.metadata.uid: pod for pod in snapshot.pods_on.get(name, ())}
    for allocation in snapshot.state.allocations(name):
        pod = pods.get(allocation.pod.metadata.uid)
        if pod is not None and _goes(snapshot, pod, leaving):
            for placement in allocation.placements:
                usage.remove(placement)
    closed = snapshot.state.node_error(name) is not None
    return tuple(_held_card(usage, name, card, closed=closed) for card in shared.physical_cards)


def _held_card(usage: UsageOverlay, node: str, card: Card, *, closed: bool) -> HeldCard:
    used = usage.card_usage(node, card.uuid)
    free = HeldCard(
        model=card.model,
        memory_mib=card.memory_mib,
        whole=used.whole > 0,
        closed=closed or not card.open,
    )
    # A slice may hold nothing but a weight of the card's time; then the card is not idle.
    return _holding(free, used.memory_mib + card.unleased_mib, used.compute)


def _holding(card: HeldCard, mib: int, compute: int) -> HeldCard:
    """Return the card with so much more held of it: no more than it has, whatever pods record."""
    return replace(
        card,
        held_mib=min(card.held_mib + max(mib, 0), card.memory_mib),
        held_compute=min(card.held_compute + max(compute, 0), WHOLE_COMPUTE),
    )


def _whole_cards(snapshot: Snapshot, node: Node, leaving: frozenset[str]) -> tuple[HeldCard, ...]:
    """Return the cards of a node that the kubelet gives away whole: only their number is known."""
    total = dict(allocatable(node)).get(NVIDIA_GPU, 0)
    used = sum(
        pod.amount(NVIDIA_GPU)
        for pod in snapshot.pods_on.get(node.metadata.name, ())
        if not _goes(snapshot, pod, leaving)
    )
    return tuple(HeldCard(whole=number < used) for number in range(min(total, MAX_WHOLE)))


MAX_WHOLE = 64
"""Cards of one node: a node's own word is not trusted for more."""


# ---- planned pods ----


def with_planned(snapshot: Snapshot, node: CaseNode, slots: Iterable[autoscaling.Slot]) -> CaseNode:
    """Return the node with what the pods planned for these slots will hold of it."""
    for slot in slots:
        waiting = {pod.metadata.uid: pod for pod in snapshot.waiting(slot)}
        for uid, cards in planned_cards(slot):
            if uid in waiting:
                node = _with_pod(snapshot, node, waiting[uid], cards)
    return node


def _with_pod(
    snapshot: Snapshot, node: CaseNode, pod: ElasticPod, indices: tuple[int, ...]
) -> CaseNode:
    try:
        request = demand.case_request(pod, snapshot.state.dialects)
    except (demand.Inexpressible, InvalidRecord):
        return node
    held, resources = node.held, dict(node.held.resources)
    for name, amount in request.resources.items():
        resources[name] = resources.get(name, 0) + amount
    held = _bounded(
        Held(
            cpu_milli=held.cpu_milli + request.cpu_milli,
            memory_mib=held.memory_mib + request.memory_mib,
            pods=held.pods + 1,
            resources=resources,
        )
    )
    if len(indices) != request.cards or any(index >= len(node.cards) for index in indices):
        # The node has other cards than were planned: nobody else is planned there while the pod is pending.
        closed = tuple(replace(card, closed=True) for card in node.cards)
        return replace(node, held=held, cards=closed)
    cards = list(node.cards)
    asked = request.card_request()
    if asked is not None:
        for index in indices:
            card = cards[index]
            mib = asked.memory.mib_on(card.memory_mib, 1) if asked.memory is not None else 0
            held_card = _holding(card, card.memory_mib if mib is None else mib, asked.compute)
            cards[index] = replace(held_card, whole=card.whole or asked.whole)
    return replace(node, held=held, cards=tuple(cards))
