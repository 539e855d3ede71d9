"""Tests the program as a process, which SIGKILL ends: nothing of it stays, and its successor goes on."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import yaml

from fenka.cloud.simulated_cloud import CloudState, Scenario
from tests.autoscaler.harness import NAMESPACE, scenario
from tests.builders import Json, pod_json, unschedulable
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.waiting import wait_until

GROUP: Json = {
    "name": "t4",
    "types": ["t4.x"],
    "zones": ["a"],
    "price": 4,
    "shape": {
        "cpu": 4,
        "memory": "16000Mi",
        "cards": [{"model": "Tesla T4", "memory": "15079Mi"}],
    },
}


class Program:
    """The program's configuration, and its processes. port: of its probes."""

    def __init__(self, folder: Path, kubeconfig: Path, made: Scenario) -> None:
        self.folder, self.kubeconfig = folder, kubeconfig
        (folder / "scenario.json").write_bytes(msgspec.json.encode(made))
        provider = {
            "kind": "simulated",
            "scenario": str(folder / "scenario.json"),
            "state": str(folder / "cloud"),
        }
        self.config: Json = {"cluster": "demo", "provider": provider, "groups": [GROUP]}
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it."""
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        words = ["autoscaler", f"--config={path}", f"--kubeconfig={self.kubeconfig}"]
        words += [f"--namespace={NAMESPACE}", f"--port={self.port}", "--address=127.0.0.1"]
        return subprocess.Popen([sys.executable, "-m", "fenka", *words], stderr=subprocess.PIPE)

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Let it run while the block does."""
        process = self.start()
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def machines(self) -> list[str]:
        """The ids of the cloud's machines."""
        path = self.folder / "cloud" / "cloud.json"
        if not path.exists():
            return []
        return sorted(msgspec.json.decode(path.read_bytes(), type=CloudState).machines)

    def read(self, page: str) -> str:
        """A page of its port; empty if it does not answer, or says no."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{page}") as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return ""


def waiting_pod(name: str) -> Json:
    """A pod that wants a whole T4."""
    made = pod_json(name, 14)
    made["status"] |= unschedulable("0/0 nodes are available")
    return made


def test_program_goes_on_when_it_was_killed(tmp_path: Path) -> None:
    """One machine is bought before SIGKILL, and one more after it. No process of it stays."""
    server = FakeApiServer.of(pods=[waiting_pod("a")])
    with in_thread(server, tmp_path) as kubeconfig:
        program = Program(tmp_path, kubeconfig, scenario())
        with program.running() as first:
            wait_until(program.machines)
            workers = psutil.Process(first.pid).children(recursive=True)
            assert workers
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: not any(each.is_running() for each in workers))
        server.put("pods", waiting_pod("b"))
        with program.running():
            wait_until(lambda: len(program.machines()) == 2)
            wait_until(lambda: program.read("readyz") == "ok\n")
            price = 'fenka_autoscaler_price_per_hour{capacity="on-demand"} 8.0'
            wait_until(lambda: price in program.read("metrics"))
            page = program.read("metrics")
    assert program.machines() == ["i-000001", "i-000002"]
    assert "fenka_autoscaler_leading 1.0" in page
    assert "fenka_autoscaler_plan_seconds_count 1.0" in page


def test_program_hands_over_when_it_is_told_to_stop(tmp_path: Path) -> None:
    """Its lease is free at once, and it ends without an error."""
    server = FakeApiServer.of(pods=[waiting_pod("a")])
    with in_thread(server, tmp_path) as kubeconfig:
        program = Program(tmp_path, kubeconfig, scenario())
        with program.running() as process:
            wait_until(program.machines)
            process.terminate()
            assert process.wait(60) == 0
        lease = server.get("leases", "fenka-autoscaler", NAMESPACE)
        assert lease["spec"]["holderIdentity"] == ""


def test_program_says_in_one_sentence_what_is_wrong_with_its_configuration(tmp_path: Path) -> None:
    """A zone that the cloud does not have: nothing is created."""
    server = FakeApiServer()
    with in_thread(server, tmp_path) as kubeconfig:
        program = Program(tmp_path, kubeconfig, scenario())
        program.config["groups"] = [{**GROUP, "zones": ["b"]}]
        process = program.start()
        _, error = process.communicate(timeout=60)
        assert process.returncode == 2
        assert error.decode() == (
            "fenka: groups[0].zones[0]: the provider has no b for t4: remove it\n"
        )
        assert server.writes == []
