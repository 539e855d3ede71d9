"""Measure what one event costs the scheduler at several sizes of the cluster, and what a pod costs of memory.

``python bench/events/run.py [--nodes N ...] [--rounds N]`` builds a cluster of each size, with 8 cards and 4
pods a node, and sends the same kinds of events to each in turn, at random places: from the line of the watch
to the cluster's state, the queue and the reports. The smallest size is the baseline: an event must cost about
the same at all of them. Each new pod is found unschedulable before it is bound.

Memory is that of 16,000 pods on 1,000 nodes in a process of its own, with all that the state and the queue
keep of them; no two request the same. The baseline keeps objects as screens and node programs decode them.
Prints Markdown tables; exits 1 if an event is too expensive.
"""

import argparse
import asyncio
import gc
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.extender import workload
from bench.extender.workload import CARDS, PODS_PER_NODE, Json
from fenka.cluster.compact import CompactNode, CompactPod
from fenka.cluster.objects import Node, Pod
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.pod_columns import LiveColumns
from fenka.cluster.queue_state import queue_state
from fenka.cluster.state import ClusterState
from fenka.kubernetes.api_client import Api, ListMeta, Page, WatchEvent, decode_event
from fenka.kubernetes.informer import Informer
from fenka.scheduler.event_reporter import EventReporter
from fenka.scheduler.informers import NodeListener, PodListener
from fenka.scheduler.queue_controller import QueueController

SIZES = [100, 1_000, 5_000, 20_000]
PODS = 4
"""Pods of a node while events are measured: with all 16 it would take minutes to make the largest cluster."""
REPEATS, MAX_FACTOR = 10, 1.2
MEMORY_NODES = 1_000


class SilentRecorder:
    """Posts no events."""

    def record_on_pod(self, pod: Pod, reason: str, note: str) -> None:
        """Ignore it."""

    def record_on_node(self, node: Node, reason: str, note: str) -> None:
        """Ignore it."""


class Collection:
    """An API server's collection, as far as an informer uses a client: one list, then lines of a watch."""

    def __init__(self, objects: Iterator[Json]) -> None:
        self._objects, self.lines = objects, asyncio.Queue[bytes]()
        self.took_us = asyncio.Queue[float]()

    async def pages(self, _: str, kind: type[Any], *__: Any) -> AsyncIterator[Page[Any]]:
        """Yield all objects as one page."""
        items = [msgspec.json.decode(msgspec.json.encode(it), type=kind) for it in self._objects]
        yield Page(items, ListMeta(resource_version="1"))

    async def watch(
        self, _: str, kind: type[Any], __: str, **___: Any
    ) -> AsyncIterator[WatchEvent[Any]]:
        """Yield the events of the lines, and measure each until the next is asked for."""
        while True:
            line = await self.lines.get()
            begun = time.perf_counter()
            yield decode_event(line, kind)
            self.took_us.put_nowait((time.perf_counter() - begun) * 1e6)


class Cluster:
    """What the scheduler keeps of a cluster, and where its events come from."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._rng, self._version = random.Random(nodes), 1
        self._generations: dict[int, int] = {}
        state = ClusterState()
        queue, self._live = QueueController(queue_state(state)), LiveColumns(state)
        self._reporter = reporter = EventReporter(
            state,
            PodEvaluator(state, "binpack"),
            SilentRecorder(),
            lambda: True,
            position=queue.position,
        )
        places = (self._place(node, pod) for node in range(nodes) for pod in range(PODS))
        self._pods = Collection(self._versioned(workload.resident(it)) for it in places)
        self._nodes = Collection(self._versioned(workload.node(it)) for it in range(nodes))
        self.informers: tuple[Informer[Any], ...] = (
            Informer(cast(Api, self._nodes), "nodes", CompactNode, NodeListener(state, reporter)),
            Informer(
                cast(Api, self._pods),
                "pods",
                CompactPod,
                PodListener(state, self._live, queue, reporter),
            ),
        )

    @staticmethod
    def _place(node: int, pod: int) -> int:
        return node * PODS_PER_NODE + pod * PODS_PER_NODE // PODS

    def _versioned(self, obj: Json) -> Json:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        return obj

    async def _send(self, to: Collection, obj: Json, type_: str = "MODIFIED") -> float:
        """Return the microseconds that the event takes."""
        event = {"type": type_, "object": self._versioned(obj)}
        to.lines.put_nowait(msgspec.json.encode(event))
        return await to.took_us.get()

    async def events(self) -> AsyncIterator[tuple[str, float]]:
        """Replace a pod by another, and change a node; yield each kind of event and its microseconds."""
        # As in a process that answers requests, the columns follow each event.
        self._live.read()
        node = self._rng.randrange(self.nodes)
        place = self._place(node, self._rng.randrange(PODS))
        generation = self._generations.get(place, 0)
        self._generations[place] = generation + 1
        old, new = workload.resident(place, generation), workload.resident(place, generation + 1)
        old["status"]["message"] = "changed"
        yield "pod's status changes", await self._send(self._pods, old)
        ended = {**old, "status": {**old["status"], "phase": "Succeeded"}}
        yield "pod ends", await self._send(self._pods, ended)
        yield "pod is deleted", await self._send(self._pods, ended, "DELETED")
        pending = deepcopy(new)
        del pending["spec"]["nodeName"]
        pending["metadata"]["annotations"], pending["status"] = {}, {"phase": "Pending"}
        yield "pod is created", await self._send(self._pods, pending, "ADDED")
        no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}
        pending["status"]["conditions"] = [no]
        # kube-scheduler has asked about it, as about all others.
        self._reporter.filtered(msgspec.convert(pending, Pod))
        yield "pod is unschedulable", await self._send(self._pods, pending)
        yield "pod is bound", await self._send(self._pods, new)
        changed = workload.node(self._rng.randrange(self.nodes))
        changed["status"]["conditions"][0]["lastHeartbeatTime"] = str(self._version)
        yield "node's heartbeat", await self._send(self._nodes, changed)
        changed["metadata"]["labels"]["changed"] = str(self._version)
        yield "node's label changes", await self._send(self._nodes, changed)
        changed["metadata"]["annotations"]["fenka.io/cordoned"] = str(self._version % CARDS)
        yield "card is cordoned", await self._send(self._nodes, changed)
        await self._send(self._nodes, workload.node(node))


def pss_bytes() -> int:
    """Return the memory of this process, shared pages by their part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def hold(kinds: tuple[type[Node], type[Pod]]) -> None:
    """Print how many bytes a node and a pod take, and the microseconds from its JSON until it is counted."""
    state = ClusterState()
    queue = queue_state(state)

    def decoded(kind: type[Any], objects: Iterator[Json]) -> Iterator[Any]:
        return (msgspec.json.decode(msgspec.json.encode(it), type=kind) for it in objects)

    list(decoded(kinds[1], map(workload.resident, range(PODS_PER_NODE))))
    sizes = [pss_bytes()]
    state.replace_nodes(decoded(kinds[0], map(workload.node, range(MEMORY_NODES))))
    sizes.append(pss_bytes())
    count = MEMORY_NODES * PODS_PER_NODE
    pods = list(decoded(kinds[1], map(workload.resident, range(count))))
    by_uid = {pod.metadata.uid: pod for pod in pods}
    sizes.append(pss_bytes())
    begun = time.process_time()
    state.replace_pods(pods)
    queue.replace_pods(pods, time.time())
    took = time.process_time() - begun
    sizes.append(pss_bytes())
    assert len(by_uid) == count
    node, pod, counted = (after - before for before, after in pairwise(sizes))
    print(node // MEMORY_NODES, pod // count, counted // count, f"{took / count * 1e6:.0f}")


async def measure(sizes: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Return the median microseconds by kind of event and number of nodes."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with asyncio.TaskGroup() as group:
        clusters = [Cluster(nodes) for nodes in sizes]
        informers = [it for cluster in clusters for it in cluster.informers]
        running = [group.create_task(it.run()) for it in informers]
        for informer in informers:
            await informer.synced.wait()
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for cluster in clusters:
                for _ in range(REPEATS):
                    async for kind, took_us in cluster.events():
                        times[kind][cluster.nodes].append(took_us)
        for task in running:
            task.cancel()
    return {
        kind: {nodes: statistics.median(took) for nodes, took in by_size.items()}
        for kind, by_size in times.items()
    }


def print_events(medians: dict[str, dict[int, float]], sizes: list[int]) -> bool:
    """Print the times; return whether all are within MAX_FACTOR of those of the smallest cluster."""
    base, *others = sizes
    print(
        f"\n| event | {base:,} nodes (baseline), us | "
        + " | ".join(f"{n:,}" for n in others)
        + " |"
    )
    print("|---" * (len(sizes) + 1) + "|")
    factors = []
    for kind, by_size in medians.items():
        ratios = [by_size[nodes] / by_size[base] for nodes in others]
        factors += ratios
        row = " | ".join(
            f"{by_size[nodes]:.0f} ({ratio:.2f} x)"
            for nodes, ratio in zip(others, ratios, strict=True)
        )
        print(f"| {kind} | {by_size[base]:.0f} | {row} |")
    worst = max(factors, default=1.0)
    print(
        f"\nWorst factor {worst:.2f}, goal {MAX_FACTOR}: {'met' if worst <= MAX_FACTOR else 'MISSED'}"
    )
    return worst <= MAX_FACTOR


def print_memory() -> None:
    """Measure both variants in processes of their own, and print."""
    print("\n| bytes of | compact | all fields (baseline) | ratio |\n|---|---|---|---|")
    results = []
    for variant in ("compact", "whole"):
        command = [sys.executable, __file__, "--hold", variant]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results.append([int(text) for text in output.split()])
    names = ("a node, with its cards", "a pod", "what is counted of it", "us to count it")
    for name, compact, whole in zip(names, *results, strict=True):
        print(f"| {name} | {compact:,} | {whole:,} | {whole / compact:.1f} x |")


def main() -> int:
    """Measure and print; return 1 if an event's cost depends on the cluster's size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--hold", choices=("compact", "whole"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold((CompactNode, CompactPod) if options.hold == "compact" else (Node, Pod))
        return 0
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(f"Load average at the start {os.getloadavg()[0]:.1f}")
    print_memory()
    medians = asyncio.run(measure(options.nodes, options.rounds))
    return 0 if print_events(medians, options.nodes) else 1


if __name__ == "__main__":
    sys.exit(main())
