"""Compare fenka's view of a cluster with the driver, the kubelets and the processes on its nodes."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from e2e.cluster import Cluster, ClusterError, Node
from fire import audit, pod_resources

HERE = Path(__file__).parent
MEMORY = "aliyun.com/gpu-mem"
VICTIMS, TENANT = "victims", "tenant"
LIBRARIES = HERE.parent / "src" / "fenka" / "_native" / "simulated"
"""The simulated driver's libraries, which find a node's cards at /run/fenka/simulated."""
PODS = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


@dataclass
class ClusterAudit:
    """The audit of one cluster, and what it must know about the pods of the experiment."""

    cluster: Cluster
    counts: dict[str, int]
    """Pods that the kubelet itself rejected are counted here."""
    requested_units: dict[str, int] = field(default_factory=dict)
    """The largest number of units that each ordinary pod has requested, at first or by a resize."""
    exempt: set[str] = field(default_factory=set)
    """Pods that may have lost memory, because they were deleted or resized."""

    def driver_usage(self, node: Node) -> dict[str, dict[str, int]]:
        """Return MiB by card and pod UID, from the node's driver and the processes' cgroups."""
        words = [
            "env",
            f"LD_LIBRARY_PATH={LIBRARIES}",
            sys.executable,
            str(HERE / "driver_usage.py"),
        ]
        cards = json.loads(node.run(*words))
        usage: dict[str, dict[str, int]] = {}
        for uuid, card in cards.items():
            pods = usage.setdefault(uuid, {})
            for pid, mib in card["processes"].items():
                with contextlib.suppress(OSError):
                    match = PODS.search(node.read(f"/proc/{pid}/cgroup"))
                    if match:
                        uid = match[1].replace("_", "-")
                        pods[uid] = pods.get(uid, 0) + mib
        return usage

    def all_pods(self) -> list[dict[str, Any]]:
        """Return the pods of both namespaces."""
        return [
            *self.cluster.list("pods", VICTIMS),
            *self.cluster.list("pods", TENANT),
        ]

    def find_violations(self) -> list[str]:
        """Return one sentence for each violation at this moment."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.all_pods()}
        violations: list[str] = []
        for node in self.cluster.nodes:
            if not node.is_on():
                continue
            for uuid, used in self.driver_usage(node).items():
                allocated = 0
                for uid, mib in used.items():
                    pod = pods.get(uid)
                    if pod is None:
                        continue  # deleted by force; its processes end with their container
                    limit = audit.units_to_mib(self.limit(pod))
                    allocated += limit
                    if mib > limit + audit.CONTEXT_MIB:
                        name = pod["metadata"]["name"]
                        violations.append(f"{name} uses {mib} MiB of {uuid}, its limit is {limit}")
                resized = any(
                    pods[uid]["metadata"]["name"] in self.exempt for uid in used if uid in pods
                )
                if allocated > audit.CARD_MIB and not resized:
                    violations.append(f"{allocated} MiB of {uuid} are allocated")
            violations += self.ids(node, pods)
        violations += self.victims(pods)
        violations += self.exhausted()
        violations += self.screen(pods)
        return violations

    def exhausted(self) -> Iterator[str]:
        """Check that no container of fenka was ended because it needed more memory than it may."""
        for pod in self.cluster.list("pods", "fenka"):
            for status in pod["status"].get("containerStatuses", ()):
                for state in (status.get("state", {}), status.get("lastState", {})):
                    if state.get("terminated", {}).get("reason") == "OOMKilled":
                        yield f"{pod['metadata']['name']} ran out of memory"

    def screen(self, pods: dict[str, Any]) -> Iterator[str]:
        """Check that `fenka top node` counts each running ordinary pod, and none for more than requested."""
        shown = json.loads(
            self.cluster.run(sys.executable, "-m", "fenka", "top", "node", "-o", "json")
        )
        for node in shown:
            on_node = [pod for pod in pods.values() if pod["spec"].get("nodeName") == node["name"]]
            alive = [
                pod for pod in on_node if pod["status"].get("phase") not in ("Failed", "Succeeded")
            ]
            most = sum(
                max(self.limit(pod), self.requested_units.get(pod["metadata"]["name"], 0))
                for pod in alive
            )
            least = sum(
                self.limit(pod)
                for pod in alive
                if pod["metadata"]["namespace"] == VICTIMS
                and pod["status"].get("phase") == "Running"
                and pod["metadata"]["name"] not in self.exempt
            )
            allocated = sum(card["allocated"] for card in node["cards"])
            if not least <= allocated <= most:
                yield f"{node['name']}: {allocated} units allocated, {least} to {most} requested"
            for card in node["cards"]:
                if card["allocated"] > card["total"]:
                    yield f"{node['name']}: a card shows {card['allocated']} of {card['total']}"

    def limit(self, pod: dict[str, Any]) -> int:
        """Return the units that a pod may use, by its limits or by an ordinary pod's resize."""
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        return max(int(limits[MEMORY]), self.requested_units.get(pod["metadata"]["name"], 0))

    def ids(self, node: Node, pods: dict[str, Any]) -> Iterator[str]:
        """Check that each container has as many device IDs as requested, and that none is allocated twice."""
        names = {
            (pod["metadata"]["namespace"], pod["metadata"]["name"]): pod for pod in pods.values()
        }
        pod_by_id: dict[str, str] = {}
        try:
            listed = list(pod_resources.held_devices(Path(f"/proc/{node.first_process}/root")))
        except grpc.RpcError:
            yield f"the kubelet of {node.name} does not answer"
            return
        for allocation in listed:
            pod = names.get((allocation.namespace, allocation.pod))
            if allocation.resource != MEMORY or pod is None:
                continue
            if pod["status"].get("phase") in ("Failed", "Succeeded"):
                continue
            want = int(pod["spec"]["containers"][0]["resources"]["limits"][MEMORY])
            if len(allocation.ids) != want:
                yield f"{allocation.pod} holds {len(allocation.ids)} IDs, it requested {want}"
            for identity in allocation.ids:
                if identity in pod_by_id:
                    yield f"{allocation.pod} and {pod_by_id[identity]} both hold {identity}"
                pod_by_id[identity] = allocation.pod

    def victims(self, pods: dict[str, Any]) -> Iterator[str]:
        """Check that ordinary pods see the memory that they requested, keep it, and do not fail."""
        for pod in pods.values():
            name, status = pod["metadata"]["name"], pod["status"]
            if pod["metadata"]["namespace"] != VICTIMS or name in self.exempt:
                continue
            if status.get("reason") == "UnexpectedAdmissionError":
                # The kubelet itself rejects pods after its restart, before it calls a plugin.
                self.exempt.add(name)
                self.counts["rejected by the kubelet"] = (
                    self.counts.get("rejected by the kubelet", 0) + 1
                )
            elif status.get("phase") == "Failed":
                yield f"{name} failed: {status.get('reason')} {status.get('message', '')[:200]}"
            if status.get("phase") != "Running":
                continue
            try:
                lines = self.cluster.kubectl("-n", VICTIMS, "logs", name).splitlines()
            except ClusterError:
                continue
            want = [audit.units_to_mib(self.requested_units[name])]
            for line in map(json.loads, filter(lambda line: line.startswith("{"), lines)):
                if "got" in line and (line["got"], line["total"]) != (want, want):
                    yield f"{name} requested {want} MiB, its program reports {line}"
                if "lost" in line or "error" in line:
                    yield f"{name}: {line}"
