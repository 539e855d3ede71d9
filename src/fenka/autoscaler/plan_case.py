"""The planning case of a snapshot: what `make_plan` is asked, and what its answer means, also for dry runs.

A case cannot express node affinity, the modes of nodes, or offers that were found not to help a pod. Such
rules become labels of the machines that they admit, and selectors of the requests that have them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fenka.autoscaler import supply
from fenka.autoscaler.demand import RULE_LABEL, Demand, Rules, pending_demand, planned_uids
from fenka.autoscaler.reclaim import evicted_demand
from fenka.autoscaler.snapshot import Snapshot, offer_of
from fenka.autoscaler.stores import ShapeStore
from fenka.autoscaler.turns import LEVELS, turn_levels
from fenka.autoscaler.watch import ElasticCluster
from fenka.cloud.config import AutoscalerConfig
from fenka.cloud.port import TYPE_LABEL, InstanceState, Offer, OfferKey
from fenka.cluster.autoscaling import AutoscalerStatus
from fenka.cluster.node_admission import AdmissionRule, admission_rule, mode_labels
from fenka.core.nodes.case import (
    FORMAT,
    PRICE_DECIMALS,
    BuyLimits,
    CaseNode,
    CaseRequest,
    Gang,
    NodeGroup,
    PlanningCase,
    with_nodes,
)
from fenka.core.nodes.plan import NodePlan, Solver, Unserved, make_plan
from fenka.core.nodes.problem import labels_of
from fenka.dialects.nodes import has_mode_label
from fenka.kubernetes.api_client import Api
from fenka.kubernetes.autoscaler_reader import AutoscalerState
from fenka.kubernetes.reader import read_scheduler_options

M = TypeVar("M", NodeGroup, CaseNode)

MIN_PRIORITY = -(2**31)
"""No pod has less."""

RULE_WORDS = "that its affinity, the node's mode or an earlier misfit excludes"


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A case and the names in it.

    Attributes:
        pods: UIDs, by the request's name. Each request is one pod.
        offers: by the case's group.
        slots: order and number of the nodes that are coming, by the case's node.
        unserved: why pods are left out of the case, by UID.
        most: how many nodes each group of the configuration may still get.
    """

    case: PlanningCase
    pods: Mapping[str, str]
    offers: Mapping[str, OfferKey]
    slots: Mapping[str, tuple[str, int]]
    unserved: Mapping[str, str]
    most: Mapping[str, int]


def plan_case(snapshot: Snapshot) -> PlanCase:
    """Return the case of the pods that are pending and not planned for."""
    demand = pending_demand(snapshot)
    return case_of(snapshot, unplanned(snapshot, demand), demand)


def unplanned(snapshot: Snapshot, demand: Demand) -> dict[str, CaseRequest]:
    """Return the requests of pods that no slot waits for, by UID."""
    planned = planned_uids(snapshot)
    return {uid: request for uid, request in demand.requests.items() if uid not in planned}


def is_below_min(snapshot: Snapshot) -> bool:
    """Return whether a group has fewer nodes than its min."""
    counts = Counter[str]()
    for key, count in sizes(snapshot).items():
        counts[key.group] += count
    return any(counts[group.name] < group.min for group in snapshot.config.groups)


def case_of(snapshot: Snapshot, requests: Mapping[str, CaseRequest], demand: Demand) -> PlanCase:
    """Return the case of these pods. requests: by UID, some of those of the demand."""
    offered = supply.offered_groups(snapshot)
    nodes = supply.case_nodes(
        snapshot, without_cards=any(not request.cards for request in requests.values())
    )
    groups, most = _bounded(snapshot, offered)
    rules = {uid: demand.rules[uid] for uid in requests}
    groups, nodes, requests = _with_rules(snapshot, offered, groups, nodes, requests, rules)
    limits = _limits(snapshot, groups)
    if _may_leave_out(limits, groups, most, len(requests)):
        requests = _with_turns(snapshot, requests)
    gangs = {
        request.gang: demand.gangs.get(request.gang, Gang())
        for request in requests.values()
        if request.gang is not None
    }
    case = PlanningCase(
        format=FORMAT,
        groups=tuple(groups),
        requests=tuple(requests.values()),
        nodes=tuple(nodes),
        gangs=gangs,
        limits=limits,
    )
    return PlanCase(
        case=case,
        pods={request.name: uid for uid, request in requests.items()},
        offers={offer.group.name: offer.offer for offer in offered},
        slots={
            supply.coming_name(name, number): (name, number)
            for name, number, *_ in snapshot.coming()
        },
        unserved=demand.unserved,
        most=most,
    )


# ---- bounds ----


def sizes(snapshot: Snapshot) -> dict[OfferKey, int]:
    """Return how many nodes of each offer there are or were asked for, without those that end."""
    counts: dict[OfferKey, int] = {}
    assigned = set[str]()
    for record in snapshot.orders.values():
        for slot in record.slots:
            if slot.state in ("gone", "failed", "ending"):
                assigned.add(slot.instance)
            elif not slot.instance or slot.instance not in snapshot.instances:
                # Asked for, and not listed yet.
                counts[offer_of(record)] = counts.get(offer_of(record), 0) + 1
    for instance in snapshot.instances.values():
        if instance.state is not InstanceState.ENDING and instance.id not in assigned:
            counts[instance.offer] = counts.get(instance.offer, 0) + 1
    return counts


def _bounded(
    snapshot: Snapshot, offered: Sequence[supply.OfferedGroup]
) -> tuple[list[NodeGroup], dict[str, int]]:
    """Return the groups with their sizes and bounds, and how many nodes each group may still get."""
    counts = sizes(snapshot)
    most, groups = dict[str, int](), dict[str, NodeGroup]()
    for config in snapshot.config.groups:
        total = sum(
            counts.get(key, 0) for key in {*config.offers, *counts} if key.group == config.name
        )
        left = most[config.name] = max(config.max - total, 0)
        own = [offer for offer in offered if offer.offer.group == config.name]
        own.sort(key=lambda offer: (offer.group.stock == 0, offer.group.price))
        missing = max(config.min - total, 0)
        for offer in own:
            size = counts.get(offer.offer, 0)
            least = missing if offer is own[0] else 0
            groups[offer.group.name] = replace(
                offer.group, size=size, min=size + least if least else 0, max=size + left
            )
    return [groups[offer.group.name] for offer in offered], most


def within_most(case: PlanCase, plan: NodePlan) -> PlanningCase | None:
    """Return a narrower case if the plan exceeds the max of a group with several offers; else None.

    Offers with pods of the highest priority keep what the group may still get, and of these the cheapest.
    """
    priorities = {request.name: request.priority for request in case.case.requests}
    highest = dict[str, int]()
    for pod in plan.placements:
        name = pod.node.removeprefix("new:").rpartition(":")[0]
        highest[name] = max(highest.get(name, MIN_PRIORITY), priorities[pod.request])
    bought = {node.group: node.count for node in plan.nodes}
    bounds: dict[str, int] = {}
    for group, most in case.most.items():
        own = [offer for offer in case.case.groups if case.offers[offer.name].group == group]
        if sum(bought.get(offer.name, 0) for offer in own) <= most:
            continue
        left = most
        own.sort(key=lambda offer: (-highest.get(offer.name, MIN_PRIORITY), offer.price))
        for offer in own:
            count = min(bought.get(offer.name, 0), left)
            left -= count
            bounds[offer.name] = offer.size + count
    if not bounds:
        return None
    groups = tuple(
        replace(group, max=max(bounds[group.name], group.min)) if group.name in bounds else group
        for group in case.case.groups
    )
    return replace(case.case, groups=groups)


def _limits(snapshot: Snapshot, groups: Sequence[NodeGroup]) -> BuyLimits:
    """Return what the limits leave for new nodes; at least what the groups' min requires."""
    limits, counts = snapshot.config.limits, sizes(snapshot)
    required = {group.name: max(group.min - group.size, 0) for group in groups}
    price = sum(count * snapshot.price_of(key) for key, count in counts.items())
    cards = {}
    for model, most in limits.cards.items():
        per_node = {
            group.name: sum(card.model == model for card in group.cards) for group in groups
        }
        there = sum(per_node[group.name] * group.size for group in groups)
        least = sum(per_node[group.name] * required[group.name] for group in groups)
        cards[model] = max(most - there, least)
    return BuyLimits(
        nodes=None
        if limits.nodes is None
        else max(limits.nodes - sum(counts.values()), sum(required.values())),
        price=None
        if limits.price is None
        else round(
            max(limits.price - price, sum(group.price * required[group.name] for group in groups)),
            PRICE_DECIMALS,
        ),
        cards=cards,
    )


def _may_leave_out(
    limits: BuyLimits, groups: Sequence[NodeGroup], most: Mapping[str, int], pods: int
) -> bool:
    """Return whether limits may leave some of the pods out, if each needs a node and a card of its own."""
    bounds = [limits.nodes, sum(most.values()), *limits.cards.values()]
    prices = [group.price for group in groups if group.price]
    if limits.price is not None and prices:
        bounds.append(int(limits.price / min(prices)))
    known = [bound for bound in bounds if bound is not None]
    # Where nothing can be bought, no limit is shared.
    return min(known) > 0 and any(bound < pods for bound in known)


def _with_turns(snapshot: Snapshot, requests: Mapping[str, CaseRequest]) -> dict[str, CaseRequest]:
    """Return the requests with priorities by which namespaces get turns among pods of equal priority.

    A tenant chooses how many pods it creates: limits of all tenants together are not its own.
    """
    own = {node.metadata.name for node in snapshot.own_nodes()}
    held = Counter(
        pod.metadata.namespace
        for name in own
        for pod in snapshot.pods_on.get(name, ())
        if pod.demand(snapshot.state.dialects).requests_gpu
    )
    held.update(
        snapshot.pods[uid].metadata.namespace
        for uid in planned_uids(snapshot)
        if uid in snapshot.pods
    )
    known = [snapshot.pods[uid] for uid in requests if uid in snapshot.pods]
    levels = turn_levels(known, held)
    priorities = sorted({request.priority for request in requests.values()})
    ranks = {priority: rank * (len(LEVELS) + 1) for rank, priority in enumerate(priorities)}
    return {
        uid: replace(request, priority=ranks[request.priority] - levels.get(uid, 0))
        for uid, request in requests.items()
    }


# ---- rules ----


def _with_rules(
    snapshot: Snapshot,
    offered: Sequence[supply.OfferedGroup],
    groups: Sequence[NodeGroup],
    nodes: Sequence[CaseNode],
    requests: Mapping[str, CaseRequest],
    rules: Mapping[str, Rules],
) -> tuple[list[NodeGroup], list[CaseNode], dict[str, CaseRequest]]:
    """Return all three with labels for the rules that not every machine satisfies."""
    distinct = list(dict.fromkeys(_relevant(snapshot, rule) for rule in rules.values()))
    of_groups: list[dict[str, str]] = [{} for _ in groups]
    of_nodes: list[dict[str, str]] = [{} for _ in nodes]
    names: dict[Rules, str] = {}
    for number, rule in enumerate(distinct):
        for_groups = [_admits_offer(snapshot, rule, offer) for offer in offered]
        for_nodes = [_admits_node(snapshot, rule, node) for node in nodes]
        if all(for_groups) and all(for_nodes):
            continue
        label = names[rule] = f"{RULE_LABEL}{number}"
        for admitted, labels in zip(
            (*for_groups, *for_nodes), (*of_groups, *of_nodes), strict=True
        ):
            if admitted:
                labels[label] = "true"
    selected = {}
    for uid, request in requests.items():
        name = names.get(_relevant(snapshot, rules[uid]))
        selector = {**request.selector, **({name: "true"} if name else {})}
        selected[uid] = replace(request, selector=selector)
    return (
        [_labelled(group, labels) for group, labels in zip(groups, of_groups, strict=True)],
        [_labelled(node, labels) for node, labels in zip(nodes, of_nodes, strict=True)],
        selected,
    )


def _labelled(machine: M, labels: Mapping[str, str]) -> M:
    return replace(machine, labels={**machine.labels, **labels}) if labels else machine


def _relevant(snapshot: Snapshot, rules: Rules) -> Rules:
    """Return the rules without the class of the pod, if no offer was found not to help it."""
    known = any(rules.pod_class in classes for classes in snapshot.unhelpful.values())
    return rules if known else replace(rules, pod_class="")


def _admits_offer(snapshot: Snapshot, rules: Rules, offered: supply.OfferedGroup) -> bool:
    if rules.pod_class in snapshot.unhelpful.get(offered.offer, ()):
        return False
    return rules.admit(offered.labels) and _admits_mode(rules, offered.labels)


def _admits_node(snapshot: Snapshot, rules: Rules, node: CaseNode) -> bool:
    labels = labels_of(node)
    offer = OfferKey(node.group, labels.get(TYPE_LABEL, ""), node.zone, node.capacity)
    if rules.pod_class in snapshot.unhelpful.get(offer, ()) or not rules.admit(labels, node.name):
        return False
    if snapshot.state.node(node.name) is None:
        return _admits_mode(rules, labels)
    if snapshot.state.shared_node(node.name) is None:
        return all(part.request.whole for part in rules.parts)
    return admission_rule(snapshot.state, node.name).rejection(rules.parts) is None


def _admits_mode(rules: Rules, labels: Mapping[str, str]) -> bool:
    """Return whether a new node with these labels admits the requests. Without a mode it may have any."""
    if not has_mode_label(labels):
        return True
    return AdmissionRule(None, mode_labels(labels), frozenset()).rejection(rules.parts) is None


# ---- answers ----


def unserved_pods(case: PlanCase, plan: NodePlan) -> dict[str, str]:
    """Return why no node is bought for pods, by UID."""
    sentences = dict(case.unserved)
    for left_out in plan.unserved:
        sentences[case.pods[left_out.request]] = _without_rule_labels(left_out.why)
    return sentences


def _without_rule_labels(text: str) -> str:
    words = []
    for part in text.split(", "):
        head, mark, rest = part.partition(f"without label {RULE_LABEL}")
        words.append(f"{head}{RULE_WORDS}{rest.partition('=true')[2]}" if mark else part)
    return ", ".join(words)


def planned_by_node(plan: NodePlan) -> Mapping[str, list[tuple[str, tuple[int, ...]]]]:
    """Return the requests that the plan places on each node, with their cards."""
    placed: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for pod in plan.placements:
        placed.setdefault(pod.node, []).append((pod.request, pod.cards))
    return placed


def new_slots(group: str, count: int) -> Iterable[str]:
    """Yield the plan's names of a group's new nodes."""
    return (f"new:{group}:{number}" for number in range(count))


OUT_OF_STOCK = "out of stock"
"""The leader's word for it. Offers that have failed pause because of their orders."""


async def read_snapshot(
    api: Api,
    published: AutoscalerState,
    status: AutoscalerStatus,
    config: AutoscalerConfig,
    now: float,
) -> Snapshot:
    """Return the snapshot of one pass, without instances: orders say what is on its way.

    Args:
        api: the cluster.
        published: by the autoscaler; without a namespace none is installed.
        status: of that.
        config: of that.
        now: the Unix time.

    Raises:
        ApiError: without the right to read the cluster.
        ApiUnreachable: if the API server does not answer.
        InvalidRecord: if the scheduler's options cannot be read.
    """
    options = await read_scheduler_options(api)
    cluster = ElasticCluster(api, options.dialects, options.topology_levels)
    shapes = ShapeStore(api, published.namespace, config)
    await asyncio.gather(cluster.read(), *([shapes.load()] if published.namespace else []))
    offers = (
        Offer(
            OfferKey(offer.group, offer.type, offer.zone, offer.capacity),
            offer.price,
            stock=0 if offer.state == OUT_OF_STOCK else None,
            machine=offer.machine,
        )
        for offer in status.offers
    )
    shown = Snapshot.of_cluster(cluster, now, config)
    return replace(
        shown,
        orders=published.orders,
        offers={offer.key: offer for offer in offers},
        shapes=shapes.shapes,
        unhelpful=shapes.unhelpful,
        status=status,
        schedulers=frozenset(status.schedulers),
        evicted=evicted_demand(shown),
    )


def dry_run(
    snapshot: Snapshot, case: PlanCase, remaining: Callable[[], float], solver: Solver | None
) -> NodePlan:
    """Return the plan of a snapshot's case, with the reasons that the loop would publish."""
    plan = make_plan(case.case, remaining, solver)
    for _ in case.most:
        narrower = within_most(case, plan)
        if narrower is None:
            break
        plan = make_plan(narrower, remaining, solver)
    return with_reasons(snapshot, case, plan)


def with_reasons(snapshot: Snapshot, case: PlanCase, plan: NodePlan) -> NodePlan:
    """Return the plan with the reasons of all pods that are left out, in the case or of it."""
    unserved = tuple(
        Unserved(request=snapshot.pods[uid].full_name, count=1, why=why)
        for uid, why in unserved_pods(case, plan).items()
    )
    return replace(plan, unserved=unserved)


def what_if(snapshot: Snapshot, case: PlanCase, added: Mapping[str, int]) -> PlanCase:
    """Return the case with exactly these new nodes, by the name of an offer or of a node that they are like.

    Raises:
        InvalidCase: if there is no such offer or node, or two names are of one group.
    """
    made = with_nodes(case.case, added)
    groups = tuple(
        # Of offers they are taken off already.
        group
        if group.name in case.offers
        else supply.less_daemons(snapshot, group, labels_of(group))
        for group in made.groups
    )
    return replace(case, case=replace(made, groups=groups), most={})
