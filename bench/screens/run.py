"""Measure the commands that show a cluster of 1,000 nodes, against only fetching the same lists.

An API server in a process of its own serves 1,000 nodes of 8 cards, 16 pods on each, and 100 pending pods,
with the fields that objects have in a real cluster. The baseline is a bare aiohttp client that reads the same
lists without decoding them. Each run is a whole process, from its start to its exit.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.extender import workload
from bench.extender.run import compiled, printed_port, process
from fenka.kubernetes.cluster_reader import PAGE

NODES, PENDING, RUNS = 1000, 100, 5
GOAL_S = 1.0
SERVER = Path(__file__).parents[1] / "extender/api_process.py"
QUIET = "0.001"
"""Changes a second: none while this runs."""

FETCH = f"""
import asyncio, sys, aiohttp
async def fetch(session, path, more=""):
    async with session.get(f"{{sys.argv[1]}}{{path}}?limit={PAGE}{{more}}") as answer:
        head = (await answer.read())[:200].decode()
    if '"continue":"' in head:
        await fetch(session, path, "&continue=" + head.split('"continue":"')[1].split('"')[0])
async def main():
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(fetch(session, "/api/v1/nodes"), fetch(session, "/api/v1/pods"))
asyncio.run(main())
"""


def kubeconfig(url: str) -> str:
    """Return a configuration that names the server."""
    return json.dumps(
        {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": ""}}],
            "current-context": "x",
        }
    )


def measure(command: list[str], folder: str) -> tuple[float, float]:
    """Return the milliseconds of one run, and those of the processor. folder: for bytecode."""
    environment = {**compiled(folder), "FENKA_RUNTIME": "/-"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1e3, cpu * 1e3


def main() -> None:
    """Print a Markdown table of medians, and of each command's processor time as a ratio."""
    words = (sys.executable, SERVER, str(NODES), QUIET)
    with process(*words, stdout=subprocess.PIPE) as server, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{printed_port(server)}"
        request = urllib.request.Request(f"{url}/bench/pending/0/{PENDING}", method="POST")
        urllib.request.urlopen(request).close()
        config = Path(folder) / "config"
        config.write_text(kubeconfig(url))
        meta = workload.pending(0)["metadata"]
        programs = Path(sys.executable).parent
        screens = {
            "kubectl inspect gpushare": [str(programs / "kubectl-inspect-gpushare")],
            **{
                f"fenka {words}": [str(programs / "fenka"), *words.split()]
                for words in ("top node", "top node -s", "top node -s -d", "queue", "why POD")
            },
        }
        screens["fenka why POD"][-1] = f"{meta['namespace']}/{meta['name']}"
        commands = {"fetch only": [sys.executable, "-c", FETCH, url]}
        for name, screen in screens.items():
            commands[name] = [*screen, "--kubeconfig", str(config)]
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(RUNS + 1):
            for name, command in commands.items():
                if number:  # The first time files are read from disk and compiled.
                    runs[name].append(measure(command, folder))
                else:
                    measure(command, folder)
    medians = {
        name: [statistics.median(each) for each in zip(*of, strict=True)]
        for name, of in runs.items()
    }
    pods = NODES * workload.PODS_PER_NODE + PENDING
    print(f"| {NODES} nodes, {pods} pods | median ms | processor ms | least | ratio |")
    print("|---|---|---|---|---|")
    for name, (wall, cpu) in medians.items():
        least = min(cpu for _, cpu in runs[name])
        ratio = cpu / medians["fetch only"][1]
        print(f"| `{name}` | {wall:.0f} | {cpu:.0f} | {least:.0f} | {ratio:.1f} |")
    slowest = max(wall for wall, _ in medians.values()) / 1e3
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(
        f"\nslowest {slowest:.2f} s, goal {GOAL_S:g} s or less; Python {platform.python_version()},"
    )
    print(f"{os.cpu_count()} cores, load averages at the end {load}")


if __name__ == "__main__":
    main()
