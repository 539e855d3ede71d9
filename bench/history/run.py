"""Measure an embedded history: the processor's time of a tick, its size after 30 days, the time of a read.

``python bench/history/run.py`` fills 30 days with a clock passed in, for 20 and 100 programs beside 8 cards.
Readings come as often as their resolution needs: each ten minutes, in the last two days each minute, in the
last two hours each five seconds. The ticks of these hours are measured. The baseline is a transaction that
writes one row. Prints a Markdown table; exits 1 when a target is missed.
"""

import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from fenka.core.inventory import DeviceId
from fenka.core.metering import (
    DAY_US,
    SECOND_US,
    Holding,
    MeteredCard,
    Observation,
    UsageLedger,
    add,
    charges,
)
from fenka.history.history_store import KEEP_S, Batch, HistoryStore
from fenka.history.series import Holder

DAYS, DAY_S = 30, 86400
CARDS, CARD_MIB = 8, 81_559
START_DAY = 20_700
LIMIT = 200 << 20
TARGETS = {20: (2.0, 20.0), 100: (8.0, 80.0)}
"""By the number of programs: milliseconds of a tick at most, and MiB after 30 days."""
READ_TARGET_MS = 150.0
JOB_S = 6 * 3600
"""A program runs for so long, then another one has its place."""


def holders(programs: int, at: int) -> list[Holder]:
    """Return the programs that run at a time."""
    generation = at // JOB_S
    return [
        Holder(f"{generation:04x}{number:04x}", f"train-{number}", f"user-{number % 7}", 1000 + number % 7,
               "vision", f"user-{number % 7}", "run", "4")
        for number in range(programs)
    ]  # fmt: skip


def observation(programs: int, at: int) -> Observation:
    """Return cards that are shared by programs."""
    cards = [
        MeteredCard(DeviceId(f"GPU-{index}"), "NVIDIA A100 80GB PCIe", CARD_MIB)
        for index in range(CARDS)
    ]
    size = CARD_MIB * CARDS // programs
    holdings = [
        Holding(holder.id, cards[number % CARDS].uuid, size, 10, size // 2, at * SECOND_US // 9)
        for number, holder in enumerate(holders(programs, at))
    ]
    return Observation(
        START_DAY * DAY_US + at * SECOND_US, at * SECOND_US, "b", "o", cards, holdings
    )


def batch(programs: int, before: Observation, at: int) -> Batch:
    """Return a tick of five seconds: readings of all programs and cards, and their usage."""
    now, usage = observation(programs, at), UsageLedger()
    add(usage, charges(before, now))
    noise = at * 7919
    return Batch(
        START_DAY * DAY_S + at,
        holders(programs, at),
        {
            held.holder: (
                (noise + number * 131) % held.memory_mib,
                held.memory_mib,
                noise % 1000,
                0,
                0,
            )
            for number, held in enumerate(now.holdings)
        },
        {
            card.uuid: (
                noise % CARD_MIB,
                CARD_MIB,
                noise % 1000,
                40 + noise % 40,
                100 + noise % 200,
            )
            for card in now.cards
        },
        usage=usage,
        first=before,
        last=now,
    )


def times() -> Iterator[int]:
    """Yield the seconds at which readings come, in 30 days."""
    starts = [0, *(DAYS * DAY_S - KEEP_S[step] for step in (60, 5)), DAYS * DAY_S]
    for step, (start, end) in zip((600, 60, 5), pairwise(starts), strict=True):
        yield from range(start + step, end + 1, step)


def write(file: Path, programs: int) -> tuple[float, float, float]:
    """Return milliseconds of the processor for a tick, MiB of the file, and milliseconds of a read."""
    store = HistoryStore(file, LIMIT)
    before, spent = observation(programs, 0), list[float]()
    for at in times():
        tick = batch(programs, before, at)
        began = time.process_time()
        assert store.write(tick), store.problem
        if at > DAYS * DAY_S - KEEP_S[5]:
            spent.append(time.process_time() - began)
        before = observation(programs, at)
    reads = []
    end = (START_DAY + DAYS) * DAY_S
    job = holders(programs, DAYS * DAY_S)[0].id
    for _ in range(5):
        began = time.process_time()
        assert store.series("program", job, end - DAYS * DAY_S, end, 1000)
        reads.append(time.process_time() - began)
    store.close()
    return statistics.mean(spent) * 1e3, file.stat().st_size / 2**20, statistics.median(reads) * 1e3


def baseline(file: Path) -> float:
    """Return milliseconds of the processor for a transaction with one row."""
    connection = sqlite3.connect(file, isolation_level=None)
    for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute("CREATE TABLE reading(at INTEGER PRIMARY KEY, mib INTEGER)")
    count, began = 5000, time.process_time()
    for at in range(count):
        connection.execute("BEGIN")
        connection.execute("INSERT INTO reading VALUES(?, ?)", (at, at))
        connection.execute("COMMIT")
    return (time.process_time() - began) / count * 1e3


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {load:.1f}\n")
    print(
        "| programs, beside 8 cards | processor, ms a tick | one row, ms | size, MiB | read, ms | targets |"
    )
    print("|---|---|---|---|---|---|")
    missed = False
    for programs, (tick_ms, size_mib) in TARGETS.items():
        with tempfile.TemporaryDirectory() as folder:
            row_ms = baseline(Path(folder) / "row.db")
            spent_ms, mib, read_ms = write(Path(folder) / "history.db", programs)
        met = spent_ms <= tick_ms and mib <= size_mib and read_ms <= READ_TARGET_MS
        missed |= not met
        print(
            f"| {programs} | {spent_ms:.2f} | {row_ms:.3f} | {mib:.1f} | {read_ms:.1f} "
            f"| {'met' if met else 'missed'} |",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
