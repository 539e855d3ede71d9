"""Deploy services of the model server in scenarios, and send them requests."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import wait_until
from e2e.images import TRAINING
from e2e.scenarios.installation import FENKA, Installation
from e2e.scenarios.serving.load import Request, read

PROGRAMS = Path(__file__).parent / "serving"
NAME, HTTP, GRPC = "model", 8000, 8001
PROCESSES = (
    'for each in /proc/[0-9]*; do grep -qs "$1" $each/cgroup && echo "${each#/proc/}"; done; true'
)


@dataclass(frozen=True)
class Services:
    """The service `model` of one namespace."""

    installation: Installation
    namespace: str

    def fenka(self, *arguments: str) -> str:
        """Run a command of fenka in the namespace."""
        return self.installation.fenka(*arguments, "-n", self.namespace)

    def serve(self, version: str, *options: str, cost_us: int = 2000) -> str:
        """Deploy a version of the service, and return what the client prints."""
        ports = (f"--restful-port={HTTP}", f"--port={GRPC}", "--health-path=/healthz")
        given = ("--name", NAME, "--version", version, "--image", TRAINING, *ports, *options)
        program = (
            "python3",
            "/opt/model_server.py",
            f"--version={version}",
            f"--cost-us={cost_us}",
        )
        command = ("serve", "custom", "-n", self.namespace, *given, "--", *program)
        return self.installation.cluster.run(*FENKA, *command)

    @property
    def address(self) -> str:
        """The address of the service in the cluster."""
        service = self.installation.cluster.get("service", NAME, self.namespace)
        return str(service["spec"]["clusterIP"])

    def pods(self, selector: str) -> Sequence[dict[str, Any]]:
        """Return the service's pods that match a label selector and are not being deleted."""
        pods = self.installation.cluster.list(
            "pods", self.namespace, f"servingName={NAME},{selector}"
        )
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, selector: str) -> int:
        """Return how many of these pods are ready."""
        conditions = [
            condition["status"] == "True"
            for pod in self.pods(selector)
            for condition in pod["status"].get("conditions", [])
            if condition["type"] == "Ready"
        ]
        return sum(conditions)

    def wait_for_replicas(self, number: int, selector: str = "servingVersion=v1") -> None:
        """Wait until exactly this number of replicas is there and ready."""

        def settled() -> bool:
            pods = self.pods(selector)
            return len(pods) == number == self.ready(selector)

        wait_until(f"{number} replicas of {selector}", settled, 180)

    def wait_for_answers(self) -> None:
        """Wait until the service answers at its address."""
        fetch = self.installation.cluster.fetch
        url = f"http://{self.address}:{HTTP}/healthz"
        wait_until("an answer of the service", lambda: fetch(url).strip() == "ok", 120)

    @contextmanager
    def load(
        self, file: Path, *phases: str, url: str | None = None
    ) -> Iterator["subprocess.Popen[str]"]:
        """Send requests beside the block. At its end wait for the last one.

        Args:
            file: gets a line for each request.
            phases: `RATExSECONDS` each.
            url: where requests are sent (default: the service's address).
        """
        cluster = self.installation.cluster
        program = (sys.executable, str(PROGRAMS / "load.py"))
        to = url or f"http://{self.address}:{HTTP}"
        command = cluster.command(*program, to, str(file), *phases)
        with subprocess.Popen(command, env=cluster.environment(), text=True) as process:
            try:
                yield process
                process.wait()
            finally:
                process.kill()
        assert process.returncode == 0

    def send(self, file: Path, *phases: str, url: str | None = None) -> list[Request]:
        """Send requests in phases `RATExSECONDS`, and return what became of them."""
        with self.load(file, *phases, url=url):
            pass
        return read(file)

    def talk(self) -> dict[str, Any]:
        """Return what clients of events, a websocket and gRPC receive through the service's address."""
        program = (sys.executable, str(PROGRAMS / "clients.py"), self.address, str(HTTP), str(GRPC))
        answers: dict[str, Any] = json.loads(self.installation.cluster.run(*program))
        return answers

    def kill(self, pod: dict[str, Any]) -> None:
        """Kill the processes of a pod by SIGKILL."""
        node = self.installation.cluster.node(pod["spec"]["nodeName"])
        processes = node.run("sh", "-c", PROCESSES, "sh", pod["metadata"]["uid"]).split()
        node.run("sh", "-c", 'kill -9 "$@" 2>/dev/null || true', "sh", *processes)
