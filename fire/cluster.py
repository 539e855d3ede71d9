"""Inject faults on a cluster with fenka's chart, a namespace of ordinary pods and a hostile tenant.

The tenant has the ClusterRole `edit` in one namespace. A proxy between the nodes and the API server can
disturb their connections. After each action the audit compares the driver, the kubelet's PodResources and the
processes with the API server's objects and with `fenka top node`.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster, ClusterError, Node, wait_until
from fire import audit
from fire.cluster_audit import HERE, MEMORY, TENANT, VICTIMS, ClusterAudit
from fire.experiment import Action, InvariantViolation, inject

IMAGE = "localhost/fenka-workload:e2e"
HOSTILE = f"system:serviceaccount:{TENANT}:mallory"
API_PORT, PROXY_PORT = 6443, 16443
CARDS = {"sd-cluster-04": 1, "sd-cluster-05": 2}
SPECS = {1: "t4", 2: "pair"}
SETTLE_WITHIN_S, RETRY_EVERY_S = 120.0, 0.5
"""How long a violation may last: long enough for a killed component to restart, also on a busy machine."""
MOST_PODS = 9
GATED_PODS, LABELS, VARIABLES = 4, 60_000, 500
"""Gated pods of one attack, and the labels or variables of 1000 bytes of each."""
LARGEST_ANNOTATIONS = 262_083
"""Bytes of one value. The API server allows 262,144 for all annotations, and fenka writes some."""
COMPONENTS = {
    "scheduler": ("fenka", "scheduler"),
    "node": ("fenka.cli.admin.node_process",),
    "relay": ("fenka.cli.admin.relay_process",),
    "kubelet": ("kubelet", "--config"),
    "containerd": ("containerd", "--config"),
}


TINY_PODS, GANGS, QUEUE_READS = 10, 6, 5
QUEUE = "/api/v1/namespaces/fenka/services/fenka-scheduler-read:http/proxy/gpushare-scheduler/queue"
GROUP = "pod-group.scheduling.sigs.k8s.io/"
REFUSED = "refused"
"""The first letters of the names of pods whose bindings are refused."""


def refusing_policy() -> list[dict[str, Any]]:
    """Return a policy as another program has it, which refuses bindings of pods of some names."""
    kind, version = "ValidatingAdmissionPolicy", "admissionregistration.k8s.io/v1"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods/binding"],
    }
    expression = f"!object.metadata.name.startsWith('{REFUSED}')"
    policy = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "fire-refuses"},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": expression, "message": "refused by another program"}],
        },
    }
    binding = {
        "apiVersion": version,
        "kind": f"{kind}Binding",
        "metadata": {"name": "fire-refuses"},
        "spec": {"policyName": "fire-refuses", "validationActions": ["Deny"]},
    }
    return [policy, binding]


@dataclass
class ClusterExperiment:
    """The state of one run.

    Args:
        cluster: a running cluster with fenka.
        seed: selects the actions.
        progress: called with lines that describe the progress.
        hostile: whether the tenant attacks.
    """

    cluster: Cluster
    seed: int
    progress: Callable[[str], None]
    hostile: bool = True
    rng: random.Random = field(init=False)
    audit: ClusterAudit = field(init=False)
    proxy: subprocess.Popen[str] | None = None
    number: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    exempt: set[str] = field(default_factory=set)
    requested_units: dict[str, int] = field(default_factory=dict)
    forged: set[str] = field(default_factory=set)
    """Pods of the tenant, which may be rejected, late, or carry forged records."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.audit = ClusterAudit(self.cluster, self.counts, self.requested_units, self.exempt)

    # ---- preparation ----

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Prepare sharing nodes, the two namespaces and the proxy."""
        kubectl = self.cluster.kubectl
        for name in (VICTIMS, TENANT):
            kubectl("create", "namespace", name)
            self.cluster.wait_for_service_account(name)
        kubectl("-n", TENANT, "create", "serviceaccount", "mallory")
        edit = ("--clusterrole=edit", f"--serviceaccount={TENANT}:mallory")
        kubectl("-n", TENANT, "create", "rolebinding", "mallory", *edit)
        for made in refusing_policy():
            kubectl("create", "-f", "-", stdin=json.dumps(made))
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
        """Return whether all units of all cards are allocatable."""
        return all(self.units(node) == cards * audit.UNITS for node, cards in CARDS.items())

    def units(self, node: str) -> int:
        """Return a node's allocatable units."""
        status = self.cluster.get("node", node)["status"]
        return int(status.get("allocatable", {}).get(MEMORY, 0))

    def start_proxy(self) -> None:
        """Start the proxy and redirect all connections from the nodes to the API server to it."""
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
            raise ClusterError("cannot start the proxy before the API server")
        rule = (
            "-p",
            "tcp",
            "--dport",
            str(API_PORT),
            "-j",
            "REDIRECT",
            "--to-ports",
            str(PROXY_PORT),
        )
        plane.run("iptables", "-t", "nat", "-A", "PREROUTING", *rule)

    def set_proxy_mode(self, mode: str) -> None:
        """Change the proxy's mode."""
        assert self.proxy
        assert self.proxy.stdin
        self.proxy.stdin.write(mode + "\n")
        self.proxy.stdin.flush()

    # ---- actions ----

    def pod(self, name: str, units: int, **rest: Any) -> dict[str, Any]:
        """Return a pod whose program fills its slice."""
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
        """Create an ordinary pod of a random size."""
        if len(self.requested_units) - len(self.exempt & self.requested_units.keys()) >= MOST_PODS:
            self.delete()
            return
        self.number += 1
        units, name = self.rng.choice([1, 2, 3, 4, 7, 14]), f"v{self.number}"
        self.requested_units[name] = units
        self.create(VICTIMS, self.pod(name, units))

    def create(self, namespace: str, pod: dict[str, Any], *options: str) -> None:
        """Run `kubectl create`."""
        self.cluster.kubectl("-n", namespace, *options, "create", "-f", "-", stdin=json.dumps(pod))

    def delete(self) -> None:
        """Delete an ordinary pod, sometimes by force."""
        names = sorted(self.requested_units)
        if not names:
            return
        name = self.rng.choice(names)
        self.exempt.add(name)
        force = ("--grace-period=0", "--force") if self.rng.random() < 0.4 else ("--wait=false",)
        with contextlib.suppress(ClusterError):
            self.cluster.kubectl("-n", VICTIMS, "delete", "pod", name, *force)
        del self.requested_units[name]

    def resize(self) -> None:
        """Request another size for a running ordinary pod."""
        names = sorted(self.requested_units)
        if names:
            name, units = self.rng.choice(names), self.rng.choice([1, 2, 4])
            self.requested_units[name] = max(units, self.requested_units[name])
            self.exempt.add(name)
            annotation = f"fenka.io/resize=gpu-mem={units}"
            with contextlib.suppress(ClusterError):
                self.cluster.kubectl(
                    "-n", VICTIMS, "annotate", "--overwrite", "pod", name, annotation
                )

    def kill(self) -> None:
        """Kill a component or an ordinary pod's program with SIGKILL."""
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
        """Return a node's processes whose command line contains these words, by this machine's PIDs."""
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
        """Return the PID namespace of the node that a process belongs to, also for containers."""
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
        """Disturb the connections to the API server for some seconds."""
        self.set_proxy_mode(self.rng.choice(["slow", "stall", "reset"]))
        time.sleep(self.rng.choice([0.5, 2, 5]))
        self.set_proxy_mode("pass")

    def attack(self) -> None:
        """Start one attack of the tenant."""
        attack = self.rng.choice(
            [
                self.forge_record,
                self.forge_resize,
                self.forge_node_name,
                self.forge_running,
                self.write_labels,
                self.write_annotations,
                self.stretch_grace,
                self.run_tiny_pods,
                self.wait_as_gangs,
                self.refuse_bindings,
            ]
        )
        self.counts[attack.__name__] = self.counts.get(attack.__name__, 0) + 1
        # A rejected attack has no effect either.
        with contextlib.suppress(ClusterError):
            attack()

    def tenant_kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl with the tenant's rights."""
        return self.cluster.kubectl(f"--as={HOSTILE}", "-n", TENANT, *words, stdin=stdin)

    def forge(self, units: int, annotations: dict[str, str], **spec: Any) -> str:
        """Create a pod of the tenant with forged records, and return its name."""
        self.number += 1
        name = f"m{self.number}"
        self.forged.add(name)
        made = self.pod(name, units, annotations=annotations, spec=spec)
        self.tenant_kubectl("create", "-f", "-", stdin=json.dumps(made))
        return name

    @staticmethod
    def record(card: int, units: int) -> dict[str, str]:
        """Return the annotations that an extender of gpushare's protocol writes."""
        return {
            "ALIYUN_COM_GPU_MEM_IDX": str(card),
            "ALIYUN_COM_GPU_MEM_POD": str(units),
            "ALIYUN_COM_GPU_MEM_DEV": str(audit.UNITS),
            "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
            "ALIYUN_COM_GPU_MEM_ASSUME_TIME": str(time.time_ns()),
            "scheduler.framework.gpushare.allocation": json.dumps({"0": {str(card): units}}),
        }

    def forge_record(self) -> None:
        """Request one unit, but record a whole card."""
        self.forge(
            1,
            self.record(self.rng.choice([0, 1, 7]), self.rng.choice([14, 1000])),
        )

    def forge_node_name(self) -> None:
        """Bypass every scheduler, with a forged record."""
        node = self.rng.choice(list(CARDS))
        self.forge(1, self.record(0, 1), nodeName=node)

    def forge_resize(self) -> None:
        """Record a forged resize on a gated pod, then remove the gate."""
        gate = {"schedulingGates": [{"name": "tenant.example/gate"}]}
        name = self.forge(1, {}, **gate)
        uid = json.loads(self.tenant_kubectl("get", "pod", name, "-o", "json"))["metadata"]["uid"]
        whole = [{"card": 0, "uuid": "", "memoryMiB": audit.CARD_MIB, "compute": 0}]
        record = {
            "version": 1,
            "pod": uid,
            "holds": whole,
            "containers": {"c": whole},
            "request": "",
        }
        with contextlib.suppress(ClusterError):
            self.tenant_kubectl("annotate", "pod", name, f"fenka.io/resized={json.dumps(record)}")
        gates = [{"op": "remove", "path": "/spec/schedulingGates"}]
        self.tenant_kubectl("patch", "pod", name, "--type=json", f"--patch={json.dumps(gates)}")

    def forge_running(self) -> None:
        """Delete or change the record of a running pod of the tenant."""
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

    def write_labels(self) -> None:
        """Create gated pods that fill the memory of whoever keeps their labels or variables."""
        gate = {"schedulingGates": [{"name": "tenant.example/gate"}]}
        for _ in range(GATED_PODS):
            self.number += 1
            if self.rng.random() < 0.5:
                labels = {f"l{number}": "x" for number in range(LABELS)}
                made = self.pod(f"m{self.number}", 1, labels=labels, spec=dict(gate))
            else:
                made = self.pod(f"m{self.number}", 1, spec=dict(gate))
                variables = [
                    {"name": f"V{number}", "value": "x" * 1000} for number in range(VARIABLES)
                ]
                made["spec"]["containers"][0]["env"] = variables
            self.tenant_kubectl("create", "-f", "-", stdin=json.dumps(made))

    def write_annotations(self) -> None:
        """Create a pod whose status the kubelet can hardly write: many annotations, or the largest."""
        if self.rng.random() < 0.5:
            self.forge(1, {f"a{number}": "x" for number in range(24_000)})
        else:
            self.forge(1, {"a": "x" * LARGEST_ANNOTATIONS})

    def stretch_grace(self) -> None:
        """Delete a running pod with a grace of a day, then by force, which leaves its program running."""
        pods = json.loads(self.tenant_kubectl("get", "pods", "-o", "json"))["items"]
        running = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]
        if running:
            name = self.rng.choice(running)
            with contextlib.suppress(ClusterError):
                self.tenant_kubectl("delete", "pod", name, "--grace-period=86400", "--wait=false")
            self.tenant_kubectl("delete", "pod", name, "--grace-period=0", "--force")

    def run_tiny_pods(self) -> None:
        """Run many pods of one unit, or delete those of the last time."""
        if self.tenant_kubectl("get", "pods", "-l", "fire=tiny", "-o", "name"):
            self.tenant_kubectl("delete", "pods", "-l", "fire=tiny", "--wait=false")
            return
        for _ in range(TINY_PODS):
            self.number += 1
            made = self.pod(f"m{self.number}", 1, labels={"fire": "tiny"})
            self.tenant_kubectl("create", "-f", "-", stdin=json.dumps(made))

    def wait_as_gangs(self) -> None:
        """Have gangs wait for which no room is, and read the queue meanwhile."""
        for _ in range(GANGS):
            self.number += 1
            group = {
                GROUP + "name": f"g{self.number}",
                GROUP + "min-available": "4",
                "fire": "gang",
            }
            for member in range(4):
                name = f"g{self.number}-{member}"
                made = self.pod(name, audit.UNITS - member, labels=group)
                self.tenant_kubectl("create", "-f", "-", stdin=json.dumps(made))
        for _ in range(QUEUE_READS):
            with contextlib.suppress(ClusterError):
                self.cluster.kubectl("get", "--raw", QUEUE)
        self.tenant_kubectl("delete", "pods", "-l", "fire=gang", "--wait=false")

    def refuse_bindings(self) -> None:
        """Have another program's policy refuse the binding of a pod of a whole card, again and again."""
        self.number += 1
        made = self.pod(f"{REFUSED}{self.number}", audit.UNITS, labels={"fire": "refused"})
        self.tenant_kubectl("delete", "pods", "-l", "fire=refused", "--wait=false")
        self.tenant_kubectl("create", "-f", "-", stdin=json.dumps(made))

    # ---- the run ----

    def check(self, moment: str) -> None:
        """Check until there is no violation. Raises InvariantViolation for those that persist."""
        violations: list[str] = []
        until = time.monotonic() + SETTLE_WITHIN_S
        while not violations or time.monotonic() < until:
            try:
                violations = list(self.audit.find_violations())
            except ClusterError as error:
                violations = [str(error)[:300]]
            if not violations:
                return
            time.sleep(RETRY_EVERY_S)
        raise InvariantViolation(f"after {moment}: " + "; ".join(violations))

    def run(self, moves: int, seconds: float) -> int:
        """Run up to `moves` actions within this time; return their number. Raises InvariantViolation."""
        table: list[tuple[Action, float]] = [
            (self.start, 8),
            (self.delete, 4),
            (self.resize, 1),
            (self.kill, 4),
            (self.disturb_network, 2),
            (self.attack, 4 * self.hostile),
        ]

        def progress(done: int) -> None:
            if done % 10 == 0:
                self.progress(f"{done} actions, {len(self.requested_units)} pods, {self.counts}")

        done = inject(self, table, moves, seconds, progress)
        self.finish()
        return done

    def finish(self) -> None:
        """Delete all pods, check that no lease is left, and that pods can allocate whole cards again."""
        for namespace in (VICTIMS, TENANT):
            self.cluster.kubectl("-n", namespace, "delete", "pods", "--all", "--now", timeout=180)
        self.requested_units.clear()
        wait_until("no lease is left", lambda: not any(map(self.leases, self.cluster.nodes)), 120)
        for number in range(sum(CARDS.values())):
            self.requested_units[f"whole{number}"] = audit.UNITS
            self.create(VICTIMS, self.pod(f"whole{number}", audit.UNITS))
        for number in range(sum(CARDS.values())):
            self.cluster.wait_for_pod(f"whole{number}", VICTIMS, seconds=120)
        self.check("the end")
        self.cluster.kubectl("-n", VICTIMS, "delete", "pods", "--all", "--now")

    @staticmethod
    def leases(node: Node) -> list[str]:
        """Return the leases on a node."""
        return node.run("ls", "-A", "/run/fenka/leases").split()
