"""Measure the time from the release of a card to the next binding, for queues of different lengths.

Needs a cluster whose kube-scheduler calls fenka's extender. Run ``python -m e2e run python -m
e2e.release_latency``. A node without a kubelet has one card. Each pod requests the whole card and is deleted
one second after it was bound. Prints a Markdown table.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from fenka.cluster.objects import Node, Pod
from fenka.core.inventory import Card, DeviceId
from fenka.dialects import base, gpushare, nodes
from fenka.kubernetes.api_client import Api, ApiError

NODE, LABEL, UNITS, GIB = "bench-latency", "fenka.io/bench-latency", 16, 1024
NAMESPACE = "default"
POD_LIFETIME_S = 1.0
PARALLEL_CALLS = 16


def node() -> dict[str, Any]:
    """Return a node with one card."""
    cards = [Card(0, DeviceId("GPU-bench-latency"), "Tesla T4", UNITS * GIB)]
    inventory = {base.CARDS: nodes.encode_inventory(cards, GIB)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {LABEL: "yes"}, "annotations": inventory},
        "spec": {"taints": [{"key": LABEL, "value": "yes", "effect": "NoSchedule"}]},
    }


def pod(name: str) -> dict[str, Any]:
    """Return a pod that requests the whole card."""
    container = {"name": "c", "image": "none", "resources": {"limits": {gpushare.MEMORY: UNITS}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {LABEL: "yes"}},
        "spec": {
            "nodeSelector": {LABEL: "yes"},
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }


class Bench:
    """The measurement on one cluster."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        self.bound: dict[str, float] = {}
        self.changed = asyncio.Event()

    async def watch(self) -> None:
        """Record when each pod is bound."""
        _, version = await self.api.list(self.path, Pod, labelSelector=LABEL)
        async for change in self.api.watch(
            self.path, Pod, version, seconds=3600, labelSelector=LABEL
        ):
            pod = change.object
            if pod is not None and pod.spec.node_name:
                self.bound.setdefault(pod.metadata.name, time.monotonic())
                self.changed.set()

    async def prepare(self) -> None:
        """Create the node."""
        await self.clean()
        await self.api.create("/api/v1/nodes", Node, node())
        resources = {"cpu": "64", "memory": "64Gi", "pods": "5000"}
        resources |= {gpushare.MEMORY: str(UNITS), gpushare.COUNT: "1"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
        await self.api.patch(f"/api/v1/nodes/{NODE}/status", Node, {"status": status})

    async def clean(self) -> None:
        """Remove the node and all pods."""
        pods, _ = await self.api.list(self.path, Pod, labelSelector=LABEL)
        await self.run_in_parallel(self.delete(f"{self.path}/{pod.metadata.name}") for pod in pods)
        await self.delete(f"/api/v1/nodes/{NODE}")

    async def delete(self, path: str) -> None:
        """Delete an object without a grace period, if it exists."""
        try:
            await self.api.delete(path, {"gracePeriodSeconds": 0})
        except ApiError as error:
            if error.status != 404:
                raise

    async def run_in_parallel(self, calls: Any) -> None:
        """Run API calls, a limited number at a time."""
        slots = asyncio.Semaphore(PARALLEL_CALLS)

        async def limited(call: Any) -> None:
            async with slots:
                await call

        await asyncio.gather(*map(limited, calls))

    async def next_bound(self, known: set[str], within_s: float) -> str:
        """Wait until a pod that is not in `known` is bound, and return its name."""
        async with asyncio.timeout(within_s):
            while not (new := self.bound.keys() - known):
                self.changed.clear()
                await self.changed.wait()
        (name, *_) = sorted(new)
        return str(name)

    async def measure(self, length: int, releases: int, settle_s: float) -> list[float]:
        """Return the seconds from each release to the next binding.

        Args:
            length: the number of pods in the queue.
            releases: how often the card is released.
            settle_s: the seconds before the first release.
        """
        await self.prepare()
        begun = time.monotonic()
        self.bound.clear()
        await self.run_in_parallel(
            self.api.create(self.path, Pod, pod(f"p-{number:05}")) for number in range(length)
        )
        known: set[str] = set()
        holder = await self.next_bound(known, 120)
        print(f"<!-- {length} created within {time.monotonic() - begun:.1f} s -->", flush=True)
        await asyncio.sleep(settle_s)
        delays = []
        for _ in range(min(releases, length - 1)):
            known.add(holder)
            await self.delete(f"{self.path}/{holder}")
            released = time.monotonic()
            holder = await self.next_bound(known, 300)
            delays.append(self.bound[holder] - released)
            await asyncio.sleep(POD_LIFETIME_S)
        await self.clean()
        return delays


async def main() -> None:
    """Print one row for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=json.loads, default=[12, 300, 800])
    parser.add_argument("--releases", type=int, default=11)
    parser.add_argument(
        "--settle", type=float, default=20.0, help="seconds before the first release"
    )
    options = parser.parse_args()
    print("| pending pods | median, s | longest, s | releases |\n|---|---|---|---|", flush=True)
    async with await Api.connect() as api:
        bench = Bench(api)
        watching = asyncio.create_task(bench.watch())
        try:
            for length in options.lengths:
                delays = await bench.measure(length, options.releases, options.settle)
                print(
                    f"| {length} | {statistics.median(delays):.2f} | {max(delays):.2f} | {len(delays)} |",
                    flush=True,
                )
        finally:
            watching.cancel()
            await bench.clean()


if __name__ == "__main__":
    asyncio.run(main())
