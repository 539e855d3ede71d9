"""The daemon, the card and the programs of `fenka doctor --hardware`."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fenka.cli.error_report import UserError
from fenka.core.errors import TEMPORARY_FAILURE
from fenka.hardware import driver_places
from fenka.hardware.nvml import Driver
from fenka.workstation import paths, protocol
from fenka.workstation.client import get_snapshot, start_daemon

BUDGET_S = 450.0
"""Of the whole check. Checks that have not begun then are not possible any more."""
SLICE_MIB = 2048
HELD_MIB = 256
"""Memory that a program holds while the driver's report of it is compared, and that a killed one held."""
CHILD_S = 60.0

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"


class NotPossible(Exception):
    """A check cannot be done here. The message says why."""


class Partial(Exception):
    """A program has died after some answers."""

    def __init__(self, why: str, answers: list[Any]) -> None:
        super().__init__(why)
        self.answers = answers


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
            cwd="/",
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
    def cuda(self) -> str:
        """Path of the driver, for programs in leases."""
        return self._inside[_CUDA]

    @property
    def nvml(self) -> str:
        """Path of NVML, for programs outside of leases."""
        return self._outside[_NVML]

    def open_driver(self) -> Driver:
        """Open NVML. Raises NoDriver."""
        return Driver.open(Path(self.before.library_dir) if self.before.simulated else None)


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
def open_station() -> Iterator[Station]:
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
