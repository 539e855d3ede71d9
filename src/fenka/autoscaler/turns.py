"""Turns of namespaces: for whose pods nodes are planned where that is not possible for all. Pure.

Tenants choose how many pods they create, how old these are and what they require. So what is bounded is given
to namespaces one by one, and within a namespace by priority and age.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from fenka.autoscaler.watch import ElasticPod
from fenka.cluster.pod_groups import group_key

MAX_AFFINITIES = 100
"""Different node affinities that are planned for at once: each is judged for each node."""

MAX_JUDGED = 500
"""Different node affinities of which it is found out at once whether some offer's nodes satisfy them."""

LEVELS = (1, 10, 100)
"""Numbers of pods. A namespace that has one of them comes after those that have fewer, of equal priority."""

COME_FIRST = f"{MAX_AFFINITIES} node affinities are planned for at once, and others come first"
NO_GROUP = "no group has nodes that its node affinity admits"


def first_in_order(pods: Sequence[ElasticPod], most: int) -> list[ElasticPod]:
    """Return at most this number of pods: gangs whole, and namespaces in turns, so that each gets some.

    Of a namespace, the pods of the highest priority come first, then the oldest.
    """
    if len(pods) <= most:
        return list(pods)
    chosen = list[ElasticPod]()
    for _, unit in _in_turns(pods, {}):
        if len(chosen) + len(unit) <= most:
            chosen += unit
    return chosen


def turn_levels(pods: Iterable[ElasticPod], held: Mapping[str, int]) -> dict[str, int]:
    """Return by UID how many of LEVELS a pod's namespace has reached before it is that pod's turn.

    held: the number of pods that each namespace has already.
    """
    return {
        pod.metadata.uid: bisect_right(LEVELS, before)
        for before, unit in _in_turns(pods, held)
        for pod in unit
    }


def _in_turns(
    pods: Iterable[ElasticPod], held: Mapping[str, int]
) -> Iterator[tuple[int, list[ElasticPod]]]:
    """Yield gangs and single pods, each after the number of pods that its namespace has before.

    A namespace's next one comes after others have had as many pods. held: with how many each begins.
    """
    units: dict[str, list[ElasticPod]] = {}
    for pod in pods:
        units.setdefault(group_key(pod) or pod.metadata.uid, []).append(pod)
    before = Counter(held)
    turns = []
    for unit in sorted(units.values(), key=lambda unit: _rank(unit[0])):
        namespace = unit[0].metadata.namespace
        turns.append((before[namespace], _rank(unit[0]), unit))
        before[namespace] += len(unit)
    for number, _, unit in sorted(turns, key=lambda turn: turn[:2]):
        yield number, unit


def _rank(pod: ElasticPod) -> tuple[int, str, str]:
    return -(pod.spec.priority or 0), pod.metadata.creation_timestamp, pod.full_name


@dataclass(frozen=True, slots=True)
class AffinityTurns:
    """The node affinities that are planned for.

    Attributes:
        admitted: Those; None for all.
        impossible: Those that no offer's nodes satisfy.
    """

    admitted: frozenset[bytes] | None
    impossible: frozenset[bytes] = frozenset()

    def refusal(self, affinity: bytes) -> str:
        """Return why a pod with this affinity is left out; empty if it is not."""
        if not affinity or self.admitted is None or affinity in self.admitted:
            return ""
        return NO_GROUP if affinity in self.impossible else COME_FIRST


def affinity_turns(
    pods: Sequence[tuple[ElasticPod, bytes]],
    planned: Collection[str],
    can_hold: Callable[[bytes], bool],
) -> AffinityTurns:
    """Return the node affinities that are planned for.

    Args:
        pods: each with its encoded node affinity, empty for none.
        planned: UIDs of pods for which a node comes. Their affinities come first.
        can_hold: whether some offer's nodes satisfy an affinity.
    """
    distinct = {affinity for _, affinity in pods if affinity}
    if len(distinct) <= MAX_AFFINITIES:
        return AffinityTurns(None)
    first = dict.fromkeys(
        affinity for pod, affinity in pods if affinity and pod.metadata.uid in planned
    )
    admitted, impossible = set(islice(first, MAX_AFFINITIES)), set[bytes]()
    for affinity in islice(_affinities_in_turns(pods, first), MAX_JUDGED):
        if len(admitted) >= MAX_AFFINITIES:
            break
        (admitted if can_hold(affinity) else impossible).add(affinity)
    return AffinityTurns(frozenset(admitted), frozenset(impossible))


def _affinities_in_turns(
    pods: Iterable[tuple[ElasticPod, bytes]], without: Mapping[bytes, object]
) -> Iterator[bytes]:
    """Yield the other affinities: the first of each namespace, then the second of each."""
    by_namespace: dict[str, dict[bytes, None]] = {}
    for pod, affinity in sorted(pods, key=lambda one: _rank(one[0])):
        if affinity and affinity not in without:
            by_namespace.setdefault(pod.metadata.namespace, {})[affinity] = None
    seen = set[bytes]()
    left = {name: iter(affinities) for name, affinities in by_namespace.items()}
    while left:
        for name, affinities in [*left.items()]:
            # An affinity that another namespace has, too, takes no turn of this one.
            other = next((one for one in affinities if one not in seen), None)
            if other is None:
                del left[name]
            else:
                seen.add(other)
                yield other
