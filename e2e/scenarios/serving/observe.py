"""Record what happens to a namespace's pods, and count what they hold of each card.

The count uses the API server's pods, the driver's figures, and nothing of fenka. Each node has one T4.
"""

import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from e2e.cluster import Cluster
from fire.audit import CARD_MIB, CONTEXT_MIB, UNITS, units_to_mib
from fire.cluster_audit import ClusterAudit

FIELDS = (
    "{.type}",
    "{.object.metadata.uid}",
    "{.object.metadata.labels.servingVersion}",
    r"{.object.spec.containers[0].resources.limits.aliyun\.com/gpu-mem}",
    "{.object.spec.nodeName}",
    "{.object.status.phase}",
    '{.object.status.conditions[?(@.type=="Ready")].status}',
    "{.object.metadata.deletionTimestamp}",
)
SAMPLE_S = 2.0


@dataclass(frozen=True)
class Pod:
    """A pod as the API server shows it. node: "" before it is bound; units: of its card."""

    uid: str
    version: str
    units: int
    node: str
    ended: bool
    ready: bool


@dataclass
class Record:
    """The pods of a namespace after each change, with its time, and what samples of the driver violate."""

    changes: list[tuple[float, dict[str, Pod]]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    samples: int = 0

    @property
    def pods(self) -> dict[str, Pod]:
        """The pods now, by their UIDs."""
        return self.changes[-1][1] if self.changes else {}

    def add(self, line: str) -> None:
        """Apply one event of the watch."""
        kind, uid, version, units, node, phase, ready, deleted = line.split("|")
        pods = dict(self.pods)
        pods.pop(uid, None)
        if kind != "DELETED":
            ended = phase in ("Succeeded", "Failed")
            is_ready = ready == "True" and not deleted
            pods[uid] = Pod(uid, version, int(units or 0), node, ended, is_ready)
        self.changes.append((time.time(), pods))

    def overcommitted(self) -> list[str]:
        """Return each moment at which the pods of a node were bound to more units than its card has."""
        found = []
        for at, pods in self.changes:
            for node, units in units_by_node(pods.values()).items():
                if units > UNITS:
                    found.append(f"{at:.1f}: pods of {units} of {UNITS} units are bound to {node}")
        return found

    def replicas(self) -> list[tuple[float, int]]:
        """Return the number of ready replicas at each time at which it changed."""
        counts = list[tuple[float, int]]()
        for at, pods in self.changes:
            ready = sum(bool(pod.version) and pod.ready for pod in pods.values())
            if not counts or counts[-1][1] != ready:
                counts.append((at, ready))
        return counts


def units_by_node(pods: Iterable[Pod]) -> dict[str, int]:
    """Return the units of the pods that are bound and have not ended."""
    held: dict[str, int] = {}
    for pod in pods:
        if pod.node and not pod.ended:
            held[pod.node] = held.get(pod.node, 0) + pod.units
    return held


@contextmanager
def recorded(cluster: Cluster, namespace: str) -> Iterator[Record]:
    """Record the namespace inside the `with` block, and sample the drivers of all nodes."""
    record, done = Record(), threading.Event()
    lines = "jsonpath=" + "|".join(FIELDS) + "{'\\n'}"
    words = ("kubectl", "-n", namespace, "get", "pods", "-w", "--output-watch-events", "-o", lines)
    environment = cluster.environment()
    with subprocess.Popen(
        cluster.command(*words), env=environment, stdout=subprocess.PIPE, text=True
    ) as watch:
        assert watch.stdout
        stdout = watch.stdout

        def follow() -> None:
            for line in stdout:
                record.add(line.strip("\n"))

        def sample() -> None:
            while not done.wait(SAMPLE_S):
                sample_drivers(cluster, record)

        threads = [threading.Thread(target=each) for each in (follow, sample)]
        for thread in threads:
            thread.start()
        try:
            yield record
        finally:
            done.set()
            watch.terminate()
            for thread in threads:
                thread.join()


def sample_drivers(cluster: Cluster, record: Record) -> None:
    """Add a violation for each pod that uses more than it requested, and for each card that is too full."""
    audit = ClusterAudit(cluster, {})
    for node in cluster.nodes:
        for card, used in audit.driver_usage(node).items():
            pods = {uid: mib for uid, mib in used.items() if uid in record.pods}
            for uid, mib in pods.items():
                limit = units_to_mib(record.pods[uid].units)
                if mib > limit + CONTEXT_MIB:
                    record.violations.append(f"pod {uid} uses {mib} MiB, its limit is {limit}")
            if sum(used.values()) > CARD_MIB:
                record.violations.append(f"{sum(used.values())} MiB of {card} are used")
    record.samples += 1
