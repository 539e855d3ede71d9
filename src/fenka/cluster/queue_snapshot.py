"""The entries of the queue, the result of scheduling it once, and what the leader publishes of both: values.

All times are seconds since 1970.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta
from msgspec.json import Decoder

from fenka.cluster.objects import Pod, seconds
from fenka.core import queue
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.evaluate import Policy
from fenka.core.inventory import DeviceId
from fenka.core.policies.scores import SCORES
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity
from fenka.dialects import card_records
from fenka.dialects.base import Dialect
from fenka.dialects.registry import DIALECTS, WITH_HAMI

GRACE_S = 30
"""Kubernetes' default for a pod that does not give its termination grace period."""

BY_TIME = queue.Fairness(penalty_per_request_s=0)


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A pending pod, or the members of a gang that have no node. id: the pod's UID, or the gang's key."""

    id: str
    pods: tuple[Pod, ...]

    @property
    def name(self) -> str:
        """Return the name of the pod or of the gang."""
        meta = self.pods[0].metadata
        return meta.name if self.id == meta.uid else self.id.partition("/")[2]

    @property
    def namespace(self) -> str:
        """Return the namespace of all its pods."""
        return self.pods[0].metadata.namespace

    @property
    def priority(self) -> int:
        """Return the lowest priority of its pods."""
        return min(pod.spec.priority or 0 for pod in self.pods)

    @property
    def time_limit_s(self) -> float | None:
        """Return the seconds after which all its pods have ended, grace included; None for no limit."""
        limits = [time_limit_s(pod) for pod in self.pods]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    def request(
        self,
        now: float,
        requests: tuple[Request, ...] = (),
        nodes: frozenset[str] | None = None,
        *,
        same_node: bool = False,
        proximity: Proximity | None = None,
    ) -> queue.PendingRequest:
        """Return the request by which the core orders it, and what it requests of which nodes."""
        created = (seconds(pod.metadata.creation_timestamp) for pod in self.pods)
        at = min(now if time is None else time for time in created)
        user, limit = self.namespace, self.time_limit_s
        return queue.PendingRequest(
            self.id, requests, at, self.priority, user, limit, nodes, same_node, proximity
        )


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An entry of a snapshot.

    Attributes:
        pending: the pods.
        sort_key: orders the entries.
        unschedulable: why it does not fit on what the entries before it leave; None if it fits.
        reservation: cards that are reserved for an entry that does not fit; only the first few have one.
        placements: where it fits.
    """

    pending: PendingEntry
    sort_key: queue.SortKey
    unschedulable: Unschedulable | None = None
    reservation: queue.Reservation | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def why(self) -> str:
        """Return why it does not fit; empty if it fits. The sentence is long to make: over all cards."""
        return self.unschedulable.sentence() if self.unschedulable else ""

    @property
    def requested_at(self) -> float:
        """Return when it was requested, in seconds since 1970."""
        return self.sort_key[3]


@dataclass(slots=True)
class QueueSnapshot:
    """The result of scheduling the queue.

    Attributes:
        entries: the pending entries, in order.
        can_reserve: whether another entry could reserve cards, at any position.
        node_of_card: the node of each card.
        history: returns what a namespace has and has used, as of `now`.
        fairness: how entries of one priority are ordered.
        now: when the queue was scheduled.
        holders: the entries for which anything is held or reserved, with their rank.
    """

    entries: tuple[QueueEntry, ...] = ()
    can_reserve: bool = True
    node_of_card: Mapping[DeviceId, str] = field(default_factory=dict)
    history: queue.HistoryLookup = lambda _: queue.NO_HISTORY
    fairness: queue.Fairness = BY_TIME
    now: float = 0.0
    holders: tuple[tuple[int, QueueEntry], ...] = field(init=False)
    _sort_keys: dict[str, queue.SortKey] = field(init=False)
    _ranks: list[queue.SortKey] = field(init=False)
    _arrivals: dict[str, list[tuple[float, float, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._sort_keys = {entry.pending.id: entry.sort_key for entry in self.entries}
        self._ranks = [entry.sort_key for entry in self.entries]
        self._arrivals = {}
        for entry in self.entries:
            insort(self._arrivals.setdefault(entry.pending.namespace, []), _arrival(entry.sort_key))
        self.holders = tuple(
            (rank, entry)
            for rank, entry in enumerate(self.entries)
            if entry.placements or entry.reservation is not None
        )

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._sort_keys

    def sort_key(self, request: queue.PendingRequest) -> queue.SortKey:
        """Return the key of an entry, or the one that it would have if it became pending now."""
        known = self._sort_keys.get(request.id)
        if known is not None:
            return known
        history = self.history(request.user)
        arrival = _arrival(queue.sort_key(request, 0, history, BY_TIME, self.now, first=False))
        arrivals = self._arrivals.get(request.user, [])
        before = bisect_left(arrivals, arrival)
        first = not before or arrivals[before - 1][0] != arrival[0]
        return queue.sort_key(request, before, history, self.fairness, self.now, first=first)

    def key_of(self, entry_id: str) -> queue.SortKey | None:
        """Return the sort key of an entry; None if it is not in the queue."""
        return self._sort_keys.get(entry_id)

    def rank(self, key: queue.SortKey) -> int:
        """Return how many entries are before this key."""
        return bisect_left(self._ranks, key)


def _arrival(key: queue.SortKey) -> tuple[float, float, str]:
    """Return priority, time and ID of a key."""
    return key[0], key[3], key[4]


def time_limit_s(pod: Pod) -> float | None:
    """Return the seconds after its start at which the kubelet has ended the pod; None if it never does."""
    deadline, grace = pod.spec.active_deadline_seconds, pod.spec.termination_grace_period_seconds
    return None if deadline is None else float(deadline + (GRACE_S if grace is None else grace))


POSITION = "fenka.io/queue-position"
"""Annotation of a pending pod: its position in the queue, or its gang's; 1 is served next."""


def read_position(pod: Pod) -> int | None:
    """Return the position that was published last; None if there is none. Users can write anything there."""
    text = pod.metadata.annotations.get(POSITION, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


ANNOTATION = "fenka.io/options"
"""Annotation of the Lease."""

LABEL = "fenka.io/component=scheduler"
"""Label of the Lease, by which readers find it in any namespace."""


MAX_LEVELS = 16
"""Topology levels, as many as Kueue allows."""


class InvalidLevels(FenkaError, ValueError):
    """Topology levels that cannot be used; the message says why."""

    exit_code = INVALID_INPUT


def check_levels(levels: Sequence[str]) -> None:
    """Raise InvalidLevels if these node labels cannot name topology domains."""
    if len(levels) > MAX_LEVELS:
        raise InvalidLevels(
            f"{len(levels)} topology levels are too many: name at most {MAX_LEVELS}"
        )
    for level in levels:
        if not re.fullmatch(_LABEL, level):
            raise InvalidLevels(
                f"topology level {level[:80]!r} is no name of a label: name a label of nodes"
            )
        if levels.count(level) > 1:
            raise InvalidLevels(f"topology level {level} is named twice: name each level once")


TopologyLevels = Annotated[
    list[str],
    Meta(
        title="LABEL",
        description="node label of topology domains, such as zones or racks, the outermost first: gangs are "
        "placed in few of them; repeatable",
    ),
]

_LABEL = (
    r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The scheduler's queue, so that other programs order and place pods as it does. Raises ValueError.

    Attributes:
        hami: whether HAMi's names are read.
        fairness: what orders pods of one priority.
        topology_levels: node labels that name topology domains, the outermost first.
    """

    policy: Policy = "binpack"
    hami: bool = False
    fairness: queue.Fairness = field(default_factory=queue.Fairness)
    topology_levels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in SCORES:
            raise ValueError(f"there is no policy {self.policy}")
        check_levels(self.topology_levels)

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """Return the dialects that the scheduler reads."""
        return WITH_HAMI if self.hami else DIALECTS

    def encode(self) -> str:
        """Return the annotation."""
        return card_records.encode(self)


def decode(text: str) -> SchedulerOptions:
    """Read the annotation; fields of newer versions are ignored. Raises InvalidRecord."""
    return card_records.decode(
        text, Decoder(SchedulerOptions), f"annotation {ANNOTATION} of the Lease"
    )
