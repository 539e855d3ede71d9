"""Which pending pods of a cluster would start by a policy, in the order of its queue."""

from collections import Counter

from fenka.autoscaler.plan_case import PlanCase, with_reasons
from fenka.autoscaler.snapshot import Snapshot
from fenka.cluster.objects import seconds
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.queue_state import UsageAccounting
from fenka.core import queue
from fenka.core.nodes.by_policy import PolicyQueue, place_by_policy
from fenka.core.nodes.plan import NodePlan


def try_policy(snapshot: Snapshot, case: PlanCase, options: SchedulerOptions) -> NodePlan:
    """Return which pods of a snapshot's case start on the nodes of that case.

    Args:
        snapshot: the cluster.
        case: its pending pods, and the nodes that they may use.
        options: of the scheduler, with the policy.

    Raises:
        InvalidCase: if the case contradicts itself.
    """
    usage, held = UsageAccounting(snapshot.state, options.fairness), Counter[str]()
    for uid, pod in snapshot.pods.items():
        usage.set(pod, snapshot.now)
        allocation = snapshot.state.allocation(uid)
        held[pod.metadata.namespace] += len(allocation.placements) if allocation else 0
    created = {
        name: seconds(snapshot.pods[uid].metadata.creation_timestamp)
        for name, uid in case.pods.items()
    }
    by = PolicyQueue(
        options.policy,
        {name: at for name, at in created.items() if at is not None},
        queue.history_lookup(held, usage.uses, snapshot.now),
        options.fairness,
        snapshot.now,
    )
    return with_reasons(snapshot, case, place_by_policy(case.case, by))
