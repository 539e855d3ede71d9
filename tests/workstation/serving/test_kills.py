"""Services whose processes are killed, in any order, and whose records are damaged."""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fenka import procfs
from fenka.local import supervisor
from fenka.local.supervisor import Home
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import Workstation, eventually, kill, refused
from tests.workstation.serving.conftest import ANSWER, Service

PROCESSES: dict[str, Callable[[Service], int]] = {
    "guard": lambda service: service.guard,
    "supervisor": lambda service: service.supervisor,
    "gateway": lambda service: int(service.status()["gateway_pid"]),
    "replica": lambda service: int(service.replicas()[0]["pid"]),
    "program": lambda service: service.programs()[0],
    "daemon": lambda service: service.station.daemon_pid(),
}


@pytest.mark.parametrize("process", ["supervisor", "gateway", "replica", "program", "daemon"])
def test_service_answers_again_when_a_process_is_killed(service: Service, process: str) -> None:
    """A request that comes in between waits. No second replica and no second lease is left."""
    service.serve("v1", "--wait")
    (program,) = service.programs()
    envoys = procfs.children(PROCESSES["gateway"](service))
    kill(PROCESSES[process](service))
    if process in ("supervisor", "gateway"):
        # Envoy ends a moment later, with the connections that it may have by then.
        eventually(lambda: not any(map(procfs.start_ticks, envoys)))
    if process in ("replica", "supervisor"):
        # The program ends a moment later, with the request that it may have by then.
        eventually(lambda: program not in service.programs())
    if process == "daemon":
        service.station.start("--simulate", "T4")
    assert service.answer()["arguments"] == ["v1"]
    service.await_ready(1)
    eventually(lambda: len(service.programs()) == 1)
    eventually(lambda: len(service.station.jobs()) == 1)


@pytest.mark.parametrize(
    "processes",
    [
        ["guard"],
        ["guard", "supervisor"],
        ["supervisor", "guard"],
        ["daemon", "guard", "supervisor", "replica"],
        ["replica", "guard", "supervisor", "gateway"],
    ],
)
def test_nothing_is_left_when_a_service_is_killed(service: Service, processes: list[str]) -> None:
    """Without its guard it ends. It can be started again."""
    service.serve("v1", "--wait")
    pids = [PROCESSES[process](service) for process in processes]
    for pid in pids:
        # Another one's end may have ended it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not service.programs())
    if "daemon" in processes:
        service.station.start("--simulate", "T4")
    eventually(lambda: service.station.jobs() == {})
    shown = json.loads(service.station.ok("serve", "get", "--local", "bert", "-o", "json"))
    assert "its supervisor has ended" in shown["note"]
    words = ["serve", "update", "custom", "--local", "--name", "bert", "--replicas", "1"]
    service.station.ok(*words)
    assert service.answer()["arguments"] == ["v1"]


def test_service_stays_as_it_was_when_its_supervisor_cannot_be_started_for_an_update(
    service: Service,
) -> None:
    """Its port is taken meanwhile. What was refused is not in force at the next start."""
    service.serve("v1", "--wait")
    os.kill(service.guard, signal.SIGTERM)
    eventually(lambda: "has ended" in service.station.ok("serve", "get", "--local", "bert"))
    before = (service.directory / "service.json").read_bytes()
    words = ["serve", "update", "custom", "--local", "--name", "bert", "--env", "MARK=new"]
    with socket.create_server(("127.0.0.1", service.port)):
        refused(service.station.fenka(*words), 2, "cannot listen on port .*")
    assert (service.directory / "service.json").read_bytes() == before


def test_interrupted_deployment_can_be_deleted(service: Service) -> None:
    """The client is killed as soon as it has written anything."""
    words = ["--name", "bert", "--gpu-mem", "3", "--restful-port", str(service.port)]
    command = [sys.executable, "-m", "fenka", "serve", "custom", "--local", *words, "--", *ANSWER]
    with subprocess.Popen(command, env=service.station.environment) as client:
        eventually((service.directory / "service.json").exists)
        client.kill()
    service.station.ok("serve", "delete", "--local", "bert")
    assert service.programs() == []
    assert service.station.jobs() == {}
    assert service.station.ok("serve", "list", "--local").count("\n") == 1


def test_nothing_is_left_when_a_program_leaves_its_process_group(service: Service) -> None:
    """What it has started in a session of its own ends with its replica."""
    program = f"setsid {' '.join(ANSWER)} & exec {' '.join(ANSWER)} other"
    service.serve("v1", "--env", "PORT=0", command=["sh", "-c", program])
    eventually(lambda: len(service.programs()) == 2)
    service.station.ok("serve", "delete", "--local", "bert")
    assert service.programs() == []
    eventually(lambda: service.station.jobs() == {})


def test_service_is_deleted_when_its_gateway_hangs(service: Service) -> None:
    """A stopped process handles no SIGTERM."""
    service.serve("v1", "--wait", "--grace", "1s")
    os.kill(int(service.status()["gateway_pid"]), signal.SIGSTOP)
    service.station.ok("serve", "delete", "--local", "bert")
    assert service.programs() == []
    assert not service.directory.exists()


def test_no_descriptor_is_kept_when_a_replica_cannot_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is tried again and again while the user has too many processes."""

    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    home = Home(Runtime(tmp_path), tmp_path, contextlib.nullcontext)
    monkeypatch.setattr(os, "fork", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        supervisor.fork(home, lambda _: 0)
    assert len(os.listdir("/proc/self/fd")) == len(before)


# --- records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "{" * 100_000,
        "[]",
        '{"uid":"a","address":"x","ports":{"http-serving":1},"versions":[],"weights":{}}',
        '{"uid":"a","address":"::1","ports":{"http-serving":0},"versions":[],"weights":{}}',
        '{"uid":"a","address":"::1","ports":{},"versions":[],"weights":{"a":-1}}',
    ],
)
def test_service_goes_on_and_is_deleted_when_its_record_is_damaged(
    service: Service, content: str
) -> None:
    """Its supervisor keeps what it knows; screens say what is wrong."""
    service.serve("v1", "--wait")
    (service.directory / "service.json").write_text(content)
    assert service.answer()["arguments"] == ["v1"]
    assert "is not understood" in service.station.ok("serve", "get", "--local", "bert")
    service.station.ok("serve", "delete", "--local", "bert")
    assert service.programs() == []
    assert not service.directory.exists()


def test_nothing_is_left_when_the_directory_is_removed(service: Service) -> None:
    """No command would find the service any more."""
    service.serve("v1", "--wait")
    guard = service.guard
    shutil.rmtree(service.directory)
    eventually(lambda: procfs.start_ticks(guard) is None)
    assert service.programs() == []
    eventually(lambda: service.station.jobs() == {})


def test_service_is_deleted_when_its_record_cannot_be_written(service: Service) -> None:
    """As on a full disk, on which it may be deleted to make room."""
    service.serve("v1", "--wait")
    (service.directory / ".service.json.new").mkdir()
    service.station.ok("serve", "delete", "--local", "bert")
    assert service.programs() == []
    assert not service.directory.exists()


def test_screens_wait_for_no_file_that_is_not_regular(station: Workstation) -> None:
    """A pipe without a writer, and a directory that is none."""
    directory = station.root / "services" / "bert"
    directory.mkdir(parents=True)
    os.mkfifo(directory / "service.json")
    (directory.parent / "file").touch()
    (directory.parent / "BAD NAME").mkdir()
    os.mkfifo(directory / "status.json")
    assert station.ok("serve", "list", "--local").count("\n") == 2
    station.ok("serve", "delete", "--local", "bert")
    assert not directory.exists()


def test_status_is_not_believed_when_it_names_another_process(service: Service) -> None:
    """Deleting the service ends no process that is not its own."""
    service.serve("v1", "--wait")
    other = subprocess.Popen(["sleep", "1000"])
    try:
        path = service.directory / "status.json"
        status = json.loads(path.read_text())
        supervisor = status["pid"]
        path.write_text(json.dumps(status | {"pid": other.pid}))
        service.station.ok("serve", "delete", "--local", "bert")
        assert other.poll() is None
        assert procfs.start_ticks(supervisor) is None
    finally:
        other.kill()
        other.wait()
