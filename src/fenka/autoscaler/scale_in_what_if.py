"""The what-ifs of scale-in, by the planner's own cases without groups: nothing is bought. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from fenka.autoscaler.demand import as_pending, class_key, demand_of, first_in_turn
from fenka.autoscaler.objects import ElasticNode, ElasticPod
from fenka.autoscaler.plan_case import case_of
from fenka.autoscaler.view import View
from fenka.cluster.autoscaling import ENDING, encode_time
from fenka.cluster.objects import Taint
from fenka.cluster.pending_queue import is_open
from fenka.core.planning.case import BuyLimits, Case, CaseRequest
from fenka.core.planning.plan import make_plan

MAX_PENDING = 300
"""Pending pods that a what-if is about."""


def fit_elsewhere(view: View, pods: Sequence[ElasticPod], without: Collection[str]) -> bool:
    """Return whether all these pods, which run, have room at once on nodes other than these.

    They leave the room that they have now: members of a gang may be on any node.
    """
    if not pods:
        return True
    gone = encode_time(view.now)
    leaving = {pod.metadata.uid: _with_metadata(pod, deletion_timestamp=gone) for pod in pods}
    what_if = replace(
        view,
        nodes={name: node for name, node in view.nodes.items() if name not in without},
        pods_on={
            name: [leaving.get(pod.metadata.uid, pod) for pod in there]
            for name, there in view.pods_on.items()
        },
    )
    return not _left_out(what_if, [as_pending(pod) for pod in pods], what_if.nodes)


def pending_pods(view: View) -> list[ElasticPod]:
    """Return pods for which a scheduler looks for a node, or will after their node is taken back.

    Of very many only the first: they are planned for in the leader's own process.
    """
    displaced = [as_pending(view.pods[uid]) for uid in sorted(view.displaced) if uid in view.pods]
    return first_in_turn([*filter(is_open, view.pods.values()), *displaced], MAX_PENDING)


def have_room_for_one(view: View, nodes: Sequence[ElasticNode], pods: Sequence[ElasticPod]) -> bool:
    """Return whether any of these pending pods has room on any of the nodes, marked ones among them."""
    if not pods or not nodes:
        return False
    what_if = replace(view, nodes={node.metadata.name: _without_taint(node) for node in nodes})
    return _placed(what_if, pods, what_if.nodes) > 0


def without_room(
    view: View, pods: Sequence[ElasticPod], without: Collection[str]
) -> list[ElasticPod]:
    """Return those of these pending pods that do not have room at once on nodes other than these."""
    nodes = {name: node for name, node in view.nodes.items() if name not in without}
    return _left_out(replace(view, nodes=nodes), pods, nodes)


def _left_out(
    view: View, pods: Sequence[ElasticPod], nodes: Mapping[str, ElasticNode]
) -> list[ElasticPod]:
    case, uids = _case(view, pods, nodes)
    placed = {uids[each.request] for each in make_plan(case, _no_time).placements}
    return [pod for pod in pods if pod.metadata.uid not in placed]


def _placed(view: View, pods: Sequence[ElasticPod], nodes: Collection[str]) -> int:
    """Return how many of the pods have room, of gangs also a part, and of spot nodes also others' pods."""
    case, _ = _case(view, pods, nodes)
    requests = tuple(
        replace(each, gang=None, interruptible=True) for each in _distinct(case.requests)
    )
    return len(make_plan(replace(case, requests=requests, gangs={}), _no_time).placements)


def _distinct(requests: Iterable[CaseRequest]) -> Iterable[CaseRequest]:
    """Return one of all requests that are equal but for their names."""
    return {class_key(each): each for each in requests}.values()


def _case(
    view: View, pods: Sequence[ElasticPod], nodes: Collection[str]
) -> tuple[Case, Mapping[str, str]]:
    """Return the case of these pods and nodes, and the pods' UIDs by the names of their requests."""
    view = replace(view, pods={**view.pods, **{pod.metadata.uid: pod for pod in pods}})
    line = demand_of(view, pods)
    planned = case_of(view, line.requests, line)
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


def _without_taint(node: ElasticNode) -> ElasticNode:
    taints: tuple[Taint, ...] = tuple(each for each in node.spec.taints if each.key != ENDING)
    return structs.replace(node, spec=structs.replace(node.spec, taints=taints))


def _with_metadata(pod: ElasticPod, **fields: str) -> ElasticPod:
    return structs.replace(pod, metadata=structs.replace(pod.metadata, **fields))
