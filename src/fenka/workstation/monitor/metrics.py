"""The metrics of a workstation: its cards, what jobs use of them, and the queue.

They have the names of a node's and a scheduler's. A user is a namespace, a job a pod, its kind a container.
"""

import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from prometheus_client.core import Metric

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card
from fenka.core.reasons import main_reason
from fenka.core.request import Slice, reserved_percent
from fenka.core.units import MIB
from fenka.hardware.nvml import Hardware, Reading
from fenka.hardware.peer_credentials import user_name
from fenka.isolation import account
from fenka.isolation.driver_usage import NO_ACTIVITY
from fenka.isolation.lease_files import account_file
from fenka.server.gpu_metrics import CardSample, GpuMetrics, SliceSample
from fenka.server.listener import listening_socket
from fenka.server.probes import serve_probes
from fenka.server.queue_metrics import (
    PendingSample,
    pending_metrics,
    reason_metric,
    wait_histogram,
)
from fenka.workstation.broker import Broker
from fenka.workstation.cards import CardsSample
from fenka.workstation.job import Job
from fenka.workstation.paths import Runtime

ADDRESS = "127.0.0.1"
"""Everybody on the machine may read the metrics, and nobody else."""


class PortUnavailable(FenkaError):
    """The port for metrics cannot be opened."""

    exit_code = INVALID_INPUT


class WorkstationMetrics(GpuMetrics):
    """Serves the last sample on a port of the loopback device."""

    def __init__(
        self,
        port: int,
        runtime: Runtime,
        hardware: Hardware,
        broker: Broker,
        xids: Mapping[tuple[str, str], int],
    ) -> None:
        """Args:
        port: Where they are served.
        runtime: The daemon's directory.
        hardware: The driver.
        broker: The jobs.
        xids: How many each card reported so far, by UUID and kind.

        Raises PortUnavailable.
        """
        try:
            self._listening = listening_socket(ADDRESS, port)
        except OSError as why:
            raise PortUnavailable(
                f"--metrics-port {port} cannot be opened ({why.strerror}): choose another port"
            ) from None
        super().__init__(socket.gethostname(), lambda: hardware.versions)
        self._runtime, self._broker = runtime, broker
        self.xids = xids
        self._waits = wait_histogram(self.registry)
        broker.on_granted = self._observe_granted

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve while the block runs."""
        async with serve_probes(self._listening, lambda: "", self.text):
            yield

    def update(self, sample: CardsSample, violations: Mapping[str, int]) -> None:
        """Take a sample. violations: how often each kind was seen so far."""
        jobs = self._broker.placed()
        cards: dict[str, Card] = {card.uuid: card for card in self._broker.node.cards}
        self.cards = [
            _card_sample(card, sample.readings, jobs, cards)
            for card in cards.values()
            if card.parent is None
        ]
        self.slices = [
            slice_sample for job in jobs for slice_sample in self._slice_samples(job, sample, cards)
        ]
        self.violations = dict(violations)

    def collect(self) -> Iterable[Metric]:
        """Implement prometheus_client's Collector."""
        yield from super().collect()
        waiting = [job for job in self._broker.jobs.values() if job.state == "waiting"]
        pending = [PendingSample(user_name(job.uid), job.requested_at) for job in waiting]
        yield from pending_metrics(pending, time.time())
        statuses = [
            status
            for job in waiting
            if job.rank == 0 and (status := self._broker.queue_status(job)) is not None
        ]
        yield reason_metric([main_reason(status.unschedulable.counts()) for status in statuses])

    def _observe_granted(self, jobs: Sequence[Job], now: float) -> None:
        for job in jobs:
            self._waits.observe(max(now - job.requested_at, 0))

    def _slice_samples(
        self, job: Job, sample: CardsSample, cards: Mapping[str, Card]
    ) -> Iterable[SliceSample]:
        try:
            written = account.read(account_file(self._runtime.lease(job.id)))
        except (OSError, account.InvalidAccount):
            written = account.Account(())
        held = written.memory_bytes
        for position, piece in enumerate(job.slices):
            card = cards.get(piece.uuid)
            if card is None:
                continue
            used = sample.activity.get((job.id, piece.uuid), NO_ACTIVITY)
            used_mib = sample.processes.used_mib(job.id, piece.uuid)
            on_card = [
                process
                for process in sample.processes.by_lease.get(job.id, ())
                if process.uuid == piece.uuid
            ]
            throttled_s, out_of_memory = written.counts(position)
            promised = reserved_percent(job.spec.gpu.core, job.spec.gpu.core_mode)
            yield SliceSample(
                (user_name(job.uid), job.name, job.spec.kind),
                cards.get(card.parent or card.uuid, card),
                piece.uuid,
                ("", "", card.profile),
                piece.memory_mib * MIB,
                held[position] if position < len(held) else None,
                None if used_mib is None else used_mib * MIB,
                used.share,
                None if used.share is None else min(used.share * 100 / (promised or 100), 1),
                len({process.pid for process in on_card}),
                promised if job.spec.gpu.core_mode == "hard" and 0 < promised < 100 else None,
                promised,
                used.busy_s,
                throttled_s,
                out_of_memory,
                job.started_at,
                used.last_active_at,
            )


def _card_sample(
    card: Card, readings: Mapping[str, Reading], jobs: Sequence[Job], cards: Mapping[str, Card]
) -> CardSample:
    def is_on(piece: Slice) -> bool:
        device = cards.get(piece.uuid)
        return device is not None and card.uuid in (device.uuid, device.parent)

    allocated_mib = sum(piece.memory_mib for job in jobs for piece in job.slices if is_on(piece))
    return CardSample(card, readings.get(card.uuid), allocated_mib * MIB)
