"""`fenka simulate`: a trace of pods on paper, by any policy; or the pending pods of a cluster."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Annotated, Any, NamedTuple

import typer

from fenka.cli import tables
from fenka.cli.admin import what_if
from fenka.cli.admin.what_if import WhatIfOptions
from fenka.cli.common_options import ClusterTarget, OutputOption
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.core.policies.scores import SCORES
from fenka.simulation.replay import LOADS, Outcome, replay
from fenka.simulation.trace import (
    Trace,
    inflated,
    ranked,
    read_arrivals,
    read_ranks,
    read_trace,
)

POLICY = "bid-price"
"""Of a trace, unless another one is given."""

MAX_LOOK_AHEAD, MAX_RUNS, MAX_LOAD = 16, 1000, 1000


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """A trace, and how it is replayed."""

    nodes: Annotated[
        Path | None,
        typer.Option(
            "--nodes", metavar="CSV", help="nodes of a trace: sn,cpu_milli,memory_mib,gpu,model"
        ),
    ] = None
    pods: Annotated[
        Path | None,
        typer.Option(
            "--pods",
            metavar="CSV",
            help="pods of a trace: name,cpu_milli,memory_mib,num_gpu,gpu_milli, and gpu_spec (A|B)",
        ),
    ] = None
    arrivals: Annotated[
        Path | None,
        typer.Option("--arrivals", metavar="CSV", help="replay the pods in this order of names"),
    ] = None
    node_rank: Annotated[
        Path | None,
        typer.Option(
            "--node-rank",
            metavar="CSV",
            help="which of equal nodes is first: sorted_node_index,prefix; default: at random",
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help=f"{', '.join(SCORES)}; default: {POLICY} for a trace, the best plan for a cluster",
        ),
    ] = None
    look_ahead: Annotated[
        int,
        typer.Option(
            "--look-ahead",
            metavar="K",
            help="wait for K pods, then place these together; 1: place each pod as it arrives",
        ),
    ] = 1
    seed: Annotated[int, typer.Option("--seed", help="of the first run")] = 42
    runs: Annotated[int, typer.Option("--runs", metavar="N", help="repeat with further seeds")] = 1
    load: Annotated[
        int,
        typer.Option("--load", metavar="PERCENT", help="pods arrive until they request this"),
    ] = 130
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", help="runs at the same time")
    ] = 1

    def check(self) -> None:
        """Raises UserError for options that make no sense."""
        for name, number, least, most in (
            ("--look-ahead", self.look_ahead, 1, MAX_LOOK_AHEAD),
            ("--runs", self.runs, 1, MAX_RUNS),
            ("--load", self.load, 1, MAX_LOAD),
            ("--processes", self.processes, 1, MAX_RUNS),
        ):
            if not least <= number <= most:
                raise UserError(f"{name} must be {least} to {most}, not {number}", INVALID_INPUT)
        if self.nodes is None or self.pods is None:
            raise UserError(
                "a trace needs both --nodes and --pods: add the other one", INVALID_INPUT
            )


class _Run(NamedTuple):
    """One run, which another process may do."""

    trace: Trace
    options: TraceOptions
    seed: int

    def __call__(self, bar: bool = False) -> tuple[Outcome, float]:
        """Return the outcome, and the seconds that it took for each pod."""
        trace, options, random = self.trace, self.options, Random(self.seed)
        arrivals = (
            read_arrivals(options.arrivals, trace)
            if options.arrivals
            else inflated(trace, options.load / 100, random)
        )
        if options.node_rank:
            ranks = read_ranks(options.node_rank, trace)
        else:
            ranks = random.sample(range(len(trace.nodes)), len(trace.nodes))
        began = time.perf_counter()
        with _progress(len(arrivals), bar) as progress:
            outcome = replay(
                *(
                    trace,
                    ranked(trace, ranks),
                    arrivals,
                    options.policy or POLICY,
                    options.look_ahead,
                ),
                *(self.seed, progress),
            )
        return outcome, (time.perf_counter() - began) / max(len(arrivals), 1)


def simulate(
    cluster_target: ClusterTarget,
    trace: TraceOptions,
    cluster: WhatIfOptions,
    output: OutputOption = "table",
) -> None:
    """Replay a trace, or print which pods of a cluster would start. Raises FenkaError, UserError."""
    if trace.policy is not None and trace.policy not in SCORES:
        raise UserError(
            f"--policy must be one of {', '.join(SCORES)}, not {trace.policy}", INVALID_INPUT
        )
    of_file = cluster.snapshot or cluster.case
    if trace.nodes is None and trace.pods is None:
        if not (cluster.add_nodes or of_file):
            raise UserError(
                "say what to simulate: --nodes and --pods of a trace, --snapshot FILE of a cluster, or "
                "--add-nodes NAME=N",
                INVALID_INPUT,
            )
        if cluster.snapshot and cluster.case:
            raise UserError("--snapshot and --case are two clusters: choose one", INVALID_INPUT)
        if trace.policy is not None and not of_file:
            raise UserError(
                "--policy needs the whole cluster: write it with `fenka snapshot > FILE`, then give "
                "--snapshot FILE",
                INVALID_INPUT,
            )
        what_if.simulate(cluster_target, cluster, trace.policy, output)
        return
    if cluster.add_nodes or of_file:
        raise UserError(
            "--add-nodes, --snapshot and --case are about a cluster, --nodes and --pods about a trace: "
            "choose one",
            INVALID_INPUT,
        )
    trace.check()
    assert trace.nodes is not None
    assert trace.pods is not None
    read = read_trace(trace.nodes, trace.pods)
    seeds = [trace.seed + number for number in range(trace.runs)]
    document = _document(trace, seeds, _outcomes([_Run(read, trace, seed) for seed in seeds]))
    if not tables.print_data(document, output):
        tables.print_lines(_screen(document))


def _outcomes(runs: list[_Run]) -> list[tuple[Outcome, float]]:
    processes = min(runs[0].options.processes, len(runs))
    if processes == 1:
        return [run(bar=True) for run in runs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_Run.__call__, runs))


@contextmanager
def _progress(total: int, bar: bool) -> Iterator[Callable[[int], object]]:
    """Show how far a run is, if somebody looks at standard error."""
    if not bar or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pods", total=total)
        yield lambda done: progress.update(task, completed=done)


def _document(
    options: TraceOptions, seeds: list[int], outcomes: list[tuple[Outcome, float]]
) -> dict[str, Any]:
    """Return the outcome as people read it in JSON: means over the runs."""
    found = [outcome for outcome, _ in outcomes]
    loads = [load for load in LOADS if all(load in outcome.allocation for outcome in found)]
    rows = [[outcome.allocation[load] for outcome in found] for load in loads]
    first = [outcome.first_refusal for outcome in found if outcome.first_refusal is not None]
    return {
        "policy": options.policy or POLICY,
        "look_ahead": options.look_ahead,
        "seeds": seeds,
        "load": loads,
        "allocation": [round(mean(row), 3) for row in rows],
        "deviation": [round(stdev(row), 3) if len(row) > 1 else 0.0 for row in rows],
        "refused": sum(outcome.refused for outcome in found),
        "refused_though_fitting": sum(outcome.refused_though_fitting for outcome in found),
        "first_refusal": round(min(first), 2) if first else None,
        "ms_per_pod": round(1000 * mean(seconds for _, seconds in outcomes), 2),
    }


def _screen(document: dict[str, Any]) -> list[str]:
    rows = [["ARRIVED %", "ALLOCATED %", "DEVIATION"]]
    for load, allocated, deviation in zip(
        document["load"], document["allocation"], document["deviation"], strict=True
    ):
        rows.append([str(load), f"{allocated:.2f}", f"{deviation:.2f}"])
    first = document["first_refusal"]
    refusals = f"{document['refused']} pods refused"
    if first is not None:
        refusals += f", the first when {first:.1f} % had arrived"
    runs = len(document["seeds"])
    return [
        *tables.align(rows),
        f"{document['policy']}, {runs} run{'s' * (runs > 1)}: {refusals}; "
        f"{document['ms_per_pod']:.2f} ms for each pod",
    ]
