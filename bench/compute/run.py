"""The share of a card's time that limited programs get, on the simulated driver.

``python bench/compute/run.py`` prints Markdown tables, and exits 1 when a target is missed. The truth is the
simulator's own account of busy nanoseconds, which neither the shim nor the agent reads. Each case has a card
of its own, so several run at once; none is measured by the wall clock of a program that wants the processor.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated import SimulatedNode, parse_spec
from fenka.isolation import account, control, telling
from fenka.isolation.control import Control, Limit, Mode
from fenka.isolation.layout import HEADER

HERE = Path(__file__).parent
SHIM = HEADER.parent / "libfenka.so"
LIMITS = (10, 20, 30, 50, 70)
KERNELS = {
    "0.05 ms": "50",
    "0.2 ms": "200",
    "2 ms": "2000",
    "20 ms": "20000",
    "mix": "50,500,5000,30000",
}
SLOWER = {
    "50": "500",
    "200": "2000",
    "2000": "20000",
    "20000": "200000",
    "50,500,5000,30000": "50000",
}
BESIDE = ("alone", "an equal", "an unlimited one", "10 times longer kernels")
CARDS = 8
SETTLE_S = 2.0


def build(folder: Path, library_dir: Path) -> Path:
    """Compiles the program that gives the card work."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    assert spec and spec.submodule_search_locations, "nvidia-cuda-runtime-cu12 is not installed"
    include = Path(spec.submodule_search_locations[0]) / "include"
    program = folder / "load"
    command = [
        "gcc",
        "-O2",
        "-w",
        "-isystem",
        str(include),
        "-o",
        str(program),
        str(HERE / "load.c"),
    ]
    subprocess.run([*command, str(library_dir / "libcuda.so.1"), "-pthread"], check=True)
    return program


@dataclass
class World:
    """A simulated node, an agent that tells, and programs in leases."""

    folder: Path
    cards: int = CARDS
    measured: bool = True
    node: SimulatedNode = field(init=False)
    program: Path = field(init=False)
    uuids: tuple[str, ...] = field(init=False)

    @contextmanager
    def running(self) -> Iterator["World"]:
        self.node = SimulatedNode.create(self.folder / "node", parse_spec(f"T4*{self.cards}"))
        self.node.start()
        self.program = build(self.folder, self.node.library_dir)
        self._leases: dict[int, str] = {}
        self._lock = threading.Lock()
        self._made = 0
        with Driver.open(self.node.library_dir) as driver:
            self.uuids = tuple(card.uuid for card in driver.cards())
            self.teller = telling.Teller(driver.busy_samples, lambda pid: self._leases.get(pid))
            stop = threading.Event()
            thread = threading.Thread(target=self._tell, args=(stop,))
            if self.measured:
                thread.start()
            try:
                yield self
            finally:
                stop.set()
                if self.measured:
                    thread.join()
                self.node.stop()

    def _tell(self, stop: threading.Event) -> None:
        while not stop.wait(telling.PERIOD_S):
            with self._lock:
                self.teller.tell()

    def lease(self, card: int, percent: int, mode: Mode = "hard") -> Path:
        """The folder of a new lease of 1 GiB of a card."""
        with self._lock:
            self._made += 1
            folder = self.folder / f"lease{self._made}"
        (folder / "lease").mkdir(parents=True)
        (folder / "account").mkdir()
        limit = Limit(self.uuids[card], 1 << 30, 0, percent, mode)
        control.write(folder / "lease" / "control", Control(folder.name, (limit,)))
        account.create(folder / "account" / "slots")
        with self._lock:
            self.teller.watch(folder.name, folder / "lease" / "control")
        return folder

    def end(self, lease: Path) -> None:
        with self._lock:
            self.teller.forget(lease.name)

    def busy(self, card: int) -> dict[int, int]:
        """Nanoseconds by process."""
        return self.node.busy_ns(card)

    @contextmanager
    def load(self, lease: Path, kernels: str, *more: str, working: bool = True) -> Iterator["Load"]:
        """A program that works."""
        process = subprocess.Popen(
            [str(self.program), kernels, *more],
            env={
                "LD_PRELOAD": str(SHIM),
                "LD_LIBRARY_PATH": str(self.node.library_dir),
                "FENKA_LEASE": str(lease),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with self._lock:
            self._leases[process.pid] = lease.name
        assert process.stdout and process.stdout.readline() == "ready\n"
        made = Load(process)
        if working:
            made.switch()
        try:
            yield made
        finally:
            process.kill()
            process.communicate()


@dataclass
class Load:
    process: "subprocess.Popen[str]"

    def switch(self) -> None:
        """Work, or pause."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def shares(
    world: World, card: int, programs: Sequence[tuple[int, Mode, str]], seconds: float
) -> list[float]:
    """Percent of the card that each of some programs gets: its limit, mode, and kernels."""
    with ExitStack() as stack:
        leases = [world.lease(card, percent, mode) for percent, mode, _ in programs]
        loads = [
            stack.enter_context(world.load(lease, kernels))
            for lease, (_, _, kernels) in zip(leases, programs, strict=True)
        ]
        time.sleep(SETTLE_S)
        before, began = world.busy(card), time.monotonic()
        time.sleep(seconds)
        after, took = world.busy(card), time.monotonic() - began
        pids = [load.process.pid for load in loads]
        result = [(after[pid] - before[pid]) / took / 1e7 for pid in pids]
    for lease in leases:
        world.end(lease)
    return result


@dataclass(frozen=True)
class Case:
    percent: int
    kernels: str
    beside: str

    def programs(self, *, limited: bool = True) -> list[tuple[int, Mode, str]]:
        own = KERNELS[self.kernels]
        first: tuple[int, Mode, str] = (self.percent if limited else 100, "hard", own)
        others: dict[str, list[tuple[int, Mode, str]]] = {
            "alone": [],
            "an equal": [first],
            "an unlimited one": [(100, "hard", own)],
            "10 times longer kernels": [(self.percent if limited else 100, "hard", SLOWER[own])],
        }
        return [first, *others[self.beside]]


@dataclass(frozen=True)
class Result:
    case: Case
    got: float
    wanted: float

    @property
    def error(self) -> float:
        return abs(self.got - self.wanted)


def in_parallel(cards: int, jobs: Sequence[Callable[[int], object]]) -> list[object]:
    """Runs each on a card that is free."""
    free = list(range(cards))
    lock = threading.Lock()

    def run(job: Callable[[int], object]) -> object:
        with lock:
            card = free.pop()
        try:
            return job(card)
        finally:
            with lock:
                free.append(card)

    with ThreadPoolExecutor(cards) as pool:
        return list(pool.map(run, jobs))


def table(world: World, cases: Sequence[Case], seconds: float, cards: int) -> list[Result]:
    """What each case gets; what it should: its limit, or what an unlimited program gets in its place."""
    places = sorted({(case.kernels, case.beside) for case in cases})

    def unlimited(place: tuple[str, str]) -> Callable[[int], object]:
        programs = Case(100, *place).programs(limited=False)
        return lambda card: shares(world, card, programs, min(seconds, 5))[0]

    def limited(case: Case) -> Callable[[int], object]:
        return lambda card: shares(world, card, case.programs(), seconds)[0]

    most = dict(zip(places, in_parallel(cards, [unlimited(p) for p in places]), strict=True))
    got = in_parallel(cards, [limited(case) for case in cases])
    return [
        Result(case, float(g), min(case.percent, float(most[case.kernels, case.beside])))
        for case, g in zip(cases, got, strict=True)
    ]


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)))
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--beside", default=",".join(BESIDE))
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--unmeasured", action="store_true", help="without the agent's readings")
    chosen = parser.parse_args()
    missed = 0
    with (
        tempfile.TemporaryDirectory() as temporary,
        World(Path(temporary), chosen.at_once, not chosen.unmeasured).running() as world,
    ):
        cases = [
            Case(int(percent), kernels, beside)
            for beside in chosen.beside.split(",")
            for kernels in chosen.kernels.split(",")
            for percent in chosen.limits.split(",")
        ]
        results = table(world, cases, chosen.seconds, chosen.at_once)
        by = {result.case: result for result in results}
        limits = [int(percent) for percent in chosen.limits.split(",")]
        print("| beside | kernels | " + " | ".join(f"{p} %" for p in limits) + " |")
        print("|---|---|" + "---|" * len(limits))
        for beside in chosen.beside.split(","):
            for kernels in chosen.kernels.split(","):
                cells = []
                for percent in limits:
                    result = by[Case(percent, kernels, beside)]
                    short = result.wanted < percent - 0.05
                    cells.append(
                        f"{result.got:.2f}" + (f" of {result.wanted:.2f}" if short else "")
                    )
                print(f"| {beside} | {kernels} | {' | '.join(cells)} |")
        errors = [result.error for result in results]
        print(f"\nMean error {statistics.mean(errors):.2f} points, worst {max(errors):.2f}.")
        missed += statistics.mean(errors) > 1 or max(errors) > 3
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
