"""Measure commands as whole processes, from start to exit, by turns and against a named baseline.

They talk to an API server in a process of its own. Modules are compiled once, as in the image.
"""

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.extender.run import compiled, printed_port, process

FENKA = str(Path(sys.executable).parent / "fenka")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a command: milliseconds, and those of the processor."""

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Served:
    """An API server in a process of its own.

    Attributes:
        url: its address.
        config: a kubeconfig that names it.
    """

    url: str
    config: Path


@contextlib.contextmanager
def server(*command: str | Path) -> Iterator[Served]:
    """Run an API server, which prints its port, while the block runs."""
    with (
        process(*command, stdout=subprocess.PIPE) as running,
        tempfile.TemporaryDirectory() as folder,
    ):
        url = f"http://127.0.0.1:{printed_port(running)}"
        config = Path(folder) / "config"
        config.write_text(kubeconfig(url))
        yield Served(url, config)


def kubeconfig(url: str) -> str:
    """Return a configuration that names the server."""
    return json.dumps(
        {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": ""}}],
            "current-context": "x",
        }
    )


def by_turns(
    commands: Callable[[int], Mapping[str, Sequence[str]]], rounds: int
) -> dict[str, list[Run]]:
    """Return the runs of each command by its name. commands: returns those of a round."""
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**compiled(folder), "FENKA_RUNTIME": "/-"}
        for number in range(rounds + 1):
            for name, command in commands(number).items():
                run = measure(command, environment)
                if number:  # The first time files are read from disk and compiled.
                    runs.setdefault(name, []).append(run)
    return runs


def measure(command: Sequence[str], environment: Mapping[str, str]) -> Run:
    """Return what one run takes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall * 1e3, cpu * 1e3)


def print_table(title: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Print medians in Markdown; the first command is the baseline. Return median seconds by name."""
    print(f"| {title} | median ms | processor ms | least | ratio |\n|---|---|---|---|---|")
    baseline, seconds = 0.0, {}
    for name, of in runs.items():
        wall = statistics.median(run.wall_ms for run in of)
        cpu = statistics.median(run.cpu_ms for run in of)
        least = min(run.cpu_ms for run in of)
        baseline = baseline or cpu
        seconds[name] = wall / 1e3
        print(f"| `{name}` | {wall:.0f} | {cpu:.0f} | {least:.0f} | {cpu / baseline:.1f} |")
    return seconds


def machine() -> str:
    """Return what figures depend on."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    python = platform.python_version()
    return f"Python {python}, {os.cpu_count()} cores, load averages at the end {load}"
