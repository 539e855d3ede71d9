"""Submit training jobs in scenarios, and look at them with fenka's commands."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.images import GIT, TRAINING
from e2e.scenarios.installation import FENKA, Installation

PROGRAMS = Path(__file__).parent / "training"
CODE = f"--code={PROGRAMS}"
JOB_LABEL = "fenka.io/job"
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: NAMESPACE}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  claimRef: {name: CLAIM, namespace: NAMESPACE}
  hostPath: {path: FOLDER, type: DirectoryOrCreate}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [NODES]}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: CLAIM, namespace: NAMESPACE}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: NAMESPACE
  resources: {requests: {storage: 1Gi}}
"""


@dataclass(frozen=True)
class Jobs:
    """The training jobs of one namespace."""

    installation: Installation
    namespace: str

    def fenka(self, *arguments: str) -> str:
        """Run a command of fenka in the namespace."""
        return self.installation.fenka(*arguments, "-n", self.namespace)

    @contextmanager
    def client(self, *argv: str, **streams: Any) -> "Iterator[subprocess.Popen[str]]":
        """Run a program beside the test, with subprocess's arguments for its streams.

        At the end of the block it is killed if it still runs.
        """
        cluster = self.installation.cluster
        command, environment = cluster.command(*argv), cluster.environment()
        with subprocess.Popen(command, env=environment, text=True, **streams) as client:
            try:
                yield client
            finally:
                client.kill()

    @contextmanager
    def claim(self, name: str, *nodes: str) -> Iterator[str]:
        """Provide a claim whose pods run on these nodes. Yield its folder, which tests see, too."""
        cluster = self.installation.cluster
        folder = str(cluster.state / "claims" / self.namespace)
        values = {"NAMESPACE": self.namespace, "CLAIM": name, "FOLDER": folder}
        values["NODES"] = ", ".join(nodes)
        text = VOLUME
        for word, value in values.items():
            text = text.replace(word, value)
        cluster.kubectl("apply", "-f", "-", stdin=text)
        try:
            yield folder
        finally:
            cluster.kubectl("delete", "pv", self.namespace, "--wait=false")

    def submission(
        self, kind: str, name: str, *options: str, command: Sequence[str], image: str = TRAINING
    ) -> Sequence[str]:
        """Return the command line that submits a training."""
        images = ("--image", image, "--sync-image", GIT)
        given = ("-n", self.namespace, "--name", name, *images, *options)
        return (*FENKA, "submit", kind, *given, "--", *command)

    def submit(
        self, kind: str, name: str, *options: str, command: Sequence[str], image: str = TRAINING
    ) -> str:
        """Submit a training, and return what the client prints."""
        argv = self.submission(kind, name, *options, command=command, image=image)
        return self.installation.cluster.run(*argv)

    def table(self, *arguments: str) -> list[list[str]]:
        """Return the cells of each line that a command of fenka prints, without ages."""
        return [line.split() for line in self.fenka(*arguments).splitlines()]

    def record(self, name: str) -> dict[str, Any]:
        """Return `fenka get -o json`."""
        document: dict[str, Any] = json.loads(self.fenka("get", name, "-o", "json"))
        return document

    def wait_for(self, name: str, status: str, seconds: float = 90) -> dict[str, Any]:
        """Wait until a job has this status, and return its record. Fail at once if it ended otherwise."""
        seen: dict[str, Any] = {}

        def has_status() -> bool:
            seen.update(self.record(name))
            if seen["status"] in {"SUCCEEDED", "FAILED"} - {status}:
                pytest.fail(f"{name}: {seen['status']}\n{self.fenka('logs', name)}")
            assert seen["status"] == status, (seen["status"], self.explain())
            return True

        wait_until(f"{name}: {status}", has_status, seconds)
        return seen

    def explain(self) -> list[str]:
        """Return the namespace's latest events and the state of its pods."""
        cluster = self.installation.cluster
        events = ("get", "events", "--sort-by=.lastTimestamp", "--no-headers")
        lines = cluster.kubectl("-n", self.namespace, *events).splitlines()[-12:]
        return [*lines, *cluster.kubectl("-n", self.namespace, "get", "pods").splitlines()]

    def pods(self, role: str = "") -> dict[str, dict[str, Any]]:
        """Return the pods of all jobs, or those of a role, by their UIDs."""
        selector = f"{JOB_LABEL},fenka.io/role={role}" if role else JOB_LABEL
        pods = self.installation.cluster.list("pods", self.namespace, selector)
        return {pod["metadata"]["uid"]: pod for pod in pods}

    def let_go(self, pod: str) -> None:
        """Let the training go on whose rank 0 is in this pod."""
        inside = ("-n", self.namespace, "exec", pod, "--")
        wait_until(
            f"{pod} can run programs",
            lambda: not self.installation.cluster.kubectl(*inside, "touch", "/tmp/go"),
        )

    def lines(self, name: str) -> list[dict[str, str]]:
        """Return the values in the lines that a training's ranks print, by rank."""
        output = self.fenka("logs", name)
        lines = [
            dict(part.split("=", 1) for part in line.split())
            for line in output.splitlines()
            if line.startswith("rank=")
        ]
        return sorted(lines, key=lambda line: line["rank"])

    def objects(self) -> Sequence[str]:
        """Return the names of all objects of the namespace that belong to a job, of whatever kind."""
        cluster = self.installation.cluster
        listing = ("api-resources", "--verbs=list", "--namespaced", "-o", "name")
        kinds = [kind for kind in cluster.kubectl(*listing).split() if "metrics" not in kind]
        options = ("-n", self.namespace, "get", ",".join(kinds), "-l", JOB_LABEL, "-o", "name")
        return cluster.kubectl(*options).split()


def program(name: str) -> Mapping[str, str]:
    """Return a program of the folder `training` as a file of a repository."""
    return {name: (PROGRAMS / name).read_text()}
