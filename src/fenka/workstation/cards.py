"""Observes the machine's cards: their health, the processes on them, and jobs that exceed their limits."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from fenka.core.inventory import Node
from fenka.core.mig.instances import is_planned
from fenka.hardware import card_lock
from fenka.hardware.machine import Hardware
from fenka.hardware.nvml import NoDriver, Reading
from fenka.hardware.spec import NodeError
from fenka.isolation import pid_namespaces
from fenka.workstation.gpu_processes import (
    GpuProcesses,
    UsageSample,
    group_by_lease,
    unattributed_mib,
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
    """

    _hardware: Hardware
    _lease_of: Callable[[int], str | None]
    _busy_ns: Callable[[str, str], int]
    dividing: set[str] = field(default_factory=set)
    """Cards that are being divided otherwise: nothing is granted on them."""
    waiting: set[str] = field(default_factory=set)
    """Cards whose layout waits for something to end: nothing is granted that would delay it."""
    _detector: ViolationDetector = field(default_factory=ViolationDetector)
    _violations: Mapping[str, list[str]] = field(default_factory=dict)
    _locked_by_root: set[str] = field(default_factory=set)

    def observe(self, node: Node) -> tuple[Node, dict[str, Reading]]:
        """Return the node with each card's current health, and the readings by UUID.

        A card is unhealthy if the driver does not list it, if root's daemon has locked it, or
        while it is divided. One whose layout waits is cordoned.
        Raises NoDriver, NodeError.
        """
        readings = self._hardware.readings()
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
            )
            for card in node.cards
        )
        return replace(node, cards=tuple(cards)), readings

    def gpu_processes(self) -> GpuProcesses:
        """Return the processes on the cards, by lease. Raises NoDriver."""
        return group_by_lease(self._hardware.processes(), self._lease_of)

    def sample(self, readings: Mapping[str, Reading]) -> UsageSample:
        """Return what the driver and the last check for violations report. Raises NoDriver."""
        return UsageSample(readings, self.gpu_processes(), self._violations)

    async def check_violations(self, jobs: Collection[Job]) -> None:
        """Look once for jobs that exceed their limits. Raises NoDriver."""
        self._violations = await asyncio.to_thread(
            self._detector.sample,
            jobs,
            self.gpu_processes(),
            self._hardware.context_mib,
            self._busy_ns,
        )

    def record_baseline(self, job: Job) -> None:
        """Record how much memory of the job's cards belongs to no process, before its programs start."""
        if not pid_namespaces.in_initial_namespace():
            return  # The driver names only processes that are visible from here.
        with contextlib.suppress(NoDriver, NodeError):
            readings, processes = self._hardware.readings(), self.gpu_processes()
            for piece in job.slices:
                unattributed = unattributed_mib(piece.uuid, readings, processes)
                if unattributed is not None:
                    job.unattributed_mib.setdefault(piece.uuid, unattributed)
