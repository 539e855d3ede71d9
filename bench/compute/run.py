"""Measure the share of a card's time that limited programs get on the simulated driver.

``python bench/compute/run.py`` prints Markdown tables, and exits 1 when a target is missed. The reference is
the simulator's account of busy nanoseconds, which neither the shim nor the agent reads. Each case has its own
card, so several run at once. None is measured by the wall clock of a program that waits for the processor.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fenka.core.request import ComputeMode
from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation import account, compute_feedback, lease_control
from fenka.isolation.lease_control import HEADER, Control, Limit

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
NEIGHBOURS = ("alone", "an equal", "an unlimited one", "10 times longer kernels")
CARDS = 8
SETTLE_S = 2.0


def build(folder: Path, library_dir: Path) -> Path:
    """Compile the program that runs kernels, and return its path."""
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec, "nvidia-cuda-runtime is not installed"
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
class Testbed:
    """A simulated node, an agent that reports compute use to the shims, and programs in leases."""

    folder: Path
    cards: int = CARDS
    measured: bool = True
    multiprocessors: Sequence[int] = ()
    """Of each card; those of a T4 if none are given."""
    node: SimulatedNode = field(init=False)
    program: Path = field(init=False)
    uuids: tuple[str, ...] = field(init=False)

    @contextmanager
    def running(self) -> Iterator["Testbed"]:
        """Run node and agent inside the `with` block."""
        cards = parse_spec(f"T4*{self.cards}")
        if self.multiprocessors:
            cards = tuple(
                replace(card, model=replace(card.model, sm_count=count))
                for card, count in zip(cards, self.multiprocessors, strict=True)
            )
        self.node = SimulatedNode.create(self.folder / "node", cards)
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
        """Create a lease of 1 GiB of a card and return its folder. percent: 0 requests no compute."""
        with self._lock:
            self._made += 1
            folder = self.folder / f"lease{self._made}"
        (folder / "lease").mkdir(parents=True)
        (folder / "account").mkdir()
        uuid = self.uuids[card]
        limit = Limit(uuid, 1 << 30, 0, percent or 100, mode)
        lease_control.write(folder / "lease" / "control", Control(folder.name, (limit,)))
        account.create(folder / "account" / "slots")
        with self._lock:
            page, requested = folder / "lease" / "control", None if percent else {uuid: 0}
            self.teller.add_lease(folder.name, page, requested=requested)
        return folder

    def end(self, lease: Path) -> None:
        """End a lease without processes."""
        with self._lock:
            self.teller.remove_lease(lease.name)

    def busy(self, card: int) -> dict[int, int]:
        """Return the busy nanoseconds of a card by process."""
        return self.node.busy_ns(card)

    @contextmanager
    def load(self, lease: Path, kernels: str, *more: str, working: bool = True) -> Iterator["Load"]:
        """Run a program in a lease."""
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
        load = Load(process)
        if working:
            load.switch()
        try:
            yield load
        finally:
            process.kill()
            process.communicate()


@dataclass
class Load:
    """A running program."""

    process: "subprocess.Popen[str]"

    def switch(self) -> None:
        """Start or pause the work."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def delayed_ns(self) -> int:
        """Return for how long its threads could have run, but had no processor (schedstat of proc(5))."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads)


@dataclass(frozen=True)
class Program:
    """The program of one lease, and the lease's limit: 100 and hard is never delayed, 0 yields to shares."""

    kernels: str
    percent: int = 100
    mode: ComputeMode = "hard"
    threads: int = 1
    graph: bool = False
    processes: int = 1

    @property
    def arguments(self) -> tuple[str, ...]:
        """The further arguments of load.c."""
        return (str(self.threads), *(["graph"] if self.graph else []))


def shares(testbed: Testbed, card: int, programs: Sequence[Program], seconds: float) -> list[float]:
    """Return the percentages of the card that programs get beside each other."""
    return shares_and_delays(testbed, card, programs, seconds)[0]


def shares_and_delays(
    testbed: Testbed, card: int, programs: Sequence[Program], seconds: float
) -> tuple[list[float], float]:
    """Return the same, and for how many percent of the time the programs waited for a processor."""
    with ExitStack() as stack:
        leases = [_start(testbed, card, program, stack) for program in programs]
        time.sleep(SETTLE_S)
        loads = [load for lease in leases for load in lease]
        before, began = [load.delayed_ns() for load in loads], time.monotonic()
        percents = _measure(testbed, card, leases, seconds)
        took = time.monotonic() - began
        delays = [load.delayed_ns() - ns for load, ns in zip(loads, before, strict=True)]
        return percents, max(delays) / took / 1e7


def _start(
    testbed: Testbed, card: int, program: Program, stack: ExitStack, *, working: bool = True
) -> list["Load"]:
    lease = testbed.lease(card, program.percent, program.mode)
    stack.callback(testbed.end, lease)
    return [
        stack.enter_context(
            testbed.load(lease, program.kernels, *program.arguments, working=working)
        )
        for _ in range(program.processes)
    ]


def _measure(
    testbed: Testbed, card: int, leases: Sequence[list["Load"]], seconds: float
) -> list[float]:
    before, began = testbed.busy(card), time.monotonic()
    time.sleep(seconds)
    after, took = testbed.busy(card), time.monotonic() - began
    return [
        sum(after[load.process.pid] - before[load.process.pid] for load in loads) / took / 1e7
        for loads in leases
    ]


def waking(testbed: Testbed, card: int, kernels: str, times: int = 10) -> list[float]:
    """Measure a program with a limit of 50 percent that pauses and resumes beside a soft one of 30.

    Returns:
        Percentages over half a second, each 200 ms after the program resumes; the last is the long-term one.
    """
    with ExitStack() as stack:
        soft = _start(testbed, card, Program(kernels, 30, "soft"), stack)
        hard = _start(testbed, card, Program(kernels, 50), stack, working=False)
        percents = []
        for _ in range(times):
            time.sleep(1.5)
            hard[0].switch()
            time.sleep(0.2)
            percents += _measure(testbed, card, [hard], 0.5)
            hard[0].switch()
        hard[0].switch()
        time.sleep(SETTLE_S)
        assert soft
        return [*percents, *_measure(testbed, card, [hard], 5)]


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    percent: int
    kernels: str
    neighbour: str

    def programs(self, *, limited: bool = True) -> list[Program]:
        """Return the programs; the first is measured."""
        own, percent = KERNELS[self.kernels], self.percent if limited else 100
        first = Program(own, percent)
        others = {
            "alone": [],
            "an equal": [first],
            "an unlimited one": [Program(own)],
            "10 times longer kernels": [Program(SLOWER[own], percent)],
        }
        return [first, *others[self.neighbour]]


@dataclass(frozen=True)
class Result:
    """The measured percentage of a case, and the expected one."""

    case: Case
    got: float
    wanted: float

    @property
    def error(self) -> float:
        """The difference in percentage points."""
        return abs(self.got - self.wanted)


def in_parallel(cards: int, jobs: Sequence[Callable[[int], Any]]) -> list[Any]:
    """Run each job on a free card, and return the results in order."""
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


def table(testbed: Testbed, cases: Sequence[Case], seconds: float, cards: int) -> list[Result]:
    """Measure each case. The expected value is its limit, or less if an unlimited program gets less."""
    places = sorted({(case.kernels, case.neighbour) for case in cases})

    def unlimited(place: tuple[str, str]) -> Callable[[int], Any]:
        programs = Case(100, *place).programs(limited=False)
        return lambda card: shares(testbed, card, programs, min(seconds, 5))[0]

    def limited(case: Case) -> Callable[[int], Any]:
        return lambda card: shares(testbed, card, case.programs(), seconds)[0]

    most = dict(zip(places, in_parallel(cards, [unlimited(p) for p in places]), strict=True))
    got = in_parallel(cards, [limited(case) for case in cases])
    return [
        Result(case, g, min(case.percent, most[case.kernels, case.neighbour]))
        for case, g in zip(cases, got, strict=True)
    ]


COMBINATIONS: tuple[tuple[str, tuple[Program, ...], tuple[float, ...]], ...] = (
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


def measure_combinations(testbed: Testbed, seconds: float, cards: int) -> list[Result]:
    """Measure programs of all modes beside each other, and print the table."""

    def measured(programs: Sequence[Program]) -> Callable[[int], Any]:
        return lambda card: shares(testbed, card, programs, seconds)

    got = in_parallel(cards, [measured(programs) for _, programs, _ in COMBINATIONS])
    print("\n| programs | wanted % | got % |\n|---|---|---|")
    results = []
    for (description, _, wanted), percents in zip(COMBINATIONS, got, strict=True):
        print(f"| {description} | {_numbers(wanted)} | {_numbers(percents)} |")
        results += [
            Result(Case(0, description, ""), g, w)
            for g, w in zip(percents, wanted, strict=True)
            if w < 100
        ]
    return results


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def soft(testbed: Testbed, seconds: float, cards: int) -> bool:
    """Print what a soft program gets alone and leaves to others; return whether that meets the targets."""

    def alone(program: Program) -> Callable[[int], Any]:
        return lambda card: shares(testbed, card, [program], seconds)[0]

    def woken(kernels: str) -> Callable[[int], Any]:
        return lambda card: waking(testbed, card, kernels)

    free = in_parallel(cards, [alone(Program(k)) for k in KERNELS.values()])
    held = in_parallel(cards, [alone(Program(k, 30, "soft")) for k in KERNELS.values()])
    print("\n| kernels | unlimited, alone % | soft 30 %, alone | of it |\n|---|---|---|---|")
    good = True
    for name, unlimited, limited in zip(KERNELS, free, held, strict=True):
        good &= limited / unlimited >= 0.97
        print(f"| {name} | {unlimited:.2f} | {limited:.2f} | {limited / unlimited:.1%} |")
    print(
        "\nA program with 50 % pauses and resumes beside a soft one of 30 %. Its percentage in the half "
        "second that begins 200 ms after it resumes:\n\n"
        "| kernels | each time % | in the long run |\n|---|---|---|"
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
    """Print the tables; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)))
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--beside", default=",".join(NEIGHBOURS))
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument(
        "--unmeasured", action="store_true", help="run without the agent's measurements"
    )
    parser.add_argument("--only-table", action="store_true", help="skip the other tables")
    options = parser.parse_args()
    missed = False
    with (
        tempfile.TemporaryDirectory() as temporary,
        Testbed(Path(temporary), options.at_once, not options.unmeasured).running() as testbed,
    ):
        cases = [
            Case(int(percent), kernels, neighbour)
            for neighbour in options.beside.split(",")
            for kernels in options.kernels.split(",")
            for percent in options.limits.split(",")
        ]
        results = table(testbed, cases, options.seconds, options.at_once)
        by = {result.case: result for result in results}
        limits = [int(percent) for percent in options.limits.split(",")]
        print("| beside | kernels | " + " | ".join(f"{p} %" for p in limits) + " |")
        print("|---|---|" + "---|" * len(limits))
        for neighbour in options.beside.split(","):
            for kernels in options.kernels.split(","):
                cells = []
                for percent in limits:
                    result = by[Case(percent, kernels, neighbour)]
                    short = result.wanted < percent - 0.05
                    cells.append(
                        f"{result.got:.2f}" + (f" of {result.wanted:.2f}" if short else "")
                    )
                print(f"| {neighbour} | {kernels} | {' | '.join(cells)} |")
        errors = [result.error for result in results]
        print(f"\nMean error {statistics.mean(errors):.2f} points, worst {max(errors):.2f}.")
        missed |= statistics.mean(errors) > 1 or max(errors) > 3
        if not options.only_table:
            beside_each_other = [
                result.error
                for result in measure_combinations(testbed, options.seconds, options.at_once)
            ]
            missed |= max(beside_each_other) > 2
            missed |= not soft(testbed, options.seconds, options.at_once)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
