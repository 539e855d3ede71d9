"""The queue as values: pending requests, their order, and what serving them comes to."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fenka.core.fairness import Fairness, UsageHistory, UserHistory
from fenka.core.inventory import DeviceId
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.values import value_class


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One request, or all requests of a gang, that are not placed yet.

    Attributes:
        requested_at: in the caller's time.
        priority: the largest is served first.
        time_limit_s: seconds after which it is ended (activeDeadlineSeconds); None if nothing ends it.
        nodes: names of the eligible nodes, the only ones in its reasons; None for all.
        same_node: whether all its requests are for one node.
    """

    id: str
    requests: tuple[Request, ...]
    requested_at: float
    priority: int = 0
    user: str = ""
    time_limit_s: float | None = None
    nodes: frozenset[str] | None = None
    same_node: bool = False


@value_class(frozen=True, slots=True)
class Allocation:
    """A placement in force. deadline: when it is ended at the latest, None if nothing ends it."""

    placement: Placement
    deadline: float | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Cards reserved for a pending request. starts_by: when they are free at the latest, None if unknown."""

    cards: frozenset[DeviceId]
    starts_by: float | None

    def blocks(self, deadline: float | None) -> bool:
        """Return whether a request that ends by this deadline must not use the cards."""
        return self.starts_by is None or deadline is None or deadline > self.starts_by


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The state of a pending request. position: 1 is served next. Only the first few have a reservation."""

    id: str
    position: int
    unschedulable: Unschedulable
    reservation: Reservation | None

    @property
    def reason(self) -> str:
        """Return the reason in one sentence."""
        return self.unschedulable.sentence()


@dataclass(frozen=True, slots=True)
class SchedulingResult:
    """The result of one scheduling pass, both parts in order."""

    placed: tuple[tuple[str, tuple[Placement, ...]], ...]
    pending: tuple[QueueStatus, ...]


HistoryLookup = Callable[[str], UserHistory]
"""Returns what a user has and had, as of now."""


def history_lookup(held: Mapping[str, int], uses: UsageHistory, now: float) -> HistoryLookup:
    """Return a lookup that computes each user once. held: the number of placements of each."""
    known: dict[str, UserHistory] = {}

    def find(user: str) -> UserHistory:
        if user not in known:
            known[user] = uses.history(user, held.get(user, 0), now)
        return known[user]

    return find


def queue_order(
    waiting: Iterable[PendingRequest], past: HistoryLookup, fairness: Fairness, now: float
) -> list[PendingRequest]:
    """Return the requests in the order of service: by priority, then by `Fairness`, time and id."""
    return [it for _, it in sort_keys(waiting, past, fairness, now)]


SortKey = tuple[float, int, float, float, str]
"""Priority, whether it starves, fair share or time, time, id; the smallest is served first."""


def sort_keys(
    waiting: Iterable[PendingRequest], past: HistoryLookup, fairness: Fairness, now: float
) -> list[tuple[SortKey, PendingRequest]]:
    """Return the requests in order, each with its sort key."""
    earlier: dict[str, int] = {}
    users: set[tuple[str, int]] = set()
    keyed = []
    for request in sorted(waiting, key=lambda it: (-it.priority, it.requested_at, it.id)):
        user = request.user
        first = not user or (user, request.priority) not in users
        users.add((user, request.priority))
        before = earlier.get(user, 0) if user else 0
        earlier[user] = before + 1
        keyed.append((sort_key(request, before, past(user), fairness, now, first=first), request))
    return sorted(keyed, key=lambda pair: pair[0])


def sort_key(
    request: PendingRequest,
    before: int,
    past: UserHistory,
    fairness: Fairness,
    now: float,
    *,
    first: bool,
) -> SortKey:
    """Return the sort key of a request.

    Args:
        request: the request.
        before: the number of requests that its user made earlier.
        past: its user's.
        fairness: how users share.
        now: in the caller's time.
        first: whether it is the earliest of its user and priority.
    """
    priority, at = -request.priority, request.requested_at
    if fairness.penalty_per_request_s == 0:
        return priority, 0, at, at, request.id
    since = max(at, past.served_at(at))
    if first and now - since >= fairness.max_penalty_s:
        return priority, 0, since, at, request.id
    share = past.used_s + fairness.penalty_per_request_s * (past.held + before)
    return priority, 1, share, at, request.id
