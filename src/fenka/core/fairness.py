"""What each user has had of the cards, and how that orders requests of one priority.

Use is measured in card-seconds: a slice counts for the larger of its shares of memory and compute. It decays:
after one half-life half of it counts. Time is a number passed in.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, inf, log

from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Placement

REMEMBERED = 256
"""Starts of one user, between which requests that are older still wait."""

FORGOTTEN = 1e-3
"""Card-seconds that order nobody."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """What orders requests of one priority.

    The user that has had less comes first. Counted are card-seconds, which decay by `half_life_s`, and
    `turn_s` seconds for each placement that the user holds and for each request that it made before. Equal
    users are ordered by time. A user's first request starves when it has waited for `starvation_s` and none
    that the user made earlier was served meanwhile. It goes before all that do not starve. With turn_s 0
    time alone decides. With half_life_s 0 nothing is remembered.
    """

    penalty_per_request_s: float = 60
    starvation_s: float = 3600
    half_life_s: float = 3600


@dataclass(frozen=True, slots=True)
class UserHistory:
    """What a user has and had. held: placements. used_s: card-seconds, decayed.

    starts: of its requests, when they were made and when served; both ascend.
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
    """As of when."""
    rate: float = 0.0
    """Cards that it holds."""
    open: int = 0
    starts: list[tuple[float, float]] = field(default_factory=list)


class UsageHistory:
    """Adds up what users hold, and lets it decay."""

    def __init__(self, fairness: Fairness) -> None:
        self._decay = log(2) / fairness.half_life_s if fairness.half_life_s > 0 else inf
        self._keep_s = fairness.starvation_s
        self._users: dict[str, _User] = {}
        self._open: dict[str, tuple[str, float]] = {}
        """By the id of who holds something: its user, and how many cards."""

    def start(
        self, holder: str, user: str, cards: float, requested_at: float, at: float, now: float
    ) -> None:
        """Count a holder from `at` on, which may be in the past. One that holds as before is not changed."""
        if self._open.get(holder) == (user, cards):
            return
        resized = holder in self._open
        self.stop(holder, now, now)
        mine = self._users.setdefault(user, _User())
        self._advance(mine, now)
        at = now if resized else min(at, now)
        mine.used_s += cards * self._weight(now - at)
        mine.rate, mine.open = mine.rate + cards, mine.open + 1
        self._open[holder] = user, cards
        if not resized:
            self._served(mine, requested_at, at)

    def stop(self, holder: str, at: float, now: float) -> None:
        """Count the holder no more since `at`, which may be in the past. Unknown holders are ignored."""
        known = self._open.pop(holder, None)
        if known is None:
            return
        user, cards = known
        mine = self._users[user]
        self._advance(mine, now)
        mine.used_s = max(0.0, mine.used_s - cards * self._weight(max(0.0, now - at)))
        mine.open -= 1
        mine.rate = mine.rate - cards if mine.open else 0.0

    @property
    def holders(self) -> frozenset[str]:
        """Who is counted now."""
        return frozenset(self._open)

    def holds(self, holder: str) -> bool:
        """Return whether the holder is counted now."""
        return holder in self._open

    def charge(self, user: str, seconds: float, requested_at: float, now: float) -> None:
        """Count card-seconds that were kept for a request of the user, which did not come for them."""
        mine = self._users.setdefault(user, _User())
        self._advance(mine, now)
        mine.used_s += seconds
        self._served(mine, requested_at, now)

    def history(self, user: str, held: int, now: float) -> UserHistory:
        """Return what this user has had until now. held: placements that it has."""
        mine = self._users.get(user)
        if mine is None:
            return UserHistory(held)
        self._advance(mine, now)
        mine.starts = [it for it in mine.starts if it[1] > now - self._keep_s]
        if not mine.open and not mine.starts and mine.used_s < FORGOTTEN:
            del self._users[user]
        return UserHistory(held, mine.used_s, tuple(mine.starts))

    def used(self, now: float) -> dict[str, float]:
        """Return the card-seconds of all users that have any."""
        found = {user: self.history(user, 0, now).used_s for user in list(self._users)}
        return {user: used for user, used in found.items() if used >= FORGOTTEN}

    def merge(self, used: Mapping[str, float], now: float) -> None:
        """Take over what another has counted until now, where that is more."""
        for user, seconds in used.items():
            mine = self._users.setdefault(user, _User())
            self._advance(mine, now)
            mine.used_s = max(mine.used_s, seconds)

    def _weight(self, seconds: float) -> float:
        """Return what a card that was held from so long ago until now counts."""
        if not 0 < self._decay < inf:
            return seconds if self._decay == 0 else 0.0
        return (1 - exp(-self._decay * seconds)) / self._decay

    def _advance(self, mine: _User, now: float) -> None:
        # A clock that was put back adds nothing.
        passed = max(0.0, now - mine.at) if mine.at > -inf else 0.0
        kept = exp(-self._decay * passed) if self._decay < inf else 0.0
        mine.used_s = mine.used_s * kept + mine.rate * self._weight(passed)
        mine.at = now

    def _served(self, mine: _User, requested_at: float, at: float) -> None:
        earlier = mine.starts[: bisect_right(mine.starts, (requested_at, -inf))]
        if earlier and earlier[-1][1] >= at:
            return
        # Whoever asks for the last start of a request made by then is answered by the latest of them.
        later = [it for it in mine.starts[len(earlier) :] if it[1] > at]
        mine.starts = [*earlier, (requested_at, at), *later][-REMEMBERED:]


def cards_of(placements: Iterable[Placement], cards: Mapping[DeviceId, Card]) -> float:
    """Return how many cards the placements on one node come to. cards: the node's."""
    total = 0.0
    for placement in placements:
        for it in placement.slices:
            card = cards.get(it.uuid)
            if placement.whole or card is None:
                total += 1
            else:
                total += max(it.memory_mib / card.memory_mib, it.compute / card.compute)
    return total
