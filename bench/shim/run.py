"""Measure what the shim adds to a call, on a driver that does nothing.

``python bench/shim/run.py`` builds the null driver and a program that calls it, and prints two Markdown
tables. The first compares calls without and with the shim, measured alternately. The second measures costs
that grow with other processes: 128 in the lease, 64 that start at once, and programs that never use the GPU.
Exits 1 when a target is missed.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fenka.isolation import account, lease_control
from fenka.isolation.lease_control import HEADER

HERE = Path(__file__).parent
SHIM = HEADER.parent / "libfenka.so"
CARD = "GPU-00000000-0000-0000-0000-000000000001"
TARGETS = {
    "cuMemAlloc+cuMemFree": 60.0,
    "cuLaunchKernel": 6.0,
    "cuLaunchKernel, limited": 25.0,
    "cuLaunchKernel, limited, a stream": 25.0,
    "cuMemGetInfo": 100.0,
    "cuInit": 500_000.0,
}
"""Nanoseconds that the shim may add."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
"""A lease's files are in /run, which is memory, so the benchmark also uses memory."""

PAIR = "cuMemAlloc+cuMemFree"
OTHERS = 128
STARTS = 64
Environment = dict[str, str]


def cuda_include() -> Path:
    """Return the folder of cuda.h in NVIDIA's header wheel."""
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec, "the wheel nvidia-cuda-runtime is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "include"


def build(folder: Path) -> Path:
    """Compile the null driver and the caller into `folder`, and return the caller."""
    flags = ["-O2", "-isystem", str(cuda_include())]
    driver = folder / "libcuda.so.1"
    shared = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        ["gcc", *flags, *shared, "-o", str(driver), str(HERE / "null_driver.c")], check=True
    )
    caller = folder / "calls"
    link = [str(driver), f"-Wl,-rpath,{folder}", "-pthread"]
    subprocess.run(["gcc", *flags, "-o", str(caller), str(HERE / "calls.c"), *link], check=True)
    return caller


def lease(folder: Path, percent: int = 100) -> Path:
    """Create a lease of 4 GiB of the null driver's card and of a percentage of its time."""
    (folder / "lease").mkdir(parents=True)
    (folder / "account").mkdir()
    lease_control.write(
        folder / "lease" / "control",
        lease_control.Control("bench", (lease_control.Limit(CARD, 4 << 30, 0, percent),)),
    )
    account.create(folder / "account" / "slots")
    return folder


def start(
    caller: Path, mode: str, environment: Environment, until: int = subprocess.PIPE
) -> "subprocess.Popen[str]":
    """Start the caller in the background, and wait for its first line.

    Args:
        caller: the program.
        mode: its argument.
        environment: added to this process's environment.
        until: its standard input, whose end ends it.
    """
    process = subprocess.Popen(
        [str(caller), mode],
        env={**os.environ, "FENKA_NULL_CARDS": CARD, **environment},
        stdin=until,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() in ("held\n", "ready\n")
    return process


def run(caller: Path, environment: Environment) -> dict[str, float]:
    """Run the caller once, and return the nanoseconds by name of call."""
    out = subprocess.run(
        [str(caller)],
        env={**os.environ, "FENKA_NULL_CARDS": CARD, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    # If the preload fails, the dynamic linker only prints a warning: the figures would be the bare driver's.
    assert not out.stderr, out.stderr
    return {name: float(ns) for name, ns in (line.split() for line in out.stdout.splitlines())}


def medians(
    runs: int, measure: Callable[[bool], dict[str, float]]
) -> dict[str, tuple[float, float]]:
    """Alternate two kinds of run, and return both medians of each figure by name."""
    figures: dict[str, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for _ in range(runs):
        for kind in (False, True):
            for name, ns in measure(kind).items():
                figures[name][kind].append(ns)
    return {
        name: (statistics.median(kinds[False]), statistics.median(kinds[True]))
        for name, kinds in figures.items()
    }


@contextmanager
def other_processes(caller: Path, environment: Environment) -> Iterator[None]:
    """Run 128 other processes that hold memory in the lease."""
    others = [start(caller, "hold", environment) for _ in range(OTHERS)]
    usage = account.read(Path(environment["FENKA_LEASE"]) / "account" / "slots")
    assert usage.memory_bytes[0] == OTHERS << 20
    yield
    for other in others:
        other.communicate()


def attach(caller: Path, environment: Environment) -> float:
    """Start 64 processes at once, and return the milliseconds of the slowest first call."""
    go, end = os.pipe2(os.O_CLOEXEC)
    waiting = [start(caller, "attach", environment, go) for _ in range(STARTS)]
    os.close(end)  # releases all of them
    slowest = max(float(process.communicate()[0].split()[1]) for process in waiting) / 1e6
    os.close(go)
    return slowest


def unrelated(environment: Environment, times: int = 100) -> float:
    """Return the minimum run time, in milliseconds, of a program that never uses the GPU."""
    least = float("inf")
    for _ in range(times):
        began = time.monotonic()
        os.waitpid(os.posix_spawn("/bin/true", ["true"], environment), 0)
        least = min(least, time.monotonic() - began)
    return least * 1e3


Row = tuple[str, float, float, float, str]
"""Name, figure without, figure with, upper limit of the second, unit."""


def calls(caller: Path, shim: Environment, folder: Path, runs: int) -> list[Row]:
    """Measure the rows of the first table."""
    figures = medians(runs, lambda shimmed: run(caller, shim if shimmed else {}))
    # Kernels take no time, so this is the cost of a launch, including the measurements of some of them.
    slowed = {**shim, "FENKA_LEASE": str(lease(folder / "limited", 50))}
    limited = medians(runs, lambda shimmed: run(caller, slowed if shimmed else {}))
    launches = {"cuLaunchKernel": "limited", "cuLaunchKernel,stream": "limited, a stream"}
    figures |= {f"cuLaunchKernel, {how}": limited[name] for name, how in launches.items()}
    return [
        (name, bare, loaded, bare + TARGETS.get(name, float("inf")), "ns")
        for name, (bare, loaded) in figures.items()
    ]


def with_other_processes(caller: Path, shim: Environment, folder: Path, runs: int) -> list[Row]:
    """Measure the rows of the second table."""
    crowded = {**shim, "FENKA_LEASE": str(lease(folder / "crowded"))}
    with other_processes(caller, crowded):
        figures = medians(runs, lambda many: run(caller, crowded if many else shim))
    alone, among = figures[PAIR]
    rows: list[Row] = [(f"{PAIR}, {OTHERS} others", alone, among, alone + 20, "ns")]
    alone, among = figures["cuMemGetInfo"]
    rows.append((f"cuMemGetInfo, {OTHERS} others", alone, among, 100, "ns"))
    single, double = (
        figures["cuLaunchKernel,one-thread"][0],
        figures["cuLaunchKernel,two-threads"][0],
    )
    rows.append(("cuLaunchKernel, slower of two threads", single, double, single * 1.25, "ns"))
    slowed = {**shim, "FENKA_LEASE": str(lease(folder / "threads", 50))}
    limited = medians(runs, lambda _: run(caller, slowed))
    single = limited["cuLaunchKernel,one-thread"][0]
    double = limited["cuLaunchKernel,two-threads"][0]
    rows.append(("the same, limited", single, double, single * 1.25, "ns"))
    starts = medians(runs, lambda shimmed: {"": attach(caller, shim if shimmed else {})})
    rows.append((f"{STARTS} starts, slowest cuInit", *starts[""], starts[""][0] + 2, "ms"))
    preload = {"LD_PRELOAD": shim["LD_PRELOAD"]}
    other = medians(runs, lambda shimmed: {"": unrelated(preload if shimmed else {})})
    rows.append(("an unrelated program", *other[""], other[""][0] + 0.3, "ms"))
    return rows


def table(title: str, rows: list[Row]) -> int:
    """Print the rows, and return how many miss their target."""
    print(f"\n| {title} | bare | with shim | added | target | met |\n|---|---|---|---|---|---|")
    for name, before, after, most, unit in rows:
        digits = 1 if unit == "ns" else 3
        cells = [f"{x:,.{digits}f} {unit}" for x in (before, after, after - before)]
        goal = ["", ""] if most == float("inf") else [f"≤ {most:,.{digits}f} {unit}"]
        goal += ["yes" if after <= most else "no"] if len(goal) == 1 else []
        print(f"| {' | '.join([name, *cells, *goal])} |")
    return sum(after > most for _, _, after, most, _ in rows)


def main() -> int:
    """Print the tables; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="runs of each kind, alternated")
    parser.add_argument("--shim", type=Path, default=SHIM)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        folder = Path(temporary)
        caller = build(folder)
        shim = {"LD_PRELOAD": str(arguments.shim), "FENKA_LEASE": str(lease(folder / "alone"))}
        missed = table("call", calls(caller, shim, folder, arguments.runs))
        rows = with_other_processes(caller, shim, folder, arguments.runs)
        missed += table(
            "with other processes; bare = alone in the lease, or one thread of two", rows
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
