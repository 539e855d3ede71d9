"""What the shim adds to a call, measured on a driver that does nothing.

``python bench/shim/run.py`` builds the null driver and a program that calls it, runs that program bare
and with the shim in turn, and prints a Markdown table of medians: nanoseconds bare, with the shim, the
difference, the ratio, and whether the difference meets its target. Exits 1 when one does not.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from fenka.isolation import account, control
from fenka.isolation.layout import HEADER

HERE = Path(__file__).parent
SHIM = HEADER.parent / "libfenka.so"
CARD = "GPU-00000000-0000-0000-0000-000000000001"
TARGETS = {"cuMemAlloc+cuMemFree": 60.0, "cuLaunchKernel": 6.0, "cuInit": 500_000.0}
"""Nanoseconds that the shim may add."""


def cuda_include() -> Path:
    """Where NVIDIA's header wheel puts cuda.h."""
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    assert spec, "the wheel nvidia-cuda-runtime-cu12 is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "include"


def build(folder: Path) -> Path:
    """Compiles the null driver and the caller into `folder`; returns the caller."""
    flags = ["-O2", "-isystem", str(cuda_include())]
    driver = folder / "libcuda.so.1"
    shared = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        ["gcc", *flags, *shared, "-o", str(driver), str(HERE / "null_driver.c")], check=True
    )
    caller = folder / "calls"
    link = [str(driver), f"-Wl,-rpath,{folder}"]
    subprocess.run(["gcc", *flags, "-o", str(caller), str(HERE / "calls.c"), *link], check=True)
    return caller


def lease(folder: Path) -> Path:
    """A lease of 4 GiB of the null driver's card."""
    (folder / "lease").mkdir()
    (folder / "account").mkdir()
    control.write(
        folder / "lease" / "control", control.Control("bench", (control.Limit(CARD, 4 << 30),))
    )
    account.create(folder / "account" / "slots")
    return folder


def run(caller: Path, environment: dict[str, str]) -> dict[str, float]:
    """One run of the caller: nanoseconds by name of call."""
    out = subprocess.run(
        [str(caller)],
        env={**os.environ, "FENKA_NULL_CARDS": CARD, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    # The dynamic linker only mumbles when it cannot preload, and the figures would be of the bare driver.
    assert not out.stderr, out.stderr
    return {name: float(ns) for name, ns in (line.split() for line in out.stdout.splitlines())}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each kind, taken in turn")
    parser.add_argument("--shim", type=Path, default=SHIM)
    arguments = parser.parse_args()
    figures: dict[str, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        caller = build(folder)
        shim = {"LD_PRELOAD": str(arguments.shim), "FENKA_LEASE": str(lease(folder))}
        for _ in range(arguments.runs):
            for shimmed in (False, True):
                for name, ns in run(caller, shim if shimmed else {}).items():
                    figures[name][shimmed].append(ns)
    print("| call | bare ns | with shim ns | added ns | ratio | target ns | met |")
    print("|---|---|---|---|---|---|---|")
    missed = 0
    for name, kinds in figures.items():
        bare, loaded = statistics.median(kinds[False]), statistics.median(kinds[True])
        added, target = loaded - bare, TARGETS.get(name)
        row = [name, f"{bare:.1f}", f"{loaded:.1f}", f"{added:.1f}", f"{loaded / bare:.1f}", "", ""]
        if target is not None:
            row[-2:] = f"≤ {target:.0f}", "yes" if added <= target else "no"
            missed += added > target
        print(f"| {' | '.join(row)} |")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
