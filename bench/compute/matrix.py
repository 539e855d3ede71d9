"""Measure the error of compute shares over cards of 5 to 170 multiprocessors, limits, kernels and programs.

``python bench/compute/matrix.py [--seconds S] [--limits L,…] [--kernels K,…] [--programs N,…]`` has the
programs of one lease run kernels on a simulated card for each number of multiprocessors, all cards at once.
The reference is the simulator's account of busy nanoseconds. Wanted is the limit, or less if the same
programs get less without a limit. A combination that misses the target is measured twice more, with the
programs' part without a limit, and its median counts: a busy machine keeps programs from launching kernels.
As root the bench raises its priority for the same reason. The defaults take about seven minutes.

The last column is the part of the time in which a program could have run and had no processor, by the
kernel's account. An error up to this is the machine's: no limit can launch kernels for a program that does
not run. Prints a Markdown table, and exits 1 if the rest of an error is larger than 3 percentage points.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.compute.run import KERNELS, Program, Testbed, in_parallel, shares_and_delays

MULTIPROCESSORS = (5, 40, 108, 170)
LIMITS, PROGRAMS = (1, 10, 50, 75, 90, 99), (1, 2, 4)
LENGTHS = ("0.2 ms", "2 ms", "20 ms")
MAX_ERROR, REPEATS = 3.0, 3
PRIORITY = -10


class Cell(NamedTuple):
    """What programs got on one card, in percent, and how long they waited for a processor, too."""

    got: float
    delayed: float


class Row(NamedTuple):
    """A limit, kernels and a number of programs, with the errors on all cards in percentage points."""

    limit: int
    kernels: str
    programs: int
    errors: tuple[float, ...]
    delays: tuple[float, ...]

    @property
    def by_limiter(self) -> tuple[float, ...]:
        """The errors less what the machine explains: programs that wait for a processor get less."""
        return tuple(
            min(error + delay, 0.0) if error < 0 else error
            for error, delay in zip(self.errors, self.delays, strict=True)
        )


def measured(
    testbed: Testbed, limit: int, kernels: str, programs: int, seconds: float
) -> list[Cell]:
    """Return what the programs of one lease get together on each card."""
    program = Program(KERNELS[kernels], limit, processes=programs)

    def on_card(card: int) -> Cell:
        percents, delayed = shares_and_delays(testbed, card, [program], seconds)
        return Cell(percents[0], delayed)

    return in_parallel(testbed.cards, [on_card] * testbed.cards)


def row(
    testbed: Testbed, limit: int, kernels: str, programs: int, seconds: float, most: list[Cell]
) -> Row:
    """Return the errors on each card. most: what the same programs get without a limit."""
    errors, delays = list[list[float]](), list[list[float]]()
    while True:
        cells = measured(testbed, limit, kernels, programs, seconds)
        errors.append(
            [cell.got - min(limit, free.got) for cell, free in zip(cells, most, strict=True)]
        )
        delays.append([cell.delayed for cell in cells])
        found = [tuple(map(median, zip(*runs, strict=True))) for runs in (errors, delays)]
        if len(errors) == REPEATS or (len(errors) == 1 and max(map(abs, found[0])) <= MAX_ERROR):
            return Row(limit, kernels, programs, *found)
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
        print(
            f"| limit | kernels | programs | {' | '.join(map(str, MULTIPROCESSORS))} | worst | waited % |"
        )
        print("|" + "---|" * (5 + cards))
        for kernels, programs in product(options.kernels.split(","), counts):
            most = measured(testbed, 100, kernels, programs, options.seconds)
            for limit in limits:
                found = row(testbed, limit, kernels, programs, options.seconds, most)
                rows.append(found)
                worst, delay = max(map(abs, found.errors)), max(found.delays)
                shown = " | ".join(f"{error:+.2f}" for error in found.errors)
                print(
                    f"| {limit} | {kernels} | {programs} | {shown} | {worst:.2f} | {delay:.2f} |",
                    flush=True,
                )
    worst = max(abs(error) for row in rows for error in row.errors)
    limiter = max(abs(error) for row in rows for error in row.by_limiter)
    delays = [delay for row in rows for delay in row.delays]
    print(
        f"\nthe worst of {len(rows) * cards} is {worst:.2f} points; {limiter:.2f} without what programs "
        f"waited for a processor, at most {MAX_ERROR:g}\nprograms waited {median(delays):.2f} % of the time "
        f"(median), {max(delays):.2f} % at most; load {os.getloadavg()[0]:.1f}"
    )
    return 1 if limiter > MAX_ERROR else 0


if __name__ == "__main__":
    sys.exit(main())
