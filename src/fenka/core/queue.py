"""The queue as values: pending requests, their order, and what serving them comes to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fenka.core.fairness import Fairness, UsageHistory, UserHistory
from fenka.core.inventory import DeviceId, Node
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """Who waits: one request, or all those of a gang, which counts as one.

    requested_at: in the caller's time. priority: the larger is served first. time_limit_s: seconds after
    which
    it is ended (activeDeadlineSeconds); None if nothing ends it. nodes: the names of those
    that it may go to, and are counted in its reasons; None for any. together: all its requests are for one
    node, whichever.
    """

    id: str
    requests: tuple[Request, ...]
    requested_at: float
    priority: int = 0
    user: str = ""
    time_limit_s: float | None = None
    nodes: frozenset[str] | None = None
    same_node: bool = False

    def eligible_nodes(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Those of the nodes to which it may go."""
        return nodes if self.nodes is None else [it for it in nodes if it.name in self.nodes]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A placement that holds. deadline: when it is ended whatever it does, None if nothing ends it."""

    placement: Placement
    deadline: float | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The cards that a waiter named, by UUID, and when they will do at the latest; None: nobody can tell."""

    cards: frozenset[DeviceId]
    starts_by: float | None

    def blocks(self, deadline: float | None) -> bool:
        """Whether its cards are barred for who would end then."""
        return self.starts_by is None or deadline is None or deadline > self.starts_by


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """How a waiter stands. position: 1 is served next. Only the first few that wait have a reservation."""

    id: str
    position: int
    unschedulable: Unschedulable
    reservation: Reservation | None

    @property
    def reason(self) -> str:
        """One sentence."""
        return self.unschedulable.sentence()


@dataclass(frozen=True, slots=True)
class SchedulingResult:
    """What serving the queue once comes to, both in order."""

    placed: tuple[tuple[str, tuple[Placement, ...]], ...]
    pending: tuple[QueueStatus, ...]


HistoryLookup = Callable[[str], UserHistory]
"""What a user has and had, as of now."""


def history_lookup(held: Mapping[str, int], uses: UsageHistory, now: float) -> HistoryLookup:
    """Return a lookup by user, which is made once for each. held: how many placements each has."""
    known: dict[str, UserHistory] = {}

    def find(user: str) -> UserHistory:
        if user not in known:
            known[user] = uses.history(user, held.get(user, 0), now)
        return known[user]

    return find


def queue_order(
    waiting: Iterable[PendingRequest], past: HistoryLookup, fairness: Fairness, now: float
) -> list[PendingRequest]:
    """Return them as they are served: by priority, then as `Fairness` says, then by time and id."""
    return [it for _, it in sort_keys(waiting, past, fairness, now)]


SortKey = tuple[float, int, float, float, str]
"""Sorts those who wait, the smaller first: priority, whether it has starved, share or time, time, id."""


def sort_keys(
    waiting: Iterable[PendingRequest], past: HistoryLookup, fairness: Fairness, now: float
) -> list[tuple[SortKey, PendingRequest]]:
    """In order, each with what it is ordered by."""
    before: dict[str, int] = {}
    headed: set[tuple[str, int]] = set()
    found = []
    for it in sorted(waiting, key=lambda it: (-it.priority, it.requested_at, it.id)):
        first = not it.user or (it.user, it.priority) not in headed
        headed.add((it.user, it.priority))
        earlier = before.get(it.user, 0) if it.user else 0
        before[it.user] = earlier + 1
        mine = past(it.user)
        found.append((sort_key(it, earlier, mine, fairness, now, first=first), it))
    return sorted(found, key=lambda pair: pair[0])


def sort_key(
    it: PendingRequest,
    before: int,
    past: UserHistory,
    fairness: Fairness,
    now: float,
    *,
    first: bool,
) -> SortKey:
    """Return what orders it. before: requests of its user in front of it; first: none of its priority is."""
    if fairness.penalty_per_request_s == 0:
        return -it.priority, 0, it.requested_at, it.requested_at, it.id
    since = max(it.requested_at, past.served_at(it.requested_at))
    if first and now - since >= fairness.starvation_s:
        return -it.priority, 0, since, it.requested_at, it.id
    share = past.used_s + fairness.penalty_per_request_s * (past.held + before)
    return -it.priority, 1, share, it.requested_at, it.id
