"""`fenka doctor --hardware`: tries on a card what fenka promises, and what its simulated driver assumes.

It uses the daemon that runs, or one of its own for as long as it runs. It takes only memory and compute that
nobody has, and starts only while nobody waits for a card. It needs no network and no root.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fenka import hardware
from fenka.cli import tables
from fenka.cli.admin.hardware_contexts import NAME as RUNTIME_CONTEXT
from fenka.cli.admin.hardware_contexts import runtime_context
from fenka.cli.admin.hardware_report import Answer, Row, make_report, print_report
from fenka.cli.admin.hardware_station import (
    BUDGET_S,
    HELD_MIB,
    NotPossible,
    Partial,
    Station,
    open_station,
)
from fenka.cli.error_report import UserError
from fenka.hardware import driver_places
from fenka.hardware.nvml import Driver

SHARES = (30, 70)
GONE_S = 15.0

_SLACK_MIB = 32
_ADDED_NS, _ADDED_PART = 1000.0, 0.1
_NAME = "fenka-check"


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the checks take.

    Attributes:
        warm_s, shares_s: Seconds before and while the shares are measured.
        rounds: Comparisons with a program outside of leases.
        points: How far a share may be off, in percent of the card.
    """

    warm_s: float
    shares_s: float
    rounds: int
    points: float


FULL, QUICK = Pace(4.0, 20.0, 3, 3.0), Pace(1.0, 2.0, 1, 8.0)


def check(output: str, *, quick: bool, torch_python: str, file: Path | None) -> None:
    """Run all checks and print the report; exit code 1 if a check differs.

    file: where the report is written as JSON, too. Raises FenkaError if there is no card, it is not free, or
    the file cannot be written.
    """
    start = time.monotonic()
    if file is not None:
        _write(file, "")  # now, and not after minutes
    with open_station() as station:
        _announce(station)
        rows = [
            row
            for step in _steps(station, QUICK if quick else FULL, torch_python)
            for row in step()
        ]
        assumptions, last = _assumptions(station)
        report = make_report(
            station.before, station.card, rows + last, assumptions, quick=quick, start=start
        )
    if file is not None:
        _write(file, tables.json_text(report, 2) + "\n")
    if not tables.print_data(report, output):
        print_report(report)
    if any(row.verdict == "differs" for row in report.rows):
        sys.exit(1)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as why:
        raise UserError(f"the report cannot be written to {file}: {why.strerror}") from None


def _announce(station: Station) -> None:
    card = station.card
    print(
        f"fenka: takes two slices of {station.slice_mib} MiB and the compute that nobody has on card "
        f"{card.index} ({card.model}) for at most {BUDGET_S / 60:.1f} minutes; running programs keep theirs",
        file=sys.stderr,
    )


def _steps(station: Station, pace: Pace, torch_python: str) -> list[Callable[[], list[Row]]]:
    named: list[tuple[str, Callable[[], list[Row]]]] = [
        ("driver", lambda: _found(station)),
        ("memory limit, driver API", lambda: _limit(station)),
        ("memory limit, PyTorch", lambda: _torch(station, torch_python)),
        (RUNTIME_CONTEXT, lambda: [runtime_context(station, _absolute(torch_python))]),
        ("memory of a program in NVML", lambda: _reported(station)),
        ("memory after SIGKILL", lambda: _killed(station)),
        ("time of calls", lambda: _overhead(station, pace)),
        ("shares 30 and 70", lambda: _shares(station, pace)),
        ("newer functions", lambda: _features(station)),
    ]
    return [lambda name=name, step=step: _guarded(name, step) for name, step in named]  # type: ignore[misc]


def _guarded(name: str, step: Callable[[], list[Row]]) -> list[Row]:
    try:
        return step()
    except NotPossible as why:
        return [Row(name, "not possible", reason=str(why))]
    except Partial as why:
        return [Row(name, "differs", reason=f"the program died: {why}")]


def _row(name: str, right: bool, measured: str, expected: str, reason: str = "") -> Row:
    return Row(name, "ok" if right else "differs", measured, expected, "" if right else reason)


# ---- the checks ----


def _found(station: Station) -> list[Row]:
    snapshot = station.before
    if snapshot.simulated:
        return [Row("driver", "ok", f"simulated, {snapshot.driver}")]
    search = driver_places.search()
    driver = search.of_version(snapshot.driver)
    where = driver.directory if driver else "a directory of the dynamic linker's"
    right = not search.problem or driver is not None
    return [_row("driver", right, f"{snapshot.driver} in {where}", "", search.problem)]


def _limit(station: Station) -> list[Row]:
    (seen,) = station.ask("limit", lease=["--name", _NAME])
    codes = [seen[key] for key in ("beyond", "all", "one_more", "again")]
    measured = (
        f"{seen['free']} bytes are free; one byte more: {codes[0]}, all pages: {codes[1]}, "
        f"then one: {codes[2]}, all again: {codes[3]}"
    )
    within = seen["total"] <= station.slice_mib << 20
    return [
        _row(
            "memory limit, driver API",
            codes == [2, 0, 2, 0] and within,
            measured,
            "2, 0, 2, 0",
            "" if within else f"the program sees {seen['total']} bytes, more than its slice",
        )
    ]


def _absolute(python: str) -> str:
    """Return a program's path as it is seen from the directory that programs of the check start in."""
    return str(Path(python).absolute()) if "/" in python else python


def _torch(station: Station, python: str) -> list[Row]:
    if station.before.simulated:
        raise NotPossible("PyTorch needs a real card")
    python = _absolute(python)
    program = [python or sys.executable, str(Path(hardware.__file__).with_name("torch_program.py"))]
    (seen,) = station.ask("", lease=["--name", _NAME], program=program)
    if seen.get("missing"):
        raise NotPossible(f"{program[0]} has no PyTorch: name one that has with --torch PYTHON")
    if "error" in seen:
        raise NotPossible(seen["error"])
    granted = [seen["beyond"], seen["half"], seen["beyond_again"]]
    words = ", ".join("granted" if one else "refused" for one in granted)
    return [
        _row(
            "memory limit, PyTorch",
            granted == [False, True, False],
            f"{seen['version']}: beyond the slice, half of it, beyond: {words}",
            "refused, granted, refused",
        )
    ]


@contextlib.contextmanager
def _running(
    station: Station, what: str, *words: object, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Give a program that has said that it is ready, and end it. Raises NotPossible."""
    process = station.start(what, *words, **options)
    try:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            station.finish(process)
            raise NotPossible("the program ended at once")
        if json.loads(line).get("code"):
            raise NotPossible(f"{words[0]} MiB were refused with {json.loads(line)['code']}")
        yield process
    finally:
        process.kill()
        process.communicate()


def _reported(station: Station) -> list[Row]:
    with (
        _running(station, "hold", HELD_MIB, lease=["--name", _NAME]) as program,
        station.open_driver() as driver,
    ):
        listed = [process for process in driver.processes() if process.pid == program.pid]
    if not listed:
        return [
            Row(
                "memory of a program in NVML",
                "differs",
                "",
                "",
                "NVML does not list the program's process ID",
            )
        ]
    used = listed[0].used_mib
    if used is None:
        raise NotPossible("this driver reports no memory of processes")
    context = station.card.context_mib
    expected = HELD_MIB + (context or 0)
    return [
        _row(
            "memory of a program in NVML",
            abs(used - expected) <= 16 if context is not None else used >= HELD_MIB,
            f"{used} MiB",
            f"{HELD_MIB} MiB and a context of {'unknown size' if context is None else f'{context} MiB'}",
            "the driver counts something else",
        )
    ]


def _killed(station: Station) -> list[Row]:
    with station.open_driver() as driver:
        before = _used_mib(driver, station.card.uuid)
        with _running(station, "churn", HELD_MIB, lease=["--name", _NAME]) as program:
            held = _used_mib(driver, station.card.uuid)
            program.send_signal(signal.SIGKILL)
            program.wait()
            start = time.monotonic()
            while not (gone := _is_gone(station, driver, before, program.pid)):
                if time.monotonic() > start + GONE_S:
                    break
                time.sleep(0.05)
            seconds = time.monotonic() - start
            left = _used_mib(driver, station.card.uuid)
    return [
        _row(
            "memory after SIGKILL",
            gone,
            f"{before} MiB before, {held} while it ran, {left} after {seconds:.1f} s",
            f"{before} MiB and no lease within {GONE_S:.0f} s",
            "the driver or the lease has kept it, or another program has taken some meanwhile",
        )
    ]


def _is_gone(station: Station, driver: Driver, before: int, pid: int) -> bool:
    """Return whether the card is as full as before, up to what a desktop varies by, and the lease is gone."""
    if any(pid == job.pid for job in station.snapshot().jobs):
        return False
    return _used_mib(driver, station.card.uuid) <= before + _SLACK_MIB


def _used_mib(driver: Driver, uuid: str) -> int:
    """Return what is in use of a card; 0 if the driver does not report it, so that only the lease decides."""
    used = [reading.used_mib for reading in driver.readings() if reading.uuid == uuid]
    return next(iter(used), None) or 0


def _overhead(station: Station, pace: Pace) -> list[Row]:
    bare, limited = list[dict[str, float]](), list[dict[str, float]]()
    for _ in range(pace.rounds):
        bare += station.ask("calls")
        limited += station.ask("calls", lease=["--name", _NAME])
    rows = []
    for key, name in (
        ("allocation", "time of an allocation and its release"),
        ("launch", "time of a launch"),
        ("query", "time of a query of the memory"),
    ):
        without, within = min(seen[key] for seen in bare), min(seen[key] for seen in limited)
        added = within - without
        rows.append(
            _row(
                name,
                added <= max(_ADDED_NS, without * _ADDED_PART),
                f"{without / 1000:.2f} µs without a limit, {within / 1000:.2f} µs with one",
                f"at most {_ADDED_NS / 1000:.0f} µs or {_ADDED_PART:.0%} more",
                f"{added / 1000:.2f} µs more",
            )
        )
    return rows


def _shares(station: Station, pace: Pace) -> list[Row]:
    held = sum(
        piece.compute
        for job in station.snapshot().jobs
        for piece in job.slices
        if piece.uuid == station.card.uuid
    )
    if held:
        raise NotPossible(f"other programs hold {held} % of the card's compute")
    (alone,) = station.ask("calibrate")
    turns, us = round(alone["turns"]), alone["us"]
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(
                _running(
                    station,
                    *("spin", turns, pace.warm_s, pace.shares_s),
                    lease=["--name", f"{_NAME}-{share}", "--gpu-core", str(share)],
                )
            )
            for share in SHARES
        ]
        cards = {
            piece.uuid
            for job in station.snapshot().jobs
            if job.name.startswith(f"{_NAME}-")
            for piece in job.slices
        }
        if len(cards) != 1:
            raise NotPossible("the two programs were placed on different cards")
        for program in programs:
            assert program.stdin
            program.stdin.write("\n")
            program.stdin.flush()
        seen = [station.finish(program)[-1] for program in programs]
    got = [one["kernels"] * us / one["seconds"] / 1e4 for one in seen]
    worst = max(abs(share - percent) for share, percent in zip(SHARES, got, strict=True))
    return [
        _row(
            "shares 30 and 70",
            worst <= pace.points,
            f"{got[0]:.1f} % and {got[1]:.1f} %, kernels of {us / 1000:.2f} ms, {pace.shares_s:.0f} s",
            f"30 % and 70 %, each within {pace.points:.0f} points",
            f"the worst is {worst:.1f} points off, and the card was idle {max(0.0, 100 - sum(got)):.1f} % of "
            "the time: if that is the cause, other programs keep the processor busy",
        )
    ]


def _features(station: Station) -> list[Row]:
    (seen,) = station.ask("features", station.nvml)
    state, count = seen["state"], len(seen["checkpoint"])
    checkpoint = Row("checkpoint functions", "ok", f"{count} of 6, state {state}", "6, state 0")
    if count < 6:
        why = f"{6 - count} of 6 are missing; drivers have them from 570 on"
        checkpoint = Row("checkpoint functions", "not possible", reason=why)
    elif state:
        why = f"cuCheckpointProcessGetState answers {state}, 801 means not supported"
        checkpoint = Row("checkpoint functions", "not possible", reason=why)
    limits = Row("the driver's own memory limits", "ok", "present")
    if not seen["memory_limits"]:
        why = "nvmlDeviceSetMemoryLimits_v1 is missing; drivers have it from 615 on"
        limits = Row("the driver's own memory limits", "not possible", reason=why)
    return [checkpoint, limits]


def _assumptions(station: Station) -> tuple[list[Answer], list[Row]]:
    """Return the assumptions that were compared, and a row if not all could be."""
    name = "assumptions of the simulated driver"
    try:
        answers, row = station.ask("assumptions"), []
    except NotPossible as why:
        answers, row = [], [Row(name, "not possible", reason=str(why))]
    except Partial as why:
        answers, row = why.answers, [Row(name, "differs", reason=f"the program died: {why}")]
    return [msgspec.convert(answer, Answer) for answer in answers if "verdict" in answer], row
