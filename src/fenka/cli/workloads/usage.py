"""`fenka usage`: who held, used and paid for how much of the cards."""

import csv
import sys
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from importlib import import_module
from typing import Annotated, Literal

import typer

from fenka.cli import tables
from fenka.cli.common_options import Target, cluster_configured, parse_duration
from fenka.cli.error_report import UserError, print_error
from fenka.cli.world import snapshot_here
from fenka.core.errors import INVALID_INPUT
from fenka.core.metering import DAY_S
from fenka.history.series import UsageGroup
from fenka.views.usage_report import UsageRow, check_prices, total_row, usage_rows
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection

EPOCH = date(1970, 1, 1)

Output = Literal["table", "csv", "json", "yaml", "focus", "opencost"]
BILLS = ("focus", "opencost")

SET_PRICE = 'write [price] and "{model}" = 0.35 to daemon.toml, and restart the daemon'
SET_CLUSTER_PRICE = 'upgrade fenka\'s chart with dashboard.page.usage.prices: {{"{model}": 0.35}}'


def usage(
    target: Target,
    by: Annotated[UsageGroup, typer.Option("--by", help="whose usage is added up")] = "user",
    since: Annotated[
        str,
        typer.Option("--since", metavar="TIME", help="month, 7d or 2026-11-01; days are in UTC"),
    ] = "month",
    until: Annotated[
        str, typer.Option("--until", metavar="DATE", help="the first day that does not count")
    ] = "",
    output: Annotated[
        Output,
        typer.Option("-o", "--output", help="focus and opencost: bills by day and job"),
    ] = "table",
) -> None:
    """Print how much of the cards' time and memory was held and used, and what it cost.

    Time of cards that nobody held is idle; time in which nothing recorded it is unobserved. All lines
    together are cards × time.
    """
    first, end = _days(since, until, time.time())
    bill = output in BILLS
    request = protocol.GetUsage("job" if bill else by, first, end, daily=bill)
    here = snapshot_here(target, required=not cluster_configured()) is not None
    read, account = _read_here(request) if here else _read_cluster(target, request)
    if read.problem:
        print_error(read.problem)
    if bill:
        check_prices(read.records, read.prices, SET_PRICE if here else SET_CLUSTER_PRICE)
        _print_bill(read, output, account)
        return
    rows = usage_rows(read.records, by, read.prices)
    if tables.print_data({"currency": read.currency, "rows": rows}, output):
        return
    if output == "csv":
        _print_csv(rows)
        return
    if not rows:
        print("no usage is recorded of this time")
        return
    rows.append(total_row(rows, read.records, read.prices))
    tables.print_lines(tables.align_to_terminal(_table(rows, by, read.currency)))
    if read.since_day is not None and read.since_day > first:
        print(f"recorded since {_date(read.since_day)}")


UNRECORDED = (
    "the dashboard's pod, which records usage, does not run: kubectl get pods,pvc -n "
    "fenka-system says why. Without a default StorageClass its claim stays Pending: name one by "
    "dashboard.page.usage.storageClassName of fenka's chart"
)


def _read_here(request: protocol.GetUsage) -> tuple[protocol.UsageRead, str]:
    """Return what this machine's daemon has recorded, and the machine's name."""
    with DaemonConnection(paths.current()) as daemon:
        return daemon.request(request, protocol.UsageRead), import_module("socket").gethostname()


def _read_cluster(target: Target, request: protocol.GetUsage) -> tuple[protocol.UsageRead, str]:
    """Return what a cluster's dashboard has recorded, and the cluster's name. Raises UserError."""
    from fenka.cli import cluster
    from fenka.kubernetes.api_client import Api
    from fenka.kubernetes.reader import read_usage

    query: dict[str, str | int] = {
        "since": request.since_day,
        "until": request.until_day,
        "by": request.by,
    }
    if request.daily:
        query["daily"] = "true"

    async def question(api: Api) -> tuple[protocol.UsageRead | None, str]:
        return await read_usage(api, protocol.UsageRead, **query), target.context or api.server

    read, account = cluster.ask(
        target,
        question,
        lambda why: (
            f"{UNRECORDED} ({why})"
            if why.status == 503
            else cluster.explain_cluster_denial(why, "fenka-usage")
        ),
    )
    if read is None:
        raise UserError(
            "nothing records the usage of this cluster: upgrade fenka's chart with "
            "--set dashboard.page.enabled=true --set dashboard.page.usage.enabled=true"
        )
    return read, account


def _days(since: str, until: str, now: float) -> tuple[int, int]:
    """Return the numbers of the first day and of the day after the last. Raises UserError."""
    today = int(now // DAY_S)
    end = today + 1 if not until else _day("--until", until)
    if since == "month":
        first = (datetime.fromtimestamp(now, UTC).date().replace(day=1) - EPOCH).days
    elif since[:1].isdigit() and "-" in since:
        first = _day("--since", since)
    else:
        seconds = parse_duration("--since", since)
        first = max(int((now - seconds) // DAY_S), 0)
    if first >= end:
        raise UserError("--since must be a day before --until", INVALID_INPUT)
    return first, end


def _day(option: str, text: str) -> int:
    try:
        return (date.fromisoformat(text) - EPOCH).days
    except ValueError:
        raise UserError(
            f"invalid {option} {text!r}: expected a date such as 2026-11-01", INVALID_INPUT
        ) from None


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def _print_bill(read: protocol.UsageRead, output: Output, account: str) -> None:
    exports = import_module("fenka.views.usage_exports")
    bill = read.records, read.prices, read.currency, account
    if output == "focus":
        sys.stdout.write(exports.focus_csv(*bill))
    else:
        tables.print_data(exports.opencost_json(*bill), "json")


def _print_csv(rows: Sequence[UsageRow]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(UsageRow.__struct_fields__)
    for row in rows:
        writer.writerow(
            "" if (value := getattr(row, name)) is None else value
            for name in UsageRow.__struct_fields__
        )


def _table(rows: Sequence[UsageRow], by: UsageGroup, currency: str) -> list[list[str]]:
    priced = any(row.cost is not None for row in rows)
    columns = {
        by.upper(): lambda row: row.name or row.kind.value,
        "CARD·H": lambda row: tables.hours_text(row.card_hours),
        "GIB·H": lambda row: tables.hours_text(row.held_gib_hours),
        "USED": lambda row: "-" if row.used_share is None else f"{row.used_share:.0%}",
        "BUSY·H": lambda row: "-" if row.busy_hours is None else tables.hours_text(row.busy_hours),
    }
    if by == "job":
        columns = {"JOB": columns["JOB"], "OWNER": lambda row: row.owner or "-", **columns}
    if priced:
        columns["COST"] = lambda row: "-" if row.cost is None else f"{row.cost:.2f} {currency}"
    return tables.tabulate(rows, columns)
