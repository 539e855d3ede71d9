"""Measure the time from the grant of a slice to the start of the program, against a bare fork and exec.

The slice is granted when the daemon writes the lease's control page. The program has started when its first
statement reads the clock.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 20
GOAL_MS = 50.0
PRINT_DELAY = (
    "import os, time; now = time.time_ns(); "
    "print(now - os.stat('/run/fenka/lease/control').st_mtime_ns)"
)
PRINT_TIME = "import time; print(time.time_ns())"


def granted(environment: dict[str, str]) -> float:
    """Return the milliseconds from the grant to the program's first statement."""
    words = [
        sys.executable,
        "-m",
        "fenka",
        "run",
        "--gpu-mem",
        "1",
        "--",
        sys.executable,
        "-SIc",
        PRINT_DELAY,
    ]
    return int(subprocess.check_output(words, env=environment)) / 1e6


def bare() -> float:
    """Return the milliseconds from fork and exec to the first statement of an unlimited program."""
    began = time.time_ns()
    return (int(subprocess.check_output([sys.executable, "-SIc", PRINT_TIME])) - began) / 1e6


def main() -> int:
    """Alternate both, and print a Markdown table. Return 1 if the goal is missed."""
    root = Path(tempfile.mkdtemp(prefix="fenka-"))
    environment = {**os.environ, "FENKA_RUNTIME": str(root)}
    fenka = [sys.executable, "-m", "fenka", "daemon"]
    subprocess.run([*fenka, "-b", "--simulate", "T4"], env=environment, check=True)
    try:
        granted(environment), bare()
        pairs = [(granted(environment), bare()) for _ in range(RUNS)]
    finally:
        subprocess.run([*fenka, "--stop"], env=environment, check=True)
        shutil.rmtree(root)
    leased, alone = zip(*pairs, strict=True)
    print("| start of a Python that prints the time | median ms | slowest ms |\n|---|---|---|")
    print(f"| bare fork and exec | {statistics.median(alone):.1f} | {max(alone):.1f} |")
    print(f"| from a lease's grant | {statistics.median(leased):.1f} | {max(leased):.1f} |")
    median = statistics.median(leased)
    ratio = median / statistics.median(alone)
    print(f"\nratio {ratio:.1f}, goal {GOAL_MS:.0f} ms or less from the grant")
    return int(median > GOAL_MS)


sys.exit(main())
