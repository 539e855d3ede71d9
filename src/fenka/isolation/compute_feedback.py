"""Tells programs ten times a second how much of a card's time they have used and may use.

No program can determine that itself. The driver's figures correct the shim's estimates
(native/shim/compute_budget.c); the demand of other leases decides in the modes soft and weight.
"""

import mmap
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenka.core.request import COMPUTE_MODES, ComputeMode, Slice
from fenka.isolation.lease_control import layout

PERIOD_S = 0.1
"""Programs ignore feedback that is older than a second."""

UNLIMITED_PERIOD_NS = 500_000_000
"""Between readings of a card on which no lease is limited."""

DEMAND_WINDOW_NS = 300_000_000
"""A lease that has used the card within this time has demand; its largest use in it counts."""

GROWTH, MIN_ROOM_PERCENT = 1.5, 5
"""Others leave a lease room for this many times its recent use, and this much more, before it asks for it.

So a lightly used share does not keep the card idle, and grows to its full size in a few rounds.
"""

MAX_SAMPLE_US = 1_000_000
"""No driver's sample covers more time."""

WITHOUT_COMPUTE: tuple[ComputeMode, int] = ("weight", 100)
"""The weight of leases without compute, and of processes in no lease, beside others."""

Samples = Callable[[str, int], tuple[int, Mapping[int, int]] | None]
""":meth:`fenka.hardware.nvml.Driver.busy_samples`."""


def requested_compute(slices: Iterable[Slice]) -> dict[str, int]:
    """Return the percentages of slices by their cards' UUIDs."""
    return {piece.uuid: piece.compute for piece in slices}


@dataclass(frozen=True, slots=True)
class ComputeDemand:
    """The share of one lease on a card. active: whether it uses the card now."""

    mode: ComputeMode
    percent: int
    active: bool
    burst_percent: int = 100
    """Upper limit for soft, also on an idle card."""
    used_percent: int = 100
    """The most of the card's time that it has used lately."""

    @property
    def claim(self) -> float:
        """The percentage that others leave to it, unless its share or weight gives it less."""
        return self.used_percent * GROWTH + MIN_ROOM_PERCENT


def allowances(leases: Mapping[str, ComputeDemand]) -> dict[str, float]:
    """Return the percentage of a card's time that each lease may use now.

    Active leases get their shares, as far as they claim them. The rest is for soft, and is divided among
    leases with a weight. An active weight leaves nothing for soft.
    """
    return {lease: _allowance(lease, leases) for lease in leases}


def _allowance(lease: str, leases: Mapping[str, ComputeDemand]) -> float:
    own = leases[lease]
    others = [demand for name, demand in leases.items() if name != lease and demand.active]
    weighted = [demand for demand in others if demand.mode == "weight"]
    rest = 100.0 - sum(
        min(demand.percent, demand.claim) for demand in others if demand.mode != "weight"
    )
    if own.mode == "weight":
        return _by_weight(own.percent, weighted, max(rest, 1))
    if own.mode == "soft" and not weighted:
        return max(own.percent, min(rest, own.burst_percent))
    return own.percent


def _by_weight(weight: int, others: Sequence[ComputeDemand], percent: float) -> float:
    """Return a weight's part of a percentage. Shares that their leases do not claim are divided again."""
    weights = weight + sum(demand.percent for demand in others)
    for demand in sorted(others, key=lambda demand: demand.claim / demand.percent):
        if demand.claim >= percent * demand.percent / weights:
            break  # This one, and those that claim more for their weight, get no more than their part.
        percent -= demand.claim
        weights -= demand.percent
    return percent * weight / weights


class _RecentUse:
    """A lease's use of a card, by the time of each reading."""

    def __init__(self) -> None:
        self._percents: dict[int, int] = {}

    def add(self, now: int, percent: int) -> None:
        """Add what one of its processes has used."""
        self._percents[now] = self._percents.get(now, 0) + percent

    def most(self, now: int) -> int | None:
        """Return its largest use in the last DEMAND_WINDOW_NS; None if it has not used the card."""
        recent = self._percents.items()
        self._percents = {at: used for at, used in recent if now - at < DEMAND_WINDOW_NS}
        return min(max(self._percents.values()), 100) if self._percents else None


@dataclass
class _Page:
    """A lease's control page, kept open."""

    memory: mmap.mmap
    control: Any
    burst_percent: int
    requested: Mapping[str, int] | None
    yielding: set[str] = field(default_factory=set)
    """Cards on which it yields to others."""
    busy_ns: dict[str, int] = field(default_factory=dict)
    recent: dict[str, _RecentUse] = field(default_factory=dict)
    """Like `requested` and `busy_ns` by card UUID."""

    def share(self, uuid: str, card: Any) -> tuple[ComputeMode, int] | None:
        """Return its share or weight of a card; None if it has none."""
        if _is_limited(card) or (self.requested or {}).get(uuid):
            return COMPUTE_MODES[card.compute_mode], card.compute_percent
        return None

    def set_yielding(self, uuid: str, yielding: bool, now: int) -> None:
        """Tell programs whether to measure launches and to keep to what is allowed."""
        (self.yielding.add if yielding else self.yielding.discard)(uuid)
        if bool(self.yielding) != bool(self.control.yielding_since):
            self.control.yielding_since = now if self.yielding else 0

    def cards(self) -> dict[str, Any]:
        control = self.control
        return {
            layout().string(card.uuid).decode(): card
            for card in control.cards[0 : control.card_count]
        }

    def close(self) -> None:
        layout().release(self.control)
        self.memory.close()


def _is_limited(card: Any) -> bool:
    return bool(card.compute_percent < 100 or card.compute_mode)


@dataclass(eq=False)
class ComputeFeedback:
    """Reads the driver and writes the control pages of all leases of one machine.

    Programs without a limit of compute are told their use twice a second: notebooks end when they have not
    used their slice for a time. While another lease with a share or weight is on its card, a lease without
    one is limited like a weight of 100. Cards whose driver measures no processes get no feedback: there the
    shim's estimates decide alone, soft is limited to its share, and weight is not limited.

    Attributes:
        _samples: Returns the driver's samples of a card.
        _lease_of: Returns the lease of a process, by the driver's PID. The answer is cached while the
            process uses a card; None is not cached.
        _clock_ns: The monotonic clock.
        _wall_us: The wall clock, by which drivers date samples.
    """

    _samples: Samples
    _lease_of: Callable[[int], str | None]
    _clock_ns: Callable[[], int] = time.monotonic_ns
    _wall_us: Callable[[], int] = lambda: time.time_ns() // 1000
    _pages: dict[str, _Page] = field(default_factory=dict)
    _leases: dict[int, str] = field(default_factory=dict)
    _sampled_us: dict[str, int] = field(default_factory=dict)
    _unleased: dict[str, _RecentUse] = field(default_factory=dict)
    """The use by processes without a lease of the card, by card UUID."""
    _read_ns: dict[str, int] = field(default_factory=dict)
    _using: dict[str, set[int]] = field(default_factory=dict)
    """The processes that used a card when it was read the last time."""

    def add_lease(
        self,
        lease: str,
        page: Path,
        burst_percent: int = 100,
        requested: Mapping[str, int] | None = None,
    ) -> None:
        """Add a lease, or change what is known about one. Raises OSError.

        Args:
            lease: Its id.
            page: Its control page.
            burst_percent: Up to what a soft lease may use idle time.
            requested: Percentages of its cards' time that it requested, by UUID, where its page has no limit.
                With 0 it yields to shares and weights. None: it is never delayed.
        """
        if lease in self._pages:
            known = self._pages[lease]
            known.burst_percent, known.requested = burst_percent, requested
            return
        with page.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        control = layout().from_buffer("struct fenka_control *", memory, require_writable=True)
        self._pages[lease] = _Page(memory, control, burst_percent, requested)

    def remove_lease(self, lease: str) -> None:
        """Remove a lease. Unknown ones are ignored."""
        page = self._pages.pop(lease, None)
        if page:
            page.close()

    def busy_ns(self, lease: str, uuid: str) -> int:
        """Return how long a lease has used a card."""
        page = self._pages.get(lease)
        return page.busy_ns.get(uuid, 0) if page else 0

    def busy_s(self, lease: str, uuid: str) -> float | None:
        """Return the same in seconds; None if the driver does not measure processes on the card."""
        return self.busy_ns(lease, uuid) / 1e9 if uuid in self._sampled_us else None

    def close(self) -> None:
        """Remove all leases."""
        for lease in list(self._pages):
            self.remove_lease(lease)

    def update(self) -> None:
        """Write feedback for all cards that are due. Raises what `samples` raises."""
        on_cards: dict[str, dict[str, Any]] = {}
        for lease, page in self._pages.items():
            for uuid, card in page.cards().items():
                on_cards.setdefault(uuid, {})[lease] = card
        now = self._clock_ns()
        self._using = {uuid: pids for uuid, pids in self._using.items() if uuid in on_cards}
        for uuid, cards in on_cards.items():
            if (
                any(map(_is_limited, cards.values()))
                or self._yielding(uuid, cards)
                or now - self._read_ns.get(uuid, -UNLIMITED_PERIOD_NS) >= UNLIMITED_PERIOD_NS
            ):
                self._read_ns[uuid] = now
                self._using[uuid] = self._update_card(uuid, cards)
        using = set().union(*self._using.values())
        self._leases = {pid: lease for pid, lease in self._leases.items() if pid in using}

    def _yielding(self, uuid: str, cards: Mapping[str, Any]) -> Collection[str]:
        """Return the leases without compute on a card, if others have a share or weight there."""
        without = {
            lease for lease, card in cards.items() if not self._pages[lease].share(uuid, card)
        }
        if len(without) == len(cards):
            return ()
        return {lease for lease in without if self._pages[lease].requested is not None}

    def _update_card(self, uuid: str, cards: Mapping[str, Any]) -> set[int]:
        """Write feedback for one card. Return the processes that use it."""
        call_us = self._wall_us()
        # A sample may be as old as its period is long. Samples must not be counted twice.
        since_us = max(self._sampled_us.get(uuid, 0), call_us - MAX_SAMPLE_US)
        samples = self._samples(uuid, since_us)
        if samples is None:
            return set()
        at_us, percents = samples
        self._sampled_us[uuid] = max(at_us, call_us - 3 * int(PERIOD_S * 1e6))
        now = self._clock_ns()
        self._add_samples(uuid, cards, percents, max(at_us - since_us, 0), now)
        allowed = allowances(self._demands(uuid, cards, now))
        yielding = self._yielding(uuid, cards)
        for lease, card in cards.items():
            page = self._pages[lease]
            page.set_yielding(uuid, lease in yielding, now)
            limited = lease in yielding or _is_limited(card)
            card.feedback_seq |= 1
            card.feedback_at = now
            card.busy_ns = page.busy_ns.get(uuid, 0)
            card.allowed = int(allowed[lease] * 100) if limited else 10_000
            card.feedback_seq += 1
        return set(percents)

    def _add_samples(
        self, uuid: str, cards: Collection[str], percents: Mapping[int, int], us: int, now: int
    ) -> None:
        for pid, percent in percents.items():
            if pid not in self._leases and (lease := self._lease_of(pid)) is not None:
                self._leases[pid] = lease
            holder = self._leases.get(pid, "")
            # A process that uses a card outside of its lease counts as one without.
            if holder not in cards:
                self._unleased.setdefault(uuid, _RecentUse()).add(now, percent)
                continue
            page = self._pages[holder]
            page.busy_ns[uuid] = page.busy_ns.get(uuid, 0) + percent * us * 10
            page.recent.setdefault(uuid, _RecentUse()).add(now, percent)

    def _demands(self, uuid: str, cards: Mapping[str, Any], now: int) -> dict[str, ComputeDemand]:
        def demand(
            recent: _RecentUse | None, share: tuple[ComputeMode, int] | None, burst_percent: int
        ) -> ComputeDemand:
            used = recent.most(now) if recent else None
            return ComputeDemand(
                *(share or WITHOUT_COMPUTE), used is not None, burst_percent, used or 0
            )

        demands = {
            lease: demand(page.recent.get(uuid), page.share(uuid, card), page.burst_percent)
            for lease, card in cards.items()
            if (page := self._pages[lease])
        }
        unleased = demand(self._unleased.get(uuid), None, 100)
        return {**demands, "": unleased} if unleased.active else demands
