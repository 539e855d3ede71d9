"""Compare binpack and ``bid-price`` on one machine that serves slices of the openb trace.

``python bench/core/workstation.py FOLDER [--seeds N]`` draws pods of the trace that request no more cards
than the machine has; processors are not counted. They arrive on an empty machine until they request all its
cards. Prints the mean part of the cards that is then allocated by binpack and by `bid-price`, which knows the
trace's workload, and in how many of the runs `bid-price` has allocated more or less.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

from fenka.simulation.trace import Trace, read_trace

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.core.tenants import allocated

CARDS = (1, 2, 4, 8)


def machine(whole: Trace, cards: int) -> Trace:
    """Return a machine of the trace with this number of cards, and the pods that fit it."""
    node = next(node for node in whole.nodes if len(node.cards) == cards)
    free = replace(node, cpu_milli=None, memory_mib=None)
    pods = tuple(
        replace(
            pod, request=replace(pod.request, cpu_milli=0, host_memory_mib=0, models=frozenset())
        )
        for pod in whole.pods
        if pod.parts > 0 and pod.request.cards <= cards
    )
    return Trace((free,), pods)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    whole = read_trace(
        options.folder / "openb_node_list_gpu_node.csv",
        options.folder / "openb_pod_list_default.csv",
    )
    print("| cards | binpack | bid-price | bid-price allocates more | less |")
    print("|---|---|---|---|---|")
    for cards in CARDS:
        trace = machine(whole, cards)
        runs = [
            tuple(allocated(trace, policy, None, seed) for policy in ("binpack", "bid-price"))
            for seed in range(options.seeds)
        ]
        base, got = (mean(column) for column in zip(*runs, strict=True))
        more = sum(new > old for old, new in runs)
        less = sum(new < old for old, new in runs)
        print(f"| {cards} | {base:.2f} | {got:.2f} | {more} | {less} |", flush=True)


if __name__ == "__main__":
    main()
