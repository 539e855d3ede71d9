"""Observes the machine's cards: their health, the processes on them, and jobs that exceed their limits."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from fenka.core.inventory import Node
from fenka.core.mig.instances import is_planned
from fenka.hardware import card_lock
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import Reading
from fenka.isolation import pid_namespaces
from fenka.isolation.unleased_memory import UnleasedMemory, UnleasedTracker
from fenka.workstation.gpu_processes import (
    GpuProcesses,
    UsageSample,
    group_by_lease,
    unleased_memory,
)
from fenka.workstation.job import Job
from fenka.workstation.log import log
from fenka.workstation.violations import ViolationDetector


@dataclass(eq=False)
class CardMonitor:
    """Reads the driver for one daemon.

    Attributes:
        _hardware: The driver.
        _lease_of: Returns the lease of a process.
        _busy_ns: Returns how long a lease has used a card, by lease and card UUID.
        _leased_mib: Returns the memory of all slices of a card or instance, by its UUID.
    """

    _hardware: Hardware
    _lease_of: Callable[[int], str | None]
    _busy_ns: Callable[[str, str], int]
    _leased_mib: Callable[[str], int]
    dividing: set[str] = field(default_factory=set)
    """Cards that are being divided otherwise: nothing is granted on them."""
    waiting: set[str] = field(default_factory=set)
    """Cards whose layout waits for something to end: nothing is granted that would delay it."""
    _detector: ViolationDetector = field(default_factory=ViolationDetector)
    _violations: Mapping[str, list[str]] = field(default_factory=dict)
    _locked_by_root: set[str] = field(default_factory=set)
    _unleased: UnleasedTracker = field(default_factory=UnleasedTracker)

    def observe(self, node: Node) -> tuple[Node, dict[str, Reading]]:
        """Return the node with each card's health and unleased memory, and the readings by UUID.

        A card is unhealthy if the driver does not list it, if root's daemon has locked it, or
        while it is divided. One whose layout waits is cordoned.
        Raises NoDriver, NodeError.
        """
        readings = self._measure_unleased(node)
        return self.health(node, readings), readings

    def health(self, node: Node, readings: Mapping[str, Reading] | None = None) -> Node:
        """Return what `observe` does without another look at unleased memory."""
        readings = self._hardware.readings() if readings is None else readings
        locked: set[str] = {
            card.uuid
            for card in node.cards
            if card.parent is None and card_lock.locked_by_root(card)
        }
        if locked > self._locked_by_root:
            log(
                f"root's daemon has locked {len(locked)} of this daemon's cards: no new leases on them"
            )
        self._locked_by_root = locked
        usable = readings.keys() - locked - self.dividing
        cards = (
            replace(
                card,
                healthy=(card.uuid in usable or is_planned(card.uuid))
                and (card.parent is None or card.parent in usable),
                cordoned=card.cordoned if card.parent else card.uuid in self.waiting,
                unleased_mib=unleased.total_mib,
                drawn_mib=unleased.drawn_mib,
            )
            for card in node.cards
            for unleased in [self._unleased.counted(card.uuid)]
        )
        return replace(node, cards=tuple(cards))

    def unleased(self, uuid: str) -> UnleasedMemory:
        """Return the memory of a card or instance that counted as in use by no lease at the last look."""
        return self._unleased.shown(uuid)

    def _measure_unleased(self, node: Node) -> dict[str, Reading]:
        before, processes = self._hardware.readings(), self.gpu_processes()
        readings = self._hardware.readings()
        # Inside, the driver names only processes of this namespace.
        names_all = pid_namespaces.in_initial_namespace()
        for card in node.cards:
            if card.divided or card.uuid not in before.keys() & readings.keys():
                continue
            # What is allocated or freed meanwhile belongs to a process that may be missing from the list.
            used_mib = min(before[card.uuid].used_mib, readings[card.uuid].used_mib)
            slices_mib = self._leased_mib(card.uuid)
            measured = unleased_memory(card, used_mib, slices_mib, processes, names_all=names_all)
            self._unleased.update(card.uuid, card.memory_mib, measured, time.monotonic())
        return readings

    def gpu_processes(self) -> GpuProcesses:
        """Return the processes on the cards, by lease. Raises NoDriver."""
        return group_by_lease(self._hardware.processes(), self._lease_of)

    def sample(self, readings: Mapping[str, Reading]) -> UsageSample:
        """Return what the driver and the last check for violations report. Raises NoDriver."""
        unleased = {uuid: self.unleased(uuid) for uuid in readings}
        return UsageSample(readings, self.gpu_processes(), self._violations, unleased)

    async def check_violations(self, jobs: Collection[Job]) -> None:
        """Look once for jobs that exceed their limits. Raises NoDriver."""
        self._violations = await asyncio.to_thread(
            self._detector.sample,
            jobs,
            self.gpu_processes(),
            self._hardware.context_mib,
            self._busy_ns,
        )
