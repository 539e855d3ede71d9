"""The report of `fenka doctor --hardware`: for people and as JSON."""

import contextlib
import platform
import time
from importlib.metadata import version
from typing import Literal

import msgspec

from fenka.build import build_id
from fenka.cli import tables
from fenka.hardware import driver_places
from fenka.hardware.driver_places import Looked
from fenka.workstation import protocol

Verdict = Literal["ok", "differs", "not possible"]


class Row(msgspec.Struct, frozen=True):
    """One check. reason: why it differs or is not possible."""

    check: str
    verdict: Verdict
    measured: str = ""
    expected: str = ""
    reason: str = ""


class Answer(msgspec.Struct, frozen=True):
    """One assumption of the simulated driver, and the answer of the driver at hand."""

    name: str
    verdict: Verdict
    assumed: str
    answer: str


class Report(msgspec.Struct, frozen=True):
    """The printed report. It contains no names of machines, users or programs."""

    fenka: str
    build: str
    date: str
    simulated: bool
    driver: str
    cuda: str
    card: str
    memory_mib: int
    context_mib: int | None
    kernel: str
    machine: str
    distribution: str
    python: str
    quick: bool
    seconds: float
    rows: list[Row]
    assumptions: list[Answer]
    places: list[Looked]


def make_report(
    snapshot: protocol.MachineSnapshot,
    card: protocol.CardView,
    rows: list[Row],
    assumptions: list[Answer],
    *,
    quick: bool,
    start: float,
) -> Report:
    """Return the report of checks that began at this time of the monotonic clock."""
    distribution = ""
    with contextlib.suppress(OSError):
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return Report(
        fenka=version("fenka"),
        build=build_id(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        simulated=snapshot.simulated,
        driver=snapshot.driver,
        cuda=snapshot.cuda,
        card=card.model,
        memory_mib=card.memory_mib,
        context_mib=card.context_mib,
        kernel=platform.release(),
        machine=platform.machine(),
        distribution=distribution,
        python=platform.python_version(),
        quick=quick,
        seconds=round(time.monotonic() - start, 1),
        rows=rows,
        assumptions=assumptions,
        places=list(driver_places.search().looked),
    )


def print_report(report: Report) -> None:
    """Print both tables, and how many checks have which verdict."""
    kind = "simulated " if report.simulated else ""
    print(
        f"{kind}{report.card}, {report.memory_mib} MiB, driver {report.driver}, CUDA {report.cuda}\n"
        f"fenka {report.fenka} ({report.build}), {report.distribution}, Linux {report.kernel}, "
        f"{report.machine}, {report.seconds} s\n"
    )
    rows = [(row.verdict, row.check, _detail(row)) for row in report.rows]
    print("\n".join(tables.align(rows)))
    print("\nWhat the simulated driver assumes, and what this one answers:\n")
    answers = [
        (
            one.verdict,
            one.name,
            one.answer + (f" (assumed: {one.assumed})" if one.verdict == "differs" else ""),
        )
        for one in report.assumptions
    ]
    print("\n".join(tables.align(answers)))
    verdicts = [row.verdict for row in report.rows]
    counts = ", ".join(
        f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "differs", "not possible")
    )
    different = sum(1 for one in report.assumptions if one.verdict == "differs")
    print(f"\nchecks: {counts}; assumptions that differ: {different} of {len(report.assumptions)}")


def _detail(row: Row) -> str:
    expected = f" (expected: {row.expected})" if row.expected and row.verdict == "differs" else ""
    return "; ".join(filter(None, (row.reason, row.measured + expected)))
