"""Places the pending requests of a case as the scheduler would: in its order, by a policy, with backfill.

`make_plan` says whether requests could start; this says which of them do, on the nodes that there are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fenka.core import queue
from fenka.core.backfill import Backfill, complete
from fenka.core.columnar_placer import ColumnarPlacer
from fenka.core.columnar_timeline import CardStates, ColumnarTimeline
from fenka.core.columns import Columns
from fenka.core.nodes.case import (
    FORMAT,
    PRICE_UNIT,
    CaseRequest,
    Gang,
    PlanningCase,
    check_case,
    whole_price,
)
from fenka.core.nodes.plan import (
    NewNodes,
    NodePlan,
    PlannedPod,
    Unserved,
    checked,
    virtual_node,
)
from fenka.core.nodes.problem import AnyMachine, domain_of, ineligible
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import kind, typical
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity, Topology

COUNTED = "its node has too few places for pods, or too little of a counted resource"


@dataclass(frozen=True, slots=True)
class PolicyQueue:
    """The order and the policy by which requests are placed.

    Attributes:
        policy: a name in SCORES.
        requested_at: by the request's name, in the caller's time; the others come last.
        history: what users have and have used. A user is what stands before the slash of a request's name.
        fairness: how requests of one priority are ordered.
        now: in the caller's time.
        depth: the number of requests that reserve cards.
    """

    policy: str
    requested_at: Mapping[str, float]
    history: queue.HistoryLookup = lambda _: queue.NO_HISTORY
    fairness: queue.Fairness = field(default_factory=queue.Fairness)
    now: float = 0.0
    depth: int = 4


def place_by_policy(case: PlanningCase, by: PolicyQueue) -> NodePlan:
    """Return which requests start on the nodes of a case, and on the least number of new ones of its groups.

    Raises:
        InvalidCase: if the case contradicts itself.
    """
    check_case(case)
    new = {
        f"new:{group.name}:{slot}": group
        for group in case.groups
        for slot in range(max(group.min - group.size, 0))
    }
    slots: dict[str, AnyMachine] = {**{node.name: node for node in case.nodes}, **new}
    nodes, held = [], {}
    for name, machine in slots.items():
        node, placements = virtual_node(name, machine)
        nodes.append(node)
        held[name] = [queue.Allocation(placement) for placement in placements]
    columns = Columns(nodes)
    columns.add(*(there.placement for on_node in held.values() for there in on_node))
    pending, members = _pending(case, by, slots)
    order = queue.queue_order(pending, by.history, by.fairness, by.now)
    seen = Counter(kind(request) for entry in pending for request in entry.requests)
    policy = TargetPolicy(by.policy, ExpectedWorkload(typical(seen)))
    policy.target.next(columns, policy)
    timeline = ColumnarTimeline(nodes, held, by.now, CardStates())
    # Pods without cards are not in the scheduler's queue: they neither reserve nor block cards.
    placed, reasons = list[tuple[str, tuple[Placement, ...]]](), dict[str, str]()
    placer = ColumnarPlacer(columns)
    for with_cards, depth in ((True, by.depth), (False, 0)):
        entries = [entry for entry in order if _has_cards(entry) == with_cards]
        result = complete(Backfill(policy, depth).serve(entries, placer, timeline, by.now))
        placed += result.placed
        reasons |= {status.id: status.reason for status in result.pending}
    pods = [
        PlannedPod(request.name, placement.node, tuple(piece.card for piece in placement.slices))
        for entry, placements in placed
        for request, placement in zip(members[entry], placements, strict=True)
    ]
    return _plan(case, slots, pods, reasons, members)


def _has_cards(entry: queue.PendingRequest) -> bool:
    return any(request.cards for request in entry.requests)


def _plan(
    case: PlanningCase,
    slots: Mapping[str, AnyMachine],
    pods: list[PlannedPod],
    reasons: Mapping[str, str],
    members: Mapping[str, list[CaseRequest]],
) -> NodePlan:
    passed = checked(case, slots, pods)
    served = Counter(pod.request for pod in passed)
    why = {request.name: reasons[entry] for entry in reasons for request in members[entry]}
    unserved = tuple(
        Unserved(request.name, request.count - served[request.name], why.get(request.name, COUNTED))
        for request in case.requests
        if served[request.name] < request.count
    )
    bought = tuple(
        NewNodes(group.name, group.min - group.size)
        for group in case.groups
        if group.min > group.size
    )
    prices = {group.name: whole_price(group.price) for group in case.groups}
    cost = sum(prices[nodes.group] * nodes.count for nodes in bought) / PRICE_UNIT
    return NodePlan(FORMAT, bought, cost, cost, False, tuple(passed), unserved)


def _pending(
    case: PlanningCase, by: PolicyQueue, slots: Mapping[str, AnyMachine]
) -> tuple[list[queue.PendingRequest], dict[str, list[CaseRequest]]]:
    """Return the entries of the queue, and the requests of each: one pod, or all of a gang."""
    members: dict[str, list[CaseRequest]] = {}
    for request in case.requests:
        for number in range(request.count):
            entry = f"{request.name} {number}" if request.gang is None else f"gang {request.gang}"
            members.setdefault(entry, []).append(request)
    eligible: dict[object, frozenset[str]] = {}
    proximities = {name: _proximity(gang, slots) for name, gang in case.gangs.items()}
    return [
        _entry(
            name,
            requests,
            by,
            _eligible(requests, slots, eligible),
            proximities.get(requests[0].gang or ""),
        )
        for name, requests in members.items()
    ], members


def _proximity(gang: Gang, slots: Mapping[str, AnyMachine]) -> Proximity | None:
    """Return how close together the members of a gang must be; None if that does not matter."""
    if not gang.in_one_domain:
        return None
    domains = {name: domain_of(gang, machine) for name, machine in slots.items()}
    labels = ("zone",) * (gang.zone == "same") + gang.same
    known = {name: domain for name, domain in domains.items() if domain is not None}
    return Proximity(Topology(labels, known), len(labels) - 1, required=True)


def _eligible(
    requests: list[CaseRequest],
    slots: Mapping[str, AnyMachine],
    known: dict[object, frozenset[str]],
) -> frozenset[str]:
    """Return the machines that rules and counted resources leave to all of the requests."""
    names = frozenset(slots)
    for request in requests:
        key = (
            *(tuple(sorted(request.selector.items())), request.tolerations),
            *(tuple(sorted(request.resources.items())), request.interruptible, request.duration_s),
        )
        if key not in known:
            known[key] = frozenset(
                name
                for name, machine in slots.items()
                if not ineligible(request, machine)
                and all(
                    machine.resources.get(resource, 0) >= amount
                    for resource, amount in request.resources.items()
                )
            )
        names &= known[key]
    return names


def _entry(
    name: str,
    requests: list[CaseRequest],
    by: PolicyQueue,
    nodes: frozenset[str],
    proximity: Proximity | None,
) -> queue.PendingRequest:
    return queue.PendingRequest(
        name,
        tuple(map(_request, requests)),
        min(by.requested_at.get(request.name, by.now) for request in requests),
        min(request.priority for request in requests),
        requests[0].name.rpartition("/")[0],
        nodes=nodes,
        proximity=proximity,
    )


def _request(request: CaseRequest) -> Request:
    """Return what a pod requests. One of nothing at all is one for the smallest part of a core."""
    asked = request.card_request()
    if asked is None:
        return Request(
            cards=0, cpu_milli=max(request.cpu_milli, 1), host_memory_mib=request.memory_mib
        )
    return asked
