"""Measure the time of `fenka --help` against a process that only imports typer."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 15
GOAL = 1.5


def seconds(command: list[str]) -> float:
    """Return the seconds of one run of the command."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> int:
    """Print a Markdown table with the ratio of the medians. Return 1 if the goal is missed."""
    baseline = [sys.executable, "-c", "import typer"]
    fenka = [str(Path(sys.executable).parent / "fenka"), "--help"]
    seconds(baseline), seconds(fenka)
    pairs = [(seconds(baseline), seconds(fenka)) for _ in range(RUNS)]
    typer, shown = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    print("| command | median ms |\n|---|---|")
    print(f"| `python -c 'import typer'` | {typer:.0f} |")
    print(f"| `fenka --help` | {shown:.0f} |")
    print(f"\nratio {shown / typer:.2f}, goal {GOAL} or less")
    return int(shown > GOAL * typer)


sys.exit(main())
