"""Services whose replicas listen at Unix sockets."""

import json
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.workstation.conftest import Workstation, eventually, kill, refused
from tests.workstation.serving.conftest import Service


def socket_of(replica: Any) -> Path:
    """Return where a replica listens for HTTP."""
    return Path(replica["ports"]["http-serving"])


def test_service_answers_through_a_socket_that_only_its_user_reaches(service: Service) -> None:
    """The program learns the path and no port; `get` shows it."""
    service.serve("v1", "--unix-socket", "--metrics-port", "9000", "--wait")
    (replica,) = service.replicas("Ready")
    path = socket_of(replica)
    metrics = replica["ports"]["http-metrics"]
    assert service.answer()["ports"] == {
        "PORT": None,
        "METRICS_PORT": str(metrics),
        "SOCKET": str(path),
    }
    assert path.is_socket()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    station = service.station
    assert str(path) in station.ok("serve", "get", "--local", "bert")
    shown = json.loads(station.ok("serve", "get", "--local", "bert", "-o", "json"))
    assert [each["sockets"] for each in shown["instances"]] == [[str(path)]]
    # An update replaces a replica that listens at a socket by one that listens on a port.
    update = ("serve", "update", "custom", "--local", "--name", "bert", "--wait")
    station.ok(*update, "--no-unix-socket")
    assert service.answer()["ports"]["SOCKET"] is None
    eventually(lambda: not path.exists())


def test_replica_has_another_socket_when_it_is_started_again(service: Service) -> None:
    """A killed program leaves its file, which would keep the next one from listening."""
    service.serve("v1", "--unix-socket", "--wait")
    (first,) = service.replicas("Ready")
    kill(service.answer()["pid"])
    (second,) = eventually(
        lambda: [each for each in service.replicas("Ready") if each["restarts"] == 1]
    )
    assert second["name"] == first["name"]
    assert service.answer()["ports"]["SOCKET"] == str(socket_of(second))
    assert [*socket_of(first).parent.iterdir()] == [socket_of(second)]


def test_stale_sockets_are_removed_when_the_supervisor_was_killed(service: Service) -> None:
    """Those of all replicas, which it had started."""
    service.serve("v1", "--unix-socket", "--replicas", "2", "--wait")
    first = {socket_of(each) for each in service.await_ready(2)}
    kill(service.supervisor)
    eventually(lambda: first.isdisjoint(map(socket_of, service.replicas())))
    second = {socket_of(each) for each in service.await_ready(2)}
    assert {*next(iter(second)).parent.iterdir()} == second
    service.answer()


def test_replica_is_ready_when_its_health_path_answers_at_its_socket(
    service: Service, tmp_path: Path
) -> None:
    """Until then it is Starting, though its program listens."""
    ready = tmp_path / "ready"
    options = ("--unix-socket", "--health-path", "/ready", "--env", f"READY={ready}")
    service.serve("v1", *options)
    (replica,) = eventually(lambda: service.replicas("Starting"))
    log = service.directory / "replicas" / replica["name"] / "log"
    eventually(lambda: "asked /ready" in log.read_text())
    assert service.replicas("Ready") == []
    ready.touch()
    service.await_ready(1)


def test_replica_is_starting_when_its_socket_has_gone(service: Service) -> None:
    """Nobody could connect to it."""
    service.serve("v1", "--unix-socket", "--wait")
    socket_of(service.replicas("Ready")[0]).unlink()
    eventually(lambda: service.replicas("Starting"))


def test_socket_is_refused_when_its_path_would_be_too_long(station: Workstation) -> None:
    """The kernel allows 107 bytes."""
    station.environment["FENKA_RUNTIME"] = str(station.root / ("a" * 60))
    words = ("serve", "custom", "--local", "--name", "b" * 43, "--version", "v1", "--unix-socket")
    refused(
        station.fenka(*words, "--restful-port", str(free_port()), "--", "sleep", "1"),
        2,
        r"--unix-socket: the path of a Unix socket has at most 107 bytes, and /\S+ has \d+: give the "
        "service a shorter --name, or set XDG_STATE_HOME to a directory with a shorter path",
    )
