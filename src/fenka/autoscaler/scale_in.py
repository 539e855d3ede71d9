"""Which nodes end, and how: decided by pure functions, done by an actor.

A node is marked with a taint, looked at again, emptied, and ended with its instance. Each pass decides by
what is there, so a pass that was interrupted anywhere is completed, or taken back, by a later one. What-ifs
are the planner's own cases without groups: nothing is bought.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from msgspec import structs

from fenka.autoscaler.actor_context import ActorContext
from fenka.autoscaler.demand import as_pending, class_key, demand_of
from fenka.autoscaler.plan_case import case_of
from fenka.autoscaler.reclaim import (
    Removal,
    evictable,
    group_of,
    has_taint,
    members_elsewhere,
    remove_pods,
)
from fenka.autoscaler.snapshot import Snapshot
from fenka.autoscaler.supply import protected_until
from fenka.autoscaler.turns import first_in_order
from fenka.autoscaler.watch import DO_NOT_DISRUPT, SAFE_TO_EVICT, ElasticPod
from fenka.cloud.port import Instance, InstanceState
from fenka.cluster import autoscaling, spot_nodes
from fenka.cluster.objects import Node
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import group_key
from fenka.cluster.pod_preemption import budgets_for
from fenka.core.nodes.case import BuyLimits, CaseRequest, PlanningCase
from fenka.core.nodes.plan import make_plan
from fenka.dialects.base import InvalidRecord

log = logging.getLogger(__name__)

SCALE_IN = "FenkaScaleIn"
UNSEEN_S = 60.0
"""A taint that was written is seen by then, or was removed at once."""


def why_node_is_kept(node: Node) -> str:
    """Return why nobody but people may end the node, empty if that is not so.

    Other autoscalers' annotations on nodes are no reason: every node that was bought has them, so that they
    leave it alone.
    """
    meta = node.metadata
    return (
        autoscaling.KEEP
        if "true" in (meta.labels.get(autoscaling.KEEP), meta.annotations.get(autoscaling.KEEP))
        else ""
    )


def why_pods_are_kept(snapshot: Snapshot, pods: Sequence[ElasticPod]) -> str:
    """Return why some of these pods may not be evicted now, empty if all may."""
    for pod in pods:
        why = _why_pod_is_kept(pod)
        if why:
            return f"{pod.full_name} {why}"
    return _exhausted_budget(snapshot, pods)


def _why_pod_is_kept(pod: ElasticPod) -> str:
    annotations, owners = pod.metadata.annotations, pod.metadata.owner_references
    if annotations.get(DO_NOT_DISRUPT) == "true":
        return f"has {DO_NOT_DISRUPT}"
    if annotations.get(SAFE_TO_EVICT) == "false":
        return f"has {SAFE_TO_EVICT}=false"
    if not any(owner.controller and owner.kind != "Node" for owner in owners):
        return "has no controller that would make it anew"
    if not spot_nodes.is_interruptible(pod) and any(
        volume.empty_dir is not None or volume.host_path is not None for volume in pod.spec.volumes
    ):
        return "has a local volume"
    return ""


def _exhausted_budget(snapshot: Snapshot, pods: Sequence[ElasticPod]) -> str:
    """Return the budget that does not allow to evict all these pods at once."""
    allowed, needed = dict[str, int](), Counter[str]()
    for pod in pods:
        for budget in budgets_for(pod, snapshot.budgets):
            allowed[budget.name] = budget.allowed
            needed[budget.name] += 1
    name = next((name for name, count in needed.items() if count > allowed[name]), None)
    return f"disruption budget {name} is exhausted" if name else ""


def holds_cards(snapshot: Snapshot, pods: Iterable[ElasticPod]) -> bool:
    """Return whether any of the pods requests something of a card."""
    return any(
        pod.demand(snapshot.state.dialects).requests_gpu
        or any(
            name.startswith("nvidia.com/")
            for container in (*pod.spec.containers, *pod.spec.init_containers)
            for name in container.resources.limits
        )
        for pod in pods
    )


MAX_PENDING = 300
"""Pending pods that a what-if is about."""


def fit_elsewhere(snapshot: Snapshot, pods: Sequence[ElasticPod], without: Collection[str]) -> bool:
    """Return whether all these pods, which run, have room at once on nodes other than these.

    They leave the room that they have now: members of a gang may be on any node.
    """
    if not pods:
        return True
    gone = autoscaling.encode_time(snapshot.now)
    leaving = {pod.metadata.uid: _with_metadata(pod, deletion_timestamp=gone) for pod in pods}
    what_if = replace(
        snapshot,
        nodes={name: node for name, node in snapshot.nodes.items() if name not in without},
        pods_on={
            name: [leaving.get(pod.metadata.uid, pod) for pod in there]
            for name, there in snapshot.pods_on.items()
        },
    )
    return not _left_out(what_if, [as_pending(pod) for pod in pods], what_if.nodes)


def pending_pods(snapshot: Snapshot) -> list[ElasticPod]:
    """Return pods for which a scheduler looks for a node, or will after their node is taken back.

    Of very many only the first: they are planned for in the leader's own process.
    """
    evicted = [
        as_pending(snapshot.pods[uid]) for uid in sorted(snapshot.evicted) if uid in snapshot.pods
    ]
    return first_in_order([*filter(is_open, snapshot.pods.values()), *evicted], MAX_PENDING)


def have_room_for_one(
    snapshot: Snapshot, nodes: Sequence[Node], pods: Sequence[ElasticPod]
) -> bool:
    """Return whether any of these pending pods has room on any of the nodes, marked ones among them."""
    if not pods or not nodes:
        return False
    what_if = replace(snapshot, nodes={node.metadata.name: _without_taint(node) for node in nodes})
    return _placed(what_if, pods, what_if.nodes) > 0


def without_room(
    snapshot: Snapshot, pods: Sequence[ElasticPod], without: Collection[str]
) -> list[ElasticPod]:
    """Return those of these pending pods that do not have room at once on nodes other than these."""
    nodes = {name: node for name, node in snapshot.nodes.items() if name not in without}
    return _left_out(replace(snapshot, nodes=nodes), pods, nodes)


def _left_out(
    snapshot: Snapshot, pods: Sequence[ElasticPod], nodes: Mapping[str, Node]
) -> list[ElasticPod]:
    case, uids = _case(snapshot, pods, nodes)
    placed = {uids[placement.request] for placement in make_plan(case, _no_time).placements}
    return [pod for pod in pods if pod.metadata.uid not in placed]


def _placed(snapshot: Snapshot, pods: Sequence[ElasticPod], nodes: Collection[str]) -> int:
    """Return how many of the pods have room, of gangs also a part, and of spot nodes also others' pods."""
    case, _ = _case(snapshot, pods, nodes)
    requests = tuple(
        replace(request, gang=None, interruptible=True) for request in _distinct(case.requests)
    )
    return len(make_plan(replace(case, requests=requests, gangs={}), _no_time).placements)


def _distinct(requests: Iterable[CaseRequest]) -> Iterable[CaseRequest]:
    """Return one of all requests that are equal but for their names."""
    return {class_key(request): request for request in requests}.values()


def _case(
    snapshot: Snapshot, pods: Sequence[ElasticPod], nodes: Collection[str]
) -> tuple[PlanningCase, Mapping[str, str]]:
    """Return the case of these pods and nodes, and the pods' UIDs by the names of their requests."""
    snapshot = replace(snapshot, pods={**snapshot.pods, **{pod.metadata.uid: pod for pod in pods}})
    demand = demand_of(snapshot, pods)
    planned = case_of(snapshot, demand.requests, demand)
    case = replace(
        planned.case,
        groups=(),
        nodes=tuple(node for node in planned.case.nodes if node.name in nodes),
        limits=BuyLimits(),
    )
    return case, planned.pods


def _no_time() -> float:
    """A first plan is made in any case, and decides."""
    return 0.0


def _without_taint(node: Node) -> Node:
    taints = tuple(taint for taint in node.spec.taints if taint.key != autoscaling.ENDING)
    return structs.replace(node, spec=structs.replace(node.spec, taints=taints))


def _with_metadata(pod: ElasticPod, **fields: str) -> ElasticPod:
    return structs.replace(pod, metadata=structs.replace(pod.metadata, **fields))


SETTLE_S = 5.0
"""From the taint to the second look: by then schedulers know of it, and their last bindings are done."""
OVERDUE_S = 300.0
"""Time after its take-back at which a node that still runs is ended: it costs money, and admits nobody."""
MAX_LOOKS = 10
"""Idle nodes about which what-ifs are asked in a pass; the others wait for the next one."""
MAX_REPACK_TRIES = 10
"""What-ifs of repacking in a pass. The nodes take turns."""

IN_USE, IDLE, ENDS = "in use", "idle", "ending"
KEPT_BY_GROUP = "kept: group "
"""A node that its group's min keeps is idle, too: the clock goes on."""

Action = Literal["mark", "unmark", "empty", "end"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A node that has the taint.

    Attributes:
        since: when this leader wrote the taint, or saw it first.
        pods: UIDs of those there then.
        seen: whether the cluster has shown the taint.
    """

    since: float
    pods: frozenset[str]
    seen: bool = True


@dataclass(frozen=True, slots=True)
class ScaleInStep:
    """The next thing to do with a node.

    Attributes:
        action: `mark` adds the taint, `unmark` removes it, `empty` evicts, `end` ends instance and Node.
        why: for the event.
        removals: for `empty`.
        instance: for `end`; None if the cloud has ended it already.
    """

    action: Action
    node: Node
    why: str = ""
    removals: tuple[Removal, ...] = ()
    instance: Instance | None = None


@dataclass(frozen=True, slots=True)
class ScaleInDecision:
    """The decisions of a pass. states: of the nodes that were bought."""

    states: Mapping[str, autoscaling.ElasticNodeStatus] = field(default_factory=dict)
    steps: tuple[ScaleInStep, ...] = ()


def decide_scale_in(snapshot: Snapshot, marked: Mapping[str, Marked]) -> ScaleInDecision:
    """Return the states of all nodes that were bought and offer their cards, and the next steps.

    Args:
        snapshot: what is there.
        marked: the nodes that have the taint, as this leader remembers them.
    """
    if snapshot.instances_at is None:
        return ScaleInDecision()
    return _Pass(snapshot, marked).run()


class _Pass:
    def __init__(self, snapshot: Snapshot, marked: Mapping[str, Marked]) -> None:
        self._snapshot, self._marked = snapshot, marked
        self._machines = snapshot.instances_by_provider_id()
        starting = {slot.node for *_, slot in snapshot.coming()}
        self._nodes = [
            node
            for node in snapshot.own_nodes()
            if node.metadata.name not in starting and not _is_being_reclaimed(snapshot, node)
        ]
        self._live: Counter[str] = Counter()
        """Nodes of each group that neither end nor are about to."""
        for node in self._nodes:
            if node.ready and node.metadata.name not in marked:
                self._live[group_of(node)] += 1
        self._ending = set(marked)
        self._moving: list[ElasticPod] = []
        """Pods that leave the nodes chosen in this pass."""
        self._looks = 0
        self._states: dict[str, autoscaling.ElasticNodeStatus] = {}
        self._steps: list[ScaleInStep] = []

    def run(self) -> ScaleInDecision:
        idle = []
        for node in self._nodes:
            known = self._marked.get(node.metadata.name)
            if known is not None:
                self._continue(node, known)
            elif self._is_idle(node):
                idle.append(node)
            else:
                self._set(node, IN_USE)
        for node in sorted(idle, key=self._dearest_first):
            self._consider(node)
        if self._snapshot.config.scale_in.mode == "repack":
            self._repack()
        return ScaleInDecision(self._states, tuple(self._steps))

    # ---- nodes that are marked ----

    def _continue(self, node: Node, known: Marked) -> None:
        snapshot, instance = self._snapshot, self._instance(node)
        if not known.seen:
            self._set(node, ENDS)
            return
        if instance is None or instance.state is InstanceState.ENDING:
            self._set(node, ENDS)
            if instance is not None or node.spec.provider_id in snapshot.missing:
                self._steps.append(ScaleInStep("end", node))
            return
        pods = self._pods(node)
        staying = [pod for pod in pods if not pod.is_ending]
        why = next(filter(None, self._changes(node, known, staying)), "")
        if why:
            self._ending.discard(node.metadata.name)
            self._live[group_of(node)] += node.ready
            self._set(node, IN_USE if staying else IDLE)
            self._steps.append(ScaleInStep("unmark", node, f"the node stays: {why}"))
            return
        self._set(node, ENDS)
        if snapshot.now < known.since + SETTLE_S:
            return
        if staying:
            self._steps.append(ScaleInStep("empty", node, removals=self._removals(node, staying)))
        elif not pods and not self._is_allocated(node):
            self._steps.append(ScaleInStep("end", node, instance=instance))

    def _changes(self, node: Node, known: Marked, staying: Sequence[ElasticPod]) -> Iterator[str]:
        """Yield what has changed since the node was marked, and what did not matter as an empty text."""
        snapshot, group = self._snapshot, group_min(self._snapshot, node)
        newcomer = next((pod for pod in staying if pod.metadata.uid not in known.pods), None)
        yield f"{newcomer.full_name} has come" if newcomer is not None else ""
        yield group.sentence if self._live[group.name] < group.least else ""
        leaving = self._leaving(node, staying)
        yield why_node_is_kept(node) or why_pods_are_kept(snapshot, leaving)
        yield "a pending pod is planned for it" if self._is_wanted(node) else ""
        if holds_cards(snapshot, staying) and not self._may_repack(leaving):
            yield "its cards are in use"
        waiting = self._pending
        if known.pods and waiting:
            # Those that were evicted from here have room elsewhere, and do not count.
            waiting = without_room(snapshot, waiting, self._ending)
        yield "a pending pod could use it" if self._is_useful(node, waiting) else ""
        self._moving += leaving
        if not fit_elsewhere(snapshot, self._moving, self._ending):
            yield "its pods have no room elsewhere any more"

    # ---- idle nodes ----

    def _is_idle(self, node: Node) -> bool:
        pods = self._pods(node)
        return not (
            holds_cards(self._snapshot, pods)
            or any(group_key(pod) for pod in pods)
            or self._is_allocated(node)
            or self._is_wanted(node)
        )

    def _consider(self, node: Node) -> None:
        """Decide about an idle node; the dearest come first."""
        snapshot, pods, group = self._snapshot, self._pods(node), group_min(self._snapshot, node)
        kept = why_node_is_kept(node) or why_pods_are_kept(snapshot, pods)
        if kept:
            self._set(node, f"kept: {kept}")
            return
        since = self._since(node, IDLE, KEPT_BY_GROUP)
        if self._live[group.name] - node.ready < group.least:
            self._set(node, f"kept: {group.sentence}", since)
            return
        until = max(since + snapshot.config.scale_in.delay, self._quiet_at)
        if snapshot.now < until:
            self._set(node, IDLE, since, until)
            self._live[group.name] -= node.ready
        elif (pods or self._is_any_useful) and not self._may_look():
            self._set(node, IDLE, since, until)
        elif self._is_useful(node, self._pending):
            self._set(node, "kept: a pending pod could use it")
        elif not fit_elsewhere(
            snapshot, [*self._moving, *pods], {*self._ending, node.metadata.name}
        ):
            self._set(node, IN_USE)
        else:
            self._mark(node, pods, f"idle for {snapshot.now - since:.0f} s: the node ends")

    def _mark(self, node: Node, leaving: Sequence[ElasticPod], why: str) -> None:
        self._set(node, ENDS)
        self._steps.append(ScaleInStep("mark", node, why))
        self._ending.add(node.metadata.name)
        self._moving += leaving
        self._live[group_of(node)] -= node.ready

    # ---- nodes whose pods fit elsewhere ----

    def _repack(self) -> None:
        """Mark one node whose pods all have room elsewhere, if nothing else is going on."""
        snapshot = self._snapshot
        coming = any(snapshot.coming())
        if self._ending or coming or self._pending or snapshot.now < self._quiet_at:
            return
        nodes = [node for node in self._nodes if self._could_repack(node)]
        nodes.sort(key=self._dearest_first)
        if len(nodes) > MAX_REPACK_TRIES:
            first = int(snapshot.now) % len(nodes)
            nodes = [*nodes[first:], *nodes[:first]][:MAX_REPACK_TRIES]
        for node in nodes:
            leaving = self._leaving(node, self._pods(node))
            if not self._may_repack(leaving) or why_pods_are_kept(snapshot, leaving):
                continue
            if fit_elsewhere(snapshot, leaving, {node.metadata.name}):
                saved = f"{self._price(node):g} an hour is saved: its pods have room elsewhere"
                self._mark(node, leaving, saved)
                return

    def _could_repack(self, node: Node) -> bool:
        snapshot, name = self._snapshot, node.metadata.name
        pods, group = self._pods(node), group_min(self._snapshot, node)
        return (
            bool(pods)
            and not any(pod.is_ending for pod in pods)
            and self._states[name].state == IN_USE
            and snapshot.now >= self._states[name].since + snapshot.config.scale_in.delay
            and self._price(node) > snapshot.config.scale_in.repack_saves
            and self._live[group.name] - node.ready >= group.least
            and not why_node_is_kept(node)
            and not self._is_wanted(node)
            and not self._is_allocated(node, beside=pods)
        )

    def _may_repack(self, leaving: Sequence[ElasticPod]) -> bool:
        return self._snapshot.config.scale_in.mode == "repack" and all(
            map(spot_nodes.is_interruptible, leaving)
        )

    # ---- facts ----

    def _instance(self, node: Node) -> Instance | None:
        return self._machines.get(node.spec.provider_id)

    def _pods(self, node: Node) -> list[ElasticPod]:
        return evictable(self._snapshot.pods_on.get(node.metadata.name, ()))

    def _leaving(self, node: Node, staying: Sequence[ElasticPod]) -> list[ElasticPod]:
        """Return what has to leave with these pods of a node: their gangs, whole."""
        return [*members_elsewhere(self._snapshot, staying, node), *staying]

    def _removals(self, node: Node, staying: Sequence[ElasticPod]) -> tuple[Removal, ...]:
        return tuple(Removal.of(pod) for pod in self._leaving(node, staying))

    def _is_allocated(self, node: Node, beside: Sequence[ElasticPod] = ()) -> bool:
        """Return whether its cards are held, also by pods that only the node still knows."""
        uids = {pod.metadata.uid for pod in beside}
        return any(
            allocation.pod.metadata.uid not in uids and (node.ready or not allocation.lingering)
            for allocation in self._snapshot.state.allocations(node.metadata.name)
        )

    def _is_wanted(self, node: Node) -> bool:
        name = node.metadata.name
        return name in self._nominated or bool(self._snapshot.planned_pods(name))

    @cached_property
    def _nominated(self) -> frozenset[str]:
        return frozenset(pod.status.nominated_node_name for pod in self._pending)

    @cached_property
    def _pending(self) -> list[ElasticPod]:
        return pending_pods(self._snapshot)

    def _is_useful(self, node: Node, waiting: Sequence[ElasticPod]) -> bool:
        """Return whether a pending pod has room there."""
        return self._is_any_useful and have_room_for_one(self._snapshot, [node], waiting)

    @cached_property
    def _is_any_useful(self) -> bool:
        return have_room_for_one(self._snapshot, self._nodes, self._pending)

    def _may_look(self) -> bool:
        """Return whether this pass may ask another what-if about an idle node."""
        self._looks += 1
        return self._looks <= MAX_LOOKS

    @cached_property
    def _quiet_at(self) -> float:
        """When the pause after the last scale-out is over."""
        asked = [
            record.asked_at or record.written_at
            for record in self._snapshot.orders.values()
            if record.slots and record.failure is None
        ]
        launched = [instance.launched_at for instance in self._snapshot.instances.values()]
        return max([*asked, *launched, 0.0]) + self._snapshot.config.scale_in.cooldown

    def _dearest_first(self, node: Node) -> tuple[float, str]:
        return -self._price(node), node.metadata.name

    def _price(self, node: Node) -> float:
        snapshot, instance = self._snapshot, self._instance(node)
        offer = snapshot.offers.get(instance.offer) if instance is not None else None
        config = snapshot.group(group_of(node))
        return offer.price if offer is not None else (config.price or 0.0) if config else 0.0

    def _since(self, node: Node, *states: str) -> float:
        known = self._snapshot.status.nodes.get(node.metadata.name)
        same = known is not None and known.state.startswith(states)
        return known.since if known is not None and same else self._snapshot.now

    def _set(
        self, node: Node, state: str, since: float | None = None, until: float | None = None
    ) -> None:
        if since is None:
            since = self._since(node, state)
        protected = self._protected_until(node)
        status = autoscaling.ElasticNodeStatus(group_of(node), state, since, until, protected)
        self._states[node.metadata.name] = status

    def _protected_until(self, node: Node) -> float | None:
        snapshot, instance = self._snapshot, self._instance(node)
        config = snapshot.group(group_of(node))
        if instance is None or config is None:
            return None
        until = protected_until(config, instance)
        return until if until is not None and until > snapshot.now else None


@dataclass(frozen=True, slots=True)
class GroupMin:
    """How many nodes a group always has."""

    name: str
    least: int

    @property
    def sentence(self) -> str:
        """Return why a node stays for it."""
        return f"group {self.name} has a min of {self.least}"


def group_min(snapshot: Snapshot, node: Node) -> GroupMin:
    """Return the min of a node's group; 0 for a group that was removed from the configuration."""
    config = snapshot.group(group_of(node))
    return GroupMin(group_of(node), config.min if config is not None else 0)


def _is_being_reclaimed(snapshot: Snapshot, node: Node) -> bool:
    """Return whether the cloud is about to end the node. Once that is overdue, scale-in ends it."""
    if not has_taint(node, autoscaling.RECLAIMED):
        return False
    with contextlib.suppress(InvalidRecord):
        at = autoscaling.decode_time(node.metadata.annotations.get(autoscaling.RECLAIM_AT, ""))
        return snapshot.now < at + OVERDUE_S
    return True


class ScaleInActor:
    """Ends nodes. Its memory only delays: after a change of the leader each look is repeated."""

    def __init__(self) -> None:
        self._marked: dict[str, Marked] = {}

    async def act(self, context: ActorContext) -> Mapping[str, autoscaling.ElasticNodeStatus]:
        """Decide by a snapshot, and do it. Return the states of nodes that offer their cards."""
        snapshot = context.snapshot()
        self._remember(snapshot)
        decided = decide_scale_in(snapshot, self._marked)
        for step in decided.steps:
            if not context.leading():
                break
            await self._do(context, snapshot, step)
        return decided.states

    def _remember(self, snapshot: Snapshot) -> None:
        """Follow which nodes have the taint, with the pods that were there at first."""
        tainted = [
            node.metadata.name
            for node in snapshot.own_nodes()
            if has_taint(node, autoscaling.ENDING)
        ]
        unseen = {
            name: marked
            for name, marked in self._marked.items()
            if not marked.seen and name in snapshot.nodes and snapshot.now < marked.since + UNSEEN_S
        }
        seen = {
            name: replace(self._marked.get(name) or _marked(snapshot, name), seen=True)
            for name in tainted
        }
        # The clock may have been set back.
        seen = {
            name: replace(marked, since=min(marked.since, snapshot.now))
            for name, marked in seen.items()
        }
        # A user who removes the taint keeps the node.
        self._marked = {**unseen, **seen}

    async def _do(self, context: ActorContext, snapshot: Snapshot, step: ScaleInStep) -> None:
        node, name = step.node, step.node.metadata.name
        match step.action:
            case "mark":
                if await context.add_taint(node, autoscaling.ENDING):
                    # Only from now on schedulers can know.
                    now = context.snapshot().now
                    self._marked[name] = replace(_marked(snapshot, name), since=now, seen=False)
                    context.recorder.record_on_node(node, SCALE_IN, step.why)
            case "unmark":
                if await context.remove_taint(node, autoscaling.ENDING):
                    del self._marked[name]
                    context.recorder.record_on_node(node, SCALE_IN, step.why)
            case "empty":
                await remove_pods(context, step.removals)
            case "end":
                await self._end(context, step)

    async def _end(self, context: ActorContext, step: ScaleInStep) -> None:
        """End instance and Node, if the API server itself shows no pod that came in this moment."""
        node = step.node
        if step.instance is not None:
            if await _has_pods(context, node) or not context.leading():
                return
            await context.provider.end([step.instance.id])
            log.info("node %s is ended", node.metadata.name)
            context.recorder.record_on_node(node, SCALE_IN, "the node is ended: nothing needs it")
        if context.leading():
            await context.delete_node(node)


def _marked(snapshot: Snapshot, name: str) -> Marked:
    pods = evictable(snapshot.pods_on.get(name, ()))
    return Marked(snapshot.now, frozenset(pod.metadata.uid for pod in pods))


async def _has_pods(context: ActorContext, node: Node) -> bool:
    selector = f"spec.nodeName={node.metadata.name}"
    pods, _ = await context.api.list("/api/v1/pods", ElasticPod, fieldSelector=selector)
    return bool(evictable(pods))
