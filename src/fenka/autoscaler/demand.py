"""Pending pods as requests of a planning case.

A rule that a case cannot express must not cause a purchase: its pod is left out, and a sentence says why.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache

import msgspec
from msgspec import structs

from fenka.autoscaler.new_nodes import labels_of_offers
from fenka.autoscaler.snapshot import LIVE, Snapshot
from fenka.autoscaler.stuck_nodes import stuck_namespaces
from fenka.autoscaler.turns import MAX_JUDGED, AffinityTurns, affinity_turns, first_in_order
from fenka.autoscaler.watch import ElasticAffinity, ElasticPod, ElasticPodSpec
from fenka.cloud.config import NOT_COUNTED
from fenka.cluster.autoscaling import GROUP
from fenka.cluster.gang_placement import GangMembers
from fenka.cluster.node_admission import ineligibility_reasons
from fenka.cluster.objects import Condition, Node, NodeStatus, ObjectMeta, Pod, seconds
from fenka.cluster.pending_queue import is_open
from fenka.cluster.pod_groups import GangPods, PodGang, gang_proximity, group_key, group_name
from fenka.cluster.queue_snapshot import time_limit_s
from fenka.cluster.spot_nodes import is_interruptible
from fenka.core.errors import FenkaError, InvalidCase
from fenka.core.inventory import Toleration
from fenka.core.nodes.case import (
    HOSTNAME_LABEL,
    OPERATORS,
    Amount,
    CaseRequest,
    Gang,
    check_request,
)
from fenka.core.request import MAX_HOST, Memory, PercentOfCard, Request
from fenka.dialects.base import GIB_MIB, Dialect, InvalidRecord, SliceRequest
from fenka.dialects.registry import DIALECTS, resource_names

UNLIMITED_S = 1e9
"""Run time assumed for a pod without a time limit. Groups with `admit: all` count as protected for it."""

RULE_LABEL = "fenka.io/eligible-"
"""Labels of a case with this prefix stand for rules that a case cannot have."""


MAX_PODS = 3000
"""Pods that are planned for at once. More take longer than a plan may, and nobody would get a node."""

MAX_PLANNED = 10_000
"""Pods that nodes are coming for. Each takes some 50 bytes of ConfigMap fenka-orders, which has 1 MiB."""


class Inexpressible(FenkaError):
    """The pod has a rule or request that a planning case cannot have."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for the nodes that a pod may use, beyond those of a case. Equal rules decide alike.

    Attributes:
        group: the group that it selects, empty for any.
        affinity: its node affinity, encoded.
        parts: the kinds of what it requests: the mode of a node admits some only.
        pod_class: names pods that are equal for offers that were found not to help them.
    """

    group: str
    affinity: bytes
    parts: tuple[SliceRequest, ...]
    pod_class: str

    def admit(self, labels: Mapping[str, str], name: str = "") -> bool:
        """Return whether group and affinity admit a node with these labels. name: empty for a new node."""
        if self.group and labels.get(GROUP) != self.group:
            return False
        if not self.affinity:
            return True
        pod = _pod_with(self.affinity)
        ready = NodeStatus(conditions=(Condition(type="Ready", status="True"),))
        node = Node(metadata=ObjectMeta(name=name, labels=labels), status=ready)
        return not ineligibility_reasons(pod, node)


@lru_cache(maxsize=2 * MAX_JUDGED)
def _pod_with(affinity: bytes) -> ElasticPod:
    decoded = msgspec.json.decode(affinity, type=ElasticAffinity)
    return ElasticPod(spec=ElasticPodSpec(affinity=decoded))


@dataclass(frozen=True, slots=True)
class Demand:
    """Pending pods.

    Attributes:
        requests: one for each pod, by its UID.
        rules: by the pod's UID.
        unserved: why pods are left out, by UID.
        gangs: rules of gangs that have some, by the gang's key.
    """

    requests: Mapping[str, CaseRequest] = field(default_factory=dict)
    rules: Mapping[str, Rules] = field(default_factory=dict)
    unserved: Mapping[str, str] = field(default_factory=dict)
    gangs: Mapping[str, Gang] = field(default_factory=dict)


def pending_demand(snapshot: Snapshot) -> Demand:
    """Return the pending pods that nodes may be bought for. Those that are planned already are among them."""
    if snapshot.evicted:
        pending = {
            uid: as_pending(snapshot.pods[uid]) for uid in snapshot.evicted if uid in snapshot.pods
        }
        snapshot = replace(snapshot, pods={**snapshot.pods, **pending})
    counted = _counted_resources(snapshot)
    demanding = [pod for pod in snapshot.pods.values() if _is_demand(snapshot, pod, counted)]
    planned, stuck = planned_uids(snapshot), stuck_namespaces(snapshot)
    unplanned = [pod for pod in demanding if pod.metadata.uid not in planned]
    waiting = [pod for pod in unplanned if pod.metadata.namespace not in stuck]
    most = max(min(MAX_PODS, MAX_PLANNED - len(planned)), 0)
    chosen = first_in_order(waiting, most)
    left_out = {pod.metadata.uid for pod in waiting} - {pod.metadata.uid for pod in chosen}
    found = demand_of(
        snapshot, [*chosen, *(pod for pod in demanding if pod.metadata.uid in planned)]
    )
    why = f"{most} pods are planned for at once, and others come first"
    told = {
        pod.metadata.uid: stuck[pod.metadata.namespace]
        for pod in unplanned
        if pod.metadata.namespace in stuck
    }
    return replace(found, unserved={**found.unserved, **dict.fromkeys(left_out, why), **told})


def planned_uids(snapshot: Snapshot) -> frozenset[str]:
    """Return the UIDs of pods for which there is a node, or one comes."""
    live = [slot for *_, slot in snapshot.slots(LIVE)]
    waiting = frozenset(pod.metadata.uid for slot in live for pod in snapshot.waiting(slot))
    return waiting | snapshot.evicted.intersection(uid for slot in live for uid in slot.pods)


def as_pending(pod: ElasticPod) -> ElasticPod:
    """Return a pod that has a node, or is about to end, as if it had just been created."""
    metadata = structs.replace(pod.metadata, deletion_timestamp=None)
    return structs.replace(pod, metadata=metadata, spec=structs.replace(pod.spec, node_name=""))


def demand_of(snapshot: Snapshot, pods: Iterable[ElasticPod]) -> Demand:
    """Return these pods as if they were pending."""
    by_gang: dict[str, list[ElasticPod]] = {}
    for pod in snapshot.pods.values():
        if (key := group_key(pod)) is not None:
            by_gang.setdefault(key, []).append(pod)
    members = _Members(snapshot)
    present = dict[str, int]()
    requests, rules, unserved = dict[str, CaseRequest](), dict[str, Rules](), dict[str, str]()
    gangs: dict[str, list[str]] = {}
    pods = list(pods)
    affinities = _affinities(snapshot, pods)
    in_domains = dict[str, Gang]()
    for pod in pods:
        uid = pod.metadata.uid
        try:
            gang = members.gang(pod) if group_name(pod) is not None else None
            if gang is not None:
                if gang.key not in present:
                    present[gang.key] = members.status(gang, by_gang.get(gang.key, ())).present
                _check_present(gang, present[gang.key])
            request = case_request(pod, snapshot.state.dialects, gang)
            if gang is not None:
                request = _in_domain(snapshot, pod, request, gang, in_domains)
            rule = _rules(pod, request, snapshot.state.dialects)
            _check_affinity(affinities, rule.affinity)
        except (Inexpressible, InvalidRecord) as why:
            unserved[uid] = str(why)
        else:
            requests[uid], rules[uid] = request, rule
        name = group_name(pod)
        if name is not None:
            gangs.setdefault(f"{pod.metadata.namespace}/{name}", []).append(uid)
    _leave_out_incomplete_gangs(snapshot, members, gangs, requests, unserved)
    return Demand(requests, rules, unserved, in_domains)


def _in_domain(
    snapshot: Snapshot,
    pod: ElasticPod,
    request: CaseRequest,
    gang: PodGang,
    in_domains: dict[str, Gang],
) -> CaseRequest:
    """Return the request of a gang's member, of the domain in which others have started.

    Args:
        snapshot: the cluster.
        pod: the member.
        request: what it requests.
        gang: its gang.
        in_domains: the rules of gangs. The gang's is added if its members must be in one domain.

    Raises:
        InvalidRecord: it requires a level that is not configured.
        Inexpressible: its gang is in several domains, or must be on one node.
    """
    topology, beside = snapshot.state.topology(), snapshot.state.gang_nodes(gang.key)
    proximity = gang_proximity([pod], topology, beside)
    if topology is None or proximity is None or not proximity.required:
        return request
    if not proximity.possible:
        raise Inexpressible(
            f"its gang has started in several {proximity.label}, and must be in one"
        )
    if proximity.label == HOSTNAME_LABEL:
        raise Inexpressible("its gang must be on one node, and nodes are planned one by one")
    labels = topology.levels[: proximity.level + 1]
    known = in_domains.get(gang.key)
    if known is None or len(known.same) < len(labels):
        in_domains[gang.key] = Gang(same=labels)
    domains = (domain or () for domain in proximity.domains_beside)
    values = dict(zip(labels, next(domains, ()), strict=False))
    return replace(request, selector={**values, **request.selector})


def _affinities(snapshot: Snapshot, pods: Sequence[ElasticPod]) -> AffinityTurns:
    """Return which node affinities of these pods are planned for."""
    planned = planned_uids(snapshot)
    labels: list[dict[str, str]] = []

    def can_hold(affinity: bytes) -> bool:
        # Few of these are judged, and none as long as all affinities are planned for.
        labels[:] = labels or labels_of_offers(snapshot)
        rules = Rules("", affinity, (), "")
        return any(rules.admit(one) for one in labels)

    return affinity_turns([(pod, affinity_rules(pod).affinity) for pod in pods], planned, can_hold)


def _check_affinity(affinities: AffinityTurns, affinity: bytes) -> None:
    if why_not := affinities.refusal(affinity):
        raise Inexpressible(why_not)


def _is_demand(snapshot: Snapshot, pod: ElasticPod, counted: frozenset[str]) -> bool:
    """Return whether the scheduler that fenka serves looks for a node with cards for it.

    counted: resources that some group has, such as MIG instances. Pods that request one count, too.
    """
    if pod.spec.node_name or not is_open(pod):
        return False
    if snapshot.schedulers and pod.spec.scheduler_name not in snapshot.schedulers:
        return False
    created = seconds(pod.metadata.creation_timestamp)
    if created is not None and snapshot.now < created + snapshot.config.scale_out.delay:
        return False
    return pod.demand(snapshot.state.dialects).requests_gpu or any(
        name in counted for container in pod.spec.containers for name in container.resources.limits
    )


def _counted_resources(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(
        name
        for group in snapshot.config.groups
        for source in (group.shape, *(snapshot.shapes.get(kind) for kind in group.types))
        if source is not None
        for name in source.resources
    )


class _Members(GangMembers):
    """Those of one moment: of pods that request alike, one is looked at."""

    def __init__(self, snapshot: Snapshot) -> None:
        pods = cache(lambda: GangPods(snapshot.pods.values()))
        super().__init__(snapshot.state, pods, lambda: snapshot.groups)
        self._requesting: dict[object, bool] = {}

    def requests_cards(self, pod: Pod) -> bool:
        """Return whether fenka places the pod. Raises InvalidRecord."""
        demand = pod.demand(self._cluster.dialects)
        if demand.dialect is None or demand.invalid is not None:
            return super().requests_cards(pod)
        key = demand.dialect.NAME, frozenset(map(_admission_kind, demand.parts))
        if key not in self._requesting:
            self._requesting[key] = super().requests_cards(pod)
        return self._requesting[key]


def _check_present(gang: PodGang, present: int) -> None:
    if present < gang.minimum:
        raise Inexpressible(
            f"its gang {gang.name} has {present} of the {gang.minimum} pods that start together"
        )


def _leave_out_incomplete_gangs(
    snapshot: Snapshot,
    members: GangMembers,
    gangs: Mapping[str, list[str]],
    requests: dict[str, CaseRequest],
    unserved: dict[str, str],
) -> None:
    """Leave out whole gangs of which a member cannot be planned for."""
    for uids in gangs.values():
        left_out = next((uid for uid in uids if uid in unserved), None)
        if left_out is None or members.gang_or_none(snapshot.pods[uids[0]]) is None:
            continue
        name = snapshot.pods[left_out].metadata.name
        for uid in uids:
            if requests.pop(uid, None) is not None:
                unserved[uid] = f"{name} of its gang is left out: {unserved[left_out]}"


def case_request(
    pod: ElasticPod, dialects: tuple[Dialect, ...] = DIALECTS, gang: PodGang | None = None
) -> CaseRequest:
    """Return what a pod requests. Raises Inexpressible, InvalidRecord."""
    _check_expressible(pod)
    parts = pod.demand(dialects).parts
    if pod.demand(dialects).in_instances:
        raise Inexpressible("it requests MIG instances, and nodes are planned for cards")
    if any(part.request.linked for part in parts):
        raise Inexpressible(
            "it requires NVLink between its cards, and nodes are planned without their connections"
        )
    if len(parts) > 1:
        raise Inexpressible(
            f"{len(parts)} of its containers request cards, and nodes are planned for one request a pod: "
            "let one container request them"
        )
    spec, host = pod.spec, pod.host_amounts()
    placed = resource_names(dialects)
    limit = time_limit_s(pod)
    request = CaseRequest(
        name=pod.full_name,
        priority=spec.priority or 0,
        gang=gang.key if gang is not None else None,
        cards=0,
        cpu_milli=min(host.get("cpu", 0), MAX_HOST),
        memory_mib=min(host.get("memory", 0), MAX_HOST),
        resources={
            name: min(amount, MAX_HOST)
            for name, amount in host.items()
            if name not in NOT_COUNTED and name not in placed
        },
        selector={key: value for key, value in spec.node_selector.items() if key != GROUP},
        tolerations=case_tolerations(spec),
        interruptible=is_interruptible(pod),
        duration_s=UNLIMITED_S if limit is None else limit,
    )
    request = with_cards(request, parts[0].request) if parts else request
    try:
        check_request("its request", request)
    except InvalidCase as why:
        # Its author must not keep the others from their plan.
        raise Inexpressible(f"no node is bought for {why}") from None
    return request


def with_cards(request: CaseRequest, asked: Request) -> CaseRequest:
    """Return the request with what is asked of cards."""
    memory = None
    if isinstance(asked.memory, PercentOfCard):
        memory = Amount(percent=asked.memory.amount)
    elif asked.memory is not None:
        unit = asked.memory.unit_mib or GIB_MIB
        amount = asked.memory.amount
        memory = Amount(mib=amount) if unit == 1 else Amount(units=amount, unit_mib=unit)
    return replace(
        request,
        cards=asked.cards,
        memory=memory,
        compute=asked.compute,
        whole=asked.whole,
        models=tuple(sorted(asked.models)),
    )


def case_tolerations(spec: ElasticPodSpec) -> tuple[Toleration, ...]:
    """Return the tolerations that a case can have. Leaving out one never makes a pod fit more nodes."""
    return tuple(toleration for toleration in spec.tolerations if toleration.operator in OPERATORS)


def _check_expressible(pod: ElasticPod) -> None:
    spec, affinity = pod.spec, pod.spec.affinity
    if any(key.startswith(RULE_LABEL) for key in spec.node_selector):
        # In a case such labels mean something else, so that the pod would seem to fit.
        raise Inexpressible(f"it selects nodes by {RULE_LABEL}…, which no node has")
    containers = (*spec.containers, *spec.init_containers)
    for present, words in (
        (_required(affinity, anti=False), "its required affinity to pods"),
        (_required(affinity, anti=True), "its required anti-affinity to pods"),
        (
            any(
                constraint.when_unsatisfiable == "DoNotSchedule"
                for constraint in spec.topology_spread_constraints
            ),
            "its required spread over nodes or zones",
        ),
        (spec.resource_claims, "its resource claims"),
        (
            any(port.host_port for container in containers for port in container.ports),
            "its host ports",
        ),
    ):
        if present:
            raise Inexpressible(
                f"no node is bought for it, because {words} cannot be planned for: remove them, "
                "or add a node by hand"
            )


def _required(affinity: ElasticAffinity | None, *, anti: bool) -> bool:
    if affinity is None:
        return False
    terms = affinity.pod_anti_affinity if anti else affinity.pod_affinity
    return terms is not None and bool(terms.required_during_scheduling_ignored_during_execution)


def affinity_rules(pod: ElasticPod) -> Rules:
    """Return the rules of a pod's node affinity alone."""
    affinity = pod.spec.affinity
    node = affinity.node_affinity if affinity is not None else None
    if node is None or node.required_during_scheduling_ignored_during_execution is None:
        return Rules("", b"", (), "")
    return Rules("", msgspec.json.encode(ElasticAffinity(node_affinity=node)), (), "")


def _rules(pod: ElasticPod, request: CaseRequest, dialects: tuple[Dialect, ...]) -> Rules:
    encoded = affinity_rules(pod).affinity
    group = pod.spec.node_selector.get(GROUP, "")
    parts = tuple(dict.fromkeys(_admission_kind(part) for part in pod.demand(dialects).parts))
    return Rules(group, encoded, parts, class_key(request, encoded))


def _admission_kind(part: SliceRequest) -> SliceRequest:
    """Return a request that nodes' modes admit alike. There are few, whatever amounts pods request."""
    asked = part.request
    request = Request(
        memory=None if asked.memory is None else Memory(1),
        compute=min(asked.compute, 1),
        whole=asked.whole,
        instance=asked.instance,
    )
    return SliceRequest(
        (), request, requires_opt_in=part.requires_opt_in, weight=min(part.weight, 1)
    )


def class_key(request: CaseRequest, affinity: bytes = b"") -> str:
    """Return a name of all pods of a namespace that are equal for planning, whatever their names and gangs.

    The namespace counts: what keeps a pod from the node that was bought for it may be its owner's mistake,
    such as a volume that does not exist.
    """
    facts = {key: value for key, value in asdict(request).items() if key not in _OWN}
    facts["namespace"] = request.name.partition("/")[0]
    encoded = msgspec.json.encode(facts, order="deterministic") + affinity
    return hashlib.sha256(encoded).hexdigest()[:16]


_OWN = ("name", "gang", "priority", "count")
"""Fields of a request by which no node is excluded."""
