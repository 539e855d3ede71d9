"""Reacts when the cloud takes nodes back: decided by pure functions, done by an actor.

A notice is the Node's annotation, or the provider's. Each pass decides again from what is there, so that a
pass that was interrupted is completed by the next one. A new node takes minutes, and a notice is as short:
evicted pods are planned for as if they were pending, until their successors exist.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fenka.autoscaler.actor_context import GONE, ActorContext
from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.watch import ElasticPod
from fenka.cloud.port import TYPE_LABEL, Instance, InstanceState, OfferKey
from fenka.cluster import autoscaling
from fenka.cluster.objects import Node, seconds
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import group_key
from fenka.core.nodes.problem import ZONE_LABEL
from fenka.dialects.base import InvalidRecord
from fenka.kubernetes.api_client import ApiError
from fenka.kubernetes.eviction import delete_pod, evict

log = logging.getLogger(__name__)

RECLAIM = "FenkaReclaim"
TAKEN_BACK: Final = "taken back"

SPARE_S = 10.0
"""Between the end of the last pod and that of the node: its last logs and reports are sent."""
GRACE_S = 30
"""Kubernetes' default of terminationGracePeriodSeconds."""

Machines = Mapping[str, Instance]
"""Instances by their provider ids."""


@dataclass(frozen=True, slots=True)
class Takeback:
    """A node that the cloud takes back.

    Attributes:
        at: when the node ends.
        noticed: whether that was announced; otherwise it is ending or gone.
    """

    node: Node
    at: float
    noticed: bool

    def sentence(self, now: float) -> str:
        """Return what the events say."""
        if not self.noticed:
            return "spot instance is taken back without notice"
        left = max(math.floor(self.at - now), 0)
        return (
            f"spot instance is taken back at {autoscaling.encode_time(self.at)[11:]}, in {left} s"
        )


@dataclass(frozen=True, slots=True)
class Removal:
    """A pod that has to end.

    Attributes:
        grace_s: from SIGTERM to SIGKILL; None for its own.
        forced: whatever its disruption budgets say.
        gang: all its other members are removed before those of the node, so that none is forgotten if the
            pass is interrupted. Empty for none.
    """

    pod: ElasticPod
    grace_s: int | None
    forced: bool
    gang: str = ""

    @classmethod
    def of(cls, pod: ElasticPod, grace_s: int | None = None, *, forced: bool = False) -> "Removal":
        """Return the removal of a pod, which belongs to its gang."""
        return cls(pod, grace_s, forced, group_key(pod) or "")


@dataclass(frozen=True, slots=True)
class Reclaim:
    """The steps that are still missing for one node.

    Attributes:
        announce: the node has no taint yet: add it, and tell people.
        backs_off: the offer that is not tried for a while, None if that is known already.
        removals: in this order.
    """

    takeback: Takeback
    announce: bool
    backs_off: OfferKey | None
    removals: tuple[Removal, ...]


@dataclass(frozen=True, slots=True)
class Reclaims:
    """All of a pass.

    Attributes:
        restored: nodes whose notice was withdrawn.
        invalid: sentences about annotations that are no time, by node.
    """

    reclaims: tuple[Reclaim, ...]
    restored: tuple[Node, ...]
    invalid: Mapping[str, str]


def decide_reclaims(snapshot: Snapshot) -> Reclaims:
    """Return what has to be done for all nodes that are taken back."""
    takebacks, invalid = list[Takeback](), dict[str, str]()
    machines = snapshot.instances_by_provider_id()
    for node in snapshot.nodes.values():
        try:
            takeback = _takeback(snapshot, node, machines)
        except InvalidRecord as why:
            invalid[node.metadata.name] = (
                f"annotation {autoscaling.RECLAIM_AT} is not understood: {why}"
            )
        else:
            if takeback is not None:
                takebacks.append(takeback)
    reclaimed = {takeback.node.metadata.name for takeback in takebacks}
    restored = tuple(
        node
        for name, node in snapshot.nodes.items()
        if has_taint(node, autoscaling.RECLAIMED)
        and name not in reclaimed
        and name not in invalid
        and _runs(node, machines)
    )
    reclaims = tuple(_reclaim(snapshot, takeback, machines) for takeback in takebacks)
    return Reclaims(reclaims, restored, invalid)


def has_taint(node: Node, key: str) -> bool:
    """Return whether the node has a taint with this key."""
    return any(taint.key == key for taint in node.spec.taints)


def _takeback(snapshot: Snapshot, node: Node, machines: Machines) -> Takeback | None:
    """Return the earliest notice. Raises InvalidRecord."""
    text = node.metadata.annotations.get(autoscaling.RECLAIM_AT)
    times = [] if text is None else [autoscaling.decode_time(text)]
    instance = machines.get(node.spec.provider_id)
    if instance is not None:
        times += [notice.at for notice in snapshot.notices if notice.instance == instance.id]
    if _is_lost(snapshot, node, instance):
        return Takeback(node, min([*times, snapshot.now]), noticed=False)
    return Takeback(node, min(times), noticed=True) if times else None


def _is_lost(snapshot: Snapshot, node: Node, instance: Instance | None) -> bool:
    """Return whether a spot node ends, or is gone, that neither scale-in nor its order has ended."""
    labels = node.metadata.labels
    if (
        autoscaling.ORDER not in labels
        or labels.get(autoscaling.CAPACITY) != "spot"
        or has_taint(node, autoscaling.ENDING)
    ):
        return False
    if instance is not None:
        ends = instance.state is InstanceState.ENDING
        # From the second pass on the order says that it ends, whoever did it.
        return ends and (
            has_taint(node, autoscaling.RECLAIMED) or not _ends_by_order(snapshot, instance)
        )
    # A single list without it is not enough while the node answers.
    return not node.ready and node.spec.provider_id in snapshot.missing


def _ends_by_order(snapshot: Snapshot, instance: Instance) -> bool:
    return any(slot.instance == instance.id for *_, slot in snapshot.slots(("ending",)))


def _runs(node: Node, machines: Machines) -> bool:
    instance = machines.get(node.spec.provider_id)
    if autoscaling.ORDER not in node.metadata.labels:
        return True
    return instance is not None and instance.state is InstanceState.RUNNING


def _reclaim(snapshot: Snapshot, takeback: Takeback, machines: Machines) -> Reclaim:
    node = takeback.node
    return Reclaim(
        takeback,
        announce=not has_taint(node, autoscaling.RECLAIMED),
        backs_off=_offer_to_back_off(snapshot, node, machines.get(node.spec.provider_id)),
        removals=tuple(_removals(snapshot, takeback)),
    )


def back_off_reason(node: Node) -> str:
    """Return why an offer is backed off. It names the node, so that one take-back counts once."""
    return f"node {node.metadata.name} was taken back"


def _offer_to_back_off(
    snapshot: Snapshot, node: Node, instance: Instance | None
) -> OfferKey | None:
    if autoscaling.ORDER not in node.metadata.labels:
        return None
    labels = node.metadata.labels
    offer = OfferKey(group_of(node), labels.get(TYPE_LABEL, ""), labels.get(ZONE_LABEL, ""), "spot")
    if instance is not None:
        offer = instance.offer
    elif offer not in snapshot.offers:
        return None
    reason = back_off_reason(node)
    counted = any(
        record.failure == "taken back" and record.why == reason
        for record in snapshot.orders.values()
    )
    return None if counted else offer


def _removals(snapshot: Snapshot, takeback: Takeback) -> Iterator[Removal]:
    """Yield the members of gangs that are elsewhere, then the pods of the node."""
    pods = evictable(snapshot.pods_on.get(takeback.node.metadata.name, ()))
    staying = [pod for pod in pods if not pod.is_ending]
    for pod in members_elsewhere(snapshot, staying, takeback.node):
        yield Removal.of(pod)
    for pod in pods:
        removal = _removal(snapshot.now, takeback, pod)
        if removal is not None:
            yield removal


def members_elsewhere(
    snapshot: Snapshot, pods: Iterable[ElasticPod], node: Node
) -> list[ElasticPod]:
    """Return the other members of these pods' gangs, on other nodes, that do not end yet."""
    gangs = {group_key(pod) for pod in pods} - {None}
    return [
        pod
        for pod in (snapshot.pods.values() if gangs else ())
        if pod.spec.node_name not in ("", node.metadata.name)
        and not pod.is_ending
        and group_key(pod) in gangs
    ]


def evictable(pods: Iterable[ElasticPod]) -> list[ElasticPod]:
    """Return the pods that have to leave a node before it ends."""
    return [pod for pod in pods if not (pod.of_daemon_set or pod.mirrors_file or pod.finished)]


def _removal(now: float, takeback: Takeback, pod: ElasticPod) -> Removal | None:
    """Return how the pod ends, None if it ends in time by itself."""
    ends = seconds(pod.metadata.deletion_timestamp or "")
    if not takeback.noticed:
        # A kubelet that is gone confirms nothing.
        return Removal.of(pod, int(takeback.node.ready), forced=True)
    last = takeback.at - SPARE_S
    grace = max(min(own_grace_s(pod), math.floor(last - now)), 1)
    if pod.metadata.deletion_timestamp is None:
        return Removal.of(pod, grace, forced=now >= last - own_grace_s(pod))
    if ends is None or ends <= max(last, now + 1):
        return None
    return Removal.of(pod, grace, forced=True)


def own_grace_s(pod: ElasticPod) -> int:
    """Return the seconds that the pod's spec gives it between SIGTERM and SIGKILL."""
    given = pod.spec.termination_grace_period_seconds
    return GRACE_S if given is None else max(given, 0)


def group_of(node: Node) -> str:
    """Return the group of a node that was bought."""
    return node.metadata.labels.get(autoscaling.GROUP, "")


Owner = tuple[str, str, str]
"""Namespace, kind and name: a JobSet makes its Jobs anew by the same names."""


def evicted_demand(snapshot: Snapshot) -> frozenset[str]:
    """Return UIDs of pods that will be made anew: as many of each controller as have no successor yet."""
    leaving = [
        pod
        for name, node in snapshot.nodes.items()
        if has_taint(node, autoscaling.RECLAIMED)
        for pod in evictable(snapshot.pods_on.get(name, ()))
    ]
    if not leaving:
        return frozenset()
    leaving += _rest_of_gangs(leaving, snapshot.pods.values())
    successors = Counter(_owner(pod) for pod in snapshot.pods.values() if is_open(pod))
    evicted = []
    for pod in sorted(leaving, key=lambda pod: pod.metadata.uid):
        owner = _owner(pod)
        if owner is None:
            continue
        if successors[owner]:
            successors[owner] -= 1
        else:
            evicted.append(pod.metadata.uid)
    return frozenset(evicted)


def _rest_of_gangs(leaving: Sequence[ElasticPod], pods: Iterable[ElasticPod]) -> list[ElasticPod]:
    """Return the members elsewhere that end because a gang ends whole."""
    gangs = {group_key(pod) for pod in leaving} - {None}
    known = {pod.metadata.uid for pod in leaving}
    return [
        pod
        for pod in pods
        if group_key(pod) in gangs
        and pod.metadata.uid not in known
        and pod.spec.node_name
        and not pod.finished
        and pod.metadata.deletion_timestamp is not None
    ]


def _owner(pod: ElasticPod) -> Owner | None:
    return next(
        (
            (pod.metadata.namespace, owner.kind, owner.name)
            for owner in pod.metadata.owner_references
            if owner.controller
        ),
        None,
    )


class Reclaimer:
    """Keeps pods from nodes that are taken back, and ends theirs in time.

    Attributes:
        counts: take-backs that were announced, by group.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def act(self, context: ActorContext) -> Mapping[str, autoscaling.ElasticNodeStatus]:
        """Decide by a snapshot, and do it. Return the states of nodes that are taken back."""
        snapshot = context.snapshot()
        decided = decide_reclaims(snapshot)
        for name, sentence in decided.invalid.items():
            context.recorder.record_on_node(snapshot.nodes[name], RECLAIM, sentence)
        for node in decided.restored:
            await self._restore(context, node)
        for reclaim in decided.reclaims:
            if not context.leading():
                break
            await self._reclaim(context, snapshot, reclaim)
        # A ConfigMap that cannot be written keeps no pod from its notice.
        for reclaim in decided.reclaims:
            if reclaim.backs_off is not None and context.leading():
                reason = back_off_reason(reclaim.takeback.node)
                await context.orders.fail_offer(reclaim.backs_off, TAKEN_BACK, reason, snapshot.now)
        return {
            reclaim.takeback.node.metadata.name: _status(snapshot, reclaim)
            for reclaim in decided.reclaims
            if autoscaling.ORDER in reclaim.takeback.node.metadata.labels
        }

    async def _restore(self, context: ActorContext, node: Node) -> None:
        if context.leading() and await context.remove_taint(node, autoscaling.RECLAIMED):
            context.recorder.record_on_node(node, RECLAIM, "the take-back was withdrawn")

    async def _reclaim(self, context: ActorContext, snapshot: Snapshot, reclaim: Reclaim) -> None:
        node = reclaim.takeback.node
        if reclaim.announce:
            if not await context.add_taint(node, autoscaling.RECLAIMED):
                # Somebody else wrote the Node, or it is gone; the pods are told in any case.
                log.info("the taint of node %s is written again", node.metadata.name)
            else:
                self._announce(context, snapshot, reclaim)
        await remove_pods(context, reclaim.removals)

    def _announce(self, context: ActorContext, snapshot: Snapshot, reclaim: Reclaim) -> None:
        node, sentence = reclaim.takeback.node, reclaim.takeback.sentence(snapshot.now)
        self.counts[group_of(node)] += 1
        log.warning("node %s: %s", node.metadata.name, sentence)
        context.recorder.record_on_node(node, RECLAIM, sentence)
        for removal in reclaim.removals:
            context.recorder.record_on_pod(removal.pod, RECLAIM, sentence)


async def remove_pods(context: ActorContext, removals: Iterable[Removal]) -> None:
    """Evict or delete pods in this order. A budget's refusal holds back the rest of the gang."""
    held = set[str]()
    for removal in removals:
        if not context.leading():
            return
        if removal.gang in held and not removal.forced:
            continue
        if not await _remove(context, removal) and removal.gang:
            held.add(removal.gang)


async def _remove(context: ActorContext, removal: Removal) -> bool:
    """Return whether the pod ends or is gone."""
    meta, grace_s = removal.pod.metadata, removal.grace_s
    pod = meta.namespace, meta.name, meta.uid
    try:
        if removal.forced:
            await delete_pod(context.api, *pod, grace_s or 0, RECLAIM)
        else:
            await evict(context.api, *pod, grace_s)
    except ApiError as why:
        if why.status in GONE:
            return True
        context.warnings.warn(removal.pod.full_name, f"it stays for now: {why}")
        return False
    return True


def _status(snapshot: Snapshot, reclaim: Reclaim) -> autoscaling.ElasticNodeStatus:
    name = reclaim.takeback.node.metadata.name
    known = snapshot.status.nodes.get(name)
    since = known.since if known is not None and known.state == TAKEN_BACK else snapshot.now
    return autoscaling.ElasticNodeStatus(
        group_of(reclaim.takeback.node), TAKEN_BACK, since, reclaim.takeback.at
    )
