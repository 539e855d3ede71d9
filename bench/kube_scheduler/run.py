"""Measure pods per second through kube-scheduler, with and without fenka, and bindings per second.

``nice python bench/kube_scheduler/run.py`` starts a control plane of Kubernetes' own programs in namespaces
(root), with nodes simulated by kwok. Baselines, by turns with fenka in the same run: kube-scheduler alone,
which counts the same resource of whole nodes, and a plain client that posts bindings to the same API server.
Prints Markdown tables of medians; exits 1 when a target is missed. Without the programs of ``make e2e`` it
only says so.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kube_scheduler import bindings, throughput, workload
from bench.kube_scheduler.control_plane import ControlPlane, Measurement
from e2e import programs
from e2e.cluster import ClusterError

SCHEDULED_TARGET, BOUND_TARGET = 0.85, 0.8


def log(text: str) -> None:
    """Report progress, apart from the tables."""
    print(f"{time.strftime('%X')}  {text}", file=sys.stderr, flush=True)


def row(name: str, measured: Sequence[Measurement]) -> tuple[float, float]:
    """Print the medians of one variant. Return its rate, and the CPU milliseconds for one pod."""
    rates = sorted(each.rate for each in measured)
    programs = {program for each in measured for program in each.cpu_s}
    cpu_ms = {
        program: statistics.median(each.cpu_ms.get(program, 0.0) for each in measured)
        for program in programs
    }
    rate, total = statistics.median(rates), sum(cpu_ms.values())
    largest = sorted(cpu_ms.items(), key=lambda item: -item[1])
    print(
        f"| {name} | {rate:.0f} pods/s ({rates[0]:.0f} to {rates[-1]:.0f})"
        f"{measured[len(measured) // 2].latencies} "
        f"| {total:.1f}: {', '.join(f'{program} {ms:.1f}' for program, ms in largest if ms >= 0.1)} "
        f"| {statistics.median(each.others for each in measured):.1f} |",
        flush=True,
    )
    return rate, total


def compare(
    what: str, rounds: int, target: float, variants: Mapping[str, Callable[[str], Measurement]]
) -> bool:
    """Measure the variants by turns, and print them.

    Args:
        what: is measured.
        rounds: how often.
        target: the share of the first variant's rate that fenka should reach.
        variants: measure once, with pods whose names begin with the argument. The last one is fenka.

    Returns:
        Whether the target is met.
    """
    results: dict[str, list[Measurement]] = {name: [] for name in variants}
    for number in range(rounds):
        for position, (name, measure) in enumerate(variants.items()):
            results[name].append(measure(f"{what}-{number}-{position}"))
            log(f"{what}, {name}: {results[name][-1]}")
    rows = [row(f"{what}, {name}", measured) for name, measured in results.items()]
    (baseline, least_ms), *_, (rate, ms) = rows
    share = f"{rate / baseline:.0%}; wanted {target:.0%}"
    # With every core busy, rates are inversely proportional to the CPU time, whatever else runs.
    print(f"| {what}, fenka's share | {share} | {least_ms / ms:.0%} by CPU time | |", flush=True)
    return rate >= target * baseline


def measure(nodes: int, options: argparse.Namespace) -> bool:
    """Measure with this number of nodes. Return whether the targets are met."""
    shape = f"{nodes} nodes of {workload.CARDS} cards, {options.pods} pods, {options.rounds} rounds"
    met = []
    with ControlPlane() as plane:
        once = partial(throughput.measure, plane, pods=options.pods, limit_s=options.limit)
        compared = (each for each in throughput.Variant if each.name.lower() in options.variants)
        schedule = {each.value: partial(once, variant=each) for each in compared}
        amounts = {"nodes": nodes, "pods": options.pods, "connections": options.connections}
        post = partial(bindings.measure, plane, **amounts)
        bind: dict[str, Callable[[str], Measurement]] = {"plain client": post}
        programs = {} if options.other is None else {str(options.other): options.other}
        for name, program in {**programs, "fenka": None}.items():
            schedule[name] = partial(once, variant=throughput.Variant.FENKA, program=program)
            bind[name] = partial(post, extender=partial(plane.extender, program=program))
        plane.enter_network()
        plane.create_nodes(nodes)
        plane.measure_idle()
        log(f"{nodes} nodes are ready; CPUs used without pods: {plane.idle_cpus}")
        print(f"\n{shape}\n\n| what | rate | CPU ms for each pod | CPUs used by others |")
        print("|---|---|---|---|", flush=True)
        if "schedule" in options.only:
            met.append(compare("schedule", options.rounds, SCHEDULED_TARGET, schedule))
        if "bind" in options.only:
            plane.control_plane.kill("kwok")
            met.append(compare("bind", options.rounds, BOUND_TARGET, bind))
    return all(met)


def main() -> int:
    """Measure and print; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds for scheduling the pods")
    parser.add_argument("--connections", type=int, default=32, help="concurrent bindings")
    parser.add_argument(
        "--only", nargs="+", choices=["schedule", "bind"], default=["schedule", "bind"]
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(names := [each.name.lower() for each in throughput.Variant][:-1]),
        default=names,
        help="what is measured beside fenka; the first is the baseline",
    )
    parser.add_argument("--other", type=Path, help="another fenka program, measured by turns")
    options = parser.parse_args()
    try:
        ControlPlane.require()
    except ClusterError as error:
        print(f"through kube-scheduler: not measured, since {error}")
        return 0
    programs.build(programs.KWOK)
    print(f"{os.cpu_count()} CPUs, Kubernetes and kwok as pinned in e2e")
    met = [measure(nodes, options) for nodes in options.nodes]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
