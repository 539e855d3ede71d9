"""Keeps readings in three resolutions, events for 30 days, and usage by day while there is room.

The 5-second tables are written; each coarser one is made from the next finer one. So a program that is killed
at any moment loses the last seconds only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from fenka.core.metering import (
    DAY_S,
    Amounts,
    Line,
    LineKind,
    Observation,
    UsageLedger,
    add,
    charges,
)
from fenka.history.database import Connection, Database
from fenka.history.series import FigureSeries, HistoryEvent, Holder, UsageRecord

KEEP_S = {5: 2 * 3600, 60: 2 * DAY_S, 600: 30 * DAY_S}
"""Seconds for which readings are kept, by their resolution in seconds."""

EVENTS_S = 30 * DAY_S
DETAIL_DAYS = 400
"""Days for which usage is kept by job; after that by user and team."""

MAINTENANCE_S = 60
"""Between two deletions of old rows."""

EARLIEST_S = 1_767_225_600
"""2026. A clock that shows an earlier time was not set yet."""

PROGRAM = ("used_mib", "limit_mib", "busy", "throttled", "refused")
"""Figures of a program.

Memory is what it uses and may use of its cards together. Times are in thousandths of its cards' time: what it
had, and how long its threads waited for their share. The last one is how often memory was refused."""

CARD = ("used_mib", "held_mib", "busy", "temperature_c", "power_w")
"""Figures of a card: memory in use and held, thousandths of the time in which a kernel ran."""

_TABLES = {"program": PROGRAM, "card": CARD}
_AMOUNTS = Amounts._fields

Figures = Sequence[int | None]
"""By the names of PROGRAM or CARD; None: not known."""


class Batch(NamedTuple):
    """Everything that one transaction writes.

    Attributes:
        at: Unix seconds.
        holders: All that the other fields name.
        programs, cards: Figures by job id and by UUID.
        usage: What is added to the ledger.
        first, last: The observer's first observation, and the one until which `usage` was charged; None if
            nothing was observed yet. The time before the first one was unobserved.
    """

    at: int
    holders: Sequence[Holder] = ()
    programs: Mapping[str, Figures] = MappingProxyType({})
    cards: Mapping[str, Figures] = MappingProxyType({})
    events: Sequence[HistoryEvent] = ()
    usage: Mapping[Line, Amounts] = MappingProxyType({})
    first: Observation | None = None
    last: Observation | None = None


def _schema() -> Iterator[str]:
    yield (
        "CREATE TABLE subject(number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, name TEXT NOT NULL,"
        " user TEXT NOT NULL, uid INTEGER NOT NULL, team TEXT NOT NULL, namespace TEXT NOT NULL,"
        " kind TEXT NOT NULL, asks TEXT NOT NULL)"
    )
    for table, figures in _TABLES.items():
        columns = "".join(
            f", {figure}_count INTEGER, {figure}_sum INTEGER, {figure}_max INTEGER"
            for figure in figures
        )
        for step in KEEP_S:
            yield (
                f"CREATE TABLE {table}_{step}(at INTEGER, subject INTEGER{columns},"
                " PRIMARY KEY(at, subject)) WITHOUT ROWID"
            )
    yield "CREATE TABLE event(at INTEGER, subject INTEGER, kind TEXT, detail TEXT)"
    yield "CREATE INDEX event_at ON event(at)"
    amounts = "".join(f", {name} INTEGER NOT NULL" for name in _AMOUNTS)
    yield (
        "CREATE TABLE usage(day INTEGER, kind TEXT, subject INTEGER, node TEXT, model TEXT, paid INTEGER"
        f"{amounts}, PRIMARY KEY(day, kind, subject, node, model, paid)) WITHOUT ROWID"
    )
    yield "CREATE TABLE meter(one INTEGER PRIMARY KEY CHECK (one = 1), last BLOB NOT NULL)"


class HistoryStore:
    """The history of one machine or cluster. All methods are for one thread."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        """file: need not exist; nothing is opened yet."""
        self.database = Database(file, max_bytes, 1, ";".join(_schema()), self._make_room)
        self._numbers: dict[str, int] = {}
        self._maintained = self._folded_day = 0

    @property
    def problem(self) -> str:
        """Why nothing is recorded, or what was lost, in a sentence; empty without a problem."""
        return self.database.problem

    def write(self, batch: Batch) -> bool:
        """Record a batch, wholly or not at all. Return whether it is recorded."""
        if not self.database.run(lambda connection: self._write(connection, batch)):
            self._numbers.clear()
            return False
        if not 0 <= batch.at - self._maintained < MAINTENANCE_S and batch.at >= EARLIEST_S:
            self._maintained = batch.at
            self.database.run(lambda connection: self._maintain(connection, batch.at))
            self._limit_size()
        return True

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def _write(self, connection: Connection, batch: Batch) -> bool:
        for holder in batch.holders:
            self._subject(connection, holder)
        if batch.at >= EARLIEST_S:
            at = batch.at // 5 * 5
            for table, figures in (("program", batch.programs), ("card", batch.cards)):
                connection.executemany(
                    f"INSERT OR REPLACE INTO {table}_5 VALUES(?, ?{', ?, ?, ?' * len(_TABLES[table])})",
                    [
                        (at, self._number(connection, subject), *_columns(values))
                        for subject, values in figures.items()
                    ],
                )
            connection.executemany(
                "INSERT INTO event VALUES(?, ?, ?, ?)",
                [
                    (event.at, self._number(connection, event.subject), event.kind, event.detail)
                    for event in batch.events
                ],
            )
        usage: Mapping[Line, Amounts] | None = batch.usage
        if batch.first is not None and batch.last is not None:
            usage = _since(_last(connection), batch.first, batch.last, batch.usage)
            if usage is not None:
                last = msgspec.json.encode(batch.last._replace(holdings=()))
                connection.execute("INSERT OR REPLACE INTO meter VALUES(1, ?)", (last,))
        self._charge(connection, usage or {})
        return True

    def _charge(self, connection: Connection, usage: Mapping[Line, Amounts]) -> None:
        _add_usage(
            connection,
            [
                (
                    *(line.day, line.kind.value),
                    self._number(connection, line.holder) if line.holder else 0,
                    *(line.node, line.model, -1 if line.paid is None else line.paid),
                    *amounts,
                )
                for line, amounts in usage.items()
            ],
        )

    def _number(self, connection: Connection, subject: str) -> int:
        """Return the number that rows have for a job or card."""
        return self._numbers.get(subject) or self._subject(connection, Holder(subject))

    def _subject(self, connection: Connection, holder: Holder) -> int:
        if holder.id not in self._numbers:
            values = msgspec.structs.astuple(holder)
            connection.execute(
                "INSERT OR IGNORE INTO subject VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?)", values
            )
            (number,) = connection.execute(
                "SELECT number FROM subject WHERE id = ?", (holder.id,)
            ).fetchone()
            self._numbers[holder.id] = number
        return self._numbers[holder.id]

    # --- maintenance --------------------------------------------------------------------------------

    def _maintain(self, connection: Connection, now: int) -> None:
        """Fill the coarser tables, and delete what is too old."""
        for table, figures in _TABLES.items():
            for fine, coarse in ((5, 60), (60, 600)):
                _consolidate(connection, table, figures, (fine, coarse), now)
            for step, keep_s in KEEP_S.items():
                connection.execute(f"DELETE FROM {table}_{step} WHERE at < ?", (now - keep_s,))
        connection.execute("DELETE FROM event WHERE at < ?", (now - EVENTS_S,))
        today = now // DAY_S
        if today != self._folded_day:
            self._folded_day = today
            self._fold(connection, today - DETAIL_DAYS)

    def _fold(self, connection: Connection, before: int) -> None:
        """Add up the usage before this day: of the jobs of each user and team, and of all nodes."""
        common = "job.namespace || '/' || job.user || '/' || job.uid || '/' || job.team"
        connection.execute(
            f"INSERT OR IGNORE INTO subject SELECT DISTINCT NULL, {common}, '', job.user, job.uid, job.team,"
            " job.namespace, '', '' FROM usage JOIN subject AS job ON usage.subject = job.number"
            " WHERE day < ? AND job.name != ''",
            (before,),
        )
        sums = ", ".join(f"SUM({name})" for name in _AMOUNTS)
        rows = connection.execute(
            f"SELECT day, usage.kind, COALESCE(owner.number, usage.subject), '', model, paid, {sums}"
            " FROM usage LEFT JOIN subject AS job ON usage.subject = job.number AND job.name != ''"
            f" LEFT JOIN subject AS owner ON owner.id = {common}"
            " WHERE day < ? AND (job.number IS NOT NULL OR node != '') GROUP BY 1, 2, 3, 5, 6",
            (before,),
        ).fetchall()
        connection.execute(
            "DELETE FROM usage WHERE day < ?"
            " AND (node != '' OR subject IN (SELECT number FROM subject WHERE name != ''))",
            (before,),
        )
        _add_usage(connection, rows)
        self._drop_subjects(connection)

    def _drop_subjects(self, connection: Connection) -> None:
        """Delete the jobs and cards of which nothing is left."""
        tables = ("usage", "event", *(f"{table}_{step}" for table in _TABLES for step in KEEP_S))
        named = " UNION ".join(f"SELECT subject FROM {table}" for table in tables)
        connection.execute(f"DELETE FROM subject WHERE number NOT IN ({named})")
        self._numbers.clear()

    def _limit_size(self) -> None:
        """Delete what is least worth while nine tenths of the limit are in use.

        First readings go, then the jobs' part in the usage of the oldest days, and in the end these days.
        """
        run = self.database.run
        run(lambda connection: drop_oldest(connection) if self._is_large() else None)
        while run(self._fold_oldest_day):
            pass
        while run(lambda connection: self._is_large() and self._drop_oldest_day(connection)):
            pass
        run(lambda connection: connection.execute("PRAGMA incremental_vacuum(256)"))

    def _fold_oldest_day(self, connection: Connection) -> bool:
        """Add up a day's usage of jobs, but not that of the last day. Return whether there was one."""
        first, last = connection.execute(
            "SELECT MIN(day), MAX(day) FROM usage JOIN subject ON subject = number WHERE name != ''"
        ).fetchone()
        if first == last or not self._is_large():
            return False
        self._fold(connection, first + 1)
        return True

    def _drop_oldest_day(self, connection: Connection) -> bool:
        """Delete a day's usage, but not that of the last day. Return whether there was one."""
        deleted = connection.execute(
            "DELETE FROM usage WHERE day = (SELECT MIN(day) FROM usage)"
            " AND day != (SELECT MAX(day) FROM usage)"
        )
        self._drop_subjects(connection)
        return deleted.rowcount > 0

    def _is_large(self) -> bool:
        used, limit = self.database.used_pages
        return used > limit * 9 // 10

    def _make_room(self, connection: Connection) -> None:
        """Delete the oldest rows of a full file, in which nothing can be added up."""
        drop_oldest(connection)
        if self._is_large():
            self._drop_oldest_day(connection)

    # --- reading ------------------------------------------------------------------------------------

    def series(
        self, table: str, subject: str, since: int, until: int, points: int
    ) -> FigureSeries | None:
        """Return figures over time; None if history cannot be read.

        Args:
            table: program or card.
            subject: The job's id or the card's UUID.
            since, until: Unix seconds.
            points: The number of intervals at most.
        """
        return self.database.run(
            lambda connection: _series(connection, table, subject, (since, until), points)
        )

    def events(self, since: int, until: int, subject: str = "") -> list[HistoryEvent] | None:
        """Return events in order, of one job or card or of all; None if history cannot be read."""
        which = "AND id = ?" if subject else ""
        rows = self.database.run(
            lambda connection: connection.execute(
                "SELECT at, id, event.kind, detail FROM event JOIN subject ON subject = number"
                f" WHERE at >= ? AND at < ? {which} ORDER BY at, event.rowid",
                (since, until, *filter(None, [subject])),
            ).fetchall()
        )
        return None if rows is None else [HistoryEvent(*row) for row in rows]

    def first_day(self) -> int | None:
        """Return the first day of which usage is recorded; None for none."""
        row = self.database.run(
            lambda connection: connection.execute("SELECT MIN(day) FROM usage").fetchone()
        )
        return row[0] if row else None

    def usage(self, first_day: int, end_day: int) -> list[UsageRecord] | None:
        """Return the usage of the days before `end_day`; None if history cannot be read."""
        rows = self.database.run(
            lambda connection: connection.execute(
                "SELECT day, usage.kind, id, name, user, uid, team, namespace, subject.kind, asks, node,"
                f" model, paid, {', '.join(_AMOUNTS)} FROM usage LEFT JOIN subject ON subject = number"
                " WHERE day >= ? AND day < ? ORDER BY day, usage.kind, subject",
                (first_day, end_day),
            ).fetchall()
        )
        return None if rows is None else [*map(_record, rows)]


def _last(connection: Connection) -> Observation | None:
    """Return the observation until which an earlier observer has charged; None without one."""
    row = connection.execute("SELECT last FROM meter").fetchone()
    try:
        return msgspec.json.decode(row[0], type=Observation) if row else None
    except msgspec.MsgspecError:
        return None


def _since(
    earlier: Observation | None,
    first: Observation,
    last: Observation,
    usage: Mapping[Line, Amounts],
) -> Mapping[Line, Amounts] | None:
    """Return what is charged for the time since an earlier observer's; None if that has charged all of it.

    Two observe at once while one replaces the other. Time that one has charged is not charged again, and the
    rest of that batch is unobserved, since its usage cannot be divided.
    """
    if earlier is None or earlier.observer == last.observer:
        return usage
    if earlier.boot == first.boot and earlier.uptime_us > first.uptime_us:
        if earlier.uptime_us >= last.uptime_us:
            return None
        first, usage = last, {}
    since: UsageLedger = {}
    add(since, usage.items())
    add(since, charges(earlier, first))
    return since


def _add_usage(connection: Connection, rows: Iterable[Sequence[object]]) -> None:
    sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in _AMOUNTS)
    connection.executemany(
        f"INSERT INTO usage VALUES(?, ?, ?, ?, ?, ?{', ?' * len(_AMOUNTS)})"
        f" ON CONFLICT DO UPDATE SET {sums}",
        rows,
    )


def _record(row: Sequence[object]) -> UsageRecord:
    day, kind, *rest = row
    holder = Holder("") if rest[0] is None else Holder(*rest[:8])  # type: ignore[arg-type]
    node, model, paid, *amounts = rest[8:]
    return UsageRecord(
        *(int(str(day)), LineKind(str(kind)), holder, str(node), str(model)),
        None if paid == -1 else int(str(paid)),
        Amounts(*amounts),  # type: ignore[arg-type]
    )


def _columns(values: Figures) -> Iterator[int | None]:
    for value in values:
        yield from (0, None, None) if value is None else (1, value, value)


def _sums(figures: Iterable[str]) -> str:
    return ", ".join(
        f"SUM({figure}_count), SUM({figure}_sum), MAX({figure}_max)" for figure in figures
    )


def _consolidate(
    connection: Connection, table: str, figures: Iterable[str], steps: tuple[int, int], now: int
) -> None:
    """Make the rows of the coarser table that the finer one covers and that are not final."""
    fine, coarse = steps
    (last,) = connection.execute(
        f"SELECT MAX(at) FROM {table}_{coarse} WHERE at <= ?", (now,)
    ).fetchone()
    connection.execute(
        f"INSERT OR REPLACE INTO {table}_{coarse} SELECT at / {coarse} * {coarse}, subject,"
        f" {_sums(figures)} FROM {table}_{fine} WHERE at >= ? AND at <= ? GROUP BY 1, 2",
        (last or 0, now),
    )


def drop_oldest(connection: Connection) -> None:
    """Delete the oldest tenth of all readings and events, by time."""
    for table in (*(f"{table}_{step}" for table in _TABLES for step in KEEP_S), "event"):
        first, last = connection.execute(f"SELECT MIN(at), MAX(at) FROM {table}").fetchone()
        if first is not None:
            until = first + max((last - first) // 10, 1)
            connection.execute(f"DELETE FROM {table} WHERE at < ?", (until,))


def _series(
    connection: Connection, table: str, subject: str, span: tuple[int, int], points: int
) -> FigureSeries:
    since, until = span
    (newest,) = connection.execute(f"SELECT MAX(at) FROM {table}_5").fetchone()
    covered = [step for step, keep_s in KEEP_S.items() if since >= (newest or until) - keep_s]
    fine = min(covered, default=max(KEEP_S))
    least = -(-(until - since) // max(points, 1))
    step = -(-max(least, fine) // fine) * fine
    start = since // step * step
    figures = _TABLES[table]
    rows = connection.execute(
        f"SELECT at / {step} * {step}, {_sums(figures)} FROM {table}_{fine}, subject"
        " WHERE subject = number AND id = ? AND at >= ? AND at < ? GROUP BY 1",
        (subject, start, until),
    ).fetchall()
    return _as_series(rows, figures, (start, until, step))


def _as_series(
    rows: Iterable[Sequence[int]], figures: Sequence[str], grid: tuple[int, int, int]
) -> FigureSeries:
    start, until, step = grid
    length = max(-(-(until - start) // step), 0)
    mean: dict[str, list[float | None]] = {figure: [None] * length for figure in figures}
    most: dict[str, list[int | None]] = {figure: [None] * length for figure in figures}
    for at, *cells in rows:
        index = (at - start) // step
        for number, figure in enumerate(figures):
            count, total, largest = cells[3 * number : 3 * number + 3]
            if count:
                mean[figure][index] = round(total / count, 3)
                most[figure][index] = largest
    return FigureSeries(start, step, mean, most)
