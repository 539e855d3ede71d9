"""What an agent tells programs whose compute is limited, ten times a second.

Two things that no program can know by itself: how much of a card's time the driver says its lease has had
(the shim's own estimates are corrected by that, see native/shim/compute.c), and, for the modes that are not
hard, how much it may have now, as others want the card or do not.

Called by the workstation's daemon and by the node agent: :meth:`ComputeFeedback.add_lease` for each
lease, and :meth:`ComputeFeedback.update` each ``PERIOD_S``. Cards whose driver measures no processes get no
feedback: there the estimates decide alone, soft is held to its share, and weight is not held at all.
"""

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenka.isolation.control import COMPUTE_MODES, ComputeMode
from fenka.isolation.layout import layout

__all__ = ["PERIOD_S", "ComputeDemand", "ComputeFeedback", "Samples", "allowances"]

PERIOD_S = 0.1
"""Programs take what is older than a second for silence."""

DEMAND_WINDOW_NS = 300_000_000
"""Who used the card so lately still wants it."""

MAX_SAMPLE_US = 1_000_000
"""No driver's sample stands for more."""

Samples = Callable[[str, int], tuple[int, Mapping[int, int]] | None]
""":meth:`fenka.hardware.nvml.Driver.busy_samples`."""


@dataclass(frozen=True, slots=True)
class ComputeDemand:
    """One lease that may use a card: what it was promised, and whether it uses it now."""

    mode: ComputeMode
    percent: int
    active: bool
    burst_percent: int = 100
    """Of soft: no more than this, however idle the card is."""

    @property
    def unlimited(self) -> bool:
        """Promised nothing, and not held back."""
        return self.mode == "hard" and self.percent == 100


def allowances(leases: Mapping[str, ComputeDemand]) -> dict[str, float]:
    """Percent of a card's time that each lease may have now.

    What was promised to those who want the card is theirs; the rest is for soft, and is divided by weight
    among those who have one (who is not limited at all counts as 100, and leaves soft nothing).
    """
    return {lease: _allowance(lease, leases) for lease in leases}


def _allowance(lease: str, leases: Mapping[str, ComputeDemand]) -> float:
    own = leases[lease]
    others = [it for name, it in leases.items() if name != lease and it.active]
    free = [it for it in others if it.unlimited or it.mode == "weight"]
    rest = 100.0 - sum(it.percent for it in others if it not in free)
    if own.mode == "weight":
        weights = sum(it.percent for it in free)
        return max(rest, 1) * own.percent / (own.percent + weights)
    if own.mode == "soft" and not free:
        return max(own.percent, min(rest, own.burst_percent))
    return own.percent


@dataclass
class _Page:
    """A lease's control page, held open."""

    memory: mmap.mmap
    control: Any
    burst_percent: int
    busy_ns: dict[str, int] = field(default_factory=dict)
    last_used_ns: dict[str, int] = field(default_factory=dict)
    """When it was last seen to use the card."""

    def cards(self) -> dict[str, Any]:
        control = self.control
        return {
            layout().string(card.uuid).decode(): card
            for card in control.cards[0 : control.card_count]
        }

    def close(self) -> None:
        layout().release(self.control)
        self.memory.close()


class ComputeFeedback:
    """Reads the driver and writes the control pages of all leases of one machine."""

    def __init__(
        self,
        samples: Samples,
        lease_of: Callable[[int], str | None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """lease_of: which lease a process is in, by the id that the driver gives it; asked once a process
        while it uses a card, and again where it did not know."""
        self._samples, self._lease_of = samples, lease_of
        self._clock_ns, self._wall_us = clock_ns, wall_us
        self._pages: dict[str, _Page] = {}
        self._leases: dict[int, str] = {}
        self._sampled_us: dict[str, int] = {}
        self._unleased_ns: dict[str, int] = {}

    def add_lease(self, lease: str, page: Path, ceiling: int = 100) -> None:
        """A lease, limited or not; again may change its ceiling, the percentage up to which a soft one may
        have what is idle. OSError when the page cannot be opened."""
        if lease in self._pages:
            self._pages[lease].burst_percent = ceiling
            return
        with page.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        control = layout().from_buffer("struct fenka_control *", memory, require_writable=True)
        self._pages[lease] = _Page(memory, control, ceiling)

    def remove_lease(self, lease: str) -> None:
        """A lease that has ended; unknown ones are nothing."""
        page = self._pages.pop(lease, None)
        if page:
            page.close()

    def busy_ns(self, lease: str, uuid: str) -> int:
        """Return what a lease has had of a card's time so far, where a lease on that card is limited."""
        page = self._pages.get(lease)
        return page.busy_ns.get(uuid, 0) if page else 0

    def close(self) -> None:
        """Forget all."""
        for lease in list(self._pages):
            self.remove_lease(lease)

    def update(self) -> None:
        """One round over the cards on which a lease is limited; nothing where there is none.

        Raises what `samples` raises.
        """
        on_cards: dict[str, dict[str, Any]] = {}
        for lease, page in self._pages.items():
            for uuid, card in page.cards().items():
                on_cards.setdefault(uuid, {})[lease] = card
        using: set[int] = set()
        for uuid, cards in on_cards.items():
            if any(card.compute_percent < 100 or card.compute_mode for card in cards.values()):
                using |= self._update_card(uuid, cards)
        self._leases = {pid: lease for pid, lease in self._leases.items() if pid in using}

    def _update_card(self, uuid: str, cards: Mapping[str, Any]) -> set[int]:
        """Returns who uses the card."""
        call_us = self._wall_us()
        # A sample may be as old as its period is long; one that was seen is not counted again.
        since_us = max(self._sampled_us.get(uuid, 0), call_us - MAX_SAMPLE_US)
        said = self._samples(uuid, since_us)
        if said is None:
            return set()
        at_us, percents = said
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
        wants = {
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
            wants[""] = ComputeDemand("hard", 100, active=True)
        return wants
