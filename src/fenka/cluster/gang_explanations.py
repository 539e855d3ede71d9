"""Explains why a gang does not start: which member stops all of it, and which pods would have to end.

A member may fit a node by itself while its gang cannot start. The gang is placed here as the scheduler
places it, on a copy of the cluster. The number of placements that are tried is bounded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fenka.cluster.gang_placement import GangMembers, GangPending, GangScheduler, GangStatus
from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.pod_groups import GangPods, PodGang, group_key, group_name, names_pod_group
from fenka.cluster.state import ClusterSnapshot
from fenka.cluster.unstarted_pods import unstarted
from fenka.core.errors import listed
from fenka.dialects.base import InvalidRecord

MAX_SINGLE, MAX_TOGETHER = 24, 32
"""Pods whose end is tried alone, and together."""

MAX_HINTS = 3
"""Pods to name, each of which makes room alone."""

MAX_MEMBERS = 32
"""Members of which it is tested whether they can start at all."""

MAX_NAMES = 5
"""Pods to name in a list."""

Never = Callable[[Pod], str]
"""Returns why a pod could not start if nothing ran in the cluster; empty if it could."""


@dataclass(slots=True)
class GangExplanation:
    """Why a gang does not start.

    Attributes:
        sentence: how many of its pods exist and run, and what stops it.
        hints: what would help.
    """

    sentence: str
    hints: list[str] = field(default_factory=list)


def explain_gang(pod: Pod, snapshot: ClusterSnapshot, never: Never) -> GangExplanation | None:
    """Return why the pod's gang does not start; None if it is in none, or enough of the gang has started.

    Args:
        pod: a member that is pending.
        snapshot: the cluster.
        never: tests a member.
    """
    key = group_key(pod)
    if key is None:
        return None
    if names_pod_group(pod) and snapshot.groups is None:
        return GangExplanation(
            f"it starts together with the pods of its PodGroup {group_name(pod)}, whose size may not be read "
            "without the ClusterRole fenka-viewer"
        )
    return _WaitingGang(pod, snapshot, key).explain(never)


class _WaitingGang:
    """A gang on a copy of the cluster."""

    def __init__(self, pod: Pod, snapshot: ClusterSnapshot, key: str) -> None:
        state = snapshot.state
        self._pods = [other for other in snapshot.pods if group_key(other) == key]
        self._pod = next(
            (other for other in self._pods if other.metadata.uid == pod.metadata.uid), pod
        )
        named = GangPods((*self._pods, self._pod))
        self._own = ClusterSnapshot.of(snapshot.nodes, snapshot.pods, dialects=state.dialects)
        self._own.state.topology_levels = state.topology_levels
        self._members = GangMembers(self._own.state, lambda: named, lambda: snapshot.groups or {})
        self._gangs = GangScheduler(self._members, self._own.state, "binpack", lambda: 0.0)
        self._nodes = [node.metadata.name for node in snapshot.nodes]
        self._key = key

    def explain(self, never: Never) -> GangExplanation | None:
        name = group_name(self._pod)
        try:
            gang = self._members.gang(self._pod)
        except InvalidRecord as why:
            return GangExplanation(f"it is in gang {name}, which cannot start", [str(why)])
        if gang is None:
            return None
        status = self._members.status(gang, self._pods)
        if status.missing <= 0:
            return None
        running = sum(bool(member.spec.node_name) for member in status.alive)
        sentence = (
            f"it starts together with its gang {gang.name}: {status.present} of {gang.minimum} pods exist, "
            f"{running} of them have a node"
        )
        return GangExplanation(sentence, self._hints(gang, status, never))

    def _hints(self, gang: PodGang, status: GangStatus, never: Never) -> list[str]:
        if status.present < gang.minimum:
            return list(_absent(gang, status))
        gates = [member for member in status.alive if _foreign_gates(member)]
        if gates and len(self._members.unplaced(status)) < status.missing:
            names = listed([member.metadata.name for member in gates], MAX_NAMES)
            return [
                f"the scheduling gates of {names} stop all of gang {gang.name}: their owner must remove "
                f"{', '.join(sorted(set().union(*map(_foreign_gates, gates))))}"
            ]
        unplaced = self._members.unplaced(status)
        for member in _different(unplaced):
            if reason := never(member):
                return [
                    f"{member.full_name} stops all of gang {gang.name}: it can never start as it is: {reason}"
                ]
        try:
            return self._room(gang, len(unplaced))
        except InvalidRecord as why:
            return [f"gang {gang.name} can never start as it is: {why}"]

    def _room(self, gang: PodGang, count: int) -> list[str]:
        """Return whose end makes room for all members. Raises InvalidRecord."""
        obstacle = self._obstacle(gang)
        if obstacle is None:
            return [
                f"there is room for all {count} pods of gang {gang.name} by what fenka knows: if they are "
                "not placed within a minute, kube-scheduler's message above, or its log, has the reason"
            ]
        together = f"all {count} pods of gang {gang.name} start when"
        holders = self._holders()
        alone = [
            holder for holder in holders[:MAX_SINGLE] if self._obstacle(gang, [holder]) is None
        ]
        if alone:
            return [
                f"{together} {holder.full_name} ends{unstarted(holder)}"
                for holder in alone[:MAX_HINTS]
            ]
        enough = self._enough(gang, holders)
        if enough:
            names = listed([holder.full_name for holder in enough], MAX_NAMES)
            stuck = [unstarted(holder) for holder in enough]
            return [f"{together} {names} end{''.join(filter(None, stuck[:MAX_NAMES]))}"]
        return [f"{obstacle.sentence}: free cards, or add nodes"]

    def _enough(self, gang: PodGang, holders: Sequence[Pod]) -> list[Pod]:
        """Return pods whose end makes room, of which none can be left out; none if few do not."""
        ending: list[Pod] = []
        for holder in reversed(holders):
            ending.append(holder)
            if len(ending) > MAX_TOGETHER:
                return []
            if self._obstacle(gang, ending) is None:
                break
        else:
            return []
        for holder in list(ending):
            others = [other for other in ending if other is not holder]
            if self._obstacle(gang, others) is None:
                ending = others
        return ending

    def _obstacle(self, gang: PodGang, ending: Iterable[Pod] = ()) -> GangPending | None:
        """Return why the gang cannot be placed once these pods have ended; None if it can."""
        state = self._own.state
        for holder in ending:
            state.forget_pod(holder.metadata.uid)
        try:
            return self._gangs.obstacle(self._pod, gang, self._nodes)
        finally:
            for holder in ending:
                state.set_pod(holder)

    def _holders(self) -> list[Pod]:
        """Return the pods of others that hold cards, those that hold least first."""
        held = [
            (
                sum(piece.memory_mib for piece in allocation.slices),
                allocation.pod.full_name,
                allocation.pod,
            )
            for shared in self._own.state.shared_nodes()
            for allocation in self._own.state.allocations(shared.node.name)
            if group_key(allocation.pod) != self._key and not allocation.lingering
        ]
        return [pod for _, _, pod in sorted(held, key=lambda holder: holder[:2])]


def _foreign_gates(pod: Pod) -> frozenset[str]:
    return frozenset(gate.name for gate in pod.spec.scheduling_gates) - {QUEUE_GATE}


def _different(pods: Iterable[Pod]) -> list[Pod]:
    """Return one pod of each kind of request: the others can start if that can."""
    kinds: dict[tuple[object, ...], Pod] = {}
    for pod in pods:
        amounts = tuple(sorted(pod.demand().amounts.items()))
        spec = pod.spec
        kinds.setdefault(
            (amounts, repr((spec.node_selector, spec.affinity, spec.tolerations))), pod
        )
    return list(kinds.values())[:MAX_MEMBERS]


def _absent(gang: PodGang, status: GangStatus) -> Iterable[str]:
    """Yield how the pods that do not exist yet come to exist."""
    yield f"gang {gang.name} starts when {gang.minimum - status.present} more of its pods exist"
    owners = {
        (owner.kind, owner.name)
        for member in status.alive
        for owner in member.metadata.owner_references
        if owner.controller
    }
    for kind, name in sorted(owners)[:MAX_HINTS]:
        if kind == "StatefulSet":
            yield (
                f"StatefulSet {name} creates its next pod only when the last one is ready, unless it has "
                "podManagementPolicy: Parallel: delete it and create it with that"
            )
        else:
            yield (
                f"kubectl describe {kind.lower()} {name} says why it creates no more pods, such as a quota "
                "or too few replicas"
            )
