"""Which pods of a node to evict, so that another one fits its cards. Pure.

PodDisruptionBudgets: how many of which pods may be evicted now.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from fenka.cluster import objects
from fenka.cluster.compact import MAX_RULE_BYTES
from fenka.cluster.node_admission import exclusion, labels, matches
from fenka.cluster.placement import (
    NO_CONSTRAINTS,
    InstanceFit,
    QueueConstraints,
    instance_holders,
    place_in_instances,
)
from fenka.cluster.state import ClusterState
from fenka.core import preemption
from fenka.core.evaluate import Policy
from fenka.core.inventory import DeviceId, Node
from fenka.core.request import Placement, Request
from fenka.core.usage import UsageOverlay, UsageView
from fenka.dialects import nodes
from fenka.dialects.base import InvalidRecord, SharedNode
from fenka.dialects.mig_records import with_instances


@dataclass(frozen=True, slots=True)
class PreemptionResult:
    """UIDs of the pods to evict, and how many of these evictions violate a disruption budget."""

    uids: tuple[str, ...]
    violations: int = 0


class PodPreemption:
    """Chooses victims where kube-scheduler's own choice does not make room on a card."""

    def __init__(
        self,
        cluster: ClusterState,
        policy: Policy,
        usage: UsageView | None = None,
        *,
        budgets: Callable[[objects.Pod], frozenset[preemption.DisruptionBudget]] = lambda _: (
            frozenset()
        ),
        gang_key: Callable[[objects.Pod], str | None] = lambda _: None,
        backfill_only: Collection[str] = (),
    ) -> None:
        """Args:
        cluster: the nodes and their pods.
        policy: the placement policy.
        usage: what is used of the cards, if that is more than the cluster's pods use.
        budgets: returns the disruption budgets of a pod.
        gang_key: returns the gang of a pod: all of it is evicted, or none.
        backfill_only: priority classes for whose pods only those of class BACKFILL_CLASS are evicted.
        """
        self._cluster, self._policy, self._usage = cluster, policy, usage or cluster
        self._budgets, self._gang_key = budgets, gang_key
        self._backfill_only = frozenset(backfill_only)

    def may_evict(self, pod: objects.Pod, other: objects.Pod) -> bool:
        """Return whether the other pod may be evicted for this one."""
        if _priority(other) >= _priority(pod):
            return False
        return not self._is_bounded(pod) or other.spec.priority_class_name == objects.BACKFILL_CLASS

    def _is_bounded(self, pod: objects.Pod) -> bool:
        return pod.spec.priority_class_name in self._backfill_only

    def victims(
        self,
        pod: objects.Pod,
        node: str,
        chosen: Collection[str],
        pods: Mapping[str, objects.Pod],
        constraints: QueueConstraints = NO_CONSTRAINTS,
    ) -> PreemptionResult | None:
        """Return the pods to evict; None if evicting any allowed set of pods does not make room.

        Args:
            pod: the pod that needs room.
            node: where.
            chosen: UIDs of the pods that kube-scheduler would evict. They stay victims, with the rest of
                their gangs on this node. The cheapest set of other pods of lower priority is added, if the
                cards need it.
            pods: all pods, by UID.
            constraints: nothing is evicted to make room on cards that others would get.
        """
        rest = self._rest_of_gangs(node, [pods[uid] for uid in chosen if uid in pods])
        pods = {**pods, **{other.metadata.uid: other for other in rest}}
        chosen = (*chosen, *dict.fromkeys(other.metadata.uid for other in rest))
        excluded = exclusion(self._cluster, node, pod) is not None
        allowed = all(
            self.may_evict(pod, pods[uid]) if uid in pods else not self._is_bounded(pod)
            for uid in chosen
        )
        if excluded or not allowed:
            return None
        demand = pod.demand(self._cluster.dialects)
        if not demand.requests_gpu:
            return PreemptionResult(tuple(chosen))
        shared = self._cluster.shared_node(node)
        shares = self._cluster.shares_with(node, demand) and not self._cluster.node_error(node)
        if shared is None or demand.error or not shares:
            # The kubelet chooses whole cards and instances of nodes that do not share.
            return PreemptionResult(tuple(chosen)) if demand.served_by_kubelet else None
        try:
            requests = tuple(part.request for part in demand.parts)
            nodes.check_admission(labels(self._cluster, node), demand.parts)
        except InvalidRecord:
            return None
        spent = Counter(
            budget.name for uid in chosen if uid in pods for budget in self._budgets(pods[uid])
        )
        usage, candidates = self._candidates(pod, node, chosen, spent)
        for held in constraints.held.get(node, ()):
            usage.add(held.placement)
        if demand.in_instances:
            victims = self._holders_of_instances(
                pod, requests, shared, usage, candidates, constraints
            )
        else:
            preemptor = preemption.Preemptor(requests, _priority(pod))
            open_node = _cordoned(self._cluster.card_node(node), constraints.reserved)
            victims = preemption.cheapest_victims(
                usage, candidates, preemptor, (open_node,), self._policy
            )
        if victims is None:
            return None
        # A pod with several placements is in the result several times.
        return PreemptionResult((*chosen, *dict.fromkeys(victims.ids)), victims.violations)

    def _holders_of_instances(
        self,
        pod: objects.Pod,
        requests: tuple[Request, ...],
        shared: SharedNode,
        usage: UsageView,
        candidates: Sequence[preemption.VictimCandidate],
        constraints: QueueConstraints,
    ) -> preemption.Victims | None:
        """Return holders of instances to evict for a pod that requests instances, or slices in them."""
        held = constraints.held.get(shared.node.name, ())
        shared = with_instances(
            shared, (piece.uuid for hold in held for piece in hold.placement.slices)
        )
        holders = instance_holders(self._cluster, shared.node.name, held)
        instances = {card.uuid for card in shared.node.cards if card.parent is not None}

        def place(view: UsageView) -> tuple[Placement, ...] | None:
            fit = place_in_instances(
                shared,
                view,
                requests,
                self._policy,
                holders,
                pod.metadata.namespace,
                constraints.reserved,
            )
            return fit.placements if isinstance(fit, InstanceFit) else None

        holding = (
            candidate
            for candidate in candidates
            if any(piece.uuid in instances for piece in candidate.placement.slices)
        )
        return preemption.cheap_victims(usage, holding, _priority(pod), place)

    def _rest_of_gangs(self, node: str, chosen: Sequence[objects.Pod]) -> list[objects.Pod]:
        """Return the other pods on the node that are in a gang of the chosen ones."""
        gangs = {self._gang_key(pod) for pod in chosen} - {None}
        known = {pod.metadata.uid for pod in chosen}
        if not gangs:
            return []
        return [
            allocation.pod
            for allocation in self._cluster.allocations(node)
            if not allocation.lingering
            and allocation.pod.metadata.uid not in known
            and self._gang_key(allocation.pod) in gangs
        ]

    def _candidates(
        self, preemptor: objects.Pod, node: str, chosen: Collection[str], spent: Mapping[str, int]
    ) -> tuple[UsageOverlay, list[preemption.VictimCandidate]]:
        """Return the usage without the chosen pods, and what else could be evicted.

        spent: how many of the chosen pods each disruption budget covers.
        """
        usage, candidates = UsageOverlay(self._usage), list[preemption.VictimCandidate]()
        for allocation in self._cluster.allocations(node):
            pod = allocation.pod
            uid = pod.metadata.uid
            if allocation.lingering:
                # The API server has no such pod to evict.
                continue
            if uid in chosen:
                for placement in allocation.placements:
                    usage.remove(placement)
                continue
            budgets = frozenset(
                replace(budget, allowed=budget.allowed - spent.get(budget.name, 0))
                for budget in self._budgets(pod)
            )
            # A pod with several placements is evicted with all of them, and counts once in its budgets.
            gang = self._gang_key(pod) or uid
            priority = _priority(pod)
            if not self.may_evict(preemptor, pod):
                # It also keeps the rest of its gang from being evicted.
                priority = max(priority, _priority(preemptor))
            for placement in allocation.placements:
                candidates.append(
                    preemption.VictimCandidate(uid, placement, priority, gang, budgets)
                )
                budgets = frozenset()
        return usage, candidates


def _cordoned(node: Node, reserved: Collection[DeviceId]) -> Node:
    """Return the node with these cards cordoned."""
    cards = (replace(card, cordoned=True) if card.uuid in reserved else card for card in node.cards)
    return replace(node, cards=tuple(cards)) if reserved else node


def _priority(pod: objects.Pod) -> int:
    return pod.spec.priority or 0


BUDGETS_PATH = "/apis/policy/v1/poddisruptionbudgets"


class LabelSelector(objects.Object):
    """Selects pods by their labels. An empty selector selects all of the namespace."""

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[objects.SelectorRequirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether all of its requirements match."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            matches(requirement, labels) for requirement in self.match_expressions
        )


class BudgetSpec(objects.Object):
    """The spec of a budget."""

    selector: LabelSelector | None = None


class BudgetStatus(objects.Object):
    """The status of a budget."""

    disruptions_allowed: int = 0


class PodDisruptionBudget(objects.Object):
    """A PodDisruptionBudget of policy/v1."""

    metadata: objects.ObjectMeta = msgspec.field(default_factory=objects.ObjectMeta)
    spec: BudgetSpec = msgspec.field(default_factory=BudgetSpec)
    status: BudgetStatus = msgspec.field(default_factory=BudgetStatus)

    def __post_init__(self) -> None:
        objects.drop_notes(self.metadata)
        if len(msgspec.json.encode(self.spec)) > MAX_RULE_BYTES:
            # Its owner's pods may be evicted as if there were no budget.
            self.spec.selector = None


def budgets_for(
    pod: objects.Pod, budgets: Iterable[PodDisruptionBudget]
) -> frozenset[preemption.DisruptionBudget]:
    """Return the budgets that select the pod."""
    return frozenset(
        preemption.DisruptionBudget(
            f"{budget.metadata.namespace}/{budget.metadata.name}", budget.status.disruptions_allowed
        )
        for budget in budgets
        if budget.metadata.namespace == pod.metadata.namespace
        and budget.spec.selector is not None
        and budget.spec.selector.selects(pod.metadata.labels)
    )
