"""The life of orders: a pure state machine, and the actor that does what it requires.

A slot, one node of an order, goes written -> asked -> known -> joined -> offering -> ending -> gone. It fails
if its node does not come, or does not offer its cards in time. Cloud and cluster decide by what they show: a
leader that was killed at any step, or lost the ConfigMap, is followed by one that goes on.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from fenka.autoscaler import node_registration, node_shapes
from fenka.autoscaler.actor_context import GONE, ActorContext
from fenka.autoscaler.metrics import ActivityCounts
from fenka.autoscaler.new_nodes import shape_for
from fenka.autoscaler.snapshot import (
    COMING,
    Snapshot,
    UnknownShape,
    offer_of,
)
from fenka.autoscaler.stores import ShapeStore, failed_order, new_name, order_for
from fenka.autoscaler.supply import has_whole_cards, is_forgotten
from fenka.autoscaler.watch import ElasticPod
from fenka.cloud import port
from fenka.cluster import autoscaling
from fenka.cluster.objects import Node, Object, node_path
from fenka.kubernetes.api_client import ApiError

log = logging.getLogger(__name__)

NEVER_JOINED, UNHELPFUL_OFFER = "FenkaNeverJoined", "FenkaMisfit"

REFUSED = (400, 403, 413, 422)
"""The API server or a policy does not accept this change of this object."""

GONE_S = 30.0
"""Between two lists of the cloud without an instance, before it counts as gone."""

PART_S = 30.0
"""After this time no more nodes are expected of an order of which some have come."""

SETTLED_S = 60.0
"""An order of which all nodes offer their cards is remembered this much longer than its nodes are pinned."""

PARTIAL_GANG_S = 300.0
"""A node with a part of a gang ends after this time, if the rest of the gang is not on its way."""

MAX_WHY = 500
"""Characters of the cloud's sentence that are remembered."""

_PROGRESS: tuple[autoscaling.OrderState, ...] = (
    "written",
    "asked",
    "known",
    "joined",
    "offering",
    "ending",
)
OVER: frozenset[autoscaling.OrderState] = frozenset({"gone", "failed"})

_TOKEN = re.compile(r"(?P<name>.+)-(?P<attempt>[0-9]+)")


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """A node that did not come.

    Attributes:
        failure: what its offer is backed off for.
        why: a sentence.
        node: it, if it has joined.
        pods: those that were planned for it.
    """

    order: str
    failure: autoscaling.Failure
    why: str
    node: Node | None
    pods: tuple[ElasticPod, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that has to be done, in this order.

    Attributes:
        orders: to write; None removes one.
        ends: instances to end.
        removed: nodes whose instances are gone.
        failures: nodes that did not come, for events.
    """

    orders: Mapping[str, autoscaling.OrderRecord | None] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()
    removed: tuple[Node, ...] = ()
    failures: tuple[LaunchFailure, ...] = ()


# ---- tokens ----


def token(cluster: str, name: str, attempt: int) -> str:
    """Return the token of an order."""
    return f"{cluster}-{name}-{attempt}"


def order_of_token(cluster: str, text: str) -> str:
    """Return the name of the order that has this token, empty if it is none of this cluster."""
    match = _TOKEN.fullmatch(text.removeprefix(f"{cluster}-"))
    return match["name"] if match and text.startswith(f"{cluster}-") else ""


def launchable(cluster: str, name: str, record: autoscaling.OrderRecord) -> port.Order:
    """Return an order as the cloud is asked for it. It is the same for the same attempt."""
    return port.Order(
        token(cluster, name, record.attempt),
        offer_of(record),
        len(record.slots),
        record.whole,
        record.cap,
    )


# ---- answers of the cloud ----


def answered(
    record: autoscaling.OrderRecord, ids: Sequence[str], now: float
) -> autoscaling.OrderRecord:
    """Return the order after the cloud has accepted it. ids: the instances that are known by now."""
    known = {slot.instance for slot in record.slots}
    new = [name for name in ids if name not in known]
    slots = list(_filled(record.slots, new))
    slots = [replace(slot, state="asked") if slot.state == "written" else slot for slot in slots]
    return _settled(replace(record, slots=tuple(slots), asked_at=now), now)


def refused(
    record: autoscaling.OrderRecord, error: port.ProviderError, now: float
) -> autoscaling.OrderRecord:
    """Return the order after an error.

    A token that is spent is replaced. Otherwise a throttled call keeps it: the call before may have had an
    effect, although nobody has received its answer.
    """
    if isinstance(error, port.Throttled) and error.spent:
        return replace(record, attempt=record.attempt + 1)
    failure = next((word for kind, word in _FAILURES if isinstance(error, kind)), None)
    if failure is None:
        # Perhaps it was done: the same token again.
        return record
    # Fields that are kept for hours have to be small: all orders share the 1 MiB of a ConfigMap.
    return replace(
        record, slots=(), state="failed", failure=failure, why=str(error)[:MAX_WHY], changed_at=now
    )


_FAILURES: tuple[tuple[type[port.ProviderError], autoscaling.Failure], ...] = (
    (port.OutOfStock, "out of stock"),
    (port.TooDear, "too dear"),
    (port.Quota, "quota"),
    (port.Denied, "denied"),
)


# ---- one pass ----


def advance(snapshot: Snapshot) -> Decision:
    """Return what the orders require by what cloud and cluster show."""
    if snapshot.instances_at is None:
        # A failed reading is never taken for none.
        return Decision()
    orders: dict[str, autoscaling.OrderRecord | None] = {}
    failures: list[LaunchFailure] = []
    for name, record in _with_adopted(snapshot).items():
        changed, late = _advance(snapshot, name, record)
        failures += late
        orders[name] = None if _is_over(snapshot, changed) else changed
        if late and changed.failure is None:
            # Others of its nodes came, so that the order itself has not failed.
            failed = new_name(record.group, snapshot.now, {*snapshot.orders, *orders})
            orders[failed] = failed_order(
                offer_of(record), late[0].failure, late[0].why, snapshot.now
            )
    changes = {
        name: record for name, record in orders.items() if record != snapshot.orders.get(name)
    }
    return Decision(changes, _ends(snapshot, orders), tuple(_removed(snapshot)), tuple(failures))


def _is_over(snapshot: Snapshot, record: autoscaling.OrderRecord) -> bool:
    """Return whether nothing has to be remembered of an order any more."""
    if record.failure is not None:
        return is_forgotten(record, snapshot.now)
    if any(slot.state not in {"offering", *OVER} for slot in record.slots):
        return False
    if any(node_registration.is_partial_gang(snapshot, slot) for slot in record.slots):
        return False
    settled = (record.changed_at or record.written_at) + snapshot.config.scale_out.pin + SETTLED_S
    return record.state in OVER or snapshot.now >= settled


def _advance(
    snapshot: Snapshot, name: str, record: autoscaling.OrderRecord
) -> tuple[autoscaling.OrderRecord, list[LaunchFailure]]:
    instances = _new_instances(snapshot, name, record)
    if record.failure is not None and not record.slots and not instances:
        return record, []
    slots = list(_filled(record.slots, instances))
    failures: list[LaunchFailure] = []
    partial = any(slot.instance for slot in slots)
    for number, slot in enumerate(slots):
        step = _step(snapshot, record, slot, partial=partial)
        slots[number] = step.slot
        if step.failure is not None:
            pods = tuple(snapshot.waiting(slot))
            node = snapshot.nodes.get(step.slot.node)
            failures.append(LaunchFailure(name, step.failure, step.why, node, pods))
    changed = _settled(replace(record, slots=tuple(slots)), snapshot.now)
    if failures and all(slot.state in {"failed", "ending"} for slot in slots):
        changed = replace(changed, failure=failures[0].failure, why=failures[0].why)
    return changed, failures


@dataclass(frozen=True, slots=True)
class _Step:
    slot: autoscaling.Slot
    failure: autoscaling.Failure | None = None
    why: str = ""


def _step(
    snapshot: Snapshot, record: autoscaling.OrderRecord, slot: autoscaling.Slot, *, partial: bool
) -> _Step:
    """Return the slot as cloud and cluster show it."""
    if slot.state in OVER:
        return _Step(slot)
    instance = snapshot.instances.get(slot.instance)
    if slot.instance and instance is None:
        return _unlisted(snapshot, slot)
    if slot.state == "ending" or (instance and instance.state is port.InstanceState.ENDING):
        return _Step(replace(slot, state="ending"))
    node = snapshot.node_of(instance) if instance is not None else None
    if node is not None:
        slot = replace(slot, node=node.metadata.name)
        if slot.state != "offering":
            ready = offers_cards(snapshot, record, node)
            slot = replace(
                slot,
                state="offering" if ready else "joined",
                offering_at=snapshot.now if ready else None,
            )
    if slot.state == "offering":
        useless = node_registration.is_partial_gang(
            snapshot, slot
        ) and snapshot.now > partial_gang_ends_at(slot)
        return _Step(replace(slot, state="ending") if useless else slot)
    return _overdue(snapshot, record, slot, partial=partial) or _Step(slot)


def partial_gang_ends_at(slot: autoscaling.Slot) -> float:
    """Return until when a node with a part of a gang is kept."""
    return (slot.offering_at or 0.0) + PARTIAL_GANG_S


def _overdue(
    snapshot: Snapshot, record: autoscaling.OrderRecord, slot: autoscaling.Slot, *, partial: bool
) -> _Step | None:
    """Return what follows if the node should be ready by now, or will not come; None otherwise."""
    instance, node = snapshot.instances.get(slot.instance), snapshot.nodes.get(slot.node)
    if snapshot.now > record.written_at + snapshot.config.start.timeout:
        why = f"{record.type} in {record.zone} was not ready in time: {_lack(snapshot, instance, node)}"
        return _Step(replace(slot, state="ending" if instance else "failed"), "never joined", why)
    if (
        instance is None
        and partial
        and snapshot.now > (record.asked_at or record.written_at) + PART_S
    ):
        why = f"fewer nodes of {record.type} in {record.zone} came than were asked for"
        return _Step(replace(slot, state="failed"), "out of stock", why)
    return None


def _unlisted(snapshot: Snapshot, slot: autoscaling.Slot) -> _Step:
    node = snapshot.nodes.get(slot.node)
    # A node that answers runs, unless this program has just ended it. Then the list is of another account,
    # region or cluster's name, and must not cost the pods that run there.
    answers = node is not None and node.ready and slot.state != "ending"
    if answers or not is_gone(snapshot, slot.instance):
        return _Step(slot)
    if slot.state in COMING:
        return _Step(
            replace(slot, state="failed"), "taken back", "its instance was ended or taken back"
        )
    return _Step(replace(slot, state="gone"))


def is_gone(snapshot: Snapshot, name: str) -> bool:
    """Return whether the cloud has listed everything without this instance twice, long enough apart."""
    since = snapshot.missing.get(name)
    return since is not None and (snapshot.instances_at or 0.0) >= since + GONE_S


def _lack(snapshot: Snapshot, instance: port.Instance | None, node: Node | None) -> str:
    """Return what a node lacks, as a sentence's part."""
    if instance is None:
        return "the cloud has started no machine"
    if node is None:
        return f"machine {instance.id} has not joined the cluster"
    if not node.ready:
        return f"node {node.metadata.name} is not Ready"
    error = snapshot.state.node_error(node.metadata.name)
    return (
        error
        or f"node {node.metadata.name} offers no cards: see whether fenka's program runs there"
    )


def offers_cards(snapshot: Snapshot, record: autoscaling.OrderRecord, node: Node) -> bool:
    """Return whether pods can use what the node was bought for."""
    if not node.ready:
        return False
    if snapshot.state.shared_node(node.metadata.name) is not None or has_whole_cards(node):
        return True
    config = snapshot.group(record.group)
    try:
        return config is not None and not shape_for(snapshot, config, record.type).cards
    except UnknownShape:
        return False


def _filled(slots: Sequence[autoscaling.Slot], new: Iterable[str]) -> Iterable[autoscaling.Slot]:
    """Yield the slots with these instances: in those that have none, then in further ones."""
    names = iter(new)
    for slot in slots:
        fillable = not slot.instance and slot.state not in {"ending", "gone"}
        name = next(names, "") if fillable else ""
        yield replace(slot, instance=name, state="known") if name else slot
    for name in names:
        yield autoscaling.Slot(state="known", instance=name)


def _new_instances(snapshot: Snapshot, name: str, record: autoscaling.OrderRecord) -> list[str]:
    known = {slot.instance for slot in record.slots}
    own = [
        instance
        for instance in snapshot.instances.values()
        if instance.id not in known
        and instance.state is not port.InstanceState.ENDING
        and adopted_name(snapshot.config.cluster, instance) == name
    ]
    own.sort(key=lambda instance: (instance.launched_at, instance.id))
    return [instance.id for instance in own]


def _settled(record: autoscaling.OrderRecord, now: float) -> autoscaling.OrderRecord:
    """Return the order with the state that follows from its slots."""
    live = [slot.state for slot in record.slots if slot.state not in OVER]
    state: autoscaling.OrderState = min(live, key=_PROGRESS.index) if live else "gone"
    if not live and any(slot.state == "failed" for slot in record.slots):
        state = "failed"
    return replace(record, state=state, changed_at=now) if state != record.state else record


# ---- what no order has ----


def adopted_name(cluster: str, instance: port.Instance) -> str:
    """Return the name of the order that an instance is of. One that has none is an order of its own."""
    return order_of_token(cluster, instance.order) or f"{instance.offer.group}-{instance.id}"


def _with_adopted(snapshot: Snapshot) -> dict[str, autoscaling.OrderRecord]:
    """Return the orders, with those of instances that are of none: the ConfigMap may have been deleted."""
    orders = dict(snapshot.orders)
    held = {slot.instance for *_, slot in snapshot.slots()}
    unanswered = {offer_of(record) for _, _, record, _ in snapshot.slots(("written",))}
    for instance in snapshot.instances.values():
        name = adopted_name(snapshot.config.cluster, instance)
        if name in orders or instance.id in held or instance.state is port.InstanceState.ENDING:
            continue
        if not instance.order and instance.offer in unanswered:
            # A cloud may tag instances after it has launched them. The call will be repeated, and name them.
            continue
        node = snapshot.node_of(instance)
        if node is not None and autoscaling.ORDER in node.metadata.labels:
            continue
        orders[name] = order_for(
            instance.offer,
            slots=(),
            state="known",
            price=snapshot.price_of(instance.offer),
            written_at=_adopted_at(snapshot, instance),
            asked_at=instance.launched_at,
        )
    return orders


def _adopted_at(snapshot: Snapshot, instance: port.Instance) -> float:
    """Return from when on the instance has time to join: its launch.

    If that was long ago, its Node may have been deleted by hand, and can come again.
    """
    recent = snapshot.now <= instance.launched_at + snapshot.config.start.timeout
    return instance.launched_at if recent else snapshot.now


def _ends(
    snapshot: Snapshot, orders: Mapping[str, autoscaling.OrderRecord | None]
) -> frozenset[str]:
    """Return the instances of slots that end, as long as they are listed."""
    return frozenset(
        slot.instance
        for record in orders.values()
        if record is not None
        for slot in record.slots
        if slot.state == "ending"
        and slot.instance in snapshot.instances
        and snapshot.instances[slot.instance].state is not port.InstanceState.ENDING
    )


def _removed(snapshot: Snapshot) -> Iterable[Node]:
    """Yield the nodes that were bought and whose instances are gone."""
    ended = {slot.node for *_, slot in snapshot.slots(("ending", *OVER))}
    for node in snapshot.own_nodes():
        answers = node.ready and node.metadata.name not in ended
        if node.spec.provider_id and is_gone(snapshot, node.spec.provider_id) and not answers:
            yield node


def listed_missing(snapshot: Snapshot) -> dict[str, float]:
    """Return what the cloud does not list at this moment, by when that was seen first.

    Instances of slots by their ids, those of nodes by their provider ids.
    """
    expected = {slot.instance for *_, slot in snapshot.slots(_PROGRESS)}
    expected -= snapshot.instances.keys()
    listed = {instance.provider_id for instance in snapshot.instances.values()}
    expected |= {
        node.spec.provider_id
        for node in snapshot.own_nodes()
        if node.spec.provider_id not in listed
    }
    at = snapshot.instances_at or snapshot.now
    return {name: snapshot.missing.get(name, at) for name in expected if name}


class OrderKeeper:
    """The first part of a pass."""

    def __init__(self, shapes: ShapeStore, counts: ActivityCounts) -> None:
        self._shapes, self._counts = shapes, counts

    async def act(self, context: ActorContext) -> Mapping[str, autoscaling.ElasticNodeStatus]:
        """Advance all orders. Return the states of nodes that do not offer their cards yet."""
        snapshot = context.snapshot()
        decision = advance(snapshot)
        if not context.leading():
            return {}
        await context.orders.save(decision.orders)
        self._report(context, snapshot, decision)
        await self._mark(context)
        for node in decision.removed:
            if context.leading():
                log.info("node %s: its instance is gone", node.metadata.name)
                await context.delete_node(node)
        # Last, and its failure ends nothing else: the cloud may refuse to end an instance for ever.
        await _end(context, sorted(decision.ends))
        return _starting(context.snapshot())

    def _report(self, context: ActorContext, snapshot: Snapshot, decision: Decision) -> None:
        self._counts.advanced(snapshot, decision.orders)
        for failure in decision.failures:
            log.warning("order %s: %s", failure.order, failure.why)
            if failure.node is not None:
                context.recorder.record_on_node(failure.node, NEVER_JOINED, failure.why)
            for pod in failure.pods:
                context.recorder.record_on_pod(pod, NEVER_JOINED, failure.why)

    async def _mark(self, context: ActorContext) -> None:
        """Write what nodes and pods lack."""
        for change in node_registration.node_changes(context.snapshot()):
            if context.leading():
                await _patch_node(context, change)
        for pod, text in node_registration.planned_annotations(context.snapshot()):
            if context.leading():
                await _annotate(context, pod, text)
        await self._learn(context)

    async def _learn(self, context: ActorContext) -> None:
        snapshot = context.snapshot()
        unhelpful = node_shapes.new_unhelpful_offers(snapshot)
        for entry in unhelpful:
            note = (
                f"it does not fit the node of {entry.offer} that was bought for it: that offer is "
                "not tried again for such pods until the configuration changes"
            )
            context.recorder.record_on_pod(entry.pod, UNHELPFUL_OFFER, note)
        if context.leading():
            classes = {entry.offer: set[str]() for entry in unhelpful}
            for entry in unhelpful:
                classes[entry.offer].add(entry.pod_class)
            await self._shapes.save(
                node_shapes.new_shapes(snapshot),
                {offer: frozenset(names) for offer, names in classes.items()},
            )


def _starting(snapshot: Snapshot) -> dict[str, autoscaling.ElasticNodeStatus]:
    return {
        slot.node: autoscaling.ElasticNodeStatus(record.group, "starting", record.written_at)
        for _, _, record, slot in snapshot.slots(("joined",))
        if slot.node
    }


async def _end(context: ActorContext, instances: list[str]) -> None:
    """End instances. Those that could not be ended are logged."""
    if not instances or not context.leading():
        return
    try:
        await context.provider.end(instances)
    except port.ProviderError as why:
        if len(instances) == 1 or isinstance(why, port.Throttled):
            for instance in instances:
                context.warnings.warn(instance, str(why))
            return
        # Perhaps one of them keeps the others: an instance may be protected.
        for instance in instances:
            await _end(context, [instance])


async def _patch_node(context: ActorContext, change: node_registration.NodeChange) -> None:
    meta = change.node.metadata
    body = {
        "metadata": {
            "uid": meta.uid,
            "labels": change.labels,
            "annotations": change.annotations,
        }
    }
    await _patch(context, node_path(meta.name), Node, body)


async def _annotate(context: ActorContext, pod: ElasticPod, text: str) -> None:
    body = {"metadata": {"uid": pod.metadata.uid, "annotations": {autoscaling.PLANNED: text}}}
    await _patch(context, pod.path, Object, body)


async def _patch(
    context: ActorContext, path: str, kind: type[Object], body: Mapping[str, object]
) -> None:
    """Patch an object. It is logged if the API server refuses this patch; other errors are raised.

    Tenants decide what a patch may do to their pods: annotations may be full already.
    """
    try:
        await context.api.patch(path, kind, body)
    except ApiError as why:
        if why.status in REFUSED:
            context.warnings.warn(path, str(why))
        elif why.status not in GONE:
            raise
