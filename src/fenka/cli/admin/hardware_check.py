"""`fenka doctor --hardware`: tries on a card what fenka promises, and what its simulated driver assumes.

It uses the daemon that runs, or one of its own for as long as it runs. It takes only memory and compute that
nobody has, and starts only while nobody waits for a card. It needs no network and no root.
"""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from fenka import hardware
from fenka.build import build_id
from fenka.cli import tables
from fenka.cli.error_report import UserError
from fenka.core.errors import TEMPORARY_FAILURE
from fenka.hardware import driver_places
from fenka.hardware.driver_places import Looked
from fenka.hardware.nvml import Driver
from fenka.workstation import paths, protocol
from fenka.workstation.client import get_snapshot, start_daemon

Verdict = Literal["ok", "differs", "not possible"]

BUDGET_S = 450.0
"""Of the whole check. What has not begun then is not possible any more."""
SLICE_MIB = 2048
HELD_MIB = 256
"""Memory that a program holds while the driver's report of it is compared, and that a killed one held."""
SHARES = (30, 70)
CHILD_S = 60.0
GONE_S = 15.0

_ADDED_NS, _ADDED_PART = 1000.0, 0.1
_NAME = "fenka-check"
_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


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
    """What is printed. Contains no names of machines, users or programs."""

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


class NotPossible(Exception):
    """A check cannot be done here. The message says why."""


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


class Station:
    """A daemon, a card of it, and the programs that this check runs."""

    def __init__(self, runtime: paths.Runtime) -> None:
        self.runtime = runtime
        self.environment = {**os.environ, "FENKA_START_DAEMON": "never"}
        if runtime != paths.current():
            self.environment["FENKA_RUNTIME"] = str(runtime.root)
        self.before = self.snapshot()
        self.card = _choose(self.before)
        free = _free_mib(self.card)
        unit = self.before.unit_mib
        self.slice_mib = min(SLICE_MIB, free // 3) // unit * unit
        if self.slice_mib < max(unit, 2 * HELD_MIB):
            raise UserError(
                f"card {self.card.index} has only {free} MiB that nobody holds, and the check needs two "
                "slices and some memory beside them: run it when more is free",
                TEMPORARY_FAILURE,
            )
        self._end = time.monotonic() + BUDGET_S
        directory = Path(self.before.library_dir) if self.before.simulated else None
        found = {} if directory else driver_places.libraries()
        self._outside = {
            name: str(directory / name) if directory else str(found.get(name, [Path(name)])[0])
            for name in (_CUDA, _NVML)
        }
        # The proxies are mounted over the driver's own paths.
        self._inside = {name: name for name in self._outside} if directory else self._outside

    def snapshot(self) -> protocol.MachineSnapshot:
        """Return what the daemon knows now. Raises DaemonUnavailable, ProtocolMismatch."""
        return get_snapshot(self.runtime)

    @property
    def left_s(self) -> float:
        """Seconds that the next program may take. Raises NotPossible if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise NotPossible(f"the {BUDGET_S:.0f} s of the whole check are over")
        return min(CHILD_S, left)

    def start(
        self,
        what: str,
        *words: object,
        lease: Sequence[str] | None = None,
        program: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a check program in a lease with these options, or outside of leases if it is None."""
        libraries = self._outside if lease is None else self._inside
        own = [sys.executable, "-Pm", "fenka.hardware.check_program", what, libraries[_CUDA]]
        command = [*(program or own), *map(str, words)]
        environment = {**self.environment}
        if lease is None:
            environment["CUDA_VISIBLE_DEVICES"] = self.card.uuid
        else:
            options = ["--no-wait", "--gpu-mem", f"{self.slice_mib}MiB", *lease]
            command = [sys.executable, "-Pm", "fenka", "run", *options, "--", *command]
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(
        self,
        what: str,
        *words: object,
        lease: Sequence[str] | None = None,
        program: Sequence[str] = (),
    ) -> list[Any]:
        """Run a program to its end, and return its answers. Raises NotPossible."""
        with self.start(what, *words, lease=lease, program=program) as process:
            return self.finish(process)

    def finish(self, process: subprocess.Popen[str]) -> list[Any]:
        """Close a program's input, and return its answers. Raises NotPossible."""
        try:
            output, errors = process.communicate(timeout=self.left_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            errors = errors or "the program did not end in time"
        except NotPossible:
            process.kill()
            raise
        answers = [json.loads(line) for line in output.splitlines() if line.startswith(("{", "["))]
        if process.returncode:
            said = [answer["error"] for answer in answers[-1:] if "error" in answer]
            said = said or errors.strip().splitlines()[-1:]
            why = said[0].removeprefix("fenka: ") if said else f"it ended with {process.returncode}"
            raise (
                NotPossible(why) if not answers or "error" in answers[-1] else Partial(why, answers)
            )
        return answers

    @property
    def nvml(self) -> str:
        """Path of NVML, for programs outside of leases."""
        return self._outside[_NVML]

    def open_driver(self) -> Driver:
        """Open NVML. Raises NoDriver."""
        return Driver.open(Path(self.before.library_dir) if self.before.simulated else None)


class Partial(Exception):
    """A program has died after some answers."""

    def __init__(self, why: str, answers: list[Any]) -> None:
        super().__init__(why)
        self.answers = answers


def _free_mib(card: protocol.CardView) -> int:
    return card.memory_mib - card.leased_mib - card.unleased_mib


def _choose(snapshot: protocol.MachineSnapshot) -> protocol.CardView:
    """Return the card with the most free memory. Raises UserError."""
    waiting = [job.name for job in snapshot.jobs if not job.slices]
    if waiting:
        raise UserError(
            f"{waiting[0]} waits for a card, and the check would take what it waits for: run it when nobody "
            "waits",
            TEMPORARY_FAILURE,
        )
    divided = {card.uuid for card in snapshot.divided}
    cards = [card for card in snapshot.cards if card.healthy and card.uuid not in divided]
    if not cards:
        raise UserError(
            "no card can be checked: those in MIG mode and those that the driver has lost are left out"
        )
    return max(cards, key=_free_mib)


@contextlib.contextmanager
def _station() -> Iterator[Station]:
    """Give a daemon: the one that runs, else one of this check's own, in a directory of its own."""
    runtime = paths.current()
    with contextlib.suppress(OSError, paths.UnsafeDirectory):
        if runtime.answers():
            yield Station(runtime)
            return
    with tempfile.TemporaryDirectory(prefix="fenka-", ignore_cleanup_errors=True) as directory:
        own = paths.Runtime(Path(directory))
        theirs, ours = os.pipe()
        process = None
        try:
            with open(theirs) as lifeline:
                process = start_daemon(own, [], lifeline.fileno())
            yield Station(own)
        finally:
            os.close(ours)
            if process:
                process.wait()


def check(output: str, *, quick: bool, torch_python: str, file: Path | None) -> None:
    """Run all checks and print the report; exit code 1 if a check differs.

    file: where the report is written as JSON, too. Raises FenkaError if there is no card, it is not free, or
    the file cannot be written.
    """
    start = time.monotonic()
    if file is not None:
        _write(file, "")  # now, and not after minutes
    with _station() as station:
        _announce(station)
        rows = [
            row
            for step in _steps(station, QUICK if quick else FULL, torch_python)
            for row in step()
        ]
        assumptions, last = _assumptions(station)
        report = _report(station, rows + last, assumptions, quick=quick, start=start)
    if file is not None:
        _write(file, tables.json_text(report, 2) + "\n")
    if not tables.print_data(report, output):
        _print(report)
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
        f"{seen['free']} bytes are free; one more: {codes[0]}, all: {codes[1]}, then one: {codes[2]}, "
        f"all again: {codes[3]}"
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


def _torch(station: Station, python: str) -> list[Row]:
    if station.before.simulated:
        raise NotPossible("PyTorch needs a real card")
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
            while (left := _used_mib(driver, station.card.uuid)) > before or _has_lease(
                station, program.pid
            ):
                if time.monotonic() > start + GONE_S:
                    break
                time.sleep(0.05)
            seconds = time.monotonic() - start
    return [
        _row(
            "memory after SIGKILL",
            left <= before,
            f"{before} MiB before, {held} while it ran, {left} after {seconds:.1f} s",
            f"{before} MiB within {GONE_S:.0f} s",
            "the driver has kept it, or another program has taken some meanwhile",
        )
    ]


def _used_mib(driver: Driver, uuid: str) -> int:
    return next(reading.used_mib for reading in driver.readings() if reading.uuid == uuid)


def _has_lease(station: Station, pid: int) -> bool:
    return any(pid == job.pid for job in station.snapshot().jobs)


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


# ---- the report ----


def _report(
    station: Station, rows: list[Row], assumptions: list[Answer], *, quick: bool, start: float
) -> Report:
    card, snapshot = station.card, station.before
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
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
        distribution=release.get("PRETTY_NAME", "") if "release" in locals() else "",
        python=platform.python_version(),
        quick=quick,
        seconds=round(time.monotonic() - start, 1),
        rows=rows,
        assumptions=assumptions,
        places=list(driver_places.search().looked),
    )


def _print(report: Report) -> None:
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
