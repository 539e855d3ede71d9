"""Rows of pods that request cards and wait for something else than the queue: they stand below it.

A scheduling gate of another program, a gang without all its pods, a request that no node can hold, or a
policy that refuses the pod. Pods change until they are old enough: kube-scheduler needs a moment for each.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from fenka.cluster.objects import QUEUE_GATE, Pod, seconds
from fenka.cluster.pending_queue import gang_complete_by_label
from fenka.cluster.pod_groups import PodGroup, group_key, names_pod_group, pod_group
from fenka.cluster.queue_snapshot import PendingEntry, QueueSnapshot
from fenka.cluster.queue_state import entry_id
from fenka.cluster.state import ClusterState
from fenka.core.errors import listed
from fenka.dialects.base import InvalidRecord
from fenka.views.workloads import QueueRow

SETTLED_S = 5.0
"""Younger pods are not shown: most of them are placed or queued by then."""

MAX_NAMES = 3

BELOW = 0
"""Position of a row that is not in the queue."""


PODS_A_STEP = 200
"""Pods that are read before others have their turn on the event loop."""


def unqueued_steps(  # noqa: PLR0913, PLR0917
    pods: Iterable[Pod],
    scheduled: QueueSnapshot,
    state: ClusterState,
    has_nodes: Callable[[Pod], bool],
    refused: Mapping[str, str],
    now: float,
    most: int | None = None,
    groups: Mapping[str, PodGroup] | None = None,
) -> Iterator[QueueRow | None]:
    """Yield a row for each pod or gang that waits for something else than the queue.

    None is yielded after each PODS_A_STEP pods, since tenants choose how many wait.

    Args:
        pods: all pods, or those without a node and the members of their gangs.
        scheduled: the queue.
        state: the cluster.
        has_nodes: whether a node could hold a pod without any allocations.
        refused: sentences of entries that neither reserve nor preempt, by ID.
        now: Unix seconds.
        most: rows at most, those that have waited the longest; None for all.
        groups: PodGroups by namespace/name; None if they are not known.
    """
    waiting: dict[str, list[Pod]] = {}
    gangs: dict[str, list[Pod]] = {}
    since: dict[str, float] = {}
    for number, pod in enumerate(pods, start=1):
        if number % PODS_A_STEP == 0:
            yield None
        gang = group_key(pod)
        if gang is not None:
            gangs.setdefault(gang, []).append(pod)
        name = entry_id(pod)
        if _waits(pod, state) and name not in scheduled:
            waiting.setdefault(name, []).append(pod)
            since[name] = min(since.get(name, now), _since(pod, now))
    settled = [name for name, at in since.items() if now - at >= SETTLED_S]
    yield None
    first = sorted(settled, key=since.__getitem__)[:most]
    yield None
    for name in first:
        entry = PendingEntry(name, tuple(waiting[name]))
        why = refused.get(name)
        if why is None:
            why = yield from _obstacle(entry.pods, gangs.get(name, []), has_nodes, groups)
        yield QueueRow(
            BELOW,
            entry.name,
            entry.namespace,
            entry.priority,
            requested(entry.pods),
            since[name],
            why=why,
        )


def requested(pods: tuple[Pod, ...]) -> str:
    """Return `8 aliyun.com/gpu-mem`, or for a gang `2 pods: 16 aliyun.com/gpu-mem`, the sum of all."""
    total: dict[str, int] = {}
    for pod in pods:
        try:
            amounts = pod.demand().amounts
        except InvalidRecord:
            continue
        for name, amount in amounts.items():
            total[name] = total.get(name, 0) + amount
    text = ", ".join(f"{amount} {name}" for name, amount in total.items())
    return text if len(pods) == 1 else f"{len(pods)} pods: {text}"


def _waits(pod: Pod, state: ClusterState) -> bool:
    if pod.spec.node_name or pod.finished or pod.metadata.deletion_timestamp is not None:
        return False
    demand = pod.demand(state.dialects)
    return not state.is_assumed(pod.metadata.uid) and (
        demand.requests_gpu or demand.invalid is not None
    )


def _since(pod: Pod, now: float) -> float:
    created = seconds(pod.metadata.creation_timestamp)
    return now if created is None else created


def _obstacle(
    pods: Sequence[Pod],
    gang: list[Pod],
    has_nodes: Callable[[Pod], bool],
    groups: Mapping[str, PodGroup] | None,
) -> Generator[None, None, str]:
    """Return why these pods are not in the queue, in steps. gang: all pods of their gang."""
    for pod in pods:
        gates = {gate.name for gate in pod.spec.scheduling_gates} - {QUEUE_GATE}
        if gates:
            names = listed(sorted(gates), MAX_NAMES)
            return f"pod {pod.metadata.name} has scheduling gates that their owner must remove: {names}"
    for pod in pods:
        invalid = pod.demand().invalid
        if invalid is not None:
            return f"pod {pod.metadata.name} can never start as it is: {invalid}"
    for pod in pods:
        if not has_nodes(pod):
            return (
                f"no node could hold pod {pod.metadata.name}, even without other pods: fenka why "
                f"{pod.full_name} says why"
            )
        # A question about all nodes.
        yield
    return _missing(pods[0], gang, groups) or next(
        (f"kube-scheduler says: {pod.unschedulable}" for pod in pods if pod.unschedulable),
        "kube-scheduler has not tried it yet: fenka why says what it waits for",
    )


def _missing(pod: Pod, gang: list[Pod], groups: Mapping[str, PodGroup] | None) -> str:
    """Return how many pods the gang lacks; empty if it lacks none, or its size is not known."""
    if not gang or (groups is None and names_pod_group(pod)):
        return ""
    try:
        known = pod_group(pod, groups or {})
    except InvalidRecord as why:
        return str(why)
    present = sum(map(is_present, gang))
    if known is None or present >= known.minimum:
        return ""
    return f"gang {known.name} is incomplete: {present} of its {known.minimum} pods exist"


def is_complete(gang: list[Pod], groups: Mapping[str, PodGroup] | None) -> bool:
    """Return whether enough pods of a gang exist to start it; True if that is not known.

    Args:
        gang: its pods that count as members.
        groups: PodGroups by namespace/name; None if they are not known.
    """
    if names_pod_group(gang[0]):
        return not _missing(gang[0], gang, groups)
    return gang_complete_by_label(gang)


def is_present(pod: Pod) -> bool:
    """Return whether the pod counts as a member of its gang, as the scheduler counts members."""
    is_alive = not pod.finished and pod.metadata.deletion_timestamp is None
    return is_alive or pod.status.phase == "Succeeded"
