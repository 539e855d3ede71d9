"""Feedback for programs about their use of cards, ten times a second if their compute is limited.

It contains two values that no program can determine itself: how much of a card's time its lease has used by
the driver's figures, which correct the shim's own estimates (native/shim/compute_budget.c); and, for the
modes soft and weight, how much it may use now, given the demand of other leases.

Programs whose compute is not limited get the first value, too, twice a second: notebooks end when they have
not used their slice for a time.

The workstation's daemon and the node agent call :meth:`ComputeFeedback.add_lease` for each lease, and
:meth:`ComputeFeedback.update` every ``PERIOD_S``. Cards whose driver measures no processes get no feedback.
There the shim's estimates decide alone, soft is limited to its share, and weight is not limited.
"""

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenka.isolation.control import COMPUTE_MODES, ComputeMode
from fenka.isolation.layout import layout

PERIOD_S = 0.1
"""Programs ignore feedback that is older than a second."""

UNLIMITED_PERIOD_NS = 500_000_000
"""Between readings of a card on which no lease is limited."""

DEMAND_WINDOW_NS = 300_000_000
"""A lease that has used the card within this time has demand."""

MAX_SAMPLE_US = 1_000_000
"""No driver's sample covers more time."""

Samples = Callable[[str, int], tuple[int, Mapping[int, int]] | None]
""":meth:`fenka.hardware.nvml.Driver.busy_samples`."""


@dataclass(frozen=True, slots=True)
class ComputeDemand:
    """The share of one lease on a card. active: whether it uses the card now."""

    mode: ComputeMode
    percent: int
    active: bool
    burst_percent: int = 100
    """Upper limit for soft, also on an idle card."""

    @property
    def unlimited(self) -> bool:
        """Whether the lease has neither share nor limit."""
        return self.mode == "hard" and self.percent == 100


def allowances(leases: Mapping[str, ComputeDemand]) -> dict[str, float]:
    """Return the percentage of a card's time that each lease may use now.

    Active leases get their shares. The rest is for soft, and is divided among leases with a weight. An
    unlimited active lease counts as a weight of 100, and leaves nothing for soft.
    """
    return {lease: _allowance(lease, leases) for lease in leases}


def _allowance(lease: str, leases: Mapping[str, ComputeDemand]) -> float:
    own = leases[lease]
    others = [demand for name, demand in leases.items() if name != lease and demand.active]
    weighted = [demand for demand in others if demand.unlimited or demand.mode == "weight"]
    rest = 100.0 - sum(demand.percent for demand in others if demand not in weighted)
    if own.mode == "weight":
        weights = sum(demand.percent for demand in weighted)
        return max(rest, 1) * own.percent / (own.percent + weights)
    if own.mode == "soft" and not weighted:
        return max(own.percent, min(rest, own.burst_percent))
    return own.percent


@dataclass
class _Page:
    """A lease's control page, kept open."""

    memory: mmap.mmap
    control: Any
    burst_percent: int
    busy_ns: dict[str, int] = field(default_factory=dict)
    last_used_ns: dict[str, int] = field(default_factory=dict)
    """Times of its last use by card UUID."""

    def cards(self) -> dict[str, Any]:
        control = self.control
        return {
            layout().string(card.uuid).decode(): card
            for card in control.cards[0 : control.card_count]
        }

    def close(self) -> None:
        layout().release(self.control)
        self.memory.close()


@dataclass(eq=False)
class ComputeFeedback:
    """Reads the driver and writes the control pages of all leases of one machine.

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
    _unleased_ns: dict[str, int] = field(default_factory=dict)
    _read_ns: dict[str, int] = field(default_factory=dict)
    _using: dict[str, set[int]] = field(default_factory=dict)
    """The processes that used a card when it was read the last time."""

    def add_lease(self, lease: str, page: Path, burst_percent: int = 100) -> None:
        """Add a lease, or change the percentage up to which a soft lease may use idle time. Raises
        OSError."""
        if lease in self._pages:
            self._pages[lease].burst_percent = burst_percent
            return
        with page.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        control = layout().from_buffer("struct fenka_control *", memory, require_writable=True)
        self._pages[lease] = _Page(memory, control, burst_percent)

    def remove_lease(self, lease: str) -> None:
        """Remove a lease. Unknown ones are ignored."""
        page = self._pages.pop(lease, None)
        if page:
            page.close()

    def busy_ns(self, lease: str, uuid: str) -> int:
        """Return how long a lease has used a card."""
        page = self._pages.get(lease)
        return page.busy_ns.get(uuid, 0) if page else 0

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
            limited = any(
                card.compute_percent < 100 or card.compute_mode for card in cards.values()
            )
            if (
                limited
                or now - self._read_ns.get(uuid, -UNLIMITED_PERIOD_NS) >= UNLIMITED_PERIOD_NS
            ):
                self._read_ns[uuid] = now
                self._using[uuid] = self._update_card(uuid, cards)
        using = set().union(*self._using.values())
        self._leases = {pid: lease for pid, lease in self._leases.items() if pid in using}

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
        self._add_samples(uuid, percents, max(at_us - since_us, 0), now)
        allowed = allowances(self._demands(uuid, cards, now))
        for lease, card in cards.items():
            card.feedback_seq |= 1
            card.feedback_at = now
            card.busy_ns = self._pages[lease].busy_ns.get(uuid, 0)
            card.allowed = int(allowed[lease] * 100)
            card.feedback_seq += 1
        return set(percents)

    def _add_samples(self, uuid: str, percents: Mapping[int, int], us: int, now: int) -> None:
        for pid, percent in percents.items():
            if pid not in self._leases and (lease := self._lease_of(pid)) is not None:
                self._leases[pid] = lease
            page = self._pages.get(self._leases.get(pid, ""))
            if page is None:
                self._unleased_ns[uuid] = now
                continue
            page.busy_ns[uuid] = page.busy_ns.get(uuid, 0) + percent * us * 10
            page.last_used_ns[uuid] = now

    def _demands(self, uuid: str, cards: Mapping[str, Any], now: int) -> dict[str, ComputeDemand]:
        demands = {
            lease: ComputeDemand(
                COMPUTE_MODES[card.compute_mode],
                card.compute_percent,
                now - self._pages[lease].last_used_ns.get(uuid, -DEMAND_WINDOW_NS)
                < DEMAND_WINDOW_NS,
                self._pages[lease].burst_percent,
            )
            for lease, card in cards.items()
        }
        if now - self._unleased_ns.get(uuid, -DEMAND_WINDOW_NS) < DEMAND_WINDOW_NS:
            demands[""] = ComputeDemand("hard", 100, active=True)
        return demands
