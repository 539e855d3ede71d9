"""Replay the openb trace with a workload that one tenant has distorted by tiny pods.

``python bench/core/tenants.py FOLDER [--nodes N …] [--seeds N …] [--times N]`` draws nodes of the trace, has
the learner see the trace's pods in namespaces of their own, and then N times as many tiny pods of another
namespace. A day's pods then arrive on the empty nodes. Prints the part of the cards that is allocated when
100 % have been requested, by binpack and by `bid-price` with and without these pods; exits 1 if `bid-price`
is below binpack in the mean of a row.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean

from fenka.core.inventory import Node
from fenka.core.policies.candidates import FULL
from fenka.core.policies.workload import LearnedWorkload, Workload
from fenka.core.request import Memory, Request
from fenka.simulation.replay import replay
from fenka.simulation.trace import Trace, inflated, read_trace

NAMESPACES = 20
LOAD = 100

ATTACKS: dict[str, tuple[int, ...]] = {
    "none": (),
    "1/1000 of a card": (1,),
    "1/20 of a card": (50,),
    "64 sizes to 113/1000": tuple(range(50, 114)),
    "64 sizes to 188/1000": tuple(range(125, 189)),
    "64 sizes to 313/1000": tuple(range(250, 314)),
}
"""Thousandths of a card that the tiny pods request, by name."""


def learned(trace: Trace, sizes: tuple[int, ...], times: int, random: Random) -> Workload:
    """Return what the scheduler expects after the trace's pods and the tiny ones."""
    seen = LearnedWorkload()
    for number, pod in enumerate(random.sample(trace.pods, len(trace.pods))):
        if pod.parts:
            seen.observe([pod.request], f"tenant-{number % NAMESPACES}", pod.parts / FULL)
    count = times * sum(pod.parts > 0 for pod in trace.pods) if sizes else 0
    for number in range(count):
        size = sizes[number % len(sizes)]
        seen.observe([_request(size)], "attacker", size / FULL)
    return seen.typical()


def allocated(trace: Trace, policy: str, expected: Workload | None, seed: int) -> float:
    """Return the percentage of the cards that is allocated when LOAD percent have been requested.

    expected: the workload that the policy expects; None for the trace's own.
    """
    arrivals = inflated(trace, LOAD / 100, Random(seed))
    allocation = replay(trace, trace.nodes, arrivals, policy, expected=expected).allocation
    return allocation[max(allocation)]


def main() -> int:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--times", type=int, default=6)
    options = parser.parse_args()
    whole = read_trace(
        options.folder / "openb_node_list_gpu_node.csv",
        options.folder / "openb_pod_list_default.csv",
    )
    failed = False
    print("| nodes | tiny pods | binpack | bid-price | of expected requests tiny |")
    print("|---|---|---|---|---|")
    for count in options.nodes:
        traces = {
            seed: replace(whole, nodes=tuple(_drawn(whole, count, seed))) for seed in options.seeds
        }
        base = mean(allocated(trace, "binpack", (), seed) for seed, trace in traces.items())
        for name, sizes in ATTACKS.items():
            expected = {
                seed: learned(trace, sizes, options.times, Random(seed))
                for seed, trace in traces.items()
            }
            got = mean(
                allocated(trace, "bid-price", expected[seed], seed)
                for seed, trace in traces.items()
            )
            tiny = mean(_tiny(workload, sizes) for workload in expected.values())
            failed |= got < base
            print(f"| {count} | {name} | {base:.2f} | {got:.2f} | {tiny:.1%} |", flush=True)
    return int(failed)


def _drawn(trace: Trace, count: int, seed: int) -> list[Node]:
    nodes = [node for node in trace.nodes if node.cards]
    return sorted(Random(seed).sample(nodes, count), key=lambda node: node.name)


def _tiny(workload: Workload, sizes: tuple[int, ...]) -> float:
    total = sum(row.weight for row in workload)
    tiny = (row.weight for row in workload if row.request in {_request(size) for size in sizes})
    return sum(tiny) / total


def _request(size: int) -> Request:
    return Request(Memory(size), cards=1, cpu_milli=1)


if __name__ == "__main__":
    sys.exit(main())
