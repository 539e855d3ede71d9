"""The storm over a cluster: fenka as its chart installs it, a namespace of victims, a hostile tenant.

The tenant has the ClusterRole `edit` in one namespace. Between the nodes and the API server stands a proxy
that fails when it is told to. After each move the audit compares the driver, the kubelet's PodResources and
the processes with the API server's objects and with fenka's screens.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from e2e.cluster import Cluster, ClusterError, Node, wait_until
from fire import audit, pod_resources
from fire.experiment import InvariantViolation, Move, inject

HERE = Path(__file__).parent
IMAGE = "localhost/fenka-workload:e2e"
MEMORY = "aliyun.com/gpu-mem"
VICTIMS, TENANT = "victims", "tenant"
HOSTILE = f"system:serviceaccount:{TENANT}:mallory"
LIBRARIES = HERE.parent / "src" / "fenka" / "_native" / "simulated"
"""The driver's, which find the cards of a node at /run/fenka/simulated."""
API_PORT, PROXY_PORT = 6443, 16443
CARDS = {"sd-cluster-04": 1, "sd-cluster-05": 2}
SPECS = {1: "t4", 2: "pair"}
SETTLE_WITHIN_S, RETRY_EVERY_S = 60.0, 0.5
"""How long a complaint may last: a component that was killed is back by then."""
MOST_PODS = 9
PODS = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
COMPONENTS = {
    "scheduler": ("fenka", "scheduler"),
    "node": ("fenka", "node", "--unit"),
    "kubelet": ("kubelet", "--config"),
    "containerd": ("containerd", "--config"),
}


@dataclass
class ClusterExperiment:
    """The state of one run. say: where progress goes."""

    cluster: Cluster
    seed: int
    say: Callable[[str], None]
    hostile: bool = True
    rng: random.Random = field(init=False)
    proxy: subprocess.Popen[str] | None = None
    number: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    exempt: set[str] = field(default_factory=set)
    """Pods that were struck: they may have lost what they had."""
    asked: dict[str, int] = field(default_factory=dict)
    """The most units that each pod has asked for, at first or by a resize."""
    forged: set[str] = field(default_factory=set)
    """Pods of the tenant, which may be refused, late, or wrong about themselves."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    # ---- the place ----

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Nodes that share, the two namespaces, and the proxy."""
        kubectl = self.cluster.kubectl
        for name in (VICTIMS, TENANT):
            kubectl("create", "namespace", name)
            self.cluster.wait_for_service_account(name)
        kubectl("-n", TENANT, "create", "serviceaccount", "mallory")
        edit = ("--clusterrole=edit", f"--serviceaccount={TENANT}:mallory")
        kubectl("-n", TENANT, "create", "rolebinding", "mallory", *edit)
        for node, cards in CARDS.items():
            label = f"fenka.io/simulated={SPECS[cards]}"
            kubectl("label", "--overwrite", "node", node, "gpushare=true", label)
        wait_until("both nodes share", self.all_nodes_share, 120)
        self.start_proxy()
        try:
            yield
        finally:
            if self.proxy and self.proxy.stdin:
                self.proxy.stdin.close()
                self.proxy.wait(10)

    def all_nodes_share(self) -> bool:
        """Whether the kubelets offer every card."""
        return all(self.units(node) == cards * audit.UNITS for node, cards in CARDS.items())

    def units(self, node: str) -> int:
        """What the kubelet offers."""
        status = self.cluster.get("node", node)["status"]
        return int(status.get("allocatable", {}).get(MEMORY, 0))

    def start_proxy(self) -> None:
        """Whatever comes from the nodes to the API server goes through it."""
        plane = self.cluster.control_plane
        words = [
            sys.executable,
            str(HERE / "proxy.py"),
            str(PROXY_PORT),
            "127.0.0.1",
            str(API_PORT),
        ]
        self.proxy = subprocess.Popen(
            self.cluster.command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.proxy.stdout
        if self.proxy.stdout.readline() != "ready\n":
            raise ClusterError("the proxy before the API server does not start")
        to = (
            "-p",
            "tcp",
            "--dport",
            str(API_PORT),
            "-j",
            "REDIRECT",
            "--to-ports",
            str(PROXY_PORT),
        )
        plane.run("iptables", "-t", "nat", "-A", "PREROUTING", *to)

    def set_proxy_mode(self, mode: str) -> None:
        """Change its mode."""
        assert self.proxy
        assert self.proxy.stdin
        self.proxy.stdin.write(mode + "\n")
        self.proxy.stdin.flush()

    # ---- moves ----

    def pod(self, name: str, units: int, **rest: Any) -> dict[str, Any]:
        """A pod whose program fills its slice."""
        code = (HERE / "memory_filler.py").read_text()
        spec = rest.pop("spec", {})
        container = {
            "name": "c",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["python3", "-u", "-c", code, "forever"],
            "resources": {"limits": {MEMORY: str(units)}},
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **rest},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **spec},
        }

    def start(self) -> None:
        """A victim's pod of a random size."""
        if len(self.asked) - len(self.exempt & self.asked.keys()) >= MOST_PODS:
            self.delete()
            return
        self.number += 1
        units, name = self.rng.choice([1, 2, 3, 4, 7, 14]), f"v{self.number}"
        self.asked[name] = units
        self.create(VICTIMS, self.pod(name, units))

    def create(self, namespace: str, pod: dict[str, Any], *options: str) -> None:
        """As `kubectl create`."""
        self.cluster.kubectl("-n", namespace, *options, "create", "-f", "-", stdin=json.dumps(pod))

    def delete(self) -> None:
        """A victim's pod goes, in peace or by force."""
        names = sorted(self.asked)
        if not names:
            return
        name = self.rng.choice(names)
        self.exempt.add(name)
        force = ("--grace-period=0", "--force") if self.rng.random() < 0.4 else ("--wait=false",)
        with contextlib.suppress(ClusterError):
            self.cluster.kubectl("-n", VICTIMS, "delete", "pod", name, *force)
        del self.asked[name]

    def resize(self) -> None:
        """A victim asks for more or less while it runs."""
        names = sorted(self.asked)
        if names:
            name, units = self.rng.choice(names), self.rng.choice([1, 2, 4])
            self.asked[name] = max(units, self.asked[name])
            self.exempt.add(name)
            wish = f"fenka.io/resize=gpu-mem={units}"
            with contextlib.suppress(ClusterError):
                self.cluster.kubectl("-n", VICTIMS, "annotate", "--overwrite", "pod", name, wish)

    def kill(self) -> None:
        """SIGKILL to a component somewhere, or to a victim's program."""
        node = self.rng.choice(self.cluster.nodes)
        target = self.rng.choice([*COMPONENTS, "apiserver", "kube-scheduler", "program"])
        self.counts[target] = self.counts.get(target, 0) + 1
        match target:
            case "apiserver":
                self.cluster.restart_apiserver()
            case "kube-scheduler":
                self.cluster.control_plane.restart("kube-scheduler")
                self.cluster.set_scheduler_configuration(self.cluster.scheduler_configuration)
            case "kubelet":
                node.restart_kubelet()
            case "containerd":
                node.restart_containerd()
            case "program":
                for pid in self.pids(node, "python3", "forever")[:1]:
                    os.kill(pid, signal.SIGKILL)
            case _:
                for pid in self.pids(node, *COMPONENTS[target]):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def pids(self, node: Node, *words: str) -> list[int]:
        """Processes of a node whose command line has these words, by this machine's numbers."""
        space = os.readlink(f"/proc/{node.first_process}/ns/pid")
        pids = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdecimal():
                    continue
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
                if all(word in line for word in words) and self.node_space(entry) == space:
                    pids.append(int(entry.name))
        return pids

    def node_space(self, process: Path) -> str:
        """The PID namespace of the machine that a process belongs to; a container's is one further in."""
        for node in self.cluster.nodes:
            own = os.readlink(f"/proc/{node.first_process}/ns/pid")
            if os.readlink(process / "ns" / "pid") == own:
                return own
            cgroup = (process / "cgroup").read_text()
            node_cgroup = (
                Path(f"/proc/{node.first_process}/cgroup").read_text().split(":")[-1].strip()
            )
            if len(node_cgroup) > 1 and node_cgroup in cgroup:
                return own
        return ""

    def disturb_network(self) -> None:
        """The way to the API server changes."""
        self.set_proxy_mode(self.rng.choice(["slow", "stall", "reset"]))
        time.sleep(self.rng.choice([0.5, 2, 5]))
        self.set_proxy_mode("pass")

    def attack(self) -> None:
        """The tenant forges."""
        attack = self.rng.choice(
            [self.forge_record, self.forge_resize, self.forge_node_name, self.forge_running]
        )
        self.counts[attack.__name__] = self.counts.get(attack.__name__, 0) + 1
        # Refused is as good as without effect.
        with contextlib.suppress(ClusterError):
            attack()

    def tenant_kubectl(self, *words: str, stdin: str | None = None) -> str:
        """kubectl with the tenant's rights."""
        return self.cluster.kubectl(f"--as={HOSTILE}", "-n", TENANT, *words, stdin=stdin)

    def forge(self, units: int, annotations: dict[str, str], **spec: Any) -> str:
        """A pod of the tenant with records of its own; its name."""
        self.number += 1
        name = f"m{self.number}"
        self.forged.add(name)
        made = self.pod(name, units, annotations=annotations, spec=spec)
        self.tenant_kubectl("create", "-f", "-", stdin=json.dumps(made))
        return name

    @staticmethod
    def record(card: int, units: int) -> dict[str, str]:
        """The keys that a scheduler extender of gpushare's protocol writes."""
        return {
            "ALIYUN_COM_GPU_MEM_IDX": str(card),
            "ALIYUN_COM_GPU_MEM_POD": str(units),
            "ALIYUN_COM_GPU_MEM_DEV": str(audit.UNITS),
            "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
            "ALIYUN_COM_GPU_MEM_ASSUME_TIME": str(time.time_ns()),
            "scheduler.framework.gpushare.allocation": json.dumps({"0": {str(card): units}}),
        }

    def forge_record(self) -> None:
        """One unit asked for, a card's worth recorded."""
        self.forge(
            1,
            self.record(self.rng.choice([0, 1, 7]), self.rng.choice([14, 1000])),
        )

    def forge_node_name(self) -> None:
        """Past every scheduler, with a record of its own."""
        node = self.rng.choice(list(CARDS))
        self.forge(1, self.record(0, 1), nodeName=node)

    def forge_resize(self) -> None:
        """A record of a resize that never was, behind a gate that the tenant opens afterwards."""
        gate = {"schedulingGates": [{"name": "tenant.example/gate"}]}
        name = self.forge(1, {}, **gate)
        uid = json.loads(self.tenant_kubectl("get", "pod", name, "-o", "json"))["metadata"]["uid"]
        whole = [{"card": 0, "uuid": "", "memoryMiB": audit.CARD_MIB, "compute": 0}]
        record = {"version": 1, "pod": uid, "holds": whole, "containers": {"c": whole}, "wish": ""}
        with contextlib.suppress(ClusterError):
            self.tenant_kubectl("annotate", "pod", name, f"fenka.io/resized={json.dumps(record)}")
        gates = [{"op": "remove", "path": "/spec/schedulingGates"}]
        self.tenant_kubectl("patch", "pod", name, "--type=json", f"--patch={json.dumps(gates)}")

    def forge_running(self) -> None:
        """A running pod of the tenant takes back, or changes, what was recorded of it."""
        names = json.loads(self.tenant_kubectl("get", "pods", "-o", "json"))["items"]
        if names:
            name = self.rng.choice(names)["metadata"]["name"]
            changes = self.rng.choice(
                [
                    [f"{key}-" for key in self.record(0, 1)],
                    [f"{key}={value}" for key, value in self.record(1, 14).items()],
                    ["scheduler.framework.gpushare.allocation=no json"],
                ]
            )
            self.tenant_kubectl("annotate", "--overwrite", "pod", name, *changes)

    # ---- truth ----

    def driver_usage(self, node: Node) -> dict[str, dict[str, int]]:
        """MiB by card and pod's UID, as the node's driver says and the kernel knows the processes."""
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
        """Of both namespaces."""
        return [
            *self.cluster.list("pods", VICTIMS),
            *self.cluster.list("pods", TENANT),
        ]

    def find_violations(self) -> list[str]:
        """What is wrong at this moment."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.all_pods()}
        violations: list[str] = []
        for node in self.cluster.nodes:
            if not node.is_on():
                continue
            for uuid, held in self.driver_usage(node).items():
                promised = 0
                for uid, mib in held.items():
                    pod = pods.get(uid)
                    if pod is None:
                        continue  # deleted by force; its processes end with their container
                    limit = audit.units_to_mib(self.limit(pod))
                    promised += limit
                    if mib > limit + audit.CONTEXT_MIB:
                        name = pod["metadata"]["name"]
                        violations.append(f"{name} holds {mib} MiB of {uuid}, it asked for {limit}")
                resized = any(
                    pods[uid]["metadata"]["name"] in self.exempt for uid in held if uid in pods
                )
                if promised > audit.CARD_MIB and not resized:
                    violations.append(f"{promised} MiB of {uuid} are promised")
            violations += self.ids(node, pods)
        violations += self.victims(pods)
        violations += self.screen(pods)
        return violations

    def screen(self, pods: dict[str, Any]) -> Iterator[str]:
        """`fenka top node` counts no pod for more than it asked for, and each victim that runs."""
        shown = json.loads(
            self.cluster.run(sys.executable, "-m", "fenka", "top", "node", "-o", "json")
        )
        for node in shown:
            at = [pod for pod in pods.values() if pod["spec"].get("nodeName") == node["name"]]
            alive = [pod for pod in at if pod["status"].get("phase") not in ("Failed", "Succeeded")]
            most = sum(
                max(self.limit(pod), self.asked.get(pod["metadata"]["name"], 0)) for pod in alive
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
                yield f"{node['name']}: {allocated} units allocated, {least} to {most} asked for"
            for card in node["cards"]:
                if card["allocated"] > card["total"]:
                    yield f"{node['name']}: a card shows {card['allocated']} of {card['total']}"

    def limit(self, pod: dict[str, Any]) -> int:
        """Units that a pod may have: what its limits ask, or a resize of the victim's own."""
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        return max(int(limits[MEMORY]), self.asked.get(pod["metadata"]["name"], 0))

    def ids(self, node: Node, pods: dict[str, Any]) -> Iterator[str]:
        """Device ids: as many as were asked for, and none held twice."""
        names = {
            (pod["metadata"]["namespace"], pod["metadata"]["name"]): pod for pod in pods.values()
        }
        pod_by_id: dict[str, str] = {}
        try:
            listed = list(pod_resources.held_devices(Path(f"/proc/{node.first_process}/root")))
        except grpc.RpcError:
            yield f"the kubelet of {node.name} says nothing"
            return
        for allocation in listed:
            pod = names.get((allocation.namespace, allocation.pod))
            if allocation.resource != MEMORY or pod is None:
                continue
            if pod["status"].get("phase") in ("Failed", "Succeeded"):
                continue
            want = int(pod["spec"]["containers"][0]["resources"]["limits"][MEMORY])
            if len(allocation.ids) != want:
                yield f"{allocation.pod} holds {len(allocation.ids)} ids, it asked for {want}"
            for identity in allocation.ids:
                if identity in pod_by_id:
                    yield f"{allocation.pod} and {pod_by_id[identity]} both hold {identity}"
                pod_by_id[identity] = allocation.pod

    def victims(self, pods: dict[str, Any]) -> Iterator[str]:
        """Victims see what they asked for, lose nothing, and do not fail."""
        for pod in pods.values():
            name, status = pod["metadata"]["name"], pod["status"]
            if pod["metadata"]["namespace"] != VICTIMS or name in self.exempt:
                continue
            if status.get("reason") == "UnexpectedAdmissionError":
                # The kubelet's own refusal after its restart, before it asks any plugin.
                self.exempt.add(name)
                self.counts["refused by the kubelet"] = (
                    self.counts.get("refused by the kubelet", 0) + 1
                )
            elif status.get("phase") == "Failed":
                yield f"{name} failed: {status.get('reason')} {status.get('message', '')[:200]}"
            if status.get("phase") != "Running":
                continue
            try:
                lines = self.cluster.kubectl("-n", VICTIMS, "logs", name).splitlines()
            except ClusterError:
                continue
            want = [audit.units_to_mib(self.asked[name])]
            for line in map(json.loads, filter(lambda line: line.startswith("{"), lines)):
                if "got" in line and (line["got"], line["total"]) != (want, want):
                    yield f"{name} asked for {want} MiB, its program says {line}"
                if "lost" in line or "error" in line:
                    yield f"{name}: {line}"

    def check(self, moment: str) -> None:
        """Look until all is well. Raises Breach with what persists."""
        violations: list[str] = []
        until = time.monotonic() + SETTLE_WITHIN_S
        while not violations or time.monotonic() < until:
            try:
                violations = list(self.find_violations())
            except ClusterError as error:
                violations = [str(error)[:300]]
            if not violations:
                return
            time.sleep(RETRY_EVERY_S)
        raise InvariantViolation(f"after {moment}: " + "; ".join(violations))

    # ---- the run ----

    def run(self, moves: int, until: float) -> int:
        """So many moves, or until this moment; how many were made. Raises Breach."""
        table: list[tuple[Move, float]] = [
            (self.start, 8),
            (self.delete, 4),
            (self.resize, 1),
            (self.kill, 4),
            (self.disturb_network, 2),
            (self.attack, 4 * self.hostile),
        ]

        def progress(made: int) -> None:
            if made % 10 == 0:
                self.say(f"{made} moves, {len(self.asked)} pods, {self.counts}")

        made = inject(self, table, moves, until, progress)
        self.finish()
        return made

    def finish(self) -> None:
        """All goes; nothing stays; whole cards are had again by ordinary pods."""
        for namespace in (VICTIMS, TENANT):
            self.cluster.kubectl("-n", namespace, "delete", "pods", "--all", "--now", timeout=180)
        self.asked.clear()
        wait_until("no lease is left", lambda: not any(map(self.left, self.cluster.nodes)), 120)
        for number in range(sum(CARDS.values())):
            self.asked[f"whole{number}"] = audit.UNITS
            self.create(VICTIMS, self.pod(f"whole{number}", audit.UNITS))
        for number in range(sum(CARDS.values())):
            self.cluster.wait_for_pod(f"whole{number}", VICTIMS, seconds=120)
        self.check("the end")
        self.cluster.kubectl("-n", VICTIMS, "delete", "pods", "--all", "--now")

    @staticmethod
    def left(node: Node) -> list[str]:
        """Leases on a node."""
        return node.run("ls", "-A", "/run/fenka/leases").split()
