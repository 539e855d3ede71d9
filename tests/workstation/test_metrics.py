"""The metrics of a workstation: S1's notebooks, by the names that nodes and schedulers have."""

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fenka.hardware.peer_credentials import user_name
from fenka.hardware.simulated_node import SimulatedNode
from fenka.workstation import protocol
from fenka.workstation.client import DaemonConnection
from fenka.workstation.paths import Runtime
from tests.monitoring import (
    BOARDS,
    board_queries,
    needs_prometheus,
    panel_queries,
    prometheus,
    rule_queries,
)
from tests.ports import free_port
from tests.workstation.conftest import (
    HOLD,
    PROGRAMS,
    Workstation,
    eventually,
    new_workstation,
    refused,
)

pytestmark = pytest.mark.process

ALLOWED = 4517265408
USED_MIB = 3344
NOTEBOOKS = ("tf-notebook", "tf-notebook-2", "tf-notebook-3")


class Metrics:
    """What a port of the loopback device serves."""

    def __init__(self, port: int) -> None:
        self.port = port

    def text(self) -> str:
        """Return the text."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            return str(answer.read().decode())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the values of the samples with these labels, by another label."""
        return {
            sample.labels[label]: sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }


@pytest.fixture(scope="module")
def machine() -> Iterator[tuple[Workstation, Metrics]]:
    """One T4; three notebooks of 4 units that use 3344 MiB each."""
    with closing(new_workstation([])) as station:
        metrics = Metrics(free_port())
        station.start("--simulate", "T4", "--metrics-port", str(metrics.port))
        with closing(DaemonConnection(Runtime(station.root))) as daemon:
            snapshot = daemon.request(protocol.GetSnapshot(), protocol.MachineSnapshot)
        context_mib = snapshot.cards[0].context_mib or 0
        for name in NOTEBOOKS:
            size = str(USED_MIB - context_mib)
            compute = ("--gpu-core", "40") if name == "tf-notebook" else ()
            words = ("--gpu-mem", "4", *compute, "--name", name)
            assert station.run(*words, "--", *HOLD, size).report()["cards"][0]["result"] == 0
        yield station, metrics


def test_three_notebooks_have_a_series_each(machine: tuple[Workstation, Metrics]) -> None:
    """A user is a namespace, a job a pod."""
    station, metrics = machine
    user = {"namespace": user_name(0), "container": "run", "index": "0", "model": "Tesla T4"}
    user["node"] = socket.gethostname()
    gpu = "fenka_container_gpu"
    used = dict.fromkeys(NOTEBOOKS, float(USED_MIB << 20))
    eventually(lambda: metrics.by("pod", f"{gpu}_memory_used_bytes", **user) == used)
    assert metrics.by("pod", f"{gpu}_memory_held_bytes") == used
    assert metrics.by("pod", f"{gpu}_memory_limit_bytes") == dict.fromkeys(NOTEBOOKS, ALLOWED)
    assert metrics.by("pod", f"{gpu}_processes") == dict.fromkeys(NOTEBOOKS, 1)
    for name in ("compute_limit_ratio", "compute_promised_ratio"):
        assert metrics.by("pod", f"{gpu}_{name}") == {"tf-notebook": 0.4}
    for name in ("throttled_seconds_total", "out_of_memory_total", "busy_seconds_total"):
        assert metrics.by("pod", f"{gpu}_{name}") == dict.fromkeys(NOTEBOOKS, 0)
    started = {row["name"]: row["started_at"] for row in json.loads(station.ok("ps", "-o", "json"))}
    granted = metrics.by("pod", f"{gpu}_start_timestamp_seconds")
    assert granted == {name: started[name] for name in NOTEBOOKS}
    assert metrics.by("pod", f"{gpu}_last_active_timestamp_seconds") == granted
    assert metrics.by("index", "fenka_card_memory_allocated_bytes") == {"0": 3 * ALLOWED}
    assert metrics.by("index", "fenka_card_power_limit_watts") == {"0": 70}


@needs_prometheus
def test_boards_and_rules_are_answered_by_prometheus(
    machine: tuple[Workstation, Metrics], tmp_path: Path
) -> None:
    """No query is an error, and the ones of GPU APP have a series for each notebook, or for the card."""
    _, metrics = machine
    target = {"targets": [f"127.0.0.1:{metrics.port}"]}
    jobs = [{"job_name": "fenka", "honor_labels": True, "static_configs": [target]}]
    panels, pods = panel_queries("gpu-app"), {(user_name(0), name) for name in NOTEBOOKS}
    with prometheus(free_port(), tmp_path, jobs) as server:

        def by_pod(expr: str) -> dict[tuple[str, str], float]:
            found = server.query(expr)
            return {(labels["namespace"], labels["pod"]): value for labels, value in found}

        used, allowed = panels["GPU memory of pods"]
        eventually(server.answers)
        eventually(lambda: by_pod(used) == dict.fromkeys(pods, USED_MIB << 20))
        assert by_pod(allowed) == dict.fromkeys(pods, ALLOWED)
        eventually(lambda: len(server.query("rate(fenka_card_xid_errors_total[1m])")) == 3)
        (ratio,) = panels["GPU memory of pods, used of allowed"]
        assert set(by_pod(ratio).values()) == {3344 / 4308}
        for title in ("Throttled: threads of pods that wait for their share", "Refused GPU memory"):
            assert by_pod(panels[title][0]) == dict.fromkeys(pods, 0)
        eventually(lambda: by_pod(panels["GPU utilisation of pods"][0]) == dict.fromkeys(pods, 0))
        assert by_pod(panels["GPU utilisation of pods"][1]) == {(user_name(0), NOTEBOOKS[0]): 0.4}
        for title in (
            "Temperature of cards",
            "Power of cards",
            "GPU memory of cards, held and used",
        ):
            for expr in panels[title]:
                assert [labels["index"] for labels, _ in server.query(expr)] == ["0"]
        assert [len(server.query(expr)) for expr in panels["Waiting pods"]] == [1, 1]
        for board in BOARDS:
            for expr in board_queries(board):
                server.query(expr)
        for expr in rule_queries().values():
            server.query(expr)
        records = [name for name in rule_queries() if ":" in name]
        eventually(lambda: all(len(server.query(name)) == 1 for name in records))
        groups = server.get("rules")["data"]["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


def test_pending_request_is_counted_with_its_reason(
    machine: tuple[Workstation, Metrics],
) -> None:
    """Under the scheduler's names, until it is served or ends."""
    station, metrics = machine
    by_user, by_reason = "namespace_waiting_pods", "waiting_reasons"

    def waiting(name: str, label: str) -> dict[str, float]:
        values = metrics.by(label, f"fenka_scheduler_{name}")
        return {key: count for key, count in values.items() if count}

    fourth = station.run("--gpu-mem", "4", "--name", "tf-notebook-4", "--", *HOLD, "1")
    eventually(lambda: waiting(by_user, "namespace") == {user_name(0): 1})
    assert waiting(by_reason, "reason") == {"memory": 1}
    (age,) = re.findall(r"^fenka_scheduler_waiting_oldest_seconds (.*)$", metrics.text(), re.M)
    assert float(age) > 0
    fourth.process.kill()
    eventually(lambda: not waiting(by_user, "namespace"))
    assert not waiting(by_reason, "reason")
    (waits,) = re.findall(r"^fenka_scheduler_wait_seconds_count (.*)$", metrics.text(), re.M)
    assert float(waits) >= len(NOTEBOOKS)


def test_refused_memory_is_counted_for_its_job(machine: tuple[Workstation, Metrics]) -> None:
    """Two units are free: a program asks for more than one of them."""
    station, metrics = machine
    program = station.run("--gpu-mem", "1", "--name", "greedy", "--", *HOLD, "2000")
    assert program.report()["cards"][0]["result"] == 2
    counted = "fenka_container_gpu_out_of_memory_total"
    eventually(lambda: metrics.by("pod", counted, pod="greedy") == {"greedy": 1})
    assert set(metrics.by("pod", counted).values()) == {0, 1}
    assert program.end() == 0
    eventually(lambda: "greedy" not in metrics.by("pod", counted))


def test_throttled_program_shows_what_it_gets_and_waits_for(
    machine: tuple[Workstation, Metrics],
) -> None:
    """It wants the whole card and may use 40 % of it, which drivers report in whole percents."""
    station, metrics = machine
    words = ("--gpu-mem", "1", "--gpu-core", "40", "--name", "busy", "--")
    program = station.run(*words, sys.executable, str(PROGRAMS / "use_card.py"), "600")

    def value(name: str) -> float:
        return metrics.by("pod", f"fenka_container_gpu_{name}", pod="busy").get("busy", 0)

    eventually(lambda: value("throttled_seconds_total") > 2)
    eventually(lambda: 0 < value("utilization_ratio") <= 0.43)
    assert value("busy_ratio") <= 1
    assert value("compute_limit_ratio") == 0.4
    assert value("busy_seconds_total") > 0
    assert value("last_active_timestamp_seconds") > value("start_timestamp_seconds")
    program.process.kill()
    eventually(lambda: not value("processes"))


def test_xids_are_counted_by_kind(station: Workstation) -> None:
    """Two of programs, one that is only a note, and one after which the card takes nothing more."""
    metrics = Metrics(free_port())
    station.start("--simulate", "T4", "--metrics-port", str(metrics.port))
    node = SimulatedNode(station.root / "simulated")
    counted = "fenka_card_xid_errors_total"
    assert metrics.by("kind", counted) == {"card": 0, "program": 0, "note": 0}
    for xid in (31, 63, 31, 48):
        node.raise_xid(0, xid)
    expected = {"card": 1, "program": 2, "note": 1}
    eventually(lambda: metrics.by("kind", counted) == expected)


def test_port_that_is_taken_is_refused(machine: tuple[Workstation, Metrics]) -> None:
    """Before anything is leased."""
    _, metrics = machine
    with closing(new_workstation([])) as other:
        result = other.fenka("daemon", "--simulate", "T4", "--metrics-port", str(metrics.port))
        sentence = rf"--metrics-port {metrics.port} cannot be opened \(.*\): choose another port"
        refused(result, 2, sentence)


def test_daemon_without_the_option_loads_no_server(station: Workstation) -> None:
    """An HTTP server would cost each daemon 20 MB."""
    station.start("--simulate", "T4")
    maps = Path(f"/proc/{station.daemon_pid()}/maps").read_text()
    assert "_native" in maps or "site-packages" in maps
    assert "aiohttp" not in maps
