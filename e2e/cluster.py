"""Run a cluster: a control plane and nodes on one network, each a machine of its own.

with Cluster(state) as cluster:
    cluster.apply(text)
    cluster.wait_for_pod("web")
    print(cluster.kubectl("get", "pods", "-A"))
    cluster.node("sd-cluster-04").restart_kubelet()
"""

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from e2e import configuration, dns, network
from e2e.administrator import Administrator
from e2e.images import copy_store
from e2e.machine import (
    ClusterError,
    Machine,
    require_programs,
    tail,
    wait_until,
)
from e2e.pki import Authority
from e2e.programs import (
    CNI,
    OWN,
    BuildError,
    chosen_containerd,
    directories,
    exclusive_lock,
    minor,
)
from e2e.supervisor import REPOSITORY, hierarchies

# The name contains a hash of this checkout's path, so that several checkouts can run clusters side by side.
STATE = Path(f"/var/tmp/fenka-e2e-{hashlib.sha256(str(REPOSITORY).encode()).hexdigest()[:6]}")
CONTROL_PLANE = "control-plane"
CLONE_NEWNET = 0x40000000
SPARES = range(100, 116)
"""Numbers of machines that may come while the cluster runs. Others have routes to their pods already."""


@dataclass(frozen=True)
class NodeSpec:
    """The name and the address of a node. All addresses are in the control plane's /24."""

    name: str
    address: str


@dataclass(frozen=True)
class Layout:
    """The machines of a cluster."""

    nodes: tuple[NodeSpec, ...] = (
        NodeSpec("sd-cluster-04", "192.168.1.214"),
        NodeSpec("sd-cluster-05", "192.168.1.215"),
    )
    control_plane: str = "192.168.1.200"

    def pod_subnet(self, number: int) -> str:
        """Return the pod subnet of one node."""
        return f"10.77.{number + 1}.0/24"

    def spare_address(self, number: int) -> str:
        """Return the address of a machine that may come later. number: one of SPARES."""
        return f"{self.control_plane.rpartition('.')[0]}.{number}"

    def pod_subnets(self) -> dict[str, str]:
        """Return the pod subnets of all nodes and of machines that may come later, by address."""
        nodes = {each.address: self.pod_subnet(at) for at, each in enumerate(self.nodes)}
        spares = {self.spare_address(number): self.pod_subnet(number) for number in SPARES}
        return nodes | spares


class Node(Machine):
    """A node: containerd, kubelet and kube-proxy in their own namespaces.

    A hostPID pod sees the node's PID namespace. A hostPath volume shows the node's root. The daemons are
    "containerd", "kubelet" and "kube-proxy". See Machine for kill, start_again, restart, log and run.
    """

    driver = "cgroupfs"
    """Of cgroups: a machine in namespaces has no systemd."""

    runtime = configuration.CONTAINERD
    """The socket of its container runtime."""

    def __init__(
        self, cluster: "Cluster", spec: NodeSpec, number: int, flags: tuple[str, ...] = ()
    ) -> None:
        """Args:
        cluster: the cluster.
        spec: its name and address.
        number: selects its pod subnet.
        flags: more of the kubelet's.
        """
        super().__init__(cluster.state, spec.name, spec.address)
        self.cluster = cluster
        self.number = number
        self.flags = flags

    def connect(self) -> None:
        """Connect the node to the bridge."""
        cluster = self.cluster
        subnets = cluster.layout.pod_subnets()
        network.connect(cluster.control_plane, self, f"node{self.number}", subnets)

    def ctr(self, *argv: str) -> str:
        """Run ctr in the containerd namespace of the kubelet's containers."""
        command = ("ctr", "--address", configuration.CONTAINERD, "-n", "k8s.io", *argv)
        return self.run(*command)

    def import_image(self, archive: Path) -> None:
        """Load a Docker or OCI archive, so that pods can use it without a registry."""
        self.ctr("images", "import", str(archive.resolve()))

    def prepare(self) -> None:
        """Start what a node can start before the API server is up."""
        if self.cluster.images:
            copy_store(self.cluster.images, self.files.folder / "disk/var/lib/containerd")
        self.start_containerd()

    def start_containerd(self) -> None:
        """Start containerd and wait until it answers."""
        cni, runc = (
            (OWN if chosen_containerd() is OWN else CNI).directory() / "bin",
            shutil.which("runc", path="/usr/sbin:/usr/bin:/sbin:/bin"),
        )
        settings = self.files.folder / "containerd.toml"
        settings.write_text(configuration.containerd(cni, runc or "runc", self.driver))
        self.write_pod_network()
        self.start("containerd", ["containerd", "--config", str(settings)])
        self.wait_for_containerd()

    def write_pod_network(self) -> None:
        """Write the settings of the CNI plugins to its disk."""
        network = self.files.folder / "disk" / "etc" / "cni" / "net.d" / "10-pods.conflist"
        network.parent.mkdir(parents=True, exist_ok=True)
        network.write_text(configuration.pod_network(self.cluster.layout.pod_subnet(self.number)))

    def wait_for_containerd(self) -> None:
        """Wait until containerd answers."""

        def answers() -> bool:
            try:
                self.ctr("version")
            except ClusterError:
                return False
            return True

        wait_until(f"{self.name}: containerd", answers, log=self.log("containerd"))

    def start_kubelet(self) -> None:
        """Start the kubelet and kube-proxy."""
        pki = self.cluster.state / "pki"
        settings = self.files.folder / "kubelet.yaml"
        text = configuration.kubelet(pki, self.name, self.driver, self.runtime)
        settings.write_text(text)
        kubelet = ["kubelet", f"--config={settings}", f"--node-ip={self.address}"]
        kubelet += [f"--kubeconfig={pki}/kubelet-{self.name}.kubeconfig"]
        self.start("kubelet", [*kubelet, f"--hostname-override={self.name}", *self.flags])
        self.cluster.start_kube_proxy(self, self.name)

    def restart_kubelet(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the kubelet, start it again, and wait until it has reported the node Ready."""
        began = time.time()
        self.restart("kubelet", number)
        self.wait_until_ready(since=began)

    def restart_containerd(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill containerd and start it again; containers keep running."""
        self.restart("containerd", number)
        self.wait_for_containerd()

    def reboot(self) -> None:
        """Switch the node off and on, and wait until it is Ready."""
        owner = self.cluster.owner
        self.power_off()
        self.power_on(owner)
        self.connect()
        self.start_containerd()
        began = time.time()
        self.start_kubelet()
        self.wait_until_ready(since=began)

    def is_ready(self, since: float = 0) -> bool:
        """Return whether the node is Ready and its kubelet renewed its lease after `since` (time.time)."""
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        if self.cluster.kubectl("get", "node", self.name, "-o", path) != "True":
            return False
        if not since:
            return True
        lease = self.cluster.get("lease", self.name, "kube-node-lease")
        renewed = datetime.fromisoformat(lease["spec"]["renewTime"])
        return self.runs("kubelet") and renewed.timestamp() >= since

    def wait_until_ready(self, seconds: float = 60, since: float = 0) -> None:
        """Wait until the node is Ready."""
        description = f"{self.name}: Ready"
        wait_until(description, lambda: self.is_ready(since), seconds, self.log("kubelet"))


class Cluster(Administrator):
    """A whole cluster in one state directory; `with` starts it and takes it down again.

    Args:
        state: the folder of all its files and logs.
        layout: its machines.
        owner: a process ID; the cluster ends when this process ends, however that happens.
        progress: called with one line for each step of the start.
    """

    def __init__(
        self,
        state: Path = STATE,
        layout: Layout | None = None,
        owner: int | None = None,
        progress: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.state = state.resolve()
        self.layout = layout or Layout()
        self.owner = owner
        self.progress = progress
        self.began = time.monotonic()
        self.scheduler_configuration: str | None = None
        self.images: Path | None = None
        super().__init__(Machine(self.state, CONTROL_PLANE, self.layout.control_plane))
        self.nodes = [Node(self, spec, number) for number, spec in enumerate(self.layout.nodes)]

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.down()

    @classmethod
    def attach(cls, state: Path = STATE) -> Self:
        """Return the cluster that runs in a state directory."""
        try:
            record = json.loads((state / "layout.json").read_text())
        except FileNotFoundError as error:
            raise ClusterError(
                f"no cluster in {state}: start one with `python -m e2e up`"
            ) from error
        specs = tuple(NodeSpec(**each) for each in record["nodes"])
        cluster = cls(state, Layout(specs, record["control_plane"]), record["owner"])
        cluster.images = Path(record["images"]) if record["images"] else None
        return cluster

    # Start and stop.

    def up(self, images: Path | None = None, scheduler_configuration: str | None = None) -> None:
        """Start everything; return when all nodes are Ready and pods can be created.

        A cluster that runs in this state directory is taken down first.

        Args:
            images: the result of e2e.images.image_store().
            scheduler_configuration: see set_scheduler_configuration.
        """
        self.began = time.monotonic()
        self.images = images
        self.require()
        self.down()
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        running = {"owner": self.owner, "images": str(images) if images else None}
        (self.state / "layout.json").write_text(json.dumps(asdict(self.layout) | running))
        with ThreadPoolExecutor() as pool:
            certificates = pool.submit(self.make_certificates)
            machines = [
                pool.submit(each.power_on, self.owner) for each in (self.control_plane, *self.nodes)
            ]
            for each in machines:
                each.result()
            self.report_progress("namespaces")
            self.make_network()
            certificates.result()
            self.report_progress("certificates and network")
            loaded = [pool.submit(node.prepare) for node in self.nodes]
            self.start_apiserver()
            self.report_progress("apiserver ready")
            self.start_controllers(scheduler_configuration)
            dns.start(self)
            for future in loaded:
                future.result()
            self.report_progress("containerd ready")
            for node in self.nodes:
                node.start_kubelet()
            for node in self.nodes:
                node.wait_until_ready()
            # The control plane is not a node. Its kube-proxy serves the scheduler and the tests. It has the
            # name of a node: without one it would wait half a minute, and end when the node appears.
            for node in self.nodes[:1]:
                self.start_kube_proxy(self.control_plane, node.name)
            self.report_progress("nodes Ready")
            dns.wait_until_ready(self)
            self.wait_for_service_account("default")
        self.report_progress("up")

    def down(self) -> None:
        """End every process and remove namespaces, mounts, cgroups and kernel settings. Logs are kept."""
        (self.state / "layout.json").unlink(missing_ok=True)
        for lock in self.state.glob("elastic/*.lock"):
            # What starts a machine now notices that there is no cluster any more.
            with exclusive_lock(lock):
                pass
        names = [each.parent.name for each in self.state.glob("machines/*/machine.json")]
        machines = {name: Machine(self.state, name, "") for name in sorted(names)}
        machines |= {node.name: node for node in self.nodes}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda machine: machine.power_off(), machines.values()))
        shutil.rmtree(self.state / "machines", ignore_errors=True)
        shutil.rmtree(self.state / "etcd", ignore_errors=True)
        shutil.rmtree(self.state / "elastic", ignore_errors=True)

    def report_progress(self, step: str) -> None:
        """Report a finished step with the seconds since the start."""
        self.progress(f"{time.monotonic() - self.began:6.2f} s  {step}")

    @staticmethod
    def require() -> None:
        """Raise ClusterError if this machine cannot run a cluster, or its programs are not built."""
        Cluster.require_machine()
        try:
            directories()
        except BuildError as error:
            raise ClusterError(str(error)) from error

    @staticmethod
    def require_machine() -> None:
        """Raise ClusterError if this machine cannot run a cluster, also once its programs are built."""
        if os.geteuid() != 0:
            raise ClusterError("a cluster in namespaces needs root: run this as root")
        require_programs()
        probe = ["unshare", "--net", "--pid", "--mount", "--fork", "true"]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            raise ClusterError("this machine does not allow namespaces (`unshare --net` fails)")
        if "memory" not in hierarchies():
            raise ClusterError(
                "this machine has no cgroup v1 `memory` hierarchy; cgroup v2 is not supported"
            )

    # Components.

    @property
    def audit_log(self) -> Path:
        """The API server's audit log: a JSON object for each request of the namespace `audited`."""
        return self.state / "logs" / "audit.log"

    def make_certificates(self) -> None:
        """Create a certificate for each component; RBAC is on, so that a missing right is noticed."""
        address = self.layout.control_plane
        server = f"https://{address}:6443"
        authority = Authority(self.state / "pki")
        authority.token_keys()
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
        names.append(f"kubernetes.default.svc.{configuration.DOMAIN}")
        authority.server("apiserver", names, ["127.0.0.1", configuration.API_SERVICE, address])
        masters = "system:masters"
        authority.client("admin", "admin", masters, server)
        authority.client("apiserver-kubelet-client", "apiserver", masters, server)
        authority.client("controller-manager", "system:kube-controller-manager", None, server)
        authority.client("scheduler", "system:kube-scheduler", None, server)
        authority.client("kube-proxy", "system:kube-proxy", None, server)
        authority.client("coredns", dns.USER, None, server)
        front_proxy = Authority(self.state / "pki" / configuration.FRONT_PROXY)
        front_proxy.client(configuration.FRONT_PROXY, configuration.FRONT_PROXY, None, server)
        for node in self.layout.nodes:
            self.make_node_certificates(node)

    def make_node_certificates(self, node: NodeSpec) -> None:
        """Create the certificates of one kubelet."""
        authority = Authority(self.state / "pki")
        authority.server(f"kubelet-serving-{node.name}", [node.name], [node.address, "127.0.0.1"])
        server = f"https://{self.layout.control_plane}:6443"
        user = f"system:node:{node.name}"
        authority.client(f"kubelet-{node.name}", user, "system:nodes", server)

    def make_network(self) -> None:
        """Create the bridge that connects all machines, and connect the nodes."""
        network.make_bridge(self.control_plane)
        for node in self.nodes:
            node.connect()

    def start_apiserver(self) -> None:
        """Start etcd and the API server, and wait until it is ready."""
        plane, pki = self.control_plane, self.state / "pki"
        plane.start("etcd", configuration.etcd(self.state / "etcd"))
        policy = self.state / "audit-policy.yaml"
        policy.write_text(configuration.audit_policy())
        log = self.audit_log
        plane.start("kube-apiserver", configuration.apiserver(pki, plane.address, policy, log))
        self.wait_for_apiserver()

    def wait_for_apiserver(self) -> None:
        """Wait until the API server reports that it is ready."""

        def ready() -> bool:
            return self.kubectl("get", "--raw=/readyz") == "ok"

        wait_until("the API server", ready, log=self.control_plane.log("kube-apiserver"))

    def start_controllers(self, scheduler_configuration: str | None) -> None:
        """Start the controller manager and the scheduler."""
        plane, pki = self.control_plane, self.state / "pki"
        plane.start("kube-controller-manager", configuration.controller_manager(pki))
        written = self.write_scheduler_configuration(scheduler_configuration)
        plane.start("kube-scheduler", configuration.kube_scheduler(written))
        self.kubectl(
            "create",
            "clusterrolebinding",
            "e2e:kubelet-api",
            "--clusterrole=system:node-proxier",
            "--user=system:kube-proxy",
        )

    def start_kube_proxy(self, machine: Machine, node: str) -> None:
        """Start kube-proxy, so that the cluster's Services work on this machine."""
        settings = machine.files.folder / "kube-proxy.yaml"
        kubeconfig = self.state / "pki" / "kube-proxy.kubeconfig"
        settings.write_text(configuration.kube_proxy(kubeconfig, node))
        machine.start("kube-proxy", ["kube-proxy", f"--config={settings}"])

    def write_scheduler_configuration(self, text: str | None) -> Path:
        """Write the configuration to the file that the scheduler reads, and return its path."""
        self.scheduler_configuration = text
        written = self.state / "scheduler.yaml"
        kubeconfig = self.state / "pki" / "scheduler.kubeconfig"
        written.write_text(configuration.scheduler(kubeconfig, text))
        return written

    # For tests.

    def enter_network(self) -> None:
        """Move this thread, and what it starts, into the control plane's network."""
        library = ctypes.CDLL(None, use_errno=True)
        with Path(f"/proc/{self.control_plane.first_process}/ns/net").open() as namespace:
            if library.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def node(self, name: str) -> Node:
        """Return the node with this name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def import_image(self, archive: Path) -> None:
        """Load an image archive into every node."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.import_image(archive), self.nodes))

    def restart_apiserver(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the API server, start it again, and wait until it is ready."""
        self.control_plane.restart("kube-apiserver", number)
        self.wait_for_apiserver()

    def set_scheduler_configuration(self, text: str | None) -> None:
        """Restart the scheduler with another configuration.

        Args:
            text: a KubeSchedulerConfiguration as a user would write it, or None for the default scheduler.
                This cluster's kubeconfig is added to it.
        """
        self.write_scheduler_configuration(text)
        self.control_plane.restart("kube-scheduler", signal.SIGTERM)

        def ready() -> bool:
            return self.run("python3", "-c", SCHEDULER_READY).strip() == "ok"

        wait_until("the scheduler", ready, log=self.control_plane.log("kube-scheduler"))


_READY = "readyz" if minor() >= 31 else "healthz"
SCHEDULER_READY = f"""\
import ssl, urllib.request
context = ssl._create_unverified_context()
print(urllib.request.urlopen("https://127.0.0.1:10259/{_READY}", context=context).read().decode())
"""


__all__ = ["STATE", "Cluster", "ClusterError", "Layout", "Node", "NodeSpec", "tail", "wait_until"]
