"""`fenka simulate`: a trace of pods on paper, by any policy; or the pending pods of a cluster."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Annotated, Any, NamedTuple

import typer

from fenka.cli import tables
from fenka.cli.admin import pending_trial
from fenka.cli.admin.pending_trial import WhatIfOptions
from fenka.cli.common_options import ClusterTarget, OutputOption
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.core.policies.scores import SCORES
from fenka.simulation.plots import SUFFIXES, Panel, check_writable, save
from fenka.simulation.replay import BY_POLICY, LOADS, WITHOUT_CARDS, Outcome, replay
from fenka.simulation.timed import TimedOptions, TimedOutcome, Waits, replay_times
from fenka.simulation.trace import (
    Trace,
    TracePod,
    inflated,
    ranked,
    read_arrivals,
    read_ranks,
    read_trace,
)

POLICY = "bid-price"
"""Of a trace, unless another one is given."""

MAX_LOOK_AHEAD, MAX_RUNS, MAX_LOAD, MAX_FASTER = 16, 1000, 1000, 1e9


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
            help=f"placement policy: {', '.join(SCORES)}; default: {POLICY} for a trace, the best plan "
            "for a cluster",
        ),
    ] = None
    without_cards: Annotated[
        str,
        typer.Option(
            "--without-cards",
            metavar="HOW",
            help=f"how pods without cards are placed: {', '.join(WITHOUT_CARDS)}",
        ),
    ] = BY_POLICY
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
        int,
        typer.Option("--processes", metavar="N", help="runs at the same time; 0: one on each core"),
    ] = 0
    by_time: Annotated[
        bool,
        typer.Option(
            "--by-time",
            help="pods come, wait and end by creation_time, scheduled_time and deletion_time; pods of one "
            "gang (column gang) start together; columns user and priority order the queue",
        ),
    ] = False
    faster: Annotated[
        float,
        typer.Option(
            "--faster",
            metavar="N",
            help="with --by-time: pods come N times as fast, and run as long",
        ),
    ] = 1.0
    known_times: Annotated[
        bool,
        typer.Option(
            "--known-times",
            help="with --by-time: the queue knows how long pods run, as by time limits",
        ),
    ] = False
    topology_level: Annotated[
        list[str] | None,
        typer.Option(
            "--topology-level",
            metavar="COLUMN",
            help="with --by-time: column of the nodes with zones or racks, the outermost first: gangs are "
            "placed in few of them; the pods' columns required_topology and preferred_topology name one; "
            "repeatable",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="draw the result: FILE.svg or FILE.png"),
    ] = None

    def check(self) -> None:
        """Raises UserError for options that make no sense."""
        for name, number, least, most in (
            ("--look-ahead", self.look_ahead, 1, MAX_LOOK_AHEAD),
            ("--runs", self.runs, 1, MAX_RUNS),
            ("--load", self.load, 1, MAX_LOAD),
            ("--processes", self.processes, 0, MAX_RUNS),
            ("--faster", self.faster, 1e-6, MAX_FASTER),
        ):
            if not least <= number <= most:
                raise UserError(
                    f"{name} must be {least:g} to {most:g}, not {number:g}", INVALID_INPUT
                )
        if self.by_time and (self.arrivals or self.look_ahead > 1):
            raise UserError(
                "--by-time takes the order from the pods' times: leave out --arrivals and --look-ahead",
                INVALID_INPUT,
            )
        if self.by_time and self.without_cards != BY_POLICY:
            raise UserError(
                f"--by-time places pods without cards by the policy: leave out --without-cards "
                f"{self.without_cards}",
                INVALID_INPUT,
            )
        if not self.by_time and (self.faster != 1 or self.known_times or self.topology_level):
            raise UserError(
                "--faster, --known-times and --topology-level are for --by-time: add it",
                INVALID_INPUT,
            )
        if self.plot is not None and self.plot.suffix not in SUFFIXES:
            raise UserError(
                f"--plot writes {' or '.join(SUFFIXES)}, not {self.plot.suffix or self.plot.name}: "
                "name the file so",
                INVALID_INPUT,
            )
        if self.without_cards not in WITHOUT_CARDS:
            raise UserError(
                f"--without-cards must be one of {', '.join(WITHOUT_CARDS)}, not {self.without_cards}",
                INVALID_INPUT,
            )
        if self.nodes is None or self.pods is None:
            raise UserError(
                "a trace needs both --nodes and --pods: add the other one", INVALID_INPUT
            )


Result = tuple[Outcome | TimedOutcome, float]
"""The result of a run, and the seconds that it took for each pod."""


class _Run(NamedTuple):
    """One run, which another process may do."""

    trace: Trace
    options: TraceOptions
    seed: int

    def __call__(self, bar: bool = False) -> Result:
        trace, options, random = self.trace, self.options, Random(self.seed)
        arrivals = trace.pods if options.by_time else self._arrivals(random)
        if options.node_rank:
            ranks = read_ranks(options.node_rank, trace)
        else:
            ranks = random.sample(range(len(trace.nodes)), len(trace.nodes))
        nodes, policy = ranked(trace, ranks), options.policy or POLICY
        began = time.perf_counter()
        outcome: Outcome | TimedOutcome
        with _progress("pods", len(arrivals), bar) as progress:
            if options.by_time:
                how = TimedOptions(
                    policy, options.faster, known_times=options.known_times, seed=self.seed
                )
                outcome = replay_times(trace, nodes, how, progress)
            else:
                outcome = replay(
                    *(trace, nodes, arrivals, policy, options.look_ahead),
                    *(self.seed, options.without_cards, progress),
                )
        return outcome, (time.perf_counter() - began) / max(len(arrivals), 1)

    def _arrivals(self, random: Random) -> Sequence[TracePod]:
        if self.options.arrivals:
            return read_arrivals(self.options.arrivals, self.trace)
        return inflated(self.trace, self.options.load / 100, random)


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
        pending_trial.simulate(cluster_target, cluster, trace.policy, output)
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
    read = read_trace(trace.nodes, trace.pods, tuple(trace.topology_level or ()))
    if trace.plot is not None:
        check_writable(trace.plot)
    seeds = [trace.seed + number for number in range(trace.runs)]
    results = _results([_Run(read, trace, seed) for seed in seeds])
    document = _document(trace, seeds, results)
    if trace.plot is not None:
        save(_panels([outcome for outcome, _ in results]), trace.plot)
    if not tables.print_data(document, output):
        tables.print_lines((_timed_screen if trace.by_time else _screen)(document))


def _results(runs: list[_Run]) -> list[Result]:
    processes = min(runs[0].options.processes or os.cpu_count() or 1, len(runs))
    if processes == 1:
        return [run(bar=True) for run in runs]
    with ProcessPoolExecutor(processes) as pool, _progress("runs", len(runs), True) as progress:
        results = []
        for result in pool.map(_Run.__call__, runs):
            results.append(result)
            progress(len(results))
        return results


@contextmanager
def _progress(words: str, total: int, bar: bool) -> Iterator[Callable[[int], object]]:
    """Show how far a run is, or how many have ended, if somebody looks at standard error."""
    if not bar or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=total)
        yield lambda done: progress.update(task, completed=done)


def _document(options: TraceOptions, seeds: list[int], results: list[Result]) -> dict[str, Any]:
    """Return the outcome as people read it in JSON: means over the runs."""
    of_runs = {
        "policy": options.policy or POLICY,
        "seeds": seeds,
        "ms_per_pod": round(1000 * mean(seconds for _, seconds in results), 2),
    }
    timed = [outcome for outcome, _ in results if isinstance(outcome, TimedOutcome)]
    arrived = [outcome for outcome, _ in results if isinstance(outcome, Outcome)]
    return of_runs | (_timed(options, timed) if options.by_time else _arrived(options, arrived))


def _timed(options: TraceOptions, found: list[TimedOutcome]) -> dict[str, Any]:
    """Waiting times are those of all runs; the samples are of the first one."""
    waits = Waits.of([seconds for outcome in found for seconds in outcome.seconds])
    return {
        "faster": options.faster,
        "waits": asdict(waits),
        "recorded_waits": asdict(found[0].recorded),
        "refused": sum(outcome.refused for outcome in found),
        "allocated": round(mean(outcome.allocated for outcome in found), 3),
        "gangs_in_one": {
            level: round(mean(outcome.gangs_in_one[level] for outcome in found), 2)
            for level in found[0].gangs_in_one
        },
        "samples": [asdict(sample) for sample in found[0].samples],
    }


def _arrived(options: TraceOptions, found: list[Outcome]) -> dict[str, Any]:
    loads = [load for load in LOADS if all(load in outcome.allocation for outcome in found)]
    rows = [[outcome.allocation[load] for outcome in found] for load in loads]
    first = [outcome.first_refusal for outcome in found if outcome.first_refusal is not None]
    return {
        "without_cards": options.without_cards,
        "look_ahead": options.look_ahead,
        "load": loads,
        "allocation": [round(mean(row), 3) for row in rows],
        "deviation": [round(stdev(row), 3) if len(row) > 1 else 0.0 for row in rows],
        "fragmentation": [
            round(mean(outcome.fragmentation[load] for outcome in found), 2) for load in loads
        ],
        "refused": sum(outcome.refused for outcome in found),
        "refused_though_fitting": sum(outcome.refused_though_fitting for outcome in found),
        "first_refusal": round(min(first), 2) if first else None,
    }


def _screen(document: dict[str, Any]) -> list[str]:
    rows = [["ARRIVED %", "ALLOCATED %", "DEVIATION", "FRAGMENTED %"]]
    columns = ("load", "allocation", "deviation", "fragmentation")
    for load, *percent in zip(*(document[name] for name in columns), strict=True):
        rows.append([str(load), *(f"{value:.2f}" for value in percent)])
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


def _timed_screen(document: dict[str, Any]) -> list[str]:
    rows = [["WAITED", "PODS", "MEAN", "MEDIAN", "95 %", "MAX"]]
    for name, waits in (("here", document["waits"]), ("trace", document["recorded_waits"])):
        seconds = (waits[field] for field in ("mean_s", "median_s", "p95_s", "max_s"))
        pods = f"{waits['waited']} of {waits['pods']}"
        rows.append([name, pods, *(f"{value:.1f} s" for value in seconds)])
    in_one = [
        f"{percent:.1f} % of the gangs are in one {level}"
        for level, percent in document["gangs_in_one"].items()
    ]
    return [
        *tables.align(rows),
        *in_one,
        f"{document['policy']}: {document['allocated']:.2f} % of the cards allocated on average, "
        f"{document['refused']} pods never fit; {document['ms_per_pod']:.2f} ms for each pod",
    ]


def _panels(found: list[Outcome | TimedOutcome]) -> list[Panel]:
    """Return what is drawn: of several runs, means by load or the first one's samples."""
    timed = [outcome for outcome in found if isinstance(outcome, TimedOutcome)]
    if timed:
        samples, waits = timed[0].samples, sorted(timed[0].seconds)
        share = [(seconds, 100 * (n + 1) / len(waits)) for n, seconds in enumerate(waits)]
        over_time = {
            "allocated": [(sample.at, sample.allocated) for sample in samples],
            "requested": [(sample.at, sample.requested) for sample in samples],
        }
        fragments = [(sample.at, sample.fragmented) for sample in samples]
        return [
            Panel("Cards", "seconds", "% of all", over_time, steps=True),
            Panel("Fragmentation", "seconds", "% of free", {"fragmented": fragments}),
            Panel("Waiting times", "seconds waited, at most", "% of pods", {"waited": share}),
        ]
    arrived = [outcome for outcome in found if isinstance(outcome, Outcome)]
    loads = sorted(set.intersection(*(set(outcome.allocation) for outcome in arrived)))
    allocation = [(x, mean(outcome.allocation[x] for outcome in arrived)) for x in loads]
    fragments = [(x, mean(outcome.fragmentation[x] for outcome in arrived)) for x in loads]
    x = "% of all cards requested by pods that arrived"
    return [
        Panel("Allocation", x, "% of all cards", {"allocated": allocation}),
        Panel("Fragmentation", x, "% of free", {"fragmented": fragments}),
    ]
