"""Compare `fenka simulate` with published results on the openb trace.

``python bench/core/published.py FOLDER [--policy P …] [--workload W …]`` replays each order of arrival that
the folder has, and prints a table. FOLDER has the trace's lists, `WORKLOAD.SEED.arrivals.csv.gz`,
`WORKLOAD.SEED.nodeperm.csv` and `expected_mean_of_10_seeds.csv`. A mean agrees with the published one within
two standard errors of a mean of as many seeds, or within 0.1 points. The exit status is 1 if one does not.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

LOADS = (80, 90, 95, 100, 110, 130)
LEAST_TOLERANCE = 0.1
PUBLISHED_NAMES = {"fgd": "FGD", "bestfit": "BestFit"}


class Published(NamedTuple):
    """A published mean, and the standard deviation of its seeds."""

    mean: float
    deviation: float

    def tolerance(self, seeds: int) -> float:
        """Return how far the mean of so many seeds may be away."""
        return max(LEAST_TOLERANCE, 2 * self.deviation / math.sqrt(seeds))


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", nargs="+", default=list(PUBLISHED_NAMES))
    parser.add_argument("--workload", nargs="+", help="default: all that the folder has")
    return parser.parse_args()


def published(folder: Path) -> dict[tuple[str, str], dict[int, Published]]:
    """Return the published results by workload, policy and load."""
    with (folder / "expected_mean_of_10_seeds.csv").open() as lines:
        return {
            (row["workload"], row["policy"]): {
                load: Published(float(row[f"alloc@{load}"]), float(row[f"sd@{load}"]))
                for load in LOADS
            }
            for row in csv.DictReader(lines)
        }


def simulated(folder: Path, workload: str, seed: str, policy: str) -> dict[int, float]:
    """Return the allocation by load of one order of arrival."""
    order = folder / f"{workload}.{seed}"
    command = (
        *(sys.executable, "-m", "fenka", "simulate", "--policy", policy, "-o", "json"),
        *("--nodes", folder / "openb_node_list_gpu_node.csv"),
        *("--pods", folder / f"openb_pod_list_{workload}.csv"),
        *("--arrivals", f"{order}.arrivals.csv.gz", "--node-rank", f"{order}.nodeperm.csv"),
    )
    printed = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return dict(zip(printed["load"], printed["allocation"], strict=True))


def orders(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the workloads, with the seeds of their orders of arrival."""
    names = sorted(file.name.split(".")[:2] for file in folder.glob("*.arrivals.csv.gz"))
    for workload in sorted({workload for workload, _ in names}):
        yield workload, [seed for name, seed in names if name == workload]


def main() -> int:
    """Replay, compare and print; return 1 if a mean is too far from the published one."""
    options, failed = arguments(), False
    expected = published(options.folder)
    print("| workload | policy | seeds |", *(f"@{load} |" for load in LOADS), "agrees |")
    print("|---|---|---|" + "---|" * (len(LOADS) + 1))
    for workload, seeds in orders(options.folder):
        for policy in options.policy:
            if options.workload and workload not in options.workload:
                continue
            runs = [simulated(options.folder, workload, seed, policy) for seed in seeds]
            cells, far = [], []
            for load in LOADS:
                known = expected[workload, PUBLISHED_NAMES[policy]][load]
                found = mean(run[load] for run in runs)
                cells.append(f"{found:.2f} ({found - known.mean:+.2f}) |")
                if abs(found - known.mean) > known.tolerance(len(seeds)):
                    far.append(f"not @{load}: at most ±{known.tolerance(len(seeds)):.2f}")
            failed |= bool(far)
            row = ", ".join(far) or "yes"
            print(f"| {workload} | {policy} | {len(seeds)} |", *cells, f"{row} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
