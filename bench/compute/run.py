"""The share of a card's time that limited programs get, on the simulated driver.

``python bench/compute/run.py`` prints Markdown tables, and exits 1 when a target is missed. The truth is the
simulator's own account of busy nanoseconds, which neither the shim nor the agent reads. Each case has a card
of its own, so several run at once; none is measured by the wall clock of a program that wants the processor.
"""

import argparse
import importlib.util
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
from typing import Any

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated import SimulatedNode, parse_spec
from fenka.isolation import account, compute_feedback, control
from fenka.isolation.control import ComputeMode, Control, Limit
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
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    assert spec, "nvidia-cuda-runtime-cu12 is not installed"
    assert spec.submodule_search_locations
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
        """Until the end of the block."""
        self.node = SimulatedNode.create(self.folder / "node", parse_spec(f"T4*{self.cards}"))
        self.node.start()
        self.program = build(self.folder, self.node.library_dir)
        self._leases: dict[int, str] = {}
        self._lock = threading.Lock()
        self._made = 0
        with Driver.open(self.node.library_dir) as driver:
            self.uuids = tuple(card.uuid for card in driver.cards())
            self.teller = compute_feedback.ComputeFeedback(driver.busy_samples, self._leases.get)
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
        while not stop.wait(compute_feedback.PERIOD_S):
            with self._lock:
                self.teller.update()

    def lease(self, card: int, percent: int, mode: ComputeMode = "hard") -> Path:
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
            self.teller.add_lease(folder.name, folder / "lease" / "control")
        return folder

    def end(self, lease: Path) -> None:
        """Nobody is in it any more."""
        with self._lock:
            self.teller.remove_lease(lease.name)

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
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
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
    """A running program."""

    process: "subprocess.Popen[str]"

    def switch(self) -> None:
        """Work, or pause."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@dataclass(frozen=True)
class Program:
    """What runs in one lease, and what it may have."""

    kernels: str
    percent: int = 100
    mode: ComputeMode = "hard"
    threads: int = 1
    graph: bool = False
    processes: int = 1

    @property
    def arguments(self) -> tuple[str, ...]:
        """For load.c."""
        return (str(self.threads), *(["graph"] if self.graph else []))


def shares(world: World, card: int, programs: Sequence[Program], seconds: float) -> list[float]:
    """Percent of the card that each of some programs gets."""
    with ExitStack() as stack:
        pids = [_start(world, card, program, stack) for program in programs]
        time.sleep(SETTLE_S)
        return _had(world, card, pids, seconds)


def _start(
    world: World, card: int, program: Program, stack: ExitStack, *, working: bool = True
) -> list["Load"]:
    lease = world.lease(card, program.percent, program.mode)
    stack.callback(world.end, lease)
    return [
        stack.enter_context(world.load(lease, program.kernels, *program.arguments, working=working))
        for _ in range(program.processes)
    ]


def _had(world: World, card: int, leases: Sequence[list["Load"]], seconds: float) -> list[float]:
    before, began = world.busy(card), time.monotonic()
    time.sleep(seconds)
    after, took = world.busy(card), time.monotonic() - began
    return [
        sum(after[load.process.pid] - before[load.process.pid] for load in loads) / took / 1e7
        for loads in leases
    ]


def waking(world: World, card: int, kernels: str, times: int = 10) -> list[float]:
    """Percent that a program limited to 50 gets, which pauses and wakes beside a soft one of 30; in the half
    second that begins 200 ms after each waking, and then, last, what it gets in the long run."""
    with ExitStack() as stack:
        soft = _start(world, card, Program(kernels, 30, "soft"), stack)
        hard = _start(world, card, Program(kernels, 50), stack, working=False)
        percents = []
        for _ in range(times):
            time.sleep(1.5)
            hard[0].switch()
            time.sleep(0.2)
            percents += _had(world, card, [hard], 0.5)
            hard[0].switch()
        hard[0].switch()
        time.sleep(SETTLE_S)
        assert soft
        return [*percents, *_had(world, card, [hard], 5)]


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    percent: int
    kernels: str
    beside: str

    def programs(self, *, limited: bool = True) -> list[Program]:
        """The one that is measured comes first."""
        own, percent = KERNELS[self.kernels], self.percent if limited else 100
        first = Program(own, percent)
        others = {
            "alone": [],
            "an equal": [first],
            "an unlimited one": [Program(own)],
            "10 times longer kernels": [Program(SLOWER[own], percent)],
        }
        return [first, *others[self.beside]]


@dataclass(frozen=True)
class Result:
    """What a case got, and what it should have got."""

    case: Case
    got: float
    wanted: float

    @property
    def error(self) -> float:
        """In points."""
        return abs(self.got - self.wanted)


def in_parallel(cards: int, jobs: Sequence[Callable[[int], Any]]) -> list[Any]:
    """Runs each on a card that is free."""
    free = list(range(cards))
    lock = threading.Lock()

    def run(job: Callable[[int], Any]) -> Any:
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

    def unlimited(place: tuple[str, str]) -> Callable[[int], Any]:
        programs = Case(100, *place).programs(limited=False)
        return lambda card: shares(world, card, programs, min(seconds, 5))[0]

    def limited(case: Case) -> Callable[[int], Any]:
        return lambda card: shares(world, card, case.programs(), seconds)[0]

    most = dict(zip(places, in_parallel(cards, [unlimited(p) for p in places]), strict=True))
    got = in_parallel(cards, [limited(case) for case in cases])
    return [
        Result(case, g, min(case.percent, most[case.kernels, case.beside]))
        for case, g in zip(cases, got, strict=True)
    ]


TOGETHER: tuple[tuple[str, tuple[Program, ...], tuple[float, ...]], ...] = (
    ("40 % and 30 %, 2 ms", (Program("2000", 40), Program("2000", 30)), (40, 30)),
    ("40 % and 30 %, 20 and 0.2 ms", (Program("20000", 40), Program("200", 30)), (40, 30)),
    ("40 % and 30 %, mixes", (Program(KERNELS["mix"], 40), Program(KERNELS["mix"], 30)), (40, 30)),
    ("30 %, four threads", (Program("2000", 30, threads=4),), (30,)),
    ("30 %, three processes", (Program("2000", 30, processes=3),), (30,)),
    ("30 %, graphs of 5.5 ms", (Program("500,5000", 30, graph=True),), (30,)),
    (
        "30 %, graphs, beside an unlimited one",
        (Program("500,5000", 30, graph=True), Program("2000")),
        (30, 70),
    ),
    ("soft 30 % beside hard 40 %", (Program("2000", 30, "soft"), Program("2000", 40)), (60, 40)),
    (
        "soft 30 % beside an unlimited one",
        (Program("2000", 30, "soft"), Program("2000")),
        (30, 70),
    ),
    (
        "weights 75 and 25",
        (Program("2000", 75, "weight"), Program("2000", 25, "weight")),
        (75, 25),
    ),
    ("weight 25 alone", (Program("2000", 25, "weight"),), (100,)),
)


def together(world: World, seconds: float, cards: int) -> list[Result]:
    """Prints what programs get beside each other, in all modes."""

    def measured(programs: Sequence[Program]) -> Callable[[int], Any]:
        return lambda card: shares(world, card, programs, seconds)

    got = in_parallel(cards, [measured(programs) for _, programs, _ in TOGETHER])
    print("\n| programs | wanted % | got % |\n|---|---|---|")
    results = []
    for (description, _, wanted), percents in zip(TOGETHER, got, strict=True):
        print(f"| {description} | {_numbers(wanted)} | {_numbers(percents)} |")
        results += [
            Result(Case(0, description, ""), g, w)
            for g, w in zip(percents, wanted, strict=True)
            if w < 100
        ]
    return results


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def soft(world: World, seconds: float, cards: int) -> bool:
    """Prints what a soft program gets alone, and what it leaves; whether that is enough."""

    def alone(program: Program) -> Callable[[int], Any]:
        return lambda card: shares(world, card, [program], seconds)[0]

    def woken(kernels: str) -> Callable[[int], Any]:
        return lambda card: waking(world, card, kernels)

    free = in_parallel(cards, [alone(Program(k)) for k in KERNELS.values()])
    held = in_parallel(cards, [alone(Program(k, 30, "soft")) for k in KERNELS.values()])
    print("\n| kernels | unlimited, alone % | soft 30 %, alone | of it |\n|---|---|---|---|")
    good = True
    for name, unlimited, limited in zip(KERNELS, free, held, strict=True):
        good &= limited / unlimited >= 0.97
        print(f"| {name} | {unlimited:.2f} | {limited:.2f} | {limited / unlimited:.1%} |")
    print(
        "\nA program with 50 % pauses and wakes beside a soft one of 30 %; what it gets in the half second "
        "that begins 200 ms after waking:\n\n| kernels | each time % | in the long run |\n|---|---|---|"
    )
    for name, percents in zip(
        ("0.2 ms", "2 ms", "20 ms"),
        in_parallel(cards, [woken(KERNELS[name]) for name in ("0.2 ms", "2 ms", "20 ms")]),
        strict=True,
    ):
        good &= statistics.mean(percents[:-1]) >= 0.95 * percents[-1]
        print(f"| {name} | {', '.join(f'{x:.1f}' for x in percents[:-1])} | {percents[-1]:.2f} |")
    return good


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)))
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--beside", default=",".join(BESIDE))
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--unmeasured", action="store_true", help="without the agent's readings")
    parser.add_argument("--only-table", action="store_true", help="and not the modes")
    chosen = parser.parse_args()
    missed = False
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
        missed |= statistics.mean(errors) > 1 or max(errors) > 3
        if not chosen.only_table:
            beside_each_other = [
                result.error for result in together(world, chosen.seconds, chosen.at_once)
            ]
            missed |= max(beside_each_other) > 2
            missed |= not soft(world, chosen.seconds, chosen.at_once)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
