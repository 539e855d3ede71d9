"""Measure the commands that show a cluster of 1,000 nodes, against only fetching the same lists.

A thread serves prepared lists, each in one page. Baseline and commands run in their own processes.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NODES, CARDS, PODS, RUNS = 1000, 4, 8000, 7
GOAL_S = 1.0

FETCH = """
import asyncio, sys, aiohttp
async def fetch(server):
    async with aiohttp.ClientSession() as session:
        for path in ("/api/v1/nodes", "/api/v1/pods"):
            async with session.get(server + path) as answer:
                await answer.read()
asyncio.run(fetch(sys.argv[1]))
"""


def _node(number: int) -> dict[str, object]:
    resources = {"aliyun.com/gpu-mem": str(14 * CARDS), "aliyun.com/gpu-count": str(CARDS)}
    return {
        "metadata": {"name": f"node-{number:04}", "labels": {"gpushare": "true"}},
        "status": {
            "allocatable": resources,
            "addresses": [
                {"type": "InternalIP", "address": f"10.0.{number // 250}.{number % 250}"}
            ],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _pod(number: int) -> dict[str, object]:
    card = str(number // NODES % CARDS)
    annotations = {"ALIYUN_COM_GPU_MEM_IDX": card, "ALIYUN_COM_GPU_MEM_POD": "4"}
    limits = {"limits": {"aliyun.com/gpu-mem": "4"}}
    name = f"pod-{number}"
    return {
        "metadata": {"name": name, "namespace": "n", "uid": name, "annotations": annotations},
        "spec": {
            "nodeName": f"node-{number % NODES:04}",
            "containers": [{"name": "main", "resources": limits}],
        },
        "status": {"phase": "Running"},
    }


BODIES = {
    "/api/v1/nodes": json.dumps({"items": [_node(number) for number in range(NODES)]}).encode(),
    "/api/v1/pods": json.dumps({"items": [_pod(number) for number in range(PODS)]}).encode(),
}


class Lists(BaseHTTPRequestHandler):
    """Serves the lists; all other lists are empty."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a list."""
        body = BODIES.get(self.path.partition("?")[0], b'{"items": []}')
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


def seconds(command: list[str]) -> float:
    """Return the processor time of one run, which excludes the server and other programs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "FENKA_RUNTIME": "/-"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a Markdown table with each command's median and its ratio."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lists)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "config"
        kubeconfig.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": url}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": ""}}],
                    "current-context": "x",
                }
            )
        )
        option = ["--kubeconfig", str(kubeconfig)]
        programs = Path(sys.executable).parent
        fenka, plugin = str(programs / "fenka"), str(programs / "kubectl-inspect-gpushare")
        commands = {
            "fetch only": [sys.executable, "-c", FETCH, url],
            "kubectl inspect gpushare": [plugin, *option],
            "fenka top node": [fenka, "top", "node", *option],
            "fenka top node -s -d": [fenka, "top", "node", "-s", "-d", *option],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(RUNS):
            for name, command in commands.items():
                times[name].append(seconds(command))
    medians = {name: statistics.median(durations) for name, durations in times.items()}
    print(f"| {NODES} nodes, {PODS} pods | median CPU ms | ratio |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| `{name}` | {median * 1e3:.0f} | {median / medians['fetch only']:.1f} |")
    slowest = max(medians.values())
    print(f"\nslowest {slowest:.2f} s, goal {GOAL_S:g} s or less")


main()
