"""Measure the error of compute shares over cards of 5 to 170 multiprocessors, limits, kernels and programs.

``python bench/compute/matrix.py [--seconds S] [--limits L,…] [--kernels K,…] [--programs N,…]`` has the
programs of one lease run kernels on a simulated card for each number of multiprocessors, all cards at once.
The reference is the simulator's account of busy nanoseconds. Wanted is the limit, or less if the same
programs get less without a limit. A combination that misses the target is measured twice more, with the
programs' part without a limit, and its median counts: a busy machine keeps programs from launching kernels.
As root the bench raises its priority for the same reason. The defaults take about five minutes. Prints a
Markdown table, and exits 1 if an error is larger than 3 percentage points.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.compute.run import KERNELS, Program, Testbed, in_parallel, shares

MULTIPROCESSORS = (5, 40, 108, 170)
LIMITS, PROGRAMS = (1, 10, 50, 90), (1, 2, 4)
LENGTHS = ("0.2 ms", "2 ms", "20 ms")
MAX_ERROR, REPEATS = 3.0, 3
PRIORITY = -10


class Row(NamedTuple):
    """A limit, kernels and a number of programs, with the errors on all cards in percentage points."""

    limit: int
    kernels: str
    programs: int
    errors: tuple[float, ...]


def measured(
    testbed: Testbed, limit: int, kernels: str, programs: int, seconds: float
) -> list[float]:
    """Return the percentages that the programs of one lease get together on each card."""
    program = Program(KERNELS[kernels], limit, processes=programs)
    jobs: list[Callable[[int], float]] = [
        lambda card: shares(testbed, card, [program], seconds)[0]
    ] * testbed.cards
    return in_parallel(testbed.cards, jobs)


def errors(
    testbed: Testbed, limit: int, kernels: str, programs: int, seconds: float, most: list[float]
) -> tuple[float, ...]:
    """Return the error on each card. most: what the same programs get without a limit."""
    runs = list[list[float]]()
    while True:
        got = measured(testbed, limit, kernels, programs, seconds)
        runs.append([percent - min(limit, free) for percent, free in zip(got, most, strict=True)])
        found = tuple(map(median, zip(*runs, strict=True)))
        if len(runs) == REPEATS or (len(runs) == 1 and max(map(abs, found)) <= MAX_ERROR):
            return found
        most = measured(testbed, 100, kernels, programs, seconds)


def main() -> int:
    """Print the table; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)))
    parser.add_argument("--kernels", default=",".join(LENGTHS))
    parser.add_argument("--programs", default=",".join(map(str, PROGRAMS)))
    options = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.nice(PRIORITY)
    limits, counts = (
        [int(text) for text in given.split(",")] for given in (options.limits, options.programs)
    )
    rows = list[Row]()
    cards = len(MULTIPROCESSORS)
    with (
        tempfile.TemporaryDirectory() as temporary,
        Testbed(Path(temporary), cards, multiprocessors=MULTIPROCESSORS).running() as testbed,
    ):
        names = ", ".join(map(str, MULTIPROCESSORS))
        print(f"{os.cpu_count()} CPUs; errors in points on cards of {names} multiprocessors\n")
        print(f"| limit | kernels | programs | {' | '.join(map(str, MULTIPROCESSORS))} | worst |")
        print("|" + "---|" * (4 + cards))
        for kernels, programs in product(options.kernels.split(","), counts):
            most = measured(testbed, 100, kernels, programs, options.seconds)
            for limit in limits:
                found = errors(testbed, limit, kernels, programs, options.seconds, most)
                rows.append(Row(limit, kernels, programs, found))
                worst = max(map(abs, found))
                shown = " | ".join(f"{error:+.2f}" for error in found)
                print(f"| {limit} | {kernels} | {programs} | {shown} | {worst:.2f} |", flush=True)
    worst = max(abs(error) for row in rows for error in row.errors)
    load = os.getloadavg()[0]
    print(
        f"\nthe worst of {len(rows) * cards} is {worst:.2f} points, at most {MAX_ERROR:g}; load {load:.1f}"
    )
    return 1 if worst > MAX_ERROR else 0


if __name__ == "__main__":
    sys.exit(main())
