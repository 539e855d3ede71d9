"""Measure the error of compute shares over cards of 5 to 170 multiprocessors, limits, kernels and programs.

``python bench/compute/matrix.py [--seconds S] [--limits L,…] [--kernels K,…] [--programs N,…]`` has the
programs of one lease run kernels on a simulated card for each number of multiprocessors, all cards at once.
The reference is the simulator's account of busy nanoseconds. Wanted is the limit, or less if the same
programs get less without a limit. Prints a Markdown table, and exits 1 if an error is larger than 3
percentage points.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.compute.run import KERNELS, Program, Testbed, in_parallel, shares

MULTIPROCESSORS = (5, 20, 40, 80, 108, 132, 170)
LIMITS, PROGRAMS = (1, 5, 10, 25, 50, 75, 90, 100), (1, 2, 4)
MAX_ERROR = 3.0


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


def main() -> int:
    """Print the table; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)))
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--programs", default=",".join(map(str, PROGRAMS)))
    options = parser.parse_args()
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
                got = measured(testbed, limit, kernels, programs, options.seconds)
                errors = [
                    percent - min(limit, free) for percent, free in zip(got, most, strict=True)
                ]
                rows.append(Row(limit, kernels, programs, tuple(errors)))
                worst = max(map(abs, errors))
                shown = " | ".join(f"{error:+.2f}" for error in errors)
                print(f"| {limit} | {kernels} | {programs} | {shown} | {worst:.2f} |", flush=True)
    worst = max(abs(error) for row in rows for error in row.errors)
    load = os.getloadavg()[0]
    print(
        f"\nthe worst of {len(rows) * cards} is {worst:.2f} points, at most {MAX_ERROR:g}; load {load:.1f}"
    )
    return 1 if worst > MAX_ERROR else 0


if __name__ == "__main__":
    sys.exit(main())
