"""Observes a daemon's jobs and cards for history and for the ledger of usage.

The ledger is charged at each change, so that it is exact. Readings are taken every few seconds.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.core.metering import DAY_S, Holding, MeteredCard, Observation
from fenka.core.request import Placement, Slice
from fenka.core.units import MIB
from fenka.formats.quantities import parse_memory, parse_price
from fenka.hardware.nvml import Reading
from fenka.hardware.peer_credentials import group_name, user_name
from fenka.history.history_store import Figures, HistoryStore
from fenka.history.recorder import HistoryRecorder
from fenka.history.series import FigureSeries, HistoryEvent, Holder, UsageRecord
from fenka.isolation import account
from fenka.isolation.compute_feedback import ComputeFeedback
from fenka.views.usage_report import grouped, visible_to
from fenka.workstation import paths, protocol
from fenka.workstation.broker import Broker
from fenka.workstation.cards import CardObserver
from fenka.workstation.files import DaemonConfig, History
from fenka.workstation.job import Job
from fenka.workstation.lifetime import describe, log
from fenka.workstation.paths import Runtime
from fenka.workstation.screens.snapshot import in_use, read_account

CLOSE_TIMEOUT_S = 2.0
"""For a slow disk, when the daemon ends."""

MAX_POINTS = 10_000
"""Of a figure in an answer."""

LATEST_S = 1 << 36
"""A time that no clock shows, and that all calculations have room for."""

MAX_FIGURE = 1 << 31
"""Of a program's own account; more is not plausible in five seconds."""


class NoHistory(FenkaError):
    """History was requested of a daemon that records none."""


class _JobState(NamedTuple):
    """The properties of a job whose changes are events."""

    state: str
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class _Counters:
    """Readings of a job at a time: its cards' time, and its own account of waits and refusals."""

    busy_us: int | None = None
    throttled_us: int | None = None
    refused: int | None = None


class MachineRecorder:
    """Observes a daemon's jobs and cards, and has them recorded. It decides nothing, and never fails."""

    def __init__(
        self,
        runtime: Runtime,
        broker: Broker,
        cards: CardObserver,
        feedback: ComputeFeedback,
        ended: History,
        config: DaemonConfig,
    ) -> None:
        self._runtime, self._broker, self._cards = runtime, broker, cards
        self._feedback, self._ended, self._config = feedback, ended, config
        size = parse_memory(config.history_size, 1).amount * MIB
        self._recorder = HistoryRecorder(HistoryStore(paths.history_database(runtime), size))
        self._jobs: dict[str, _JobState] = {}
        self._healthy: dict[str, bool] | None = None
        self._holders: dict[str, Holder] = {}
        self._used_mib: dict[tuple[str, str], int | None] = {}
        self._counters: dict[str, _Counters] = {}
        self._sampled_at = 0.0
        self._problem = ""

    def on_change(self) -> None:
        """Observe jobs and cards if any of them has changed."""
        if not self._config.no_history:
            with self._guarded():
                self._on_change()

    def _on_change(self) -> None:
        jobs = {job.id: _JobState(job.state, job.placement) for job in self._broker.jobs.values()}
        healthy: dict[str, bool] = {
            card.uuid: card.healthy for card in self._broker.node.cards if card.parent is None
        }
        if jobs == self._jobs and healthy == self._healthy:
            return
        for job_id in jobs.keys() - self._jobs.keys():
            self._holders[job_id] = _holder(self._broker.jobs[job_id])
        now = int(time.time())
        for job_id, kind, sizes in _events(self._jobs, jobs):
            detail = self._ended.sentence(job_id) if kind == "ended" else sizes
            event = HistoryEvent(now, job_id, kind, detail)
            self._recorder.add_event(event, self._holders.get(job_id))
        for uuid, is_healthy in healthy.items():
            if (self._healthy or healthy).get(uuid, True) != is_healthy:
                self._recorder.add_event(
                    HistoryEvent(now, uuid, "returned" if is_healthy else "lost")
                )
        self._jobs, self._healthy = jobs, healthy
        self._observe()
        self._holders = {job_id: self._holders[job_id] for job_id in jobs}

    def on_xid(self, uuid: str, sentence: str) -> None:
        """Record an error that a card's driver reported."""
        if not self._config.no_history:
            self._recorder.add_event(HistoryEvent(int(time.time()), uuid, "xid", sentence))

    async def sample(self, readings: Mapping[str, Reading]) -> None:
        """Observe all jobs and cards, and write what has been recorded. readings: empty without a driver."""
        if not self._config.no_history:
            with self._guarded():
                await self._sample(readings)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as why:  # A fault of the history must not cost a grant.
            log(f"history is incomplete: {describe(why)}")

    async def _sample(self, readings: Mapping[str, Reading]) -> None:
        self._on_change()
        now = time.monotonic()
        elapsed_us, self._sampled_at = (now - self._sampled_at) * 1e6, now
        jobs = [(job.id, job.slices) for job in self._broker.placed()]
        processes = self._cards.processes
        self._used_mib = {
            (job_id, piece.uuid): processes.used_mib(job_id, piece.uuid) if readings else None
            for job_id, slices in jobs
            for piece in slices
        }
        busy = {job_id: self._busy_us(job_id, slices) for job_id, slices in jobs}
        cards: dict[str, Figures] = {
            card.uuid: _card_figures(self._broker, card, readings.get(card.uuid))
            for card in self._broker.node.cards
            if card.parent is None
        }
        self._observe()
        used_mib, before = self._used_mib, self._counters

        def samples() -> tuple[Mapping[str, Figures], Mapping[str, Figures]]:
            programs = dict[str, Figures]()
            counters = dict[str, _Counters]()
            for job_id, slices in jobs:
                own = read_account(self._runtime, job_id)
                counters[job_id] = now = _counters(own, busy[job_id])
                used = [
                    in_use(used_mib[job_id, piece.uuid], own, position)
                    for position, piece in enumerate(slices)
                ]
                programs[job_id] = _program_figures(
                    slices, used, (before.get(job_id, _Counters()), now), elapsed_us
                )
            self._counters = counters
            return programs, cards

        await self._recorder.write(int(time.time()), samples)
        if self._recorder.problem != self._problem:
            self._problem = self._recorder.problem
            log(self._problem or "history is recorded again")

    async def close(self) -> None:
        """Write the rest."""
        if self._config.no_history:
            return
        with self._guarded():
            self._observe()
            await self._recorder.close(int(time.time()), CLOSE_TIMEOUT_S)

    async def answer(
        self, request: protocol.GetHistory | protocol.GetUsage, reader: int | None
    ) -> protocol.HistoryRead | protocol.UsageRead:
        """Return what a client requests of the history. Raises NoHistory.

        reader: The user whose jobs are named in sums; None for all users'.
        """
        if self._config.no_history:
            raise NoHistory("this daemon records no history: start it without --no-history")
        if isinstance(request, protocol.GetHistory):
            return await self._history(request)
        return await self._usage(request, reader)

    async def _history(self, request: protocol.GetHistory) -> protocol.HistoryRead:
        """Return the history of a job, of a card, or of all cards."""
        subject = request.job or request.card
        cards = [card.uuid for card in self._broker.node.cards if card.parent is None]
        subjects = [subject] if subject else [*cards]
        # Times are recorded in whole seconds, and the second that has begun counts.
        since, until = (
            rounded(min(max(at, 0), LATEST_S))
            for rounded, at in ((floor, request.since), (ceil, request.until))
        )
        points = min(max(request.points, 1), MAX_POINTS)

        def read(
            store: HistoryStore,
        ) -> tuple[dict[str, FigureSeries | None], list[HistoryEvent] | None]:
            table = "program" if request.job else "card"
            series = {name: store.series(table, name, since, until, points) for name in subjects}
            return series, store.events(since, until, subject)

        series, events = await self._recorder.read(read)
        known = {name: values for name, values in series.items() if values is not None}
        return protocol.HistoryRead(known, events or [], self._recorder.problem)

    async def _usage(self, request: protocol.GetUsage, reader: int | None) -> protocol.UsageRead:
        """Return sums of the ledger until now."""
        self._observe()
        await self._recorder.write(int(time.time()))
        since, until = (
            min(max(day, 0), LATEST_S // DAY_S) for day in (request.since_day, request.until_day)
        )

        def read(store: HistoryStore) -> tuple[list[UsageRecord], int | None]:
            records = store.usage(since, until) or []
            if reader is not None:
                records = visible_to(records, reader)
            return grouped(records, request.by, daily=request.daily), store.first_day()

        records, first_day = await self._recorder.read(read)
        prices = dict(map(parse_price, self._config.price))
        return protocol.UsageRead(
            records, prices, self._config.currency, first_day, self._recorder.problem
        )

    def _observe(self) -> None:
        parents = {card.uuid: card.parent or card.uuid for card in self._broker.node.cards}
        holdings = tuple(
            Holding(
                job.id,
                parents.get(piece.uuid, piece.card_uuid),
                *(piece.memory_mib, piece.compute),
                self._used_mib.get((job.id, piece.uuid)),
                self._busy_us(job.id, [piece]),
            )
            for job in self._broker.placed()
            for piece in job.slices
        )
        cards = tuple(
            MeteredCard(card.uuid, card.model, card.memory_mib)
            for card in self._broker.node.cards
            if card.parent is None
        )
        observation = Observation(*self._recorder.now(), cards, holdings)
        self._recorder.observe(observation, self._holders)

    def _busy_us(self, job_id: str, slices: Sequence[Slice]) -> int | None:
        seconds = [self._feedback.busy_s(job_id, piece.uuid) for piece in slices]
        known = [had for had in seconds if had is not None]
        return round(sum(known) * 1e6) if len(known) == len(seconds) else None


def _holder(job: Job) -> Holder:
    user = user_name(job.uid)
    team = job.spec.team or group_name(job.uid)
    return Holder(
        *(job.id, job.name, user, job.uid, team, user, job.spec.kind, job.spec.gpu.describe())
    )


def _events(
    before: Mapping[str, _JobState], after: Mapping[str, _JobState]
) -> Iterator[tuple[str, str, str]]:
    """Yield job, kind and detail of each change."""
    for job_id, job in after.items():
        was = before.get(job_id)
        if was is None:
            yield job_id, "asked", ""
        had, has = was.placement if was else None, job.placement
        if has is not None and has != had:
            sizes = " + ".join(f"{piece.memory_mib} MiB" for piece in has.slices)
            indices = ", ".join(str(piece.card) for piece in has.slices)
            kind = "granted" if had is None else "resized"
            yield job_id, kind, f"{sizes} of card {indices}"
    for job_id in before.keys() - after.keys():
        yield job_id, "ended", ""


def _counters(own: account.Account | None, busy_us: int | None) -> _Counters:
    if own is None:
        return _Counters(busy_us)
    return _Counters(busy_us, sum(own.throttled_ns) // 1000, own.refused)


def _program_figures(
    slices: Sequence[Slice],
    used: Sequence[int | None],
    counters: tuple[_Counters, _Counters],
    elapsed_us: float,
) -> Figures:
    """Return the values of history_store.PROGRAM."""
    before, now = counters
    known = [mib for mib in used if mib is not None]
    cards = max(len(slices), 1)
    busy, throttled = (
        _share(_grown(getattr(before, name), getattr(now, name)), elapsed_us * cards)
        for name in ("busy_us", "throttled_us")
    )
    return (
        min(sum(known), MAX_FIGURE) if len(known) == len(used) else None,
        sum(piece.memory_mib for piece in slices),
        *(busy, throttled, _grown(before.refused, now.refused)),
    )


def _grown(before: int | None, now: int | None) -> int | None:
    """Return the growth of a counter, which may be a program's own and so anything."""
    if before is None or now is None:
        return None
    return min(max(now - before, 0), MAX_FIGURE)


def _share(part_us: int | None, whole_us: float) -> int | None:
    """Return thousandths."""
    return None if part_us is None or whole_us <= 0 else min(round(part_us * 1000 / whole_us), 1000)


def _card_figures(broker: Broker, card: Card, reading: Reading | None) -> Figures:
    """Return the values of history_store.CARD."""
    parts = [part.uuid for part in broker.node.cards if card.uuid in (part.uuid, part.parent)]
    held = sum(map(broker.leased_mib, parts))
    if reading is None:
        return None, held, None, None, None
    utilisation, power_w = reading.utilisation, reading.power_w
    return (
        *(reading.used_mib, held, None if utilisation is None else utilisation * 10),
        *(reading.temperature_c, None if power_w is None else round(power_w)),
    )
