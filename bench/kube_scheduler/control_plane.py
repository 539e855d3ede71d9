"""A control plane whose nodes are simulated by kwok; kube-scheduler runs only while it is measured.

The programs are those of e2e; each runs as a daemon of one machine with its own network.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bench.kube_scheduler import workload
from bench.kube_scheduler.workload import Pods, Request
from e2e import configuration
from e2e.cluster import STATE, Cluster, Layout
from e2e.machine import ClusterError, run, wait_until
from e2e.pki import Authority
from e2e.programs import KWOK
from e2e.supervisor import CGROUPS, REPOSITORY
from fenka.cluster.pod_preemption import BUDGETS_PATH
from fenka.scheduler.server import PREFIX
from fenka.server.certificate_files import CLIENT_FILE, SERVER_FILE, SERVER_NAME

EXTENDER_PORT = 12345
CHART_MAX_NODES = 1
CONTROLLERS = "node-lifecycle-controller,serviceaccount-controller"
"""The first removes the taints of new nodes; without the second no pod can be created."""
FENKA = "fenka"
"""Name of the certificate of fenka's extender, and of the client that it is compared with."""
ACCOUNT = "system:serviceaccount:kube-system:fenka-scheduler"
WATCHED = (
    *("/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces/kube-system/configmaps"),
    BUDGETS_PATH,
)
CLIENT_QPS = 5000
"""Far above what is reached, so that no client limits itself."""


def program(name: str) -> str:
    """Return the path of a program of e2e's Go module kwok."""
    return str(KWOK.directory() / "bin" / name)


@dataclass(frozen=True)
class Report:
    """What `post` reports of the requests that it has sent. Latencies are milliseconds."""

    requests: int
    errors: int
    error: str
    seconds: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Measurement:
    """How fast pods were scheduled or bound.

    Attributes:
        pods: their number.
        seconds: how long that took.
        cpu_s: CPU seconds by program, without what it uses when there are no pods.
        others: CPUs that other programs of this machine used meanwhile.
        latencies: those of the requests, as text.
    """

    pods: int = 0
    seconds: float = 1.0
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    others: float = 0.0
    latencies: str = ""

    @property
    def rate(self) -> float:
        """Pods per second."""
        return self.pods / self.seconds

    @property
    def cpu_ms(self) -> dict[str, float]:
        """CPU milliseconds of each program for one pod."""
        return {name: 1000 * used / max(self.pods, 1) for name, used in self.cpu_s.items()}


class ControlPlane(Cluster):
    """etcd, kube-apiserver, kube-controller-manager and kwok; the rest is started for each measurement."""

    def __init__(self) -> None:
        super().__init__(Path(f"{STATE}-bench"), Layout(nodes=()), owner=os.getpid())
        self.idle_cpus: Mapping[str, float] = {}
        """CPUs that each program uses without pods, see measure_idle."""
        self.server = f"https://{self.layout.control_plane}:6443"

    def make_certificates(self) -> None:
        """Create also those of the extender, as `fenka certificates` does."""
        super().make_certificates()
        authority = Authority(self.state / "pki")
        authority.client(FENKA, ACCOUNT, "system:serviceaccounts", self.server)
        authority.server(SERVER_FILE, [SERVER_NAME], ["127.0.0.1"])
        authority.client(CLIENT_FILE, "kube-scheduler", None, self.server)

    def start_controllers(self, scheduler_configuration: str | None) -> None:
        """Start kube-controller-manager with two controllers, and kwok."""
        del scheduler_configuration
        plane, pki = self.control_plane, self.state / "pki"
        # No kubelet reports: what the nodes' Leases cost is not measured here.
        options = [f"--controllers={CONTROLLERS}", "--node-monitor-grace-period=2h"]
        options += ["--node-monitor-period=60s"]
        plane.start("kube-controller-manager", [*configuration.controller_manager(pki), *options])
        stages = self.state / "stages.yaml"
        stages.write_text(run([program("stages")]))
        kwok = [program("kwok"), f"--kubeconfig={self.kubeconfig}", f"--config={stages}"]
        plane.start("kwok", [*kwok, "--manage-all-nodes", "--node-lease-duration-seconds=3600"])
        self.kubectl(
            "create",
            "clusterrolebinding",
            "fenka",
            "--clusterrole=cluster-admin",
            f"--user={ACCOUNT}",
        )

    def create_nodes(self, count: int) -> None:
        """Create nodes, and wait until kwok has made them ready and their first taints are removed."""
        self.post(map(workload.node, range(count)))
        ready = "{.status.conditions[?(@.type=='Ready')].status}{.spec.taints[*].key}"
        path = f"jsonpath={{range .items[*]}}{ready} {{end}}"

        def all_open() -> bool:
            return self.kubectl("get", "nodes", "-o", path).split() == ["True"] * count

        wait_until("ready nodes without taints", all_open, 300, self.control_plane.log("kwok"))

    def measure_idle(self, seconds: float = 4, times: int = 4) -> None:
        """Measure what the programs use without pods; further measurements leave that out.

        The least of several times counts: after the nodes were made there is work left for a while.
        """
        measured = []
        for _ in range(times):
            cpu = CpuTime(self)
            time.sleep(seconds)
            measured.append(cpu.measurement(0).cpu_s)
        self.idle_cpus = {
            name: min(each[name] for each in measured) / seconds for name in measured[0]
        }

    # Requests.

    def post(
        self,
        requests: Iterable[Request],
        connections: int = 16,
        *,
        extender: bool = False,
        user: str = "admin",
    ) -> Report:
        """Send requests to the API server as a user, or to the extender, and return how fast that went."""
        pki = self.state / "pki"
        server, name, expected = self.server, user, ""
        if extender:
            # The protocol reports a failure in the body: an answer without one has an empty Error.
            server, name, expected = f"https://127.0.0.1:{EXTENDER_PORT}", CLIENT_FILE, '"Error":""'
        command = [program("post"), f"-server={server}", f"-ca={pki}/ca.crt"]
        command += [f"-cert={pki}/{name}.crt", f"-key={pki}/{name}.key", f"-expect={expected}"]
        lines = "\n".join(map(json.dumps, requests))
        text = run([*command, f"-connections={connections}"], stdin=lines, timeout=300)
        report = Report(**json.loads(text))
        if report.errors:
            raise ClusterError(f"{report.errors} requests failed, the first: {report.error}")
        return report

    @contextmanager
    def pending(self, series: str, count: int) -> Iterator[Pods]:
        """Create pods, and delete them at the end."""
        pods = Pods(series, count)
        self.post(pods.creations())
        try:
            yield pods
        finally:
            self.post(pods.deletions())

    # Programs that run during a measurement.

    @contextmanager
    def running(self, daemon: str, argv: list[str]) -> Iterator[None]:
        """Run a daemon."""
        self.control_plane.start(daemon, argv)
        try:
            yield
        finally:
            # The extender hands over its Lease, so that the next one leads at once.
            self.control_plane.kill(daemon, signal.SIGTERM)

    @contextmanager
    def extender(
        self, max_nodes: int = CHART_MAX_NODES, program: Path | None = None
    ) -> Iterator[None]:
        """Run `fenka scheduler`, from when it leads.

        max_nodes: how many nodes filter returns. program: another `fenka`, such as an earlier version.
        """
        pki, url = self.state / "pki", f"https://127.0.0.1:{EXTENDER_PORT}"
        command = [str(program or Path(sys.executable).with_name("fenka")), "scheduler"]
        command += [f"--kubeconfig={pki}/{FENKA}.kubeconfig", f"--tls={pki}", "--address=127.0.0.1"]
        curl = ["curl", "-sf", "--cacert", f"{pki}/ca.crt", "--cert", f"{pki}/{CLIENT_FILE}.crt"]
        metrics = [*curl, "--key", f"{pki}/{CLIENT_FILE}.key", f"{url}/metrics"]
        log = self.control_plane.log("fenka-scheduler")
        command += [f"--port={EXTENDER_PORT}", f"--max-nodes={max_nodes}"]
        with self.running("fenka-scheduler", command):
            wait_until("a leader", lambda: "fenka_scheduler_leading 1.0" in run(metrics), log=log)
            yield

    @contextmanager
    def null_extender(self, *options: str) -> Iterator[None]:
        """Run an extender that decides nothing."""
        command = [program("extender"), f"-pki={self.state}/pki", f"-server={self.server}"]
        command += [f"-address=127.0.0.1:{EXTENDER_PORT}", *options]
        with self.running("extender", command):
            yield

    @contextmanager
    def watched(self, form: str, *options: str) -> Iterator[None]:
        """Run an extender that decides nothing, and a client that watches what fenka watches.

        form: json or protobuf, what the API server encodes for the client.
        """
        command = [program("watch"), f"-pki={self.state}/pki", f"-server={self.server}"]
        with (
            self.null_extender(*options),
            self.running("watch", [*command, f"-format={form}", *WATCHED]),
        ):
            yield

    @contextmanager
    def kube_scheduler(self, extender: bool) -> Iterator[None]:
        """Run kube-scheduler, as fenka's documents configure it, with or without the extender."""
        chart = REPOSITORY / "deploy/chart/files/scheduler-config.yaml"
        settings = yaml.safe_load(chart.read_text())
        settings["clientConnection"] = {"qps": CLIENT_QPS, "burst": 2 * CLIENT_QPS}
        pki = self.state / "pki"
        for entry in settings["extenders"]:
            entry["urlPrefix"] = f"https://127.0.0.1:{EXTENDER_PORT}{PREFIX}"
            entry["tlsConfig"] |= {
                "caFile": f"{pki}/ca.crt",
                "certFile": f"{pki}/{CLIENT_FILE}.crt",
                "keyFile": f"{pki}/{CLIENT_FILE}.key",
            }
        if not extender:
            del settings["extenders"]
        written = self.write_scheduler_configuration(yaml.safe_dump(settings))
        with self.running("kube-scheduler", configuration.kube_scheduler(written)):
            yield


class CpuTime:
    """The CPU seconds of the control plane's daemons, and of everything else on this machine."""

    def __init__(self, plane: ControlPlane) -> None:
        machine = plane.control_plane
        self._all = CGROUPS / "cpuacct" / machine.files.cgroup / "cpuacct.usage"
        self._machine = machine
        self._idle_cpus = plane.idle_cpus
        self._begun = self._read()
        self._begun_at = time.monotonic()

    def _read(self) -> dict[str, float]:
        tick = os.sysconf("SC_CLK_TCK")
        seconds = {}
        for daemon in self._machine.daemons():
            if self._machine.runs(daemon):
                stat = self._machine.read(f"/proc/{self._machine.pid(daemon)}/stat")
                fields = stat.rpartition(")")[2].split()
                seconds[daemon] = (int(fields[11]) + int(fields[12])) / tick
        busy = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        seconds["busy"] = sum(int(busy[i]) for i in (1, 2, 3, 6, 7)) / tick
        own = os.times()
        seconds["ours"] = int(self._all.read_text()) / 1e9 + sum(own[:4])
        return seconds

    def measurement(
        self, pods: int, seconds: float | None = None, latencies: str = ""
    ) -> Measurement:
        """Return what was spent on pods. seconds: how long that took; default: the time since the start."""
        now, elapsed = self._read(), time.monotonic() - self._begun_at
        used = {name: value - self._begun.get(name, 0.0) for name, value in now.items()}
        others = max((used.pop("busy") - used.pop("ours")) / elapsed, 0.0)
        cpu_s = {
            name: max(value - elapsed * self._idle_cpus.get(name, 0.0), 0.0)
            for name, value in used.items()
        }
        return Measurement(pods, seconds or elapsed, cpu_s, others, latencies)
