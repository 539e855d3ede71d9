"""Measure the commands that show a cluster of 1,000 nodes, against only fetching the same lists.

An API server in a process of its own serves 1,000 nodes of 8 cards, 16 pods on each, and 100 pending pods,
with the fields that objects have in a real cluster. An autoscaler has published that it bought all nodes.
The baseline is a bare aiohttp client that reads the same lists without decoding them. Each run is a whole
process, from its start to its exit.

``--without-reports``: nodes do not report what their pods hold, as where gpushare's node program runs.
"""

import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.commands import FENKA, by_turns, machine, print_table, server
from bench.extender import workload
from fenka.cluster.autoscaling import (
    STATUS_KEY,
    STATUS_MAP,
    AutoscalerStatus,
    ElasticNodeStatus,
    OfferStatus,
)
from fenka.kubernetes.autoscaler_reader import NAMESPACE
from fenka.kubernetes.reader import PAGE

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


def publish_status(url: str) -> None:
    """Create what an autoscaler publishes."""
    offer = OfferStatus("a100", "gn7", "g", "on-demand", 34.7, None, NODES, 0, NODES)
    bought = {
        workload.node_name(number): ElasticNodeStatus("a100", "in use", 0)
        for number in range(NODES)
    }
    status = msgspec.json.encode(AutoscalerStatus((offer,), bought)).decode()
    create_config_map(url, "kube-public", "fenka", {NAMESPACE: "fenka"})
    create_config_map(url, "fenka", STATUS_MAP, {STATUS_KEY: status})


def create_config_map(url: str, namespace: str, name: str, data: Mapping[str, str]) -> None:
    """Create a ConfigMap."""
    body = {"metadata": {"name": name, "namespace": namespace}, "data": data}
    request = urllib.request.Request(
        f"{url}/api/v1/namespaces/{namespace}/configmaps",
        msgspec.json.encode(body),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()


def main() -> int:
    """Print a Markdown table of medians, and of each command's processor time as a ratio.

    Return 1 if the goal is missed.
    """
    with server(sys.executable, SERVER, str(NODES), QUIET, *sys.argv[1:]) as served:
        path = f"{served.url}/bench/pending/0/{PENDING}"
        urllib.request.urlopen(urllib.request.Request(path, method="POST")).close()
        publish_status(served.url)
        meta = workload.pending(0)["metadata"]
        pod = f"{meta['namespace']}/{meta['name']}"
        inspect = str(Path(FENKA).with_name("kubectl-inspect-gpushare"))
        screens = {
            "kubectl inspect gpushare": [inspect],
            **{
                f"fenka {words}": [FENKA, *words.replace("POD", pod).split()]
                for words in (
                    *("top node", "top node -s", "top node -s -d", "queue", "why POD"),
                    *("groups", "nodes"),
                )
            },
        }
        config = ["--kubeconfig", str(served.config)]
        commands = {"fetch only": [sys.executable, "-c", FETCH, served.url]}
        commands |= {name: [*screen, *config] for name, screen in screens.items()}
        runs = by_turns(lambda _: commands, RUNS)
    pods = NODES * workload.PODS_PER_NODE + PENDING
    slowest = max(print_table(f"{NODES} nodes, {pods} pods", runs).values())
    print(f"\nslowest {slowest:.2f} s, goal {GOAL_S:g} s or less; {machine()}")
    return int(slowest > GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
