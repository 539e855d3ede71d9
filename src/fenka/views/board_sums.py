"""Sums and judgements that the dashboard's messages of a workstation and of a cluster share."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from fenka.core.metering import DAY_S
from fenka.history.series import HistoryEvent, UsageGroup, UsageRecord
from fenka.views import board
from fenka.views.usage_report import usage_rows
from fenka.views.workloads import ServiceVersion, Workload, workload_row

MAX_WAITING = 200
"""Requests that `World.waiting` lists; `waiting_total` counts all."""

HELD_S = 600.0
"""A younger program is not called idle: it loads data or compiles."""

IDLE_AFTER_S = 1800.0
"""Without card time, before a program is called idle."""

MAX_ADDED = 64
"""Cards that a what-if question may add."""

WAITED_S = 2
"""A request that is granted within this time has not waited."""

Number = TypeVar("Number", int, float)


def total(amounts: Iterable[Number | None]) -> Number | None:
    """Return the sum; None if one of them is not known."""
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)


def idle_for(
    quiet_s: Sequence[float | None], held_s: float | None, after_s: float = IDLE_AFTER_S
) -> float | None:
    """Return for how long a program has been idle; None if it is not idle, or that is not known.

    Args:
        quiet_s: seconds since each of its cards last worked for it; None if that is not known.
        held_s: seconds for which it has held them.
        after_s: without card time, before it is called idle.
    """
    if held_s is None or held_s < HELD_S or not quiet_s or None in quiet_s:
        return None
    idle_s = min(quiet for quiet in quiet_s if quiet is not None)
    return idle_s if idle_s >= after_s else None


def people(
    programs: Sequence[board.ProgramLine], waiting: Sequence[tuple[str, float]]
) -> list[board.PersonLine]:
    """Return the users by what they hold, the most first. waiting: users and since when, of all requests."""
    held = defaultdict[str, list[board.ProgramLine]](list)
    for program in programs:
        held[program.user].append(program)
    waits = defaultdict[str, list[float]](list)
    for user, since in waiting:
        waits[user].append(since)
    lines = [
        board.PersonLine(
            user=user,
            held_mib=sum(program.held_mib for program in held[user]),
            used_mib=total(program.used_mib for program in held[user]),
            busy=total(program.busy for program in held[user]),
            waiting=len(waits[user]),
            oldest=min(waits[user], default=None),
            idle_mib=sum(program.held_mib for program in held[user] if program.idle_s is not None),
        )
        for user in {*held, *waits}
    ]
    return sorted(lines, key=lambda line: (-line.held_mib, line.user))


def usage_lines(
    records: Iterable[UsageRecord], by: UsageGroup, prices: Mapping[str, int]
) -> list[board.UsageLine]:
    """Return the lines of a report for the page, as `usage_rows` has them."""
    return [
        board.UsageLine(
            row.kind.value,
            row.name,
            row.card_hours,
            row.held_gib_hours,
            row.used_share,
            None if row.cost is None else float(row.cost),
        )
        for row in usage_rows(records, by, prices)
    ]


def wait_sums(events: Iterable[HistoryEvent], since: float) -> board.WaitSums:
    """Return how requests waited that were granted since a time, from a machine's history."""
    asked: dict[str, int] = {}
    waits: list[int] = []
    for event in events:
        if event.kind == "asked":
            asked[event.subject] = event.at
        elif event.kind == "granted" and event.at >= since:
            waits.append(max(event.at - asked.get(event.subject, event.at), 0))
    waited = [seconds for seconds in waits if seconds >= WAITED_S]
    mean_s = sum(waited) / len(waited) if waited else None
    return board.WaitSums(len(waits), len(waited), mean_s, max(waited, default=None))


def first_days(now: float) -> tuple[int, int]:
    """Return the first day of a month, and the day, in UTC, both numbered from 1970. now: Unix seconds."""
    today = int(now // DAY_S)
    return today - datetime.fromtimestamp(now, UTC).day + 1, today


def _page_of(service: ServiceVersion) -> str:
    """Return the URL that a browser opens; without a port for HTTP, the address alone."""
    port = next((port.port for port in service.ports if port.name == "RESTFUL"), None)
    host = service.page_host or service.address
    return f"http://{host}:{port}" if host and port else service.address


def workload_line(
    workload: Workload, programs: list[str], loss: list[tuple[int, float]] | None = None
) -> board.WorkloadLine:
    """Return a training, a notebook or a version of a service. programs: ids of those that are its own."""
    row = workload_row(workload)
    service = workload if isinstance(workload, ServiceVersion) else None
    return board.WorkloadLine(
        name=row.name,
        user=row.user,
        kind=row.kind,
        state=row.state,
        created=row.created,
        version=row.version,
        address=_page_of(service) if service else without_token(row.address),
        why=row.why,
        ready=service.available if service else None,
        desired=service.desired if service else None,
        requests_per_s=service.requests_per_s if service else None,
        waiting_requests=service.waiting_requests if service else None,
        loss=loss or [],
        programs=programs,
    )


def without_token(url: str) -> str:
    """Return a URL without its query, in which notebooks have their token."""
    return url.partition("?")[0]


def what_if_sentence(starts: Sequence[str], waits: Sequence[tuple[str, str]]) -> str:
    """Return `2 of 3 start: a, b. c: no GPU fits: …`. waits: names and reasons."""
    count = len(starts) + len(waits)
    if not count:
        return "nothing waits"
    first = f"{len(starts)} of {count} start{'s' if len(starts) == 1 else ''}"
    first += f": {', '.join(starts)}" if starts else ""
    return ". ".join([first, *(f"{name}: {reason}" for name, reason in waits)])
