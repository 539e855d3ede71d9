"""The queue as values: pending requests, their order by priority and fair share, and their outcome."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log

from fenka.core.inventory import WHOLE_COMPUTE, Card, DeviceId, value_class
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.topology.domains import Proximity

REMEMBERED = 256
"""Starts that are remembered of each user."""

FORGOTTEN = 1e-3
"""Fewer card-seconds are forgotten."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """How requests of equal priority are ordered.

    The user with the smaller share comes first. Users of equal share are ordered by time. A user's first
    request starves if none that the user made earlier was served for a long time. It then precedes all that
    do not starve.

    Attributes:
        penalty_per_request_s: card-seconds added to a user's share for each placement that it has, and for
            each request that it made earlier. With 0 time alone decides.
        max_penalty_s: a request that waits for so long starves.
        half_life_s: after this time half of a user's card-seconds count. With 0 nothing is remembered.

    Raises ValueError unless all are finite and 0 or more.
    """

    penalty_per_request_s: float = 60
    max_penalty_s: float = 3600
    half_life_s: float = 3600

    def __post_init__(self) -> None:
        if not all(
            0 <= seconds < inf
            for seconds in (self.penalty_per_request_s, self.max_penalty_s, self.half_life_s)
        ):
            raise ValueError("the settings of fair share must be 0 or more seconds")


@dataclass(frozen=True, slots=True)
class UserHistory:
    """A user's present and past use.

    Attributes:
        held: the number of its placements.
        used_s: its card-seconds, decayed.
        starts: when its requests were made and when they were served; both ascend.
    """

    held: int = 0
    used_s: float = 0.0
    starts: tuple[tuple[float, float], ...] = ()

    def served_at(self, requested_at: float) -> float:
        """Return when a request made at that time or before was last served; -inf if none is known."""
        index = bisect_right(self.starts, (requested_at, inf))
        return self.starts[index - 1][1] if index else -inf


NO_HISTORY = UserHistory()


@dataclass(slots=True)
class _User:
    used_s: float = 0.0
    at: float = -inf
    """When `used_s` was computed."""
    rate: float = 0.0
    """The number of cards that it has."""
    open: int = 0
    starts: list[tuple[float, float]] = field(default_factory=list)


class UsageHistory:
    """Adds up what users have over time, with decay.

    Usage is measured in card-seconds: a slice counts for the larger of its shares of memory and compute. It
    decays: after one half-life half of it counts. Time is passed in as a number.
    """

    def __init__(self, fairness: Fairness) -> None:
        self._decay = log(2) / fairness.half_life_s if fairness.half_life_s > 0 else inf
        self._keep_s = fairness.max_penalty_s
        self._users: dict[str, _User] = {}
        self._open: dict[str, tuple[str, float]] = {}
        """By the id of an allocation: its user, and how many cards it counts for."""

    def start(
        self, holder: str, user: str, cards: float, requested_at: float, at: float, now: float
    ) -> None:
        """Count an allocation from `at` on, which may be in the past, unless it is counted already."""
        if self._open.get(holder) == (user, cards):
            return
        resized = holder in self._open
        if resized:
            self.stop(holder, now, now)
        record = self._users.get(user)
        if record is None:
            record = self._users[user] = _User()
        self._advance(record, now)
        at = now if resized else min(at, now)
        record.used_s += cards * self._weight(now - at)
        record.rate, record.open = record.rate + cards, record.open + 1
        self._open[holder] = user, cards
        if not resized:
            self._served(record, requested_at, at)

    def stop(self, holder: str, at: float, now: float) -> None:
        """Stop counting an allocation at `at`, which may be in the past. Unknown ids are ignored."""
        known = self._open.pop(holder, None)
        if known is None:
            return
        user, cards = known
        record = self._users[user]
        self._advance(record, now)
        record.used_s = max(0.0, record.used_s - cards * self._weight(max(0.0, now - at)))
        record.open -= 1
        record.rate = record.rate - cards if record.open else 0.0

    @property
    def holders(self) -> frozenset[str]:
        """Return the ids that are counted now."""
        return frozenset(self._open)

    def holds(self, holder: str) -> bool:
        """Return whether the id is counted now."""
        return holder in self._open

    def charge(self, user: str, seconds: float, requested_at: float, now: float) -> None:
        """Count card-seconds that were reserved for a request of the user and not used."""
        record = self._users.setdefault(user, _User())
        self._advance(record, now)
        record.used_s += seconds
        self._served(record, requested_at, now)

    def history(self, user: str, held: int, now: float) -> UserHistory:
        """Return what this user has used until now. held: the number of its placements."""
        record = self._users.get(user)
        if record is None:
            return UserHistory(held)
        self._advance(record, now)
        record.starts = [start for start in record.starts if start[1] > now - self._keep_s]
        if not record.open and not record.starts and record.used_s < FORGOTTEN:
            del self._users[user]
        return UserHistory(held, record.used_s, tuple(record.starts))

    def used(self, now: float) -> dict[str, float]:
        """Return the card-seconds of all users that have any."""
        used_s = {user: self.history(user, 0, now).used_s for user in list(self._users)}
        return {user: used for user, used in used_s.items() if used >= FORGOTTEN}

    def _weight(self, seconds: float) -> float:
        """Return the decayed card-seconds of one card from `seconds` ago until now."""
        if not 0 < self._decay < inf:
            return seconds if self._decay == 0 else 0.0
        return (1 - exp(-self._decay * seconds)) / self._decay

    def _advance(self, record: _User, now: float) -> None:
        if record.at == now and self._decay < inf:
            return
        # A clock that was set back adds nothing.
        passed = max(0.0, now - record.at) if record.at > -inf else 0.0
        kept = exp(-self._decay * passed) if self._decay < inf else 0.0
        record.used_s = record.used_s * kept + record.rate * self._weight(passed)
        record.at = now

    def _served(self, record: _User, requested_at: float, at: float) -> None:
        starts = record.starts
        index = bisect_right(starts, (requested_at, -inf))
        if index and starts[index - 1][1] >= at:
            return
        # `served_at` returns the latest start of requests made until then: later starts hide earlier ones.
        later = [start for start in starts[index:] if start[1] > at]
        record.starts = [*starts[:index], (requested_at, at), *later][-REMEMBERED:]


def cards_of(placements: Iterable[Placement], cards: Sequence[Card]) -> float:
    """Return how many cards the placements on one node amount to. cards: the node's."""
    total = 0.0
    for placement in placements:
        for piece in placement.slices:
            card = _card(cards, piece.uuid)
            if card is None:
                total += 1
                continue
            memory = _share(piece.memory_mib, card.memory_mib)
            compute = _share(piece.compute, card.compute) if piece.compute else 0.0
            part = 1 if placement.whole else max(memory, compute)
            total += part * card.compute / WHOLE_COMPUTE if card.parent else part
    return total


def _card(cards: Sequence[Card], uuid: DeviceId) -> Card | None:
    # For the few cards of a node this takes less time than to make a dictionary.
    for card in reversed(cards):
        if card.uuid == uuid:
            return card
    return None


def _share(part: int, total: int) -> float:
    """Return the share; all of a card that reports to have nothing."""
    return part / total if total else float(part > 0)


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One request, or all requests of a gang, that are not placed yet.

    Attributes:
        requested_at: in the caller's time.
        priority: the largest is served first.
        time_limit_s: seconds after which it is ended (activeDeadlineSeconds); None if nothing ends it.
        nodes: names of the eligible nodes, the only ones in its reasons; None for all.
        same_node: whether all its requests are for one node.
        proximity: how close together its requests are placed, None if that does not matter.
    """

    id: str
    requests: tuple[Request, ...]
    requested_at: float
    priority: int = 0
    user: str = ""
    time_limit_s: float | None = None
    nodes: frozenset[str] | None = None
    same_node: bool = False
    proximity: Proximity | None = None


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
    return [request for _, request in sort_keys(waiting, past, fairness, now)]


SortKey = tuple[float, int, float, float, str]
"""Priority, whether it starves, fair share or time, time, id; the smallest is served first."""


def sort_keys(
    waiting: Iterable[PendingRequest], past: HistoryLookup, fairness: Fairness, now: float
) -> list[tuple[SortKey, PendingRequest]]:
    """Return the requests in order, each with its sort key."""
    earlier: dict[str, int] = {}
    users: set[tuple[str, int]] = set()
    keyed = []
    for request in sorted(waiting, key=_by_time):
        user = request.user
        first = not user or (user, request.priority) not in users
        users.add((user, request.priority))
        before = earlier.get(user, 0) if user else 0
        earlier[user] = before + 1
        keyed.append((sort_key(request, before, past(user), fairness, now, first=first), request))
    return sorted(keyed, key=lambda pair: pair[0])


def _by_time(request: PendingRequest) -> tuple[int, float, str]:
    return -request.priority, request.requested_at, request.id


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
