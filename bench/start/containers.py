"""Measure what a slice adds to a container that prints its user and ends, with and without one, by turns.

`python -m bench.start.containers` measures Podman, with `docker` behind it Docker. It needs root.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from e2e.container_machine import IMAGE, ContainerMachine, PodmanMachine, image_archive, serving
from e2e.docker_machine import DockerMachine

RUNS = 30
GOAL_MS = 30.0
SLICE = ("--device", "fenka.io/slice=1")


def start(machine: ContainerMachine, *options: str) -> float:
    """Return the milliseconds of a container from its command's start to its end."""
    began = time.monotonic()
    done = machine.run(machine.engine, "run", "--rm", *options, IMAGE, "id", "-u")
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    return took * 1000


def main() -> int:
    """Alternate both, and print a Markdown table. Return 1 if the goal is missed."""
    docker = sys.argv[1:] == ["docker"]
    if os.geteuid() != 0 or not (docker or shutil.which("podman")):
        print("not measured: it needs root and Podman")
        return 0
    machine = DockerMachine("runc") if docker else PodmanMachine("runc")
    with tempfile.TemporaryDirectory() as folder:
        archive = image_archive(Path(folder))
        with serving(machine, archive):
            start(machine), start(machine, *SLICE)
            pairs = [(start(machine), start(machine, *SLICE)) for _ in range(RUNS)]
    bare, sliced = zip(*pairs, strict=True)
    print("| a container that prints its user | median ms | fastest ms |\n|---|---|---|")
    for name, times in (("without a slice", bare), ("with a slice", sliced)):
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} |")
    added = statistics.median(sliced) - statistics.median(bare)
    print(f"\n{added:.1f} ms added, goal {GOAL_MS:.0f} ms or less, load {os.getloadavg()[0]:.1f}")
    return int(added > GOAL_MS)


sys.exit(main())
