"""`fenka serve --local`: replicas in leases behind a gateway, their number, versions and updates."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.workstation.conftest import HOLD, Workstation, eventually, refused
from tests.workstation.serving.conftest import ANSWER, Service


def test_service_answers_when_it_is_deployed(service: Service, tmp_path: Path) -> None:
    """Its program is in a lease, knows its own port, and has the environment of the command."""
    service.station.environment["MARK"] = "é"
    service.serve("v1", "--wait", "--metrics-port", "9", "--working-dir", str(tmp_path))
    body = service.answer()
    assert (body["arguments"], body["leased"], body["mark"]) == (["v1"], True, "é")
    assert body["directory"] == str(tmp_path)
    assert body["ports"]["PORT"] != str(service.port)
    assert body["ports"]["METRICS_PORT"] not in (None, "9")
    (job,) = service.station.jobs().values()
    (slice_,) = job["slices"]
    assert slice_["memory_mib"] == 3231  # 3 of 14 units of 15079 MiB
    assert service.station.ok("logs", "bert") == "listening\nasked /\n"
    shown = json.loads(service.station.ok("serve", "get", "--local", "bert", "-o", "json"))
    assert (shown["desiredInstances"], shown["availableInstances"], shown["requestGPUs"]) == (
        1,
        1,
        0.2,
    )
    attached = service.station.ok("attach", "--local", "bert", "--", "printenv", "PORT")
    assert attached.strip() == body["ports"]["PORT"]
    assert "is running: it holds 3231 MiB of card 0" in service.station.ok("why", "bert")
    assert service.station.ok("wait", "bert").startswith(
        "bert: 1 of 1 replicas accept requests at "
    )
    assert service.station.ok("delete", "--local", "bert") == "service bert: deleted\n"
    assert service.station.jobs() == {}
    assert service.programs() == []
    assert not service.directory.exists()


def test_screens_are_those_of_a_cluster(service: Service) -> None:
    """The columns are arena's."""
    service.serve("v1", "--wait", "--replicas", "2")
    heading, row = service.station.ok("serve", "list", "--local").splitlines()
    assert heading.split() == [
        "NAME",
        "TYPE",
        "VERSION",
        "DESIRED",
        "AVAILABLE",
        "ADDRESS",
        "PORTS",
        "GPU",
    ]
    assert row.split() == [
        *("bert", "Custom", "v1", "2", "2", "127.0.0.1", f"RESTFUL:{service.port}", "0.4")
    ]
    lines = service.station.ok("serve", "get", "--local", "bert").splitlines()
    start = lines.index("Instances:")
    assert lines[start + 1].split() == ["NAME", "STATUS", "AGE", "READY", "RESTARTS", "GPU", "NODE"]
    assert [line.split()[1] for line in lines[start + 3 : start + 5]] == ["Running", "Running"]


def test_replica_that_waits_is_shown_with_its_reason(service: Service) -> None:
    """It starts when there is room."""
    program = service.station.run("--gpu-mem", "12", "--", *HOLD, "1")
    program.report()
    service.serve("v1")
    eventually(lambda: service.replicas("Pending"))
    shown = eventually(
        lambda: json.loads(service.station.ok("serve", "get", "--local", "bert", "-o", "json"))
    )
    (replica,) = shown["instances"]
    assert program.process.poll() is None
    assert (replica["status"], replica["readyContainers"]) == ("Pending", 0)
    assert "no GPU fits: 1 of 1 has too little memory" in shown["why"]
    program.end()
    assert service.answer()["arguments"] == ["v1"]


# --- the number of replicas -----------------------------------------------------------------------------


def test_number_follows_the_load(service: Service, tmp_path: Path) -> None:
    """Six requests at once need three replicas of two each; afterwards one is enough."""
    service.serve("v1", "--replicas", "1..3", "--target", "2", "--down-after", "1s", "--wait")
    clients = service.hold(6, tmp_path / "go")
    service.await_ready(3)
    (tmp_path / "go").touch()
    for client in clients:
        client.join()
    service.await_ready(1)
    assert len(service.station.jobs()) == 1


def test_idle_version_has_no_replica_when_its_range_begins_with_zero(service: Service) -> None:
    """Its slice is free. The next request waits for a new replica."""
    service.serve("v1", "--replicas", "0..1", "--down-after", "1s", "--wait")
    first = service.answer()["pid"]
    eventually(lambda: service.replicas() == [] and service.station.jobs() == {})
    assert service.answer()["pid"] != first


def test_replica_finishes_its_requests_before_it_ends(service: Service, tmp_path: Path) -> None:
    """Requests are held by two replicas, of which one is to end."""
    service.serve("v1", "--replicas", "2", "--wait")
    # A gateway with one of them only would send both requests there.
    metric = 'fenka_gateway_replicas{state="ready",version="v1"} 2'
    eventually(lambda: metric in metrics(service))
    clients: list[threading.Thread] = []

    def held() -> list[int]:
        logs = service.directory.glob("replicas/*/log")
        return [log.read_text().count("hold") for log in logs]

    def all_held() -> bool:
        return sum(held()) == len(clients)

    # Envoy compares two random replicas, which may be the same one twice.
    while not (clients and all(held())):
        clients += service.hold(1, tmp_path / "go")
        eventually(all_held)
    service.station.ok("serve", "update", "custom", "--local", "--name", "bert", "--replicas", "1")
    eventually(lambda: service.replicas("Draining"))
    assert service.answer()["arguments"] == ["v1"]
    assert len(service.replicas("Draining")) == 1
    (tmp_path / "go").touch()
    for client in clients:
        client.join()
    service.await_ready(1)


def logs(service: Service) -> str:
    """Return what all replicas have printed."""
    return "".join(log.read_text() for log in service.directory.glob("replicas/*/log"))


# --- versions -------------------------------------------------------------------------------------------


def test_requests_are_divided_by_weights(service: Service) -> None:
    """A new version gets none until it has a weight; its share is exact."""
    service.serve("v1", "--wait")
    assert "version v2 gets no requests yet" in service.serve("v2", "--wait")
    assert {service.answer()["arguments"][0] for _ in range(10)} == {"v1"}
    service.station.ok("traffic-split", "--local", "--name", "bert", "-v", "v1:90", "-v", "v2:10")
    metric = 'fenka_gateway_version_weight{version="v2"} 10'
    eventually(lambda: metric in metrics(service))
    answers = [service.answer()["arguments"][0] for _ in range(100)]
    assert answers.count("v2") == 10
    assert "127.0.0.1(90%)" in service.station.ok("serve", "list", "--local")


def metrics(service: Service) -> str:
    """Return the gateway's metrics."""
    port = int(service.status()["metrics"].rpartition(":")[2].partition("/")[0])
    return str(Service(service.station, port=port).get("/metrics")[1])


def test_version_is_replaced_when_it_is_deployed_again_at_once(service: Service) -> None:
    """Its supervisor is stopped meanwhile, so it never sees that the version was deleted."""
    service.serve("v1", "--wait")
    service.serve("v2", "--wait")
    supervisor = service.supervisor
    os.kill(supervisor, signal.SIGSTOP)
    try:
        service.station.ok("serve", "delete", "--local", "bert", "-v", "v2")
        service.serve("v2", command=[*ANSWER, "again"])
    finally:
        os.kill(supervisor, signal.SIGCONT)
    service.station.ok("traffic-split", "--local", "--name", "bert", "-v", "v1:0", "-v", "v2:100")
    eventually(lambda: service.answer()["arguments"] == ["again"])


def test_broken_canary_harms_no_other_version(service: Service) -> None:
    """It is started again with pauses; its share goes to the others."""
    service.serve("v1", "--wait")
    service.serve("v2", command=[*ANSWER, "--crash"])
    service.station.ok("traffic-split", "--local", "--name", "bert", "-v", "v1:50", "-v", "v2:50")
    eventually(lambda: [each for each in service.replicas(version="v2") if each["restarts"] > 1])
    assert {service.answer()["arguments"][0] for _ in range(20)} == {"v1"}
    shown = json.loads(
        service.station.ok("serve", "get", "--local", "bert", "-v", "v2", "-o", "json")
    )
    (replica,) = shown["instances"]
    assert replica["restartCount"] > 1
    assert "this version is broken" in service.station.ok(
        "serve", "logs", "--local", "bert", "-v", "v2"
    )
    service.station.ok("traffic-split", "--local", "--name", "bert", "-v", "v1:100", "-v", "v2:0")
    service.station.ok("serve", "delete", "--local", "bert", "-v", "v2")
    eventually(lambda: not service.replicas(version="v2"))


def test_reason_is_shown_when_a_program_cannot_be_started(service: Service, tmp_path: Path) -> None:
    """The file exists and is no program."""
    (tmp_path / "serve").touch()
    service.serve("v1", command=[str(tmp_path / "serve"), "now"])
    reason = f"ended with exit code 126: {tmp_path}/serve cannot be started: Permission denied"
    eventually(lambda: reason in service.station.ok("serve", "get", "--local", "bert"))


def test_update_replaces_replicas_without_an_error(service: Service) -> None:
    """The old one serves until the new one is ready."""
    service.serve("v1", "--wait")
    before = service.answer()["pid"]
    words = ["serve", "update", "custom", "--local", "--name", "bert", "--env", "MARK=new"]
    service.station.ok(*words, "--wait")
    while (body := service.answer())["mark"] != "new":
        assert body["pid"] == before
    (replica,) = service.await_ready(1)
    assert replica["restarts"] == 0


def test_update_is_taken_back_by_undo(service: Service) -> None:
    """There is nothing to undo before the first one."""
    service.serve("v1", "--wait")
    before = service.answer()["mark"]
    done = service.station.fenka("serve", "undo", "--local", "bert")
    assert done.returncode
    assert (
        "version v1 of service bert has not been updated: there is nothing to undo" in done.stderr
    )
    words = ["serve", "update", "custom", "--local", "--name", "bert", "--env", "MARK=new"]
    service.station.ok(*words, "--wait")
    eventually(lambda: service.answer()["mark"] == "new")
    service.station.ok("serve", "undo", "--local", "bert", "--wait")
    eventually(lambda: service.answer()["mark"] == before)


def test_update_goes_on_when_there_is_no_room_for_one_more(service: Service) -> None:
    """An old replica makes room; requests wait meanwhile."""
    service.serve("v1", "--gpu-mem", "10", "--wait")
    before = service.answer()["pid"]
    words = ["serve", "update", "custom", "--local", "--name", "bert", "--env", "MARK=new"]
    service.station.ok(*words)
    eventually(lambda: service.answer()["pid"] != before)
    assert service.answer()["mark"] == "new"


def test_replica_is_ready_when_its_path_answers(service: Service, tmp_path: Path) -> None:
    """An open port is not enough where a path is named."""
    ready = tmp_path / "ready"
    service.serve("v1", "--health-path", "/ready", "--env", f"READY={ready}")
    eventually(lambda: logs(service).count("asked /ready") > 1)
    assert service.replicas("Starting")
    ready.touch()
    service.await_ready(1)


# --- training in the trough -----------------------------------------------------------------------------


def test_training_makes_room_for_replicas_and_goes_on_afterwards(
    service: Service, tmp_path: Path
) -> None:
    """It has what the service leaves, is evicted as a whole at the peak, and starts again."""
    train = "echo from $FENKA_RESTARTS; exec sleep 1000"
    words = ["--workers", "2", "--gpu-mem", "5", "--backfill", "--grace", "1s", "--", train]
    service.serve("v1", "--replicas", "1..2", "--target", "1", "--down-after", "1s", "--wait")
    service.station.ok("submit", "pytorch", "--local", "--name", "pt", *words)
    directory = service.station.root / "jobs" / "pt" / ".fenka"
    try:
        eventually(lambda: started(directory) == ["from 0"] * 2)
        clients = service.hold(3, tmp_path / "go")
        service.await_ready(2)
        assert service.station.jobs()["pt"]["state"] == "waiting"
        (tmp_path / "go").touch()
        for client in clients:
            client.join()
        eventually(lambda: started(directory) == ["from 0", "from 1"] * 2)
    finally:
        service.station.fenka("delete", "--local", "pt")


def started(directory: Path) -> list[str]:
    """Return what all members have printed."""
    return [
        line for log in sorted(directory.glob("pt-*/log")) for line in log.read_text().splitlines()
    ]


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data", "claim:/data"], "--data requires a cluster: use --data-dir DIRECTORY"),
        (["--scaler", "keda"], "--scaler requires a cluster: leave it out"),
        (["--gpu-mem", "15"], "no GPU fits: .*the largest card has 14 units, ask for no more"),
        (["--replicas", "4..1"], "invalid --replicas '4..1': expected N or MIN..MAX"),
        (["--data-dir", "/nonesuch"], "--data-dir /nonesuch is not a directory on this machine"),
        (["--gateway-replicas", "2"], "--gateway-image and --gateway-replicas require .*"),
        (["--priority", "high"], "invalid --priority 'high': on a workstation it is a number.*"),
        (["--", "nonesuch", "x"], "there is no program called nonesuch on this machine"),
    ],
)
def test_nothing_is_created_when_the_request_is_refused(
    service: Service, options: list[str], sentence: str
) -> None:
    """One sentence."""
    words = ["--name", "bert", "--restful-port", str(service.port), "--gpu-mem", "3"]
    command = [] if "--" in options else ["--", *ANSWER]
    refused(
        service.station.fenka("serve", "custom", "--local", *words, *options, *command), 2, sentence
    )
    assert not service.directory.exists()
    assert service.station.jobs() == {}


def test_nothing_is_left_when_a_file_cannot_be_copied(service: Service, tmp_path: Path) -> None:
    """The same name can be deployed afterwards."""
    target = tmp_path / "settings"
    target.touch()
    words = ["--name", "bert", "--restful-port", str(service.port), "--gpu-mem", "3"]
    # It is a regular file whose first bytes nobody can read.
    file = f"--config-file=/proc/self/mem:{target}"
    failed = service.station.fenka("serve", "custom", "--local", *words, file, "--", *ANSWER)
    assert failed.returncode
    assert not service.directory.exists()
    service.serve("v1", "--wait")
    assert service.answer()["arguments"] == ["v1"]


def test_second_service_is_refused_when_its_port_is_taken(service: Service) -> None:
    """Nothing of it is left, and the first one goes on."""
    service.serve("v1", "--wait")
    other = Service(service.station, "other", service.port)
    words = ["--name", "other", "--gpu-mem", "3", "--restful-port", str(service.port)]
    refused(
        service.station.fenka("serve", "custom", "--local", *words, "--", *ANSWER),
        2,
        rf"cannot listen on port {service.port} of 127.0.0.1 \(Address already in use\): choose another .*",
    )
    assert not other.directory.exists()
    assert service.answer()["arguments"] == ["v1"]


def test_version_is_refused_when_the_service_has_it_or_other_ports(service: Service) -> None:
    """The service stays as it is."""
    service.serve("v1", "--wait")
    words = ["serve", "custom", "--local", "--name", "bert", "--gpu-mem", "3"]
    refused(
        service.station.fenka(*words, "--version", "v1", "--restful-port", "1", "--", *ANSWER),
        2,
        "version v1 of service bert already exists on this machine: use fenka serve update custom, .*",
    )
    refused(
        service.station.fenka(*words, "--version", "v2", "--port", str(free_port()), "--", *ANSWER),
        2,
        "service bert has the ports http-serving, and this version grpc-serving: .*",
    )
    delete = ["serve", "delete", "--local", "bert", "-v"]
    refused(
        service.station.fenka(*delete, "v3"),
        1,
        "service bert has no version v3: existing versions are v1",
    )
    assert [each["version"] for each in service.replicas()] == ["v1"]


@pytest.mark.parametrize("verb", ["get", "logs", "delete"])
def test_service_is_not_found_when_it_does_not_exist(station: Workstation, verb: str) -> None:
    """Also where no daemon runs."""
    result = station.fenka("serve", verb, "--local", "nothing")
    refused(result, 1, "service nothing not found .*")


def test_signal_ends_a_service_in_order(service: Service) -> None:
    """As at the end of a session: no lease and no process is left, and the service can be started again."""
    service.serve("v1", "--wait")
    os.kill(service.guard, signal.SIGTERM)
    eventually(lambda: not service.programs())
    assert "(fenka serve update custom --name bert -v v1)" in service.station.ok(
        "serve", "get", "--local", "bert"
    )
    words = ["serve", "update", "custom", "--local", "--name", "bert", "--replicas", "1"]
    service.station.ok(*words, "--wait")
    assert service.answer()["arguments"] == ["v1"]


def test_gateway_runs_fenka_when_the_directory_has_modules_of_its_names(
    service: Service, tmp_path: Path
) -> None:
    """`fenka serve` from another user's directory runs nothing of it; the replicas begin there."""
    (tmp_path / "fenka").mkdir()
    for module in ("fenka/__init__", "fenka/__main__", "logging"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')\n")
    words = ["serve", "custom", "--local", "--name", "bert", "--version", "v1", "--wait"]
    words += ["--gpu-mem", "3", "--restful-port", str(service.port), "--", *ANSWER, "v1"]
    station = service.station
    result = subprocess.run(
        [sys.executable, "-Pm", "fenka", *words],
        env=station.environment,
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert service.answer()["directory"] == str(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_gateways_log_is_kept_short(service: Service) -> None:
    """What fills it leaves its end."""
    service.serve("v1", "--wait")
    log = service.directory / "gateway.log"
    with log.open("ab") as file:
        file.write(b"a line\n" * 1_000_000)
    # The log is empty for a moment, and the gateway may write another line.
    eventually(lambda: 0 < log.stat().st_size < 2 << 20)
    assert b"a line\n" in log.read_bytes()
