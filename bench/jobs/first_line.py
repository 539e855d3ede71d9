"""Measure the time from `fenka submit` to the first line that the submitted program prints.

The baseline is `kubectl apply` of exactly the same objects, as `fenka submit --dry-run -o yaml` prints them,
by turns in the same run. The cluster is that of the end-to-end tests: real programs of Kubernetes on this
machine. The container runtime records the time of the line, so that nothing has to be polled for it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from bench.commands import FENKA, machine
from bench.jobs import submissions
from bench.jobs.submissions import JOBS, training
from e2e.cluster import STATE, Cluster
from e2e.images import BUSYBOX, TRAINING, image_store
from e2e.machine import ClusterError, run, wait_until
from e2e.scenarios.conftest import install, install_jobset
from e2e.scenarios.installation import MEMORY, Installation
from e2e.supervisor import CGROUPS
from fenka.jobs.collection import collect
from fenka.jobs.manifests.training_manifest import render

ROUNDS = 7
GOAL = 1.1
"""Times the baseline."""
NAMESPACE = "bench"
POLL_S = 0.5
AT_ONCE = ("chrt", "--rr", "20")
"""Both commands precede others of this machine, since one of them needs more of the processor."""
MOST_SHARES = 2**18
"""cgroup v1's largest weight."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A training that is submitted.

    Attributes:
        name: For the table.
        words: What follows `fenka submit`, without a name.
        chief: The role whose first line is awaited.
        command: Prints that line.
    """

    name: str
    words: Sequence[str]
    chief: str
    command: Sequence[str]


SHAPES = (
    Shape(
        "one process",
        ("pytorchjob", "--image", BUSYBOX, "--gpu-mem=4"),
        "worker",
        ("echo", "started"),
    ),
    Shape(
        "MPI, two workers",
        ("mpijob", "--image", TRAINING, "--gpu-mem=4", "--workers=2"),
        "launcher",
        ("mpirun", "echo", "started"),
    ),
)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from a command to the first line, and those of the command itself."""

    first_line_s: float
    command_s: float


class Bench:
    """Submits trainings to a cluster, one at a time. folder: for files and bytecode."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._environment = cluster.environment() | {"PYTHONPYCACHEPREFIX": str(folder)}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def submit(self, shape: Shape, name: str) -> Start:
        """Submit a training."""
        return self._start(shape, name, self._submission(shape, name))

    def apply(self, shape: Shape, name: str) -> Start:
        """Create the objects of a training by kubectl."""
        text = self._run(self._submission(shape, name, "--dry-run", "-o", "yaml"))
        written = self._folder / f"{name}.yaml"
        written.write_text(text)
        return self._start(shape, name, ["kubectl", "apply", "-f", str(written)])

    def apply_many(self, namespace: str) -> float:
        """Create the objects of many suspended jobs by one kubectl. Return the seconds."""
        items = []
        for number in range(JOBS):
            rendered = render(*collect(training(f"many-{number}")))
            rendered.root["spec"]["suspend"] = True
            items += [rendered.root, *rendered.dependents]
        written = self._folder / "many.json"
        everything = {"apiVersion": "v1", "kind": "List", "items": items}
        written.write_bytes(msgspec.json.encode(everything))
        return self._in_namespace(
            namespace, ["kubectl", "apply", "-n", namespace, "-f", str(written)]
        )

    def submit_many(self, namespace: str) -> float:
        """Submit many jobs to a queue in one process. Return the seconds."""
        config = str(self._cluster.kubeconfig)
        command = [
            sys.executable,
            submissions.__file__,
            "submit",
            config,
            "many",
            namespace,
            "none",
        ]
        return self._in_namespace(namespace, command)

    def _in_namespace(self, namespace: str, command: Sequence[str]) -> float:
        """Return the seconds of a command that creates jobs. Return when no more Jobs are made of them."""
        self._cluster.kubectl("create", "namespace", namespace)
        began = time.perf_counter()
        self._run(command)
        seconds = time.perf_counter() - began
        numbers: list[int] = []

        def settled() -> bool:
            time.sleep(4 * POLL_S)
            numbers.append(len(self._cluster.list("jobs", namespace)))
            return numbers[-2:] == [numbers[-1]] * 2

        wait_until(f"the Jobs of {namespace}", settled, 120)
        return seconds

    def _submission(self, shape: Shape, name: str, *options: str) -> list[str]:
        given = ["-n", NAMESPACE, "--name", name, *options]
        return [FENKA, "submit", *shape.words, *given, "--", *shape.command]

    def _run(self, command: Sequence[str]) -> str:
        return run(self._cluster.command(*command), self._environment)

    def _start(self, shape: Shape, name: str, command: Sequence[str]) -> Start:
        inside = [*AT_ONCE, *self._cluster.command(*command)]
        began, clock = time.time(), time.perf_counter()
        subprocess.run(inside, env=self._environment, check=True, capture_output=True)
        command_s = time.perf_counter() - clock
        chief = f"fenka.io/job={name},fenka.io/role={shape.chief}"
        printed = self._first_line(chief)
        self._cluster.kubectl("-n", NAMESPACE, "delete", "jobset,job", name, "--ignore-not-found")
        owned = ("pods,configmaps,secrets", "-l", f"fenka.io/job={name}")
        self._cluster.kubectl("-n", NAMESPACE, "delete", *owned, "--now")
        start = Start(printed - began, command_s)
        # Progress, apart from the tables.
        print(f"{name}: {start}", file=sys.stderr, flush=True)
        return start

    def _first_line(self, selector: str) -> float:
        """Return when the chief printed its first line, in Unix seconds."""
        logs = ("-n", NAMESPACE, "logs", "--timestamps", "-l", selector)
        lines: list[str] = []

        def printed() -> bool:
            # Rarely, since both cores are needed.
            time.sleep(POLL_S)
            lines[:] = self._cluster.kubectl(*logs).splitlines()
            return bool(lines)

        wait_until(f"output of {selector}", printed, 120)
        return datetime.fromisoformat(lines[0].split()[0]).timestamp()


def measure() -> bool:
    """Print a table of medians. Return whether the goal is met, or whether there can be no cluster."""
    try:
        Cluster.require()
    except ClusterError as error:
        print(f"from a submission to its output: not measured, since {error}")
        return True
    state = Path(f"{STATE}-jobs")
    cluster = Cluster(state, owner=os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        try:
            cluster.up(image_store())
            prepare(cluster)
            bench = Bench(cluster, Path(folder))
            met = compare(bench)
            submit_many(bench)
            return met
        finally:
            cluster.down()


def prepare(cluster: Cluster) -> None:
    """Install fenka and JobSet, and let both nodes share their card."""
    raise_priority(cluster)
    install(cluster)
    install_jobset(cluster)
    installation = Installation(cluster)
    for node in cluster.nodes:
        installation.label(node.name, "gpushare=true")
    for node in cluster.nodes:
        installation.wait_for_allocatable(node.name, MEMORY, 14)
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.wait_for_service_account(NAMESPACE)


def raise_priority(cluster: Cluster) -> None:
    """Let the cluster's programs precede others of this machine, as far as cgroups can."""
    for each in (cluster.control_plane, *cluster.nodes):
        (CGROUPS / "cpu" / each.files.cgroup / "cpu.shares").write_text(str(MOST_SHARES))


def compare(bench: Bench) -> bool:
    """Measure by turns and print. Return whether the goal is met."""
    print(f"| {ROUNDS} rounds | first line, median s | least | the command itself | ratio |")
    print("|---|---|---|---|---|")
    ways: Mapping[str, Callable[[Shape, str], Start]] = {
        "kubectl apply": bench.apply,
        "fenka submit": bench.submit,
    }
    ratios = []
    for number, shape in enumerate(SHAPES):
        starts: dict[str, list[Start]] = {way: [] for way in ways}
        for turn in range(ROUNDS + 1):
            order = list(ways)[:: 1 if turn % 2 else -1]
            for way in order:
                start = ways[way](shape, f"{way.split()[0]}-{number}-{turn}")
                if turn:  # The first time files are read from disk and compiled.
                    starts[way].append(start)
        ratios.append(print_rows(shape, starts))
    print(f"\nlargest ratio {max(ratios):.2f}, goal {GOAL:g} or less; {machine()}")
    return max(ratios) <= GOAL


def submit_many(bench: Bench) -> None:
    """Print how long the submission of many jobs takes, which wait in a queue that nobody serves."""
    seconds = {
        "kubectl apply -f FILE": bench.apply_many("many-applied"),
        "submit": bench.submit_many("many-submitted"),
    }
    print(f"\n| {JOBS} jobs, one process | s |\n|---|---|")
    for way, each in seconds.items():
        print(f"| `{way}` | {each:.1f} |")


def print_rows(shape: Shape, starts: Mapping[str, Sequence[Start]]) -> float:
    """Print the rows of a training. Return the ratio of the last one to the first."""
    medians = {
        way: statistics.median(start.first_line_s for start in of) for way, of in starts.items()
    }
    baseline = next(iter(medians.values()))
    for way, of in starts.items():
        least = min(start.first_line_s for start in of)
        command = statistics.median(start.command_s for start in of)
        ratio = medians[way] / baseline
        print(
            f"| {shape.name}, `{way}` | {medians[way]:.2f} | {least:.2f} | {command:.2f} | {ratio:.2f} |",
            flush=True,
        )
    return medians[way] / baseline
