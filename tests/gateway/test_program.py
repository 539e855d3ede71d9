"""`fenka gateway` as a process: options, the table's file, metrics, and its end."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fenka.cli.main import run
from fenka.core.errors import FenkaError
from fenka.isolation.lease_files import write_atomically
from fenka.jobs.routing_table import InvalidTable, ReplicaEntry, decode, encode
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.gateway.harness import LOOPBACK, table, version
from tests.gateway.test_endpoints import endpoint, endpoint_slice
from tests.ports import free_port
from tests.waiting import wait_until


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held = threading.Event()
    begun = threading.Event()

    def do_GET(self) -> None:
        """Answer, after a while if the path says so."""
        if self.path == "/slow":
            self.begun.set()
            self.held.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def replica() -> Iterator[ReplicaEntry]:
    """Return a replica that answers `ok`."""
    server = ThreadingHTTPServer((LOOPBACK, 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _Handler.held.clear()
    _Handler.begun.clear()
    yield ReplicaEntry(LOOPBACK, {"http": server.server_address[1]})
    _Handler.held.set()
    server.shutdown()


def command(*words: object) -> list[str]:
    """Return the words of a command."""
    return [sys.executable, "-m", "fenka", "gateway", *map(str, words)]


def get(port: int, path: str = "/") -> tuple[int, bytes]:
    """Return the status and the body of a response."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def listens(port: int) -> bool:
    """Return whether anything listens on a port."""
    with socket.socket() as trial:
        return trial.connect_ex((LOOPBACK, port)) == 0


class Program:
    """A running gateway."""

    def __init__(self, *source: object) -> None:
        self.port, self.admin = free_port(), free_port()
        self.process = subprocess.Popen(
            command(
                *(*source, "--listen", f"http={LOOPBACK}:{self.port}"),
                *("--admin", f"{LOOPBACK}:{self.admin}"),
            )
        )
        wait_until(lambda: self.process.poll() is not None or listens(self.port))

    def metric(self, name: str) -> float | None:
        """Return a metric's value."""
        for line in get(self.admin, "/metrics")[1].decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return None


@pytest.fixture
def path(tmp_path: Path, replica: ReplicaEntry) -> Path:
    """Return the file with the table of a service with one replica."""
    path = tmp_path / "table.json"
    write_atomically(path, encode(table(version("v1", replica))))
    return path


@pytest.fixture
def program(path: Path) -> Iterator[Program]:
    """Return a gateway of this service."""
    program = Program("--table", path)
    yield program
    program.process.kill()
    program.process.wait()


def test_gateway_serves_and_reports(program: Program) -> None:
    """Requests are passed on, and counted."""
    assert [get(program.port) for _ in range(3)] == [(200, b"ok")] * 3
    assert get(program.admin, "/readyz")[0] == get(program.admin, "/healthz")[0] == 200
    assert program.metric('fenka_gateway_responses_total{status="200",version="v1"}') == 3
    assert program.metric('fenka_gateway_request_seconds_bucket{le="+Inf",version="v1"}') == 3
    assert program.metric("fenka_gateway_requests") == 0
    assert program.metric('fenka_gateway_replicas{state="ready",version="v1"}') == 1
    assert program.metric('fenka_gateway_version_idle_seconds{version="v1"}') is not None


def test_gateway_follows_the_table(program: Program, path: Path, replica: ReplicaEntry) -> None:
    """A new table holds soon; an invalid one is reported and changes nothing."""
    path.write_bytes(b"{}")
    wait_until(lambda: program.metric("fenka_gateway_table_valid") == 0)
    assert get(program.port) == (200, b"ok")
    write_atomically(path, encode(table(version("v2", replica))))
    wait_until(lambda: program.metric('fenka_gateway_version_weight{version="v2"}') == 1)
    assert program.metric("fenka_gateway_table_valid") == 1
    path.unlink()
    wait_until(lambda: program.metric("fenka_gateway_table_valid") == 0)
    assert get(program.port) == (200, b"ok")


def test_gateway_waits_for_no_file_that_is_not_regular(
    program: Program, path: Path, replica: ReplicaEntry, tmp_path: Path
) -> None:
    """A pipe without a writer stops nothing. A link, as in a mounted ConfigMap, is followed."""
    path.unlink()
    os.mkfifo(path)
    wait_until(lambda: program.metric("fenka_gateway_table_valid") == 0)
    assert get(program.port) == (200, b"ok")
    mounted = tmp_path / "mounted"
    write_atomically(mounted, encode(table(version("v2", replica))))
    path.unlink()
    path.symlink_to(mounted)
    wait_until(lambda: program.metric('fenka_gateway_version_weight{version="v2"}') == 1)


def test_gateway_finishes_requests_when_terminated(program: Program) -> None:
    """SIGTERM loses no request, and new connections are refused."""
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(get(program.port, "/slow")))
    client.start()
    assert _Handler.begun.wait(60)
    program.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not listens(program.port))
    assert get(program.admin, "/readyz")[0] == 503
    _Handler.held.set()
    client.join(60)
    assert answers == [(200, b"ok")]
    assert program.process.wait(60) == 0


def test_gateway_accepts_connections_while_it_lingers(path: Path) -> None:
    """A gateway that ends reports it, and serves those that have not heard of it yet."""
    program = Program("--table", path, "--linger", 1000)
    try:
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: get(program.admin, "/readyz")[0] == 503)
        assert get(program.port) == (200, b"ok")
    finally:
        program.process.kill()
        program.process.wait()


def test_client_is_answered_by_the_next_gateway_when_it_comes_between_two(path: Path) -> None:
    """Whoever starts gateways keeps their socket open, so a killed one refuses no connection."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        words = command("--table", path, "--listen", f"http=fd:{listening.fileno()}")
        port, answers = listening.getsockname()[1], list[tuple[int, bytes]]()
        for _ in range(2):
            client = threading.Thread(target=lambda: answers.append(get(port)))
            client.start()
            with subprocess.Popen(words, pass_fds=[listening.fileno()]) as process:
                client.join(60)
                process.kill()
    assert answers == [(200, b"ok")] * 2


def test_requests_of_a_terminating_replica_are_shown(
    program: Program, path: Path, replica: ReplicaEntry
) -> None:
    """Whoever ends the replica waits until it has none."""
    client = threading.Thread(target=get, args=(program.port, "/slow"))
    client.start()
    assert _Handler.begun.wait(60)
    ending = ReplicaEntry(replica.host, replica.ports, terminating=True)
    write_atomically(path, encode(table(version("v1", ending))))
    address = f"{replica.host}:{replica.ports['http']}"
    name = f'fenka_gateway_terminating_requests{{replica="{address}",version="v1"}}'
    wait_until(lambda: program.metric(name) == 1)
    _Handler.held.set()
    wait_until(lambda: program.metric(name) == 0)
    client.join(60)


def test_clients_get_whole_answers_or_errors_when_gateway_is_killed_under_load(
    program: Program, path: Path
) -> None:
    """A killed gateway costs connections, and never a wrong answer."""
    answers: list[tuple[int, bytes]] = []
    errors: list[Exception] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                answers.append(get(program.port))
            except (OSError, http.client.HTTPException) as error:
                errors.append(error)

    clients = [threading.Thread(target=load) for _ in range(4)]
    for client in clients:
        client.start()
    wait_until(lambda: len(answers) > 50)
    program.process.kill()
    program.process.wait()
    wait_until(lambda: errors)
    count = len(answers)
    again = subprocess.Popen(
        command("--table", path, "--listen", f"http={LOOPBACK}:{program.port}")
    )
    try:
        wait_until(lambda: len(answers) > count + 50)
    finally:
        stop.set()
        for client in clients:
            client.join()
        again.kill()
        again.wait()
    assert set(answers) == {(200, b"ok")}


def test_requests_are_answered_when_gateway_is_killed_and_started_again(
    program: Program, path: Path
) -> None:
    """The table is all that a gateway knows."""
    program.process.kill()
    program.process.wait()
    again = Program("--table", path)
    try:
        assert get(again.port) == (200, b"ok")
    finally:
        again.process.kill()
        again.process.wait()


def test_gateway_follows_a_service_on_kubernetes(tmp_path: Path, replica: ReplicaEntry) -> None:
    """A gateway is ready once it knows the replicas, and routes to those of the service."""
    server = FakeApiServer()
    ports = [{"name": "http", "port": replica.ports["http"]}]
    server.put("endpointslices", endpoint_slice("v1", endpoint(LOOPBACK, "a"), ports=ports))
    with in_thread(server, tmp_path) as kubeconfig:
        source = "--service", "bert", "--namespace", "d", "--kubeconfig", kubeconfig
        program = Program(*source)
        try:
            wait_until(lambda: get(program.admin, "/readyz")[0] == 200)
            assert get(program.port) == (200, b"ok")
        finally:
            program.process.kill()
            program.process.wait()


def test_gateway_refuses_to_follow_two_sources(path: Path) -> None:
    """A service is either in a file or on Kubernetes."""
    listen = ["--listen", "http=127.0.0.1:0"]
    for source in ([], ["--table", str(path), "--service", "bert"]):
        with pytest.raises(FenkaError, match="use either --table FILE or --service NAME"):
            run(["gateway", *source, *listen])


VALID = encode(table())


@pytest.mark.parametrize(
    ("text", "listen", "sentence"),
    [
        (b"[]", "http=127.0.0.1:0", "the routing table is invalid: Expected `object`, got `array`"),
        (
            VALID.replace(b"gateway/1", b"gateway/2"),
            "http=127.0.0.1:0",
            "the routing table is invalid: Invalid enum value 'fenka.gateway/2' - at `$.format`",
        ),
        (VALID, "127.0.0.1:80", "invalid --listen '127.0.0.1:80': expected NAME=ADDRESS:PORT"),
        (VALID, "http=127.0.0.1", "invalid --listen '127.0.0.1': expected ADDRESS:PORT"),
        (
            VALID,
            "http=127.0.0.1:99999",
            "invalid --listen '127.0.0.1:99999': expected ADDRESS:PORT",
        ),
        (VALID, "http=fd:x", "invalid --listen 'fd:x': no open socket"),
        (VALID, "http=fd:-1", "invalid --listen 'fd:-1': no open socket"),
        (None, "http=127.0.0.1:0", "No such file or directory"),
    ],
)
def test_gateway_refuses_bad_input(
    tmp_path: Path, text: bytes | None, listen: str, sentence: str
) -> None:
    """Bad input ends the program with one sentence."""
    path = tmp_path / "table.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises((FenkaError, OSError), match=re.escape(sentence)):
        run(["gateway", "--table", str(path), "--listen", listen])


def row(**changes: object) -> bytes:
    """Return a table with one version and one replica, changed as given."""
    replica = {"host": "10.0.0.1", "ports": {"http": 80}}
    fields = {"name": "v1", "weight": 1, "replicas": [replica], **changes}
    return json.dumps({"format": "fenka.gateway/1", "service": "s", "versions": [fields]}).encode()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (row(weight=-1), "Expected `int` >= 0"),
        (row(name="../v"), "invalid name '../v'"),
        (row(extra=1), "unknown field `extra`"),
        (b'{"\xff":1}', "invalid: 'utf-8' codec can't decode byte 0xff"),
        (row(replicas=[{"host": "example.com", "ports": {}}]), "invalid replica 'example.com'"),
        (row(replicas=[{"host": "::1", "ports": {"http": 0}}]), "Expected `int` >= 1"),
        (row(replicas=[{"host": "::1", "ports": {"http": 1}}] * 2), "a replica appears twice"),
    ],
)
def test_invalid_table_is_refused(text: bytes, sentence: str) -> None:
    """Each mistake in a table is named."""

    decode(row())
    with pytest.raises(InvalidTable) as error:
        decode(text)
    assert sentence in str(error.value)


def test_two_gateways_share_a_port(program: Program, path: Path) -> None:
    """Several processes serve one address: the kernel spreads connections."""
    second = subprocess.Popen(
        command("--table", path, "--listen", f"http={LOOPBACK}:{program.port}")
    )
    requests = 0

    def both_have_answered() -> bool:
        nonlocal requests
        for _ in range(20):
            assert get(program.port) == (200, b"ok")
        requests += 20
        first = program.metric('fenka_gateway_responses_total{status="200",version="v1"}')
        return first is not None and first < requests

    try:
        wait_until(both_have_answered)
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0


def test_program_uses_all_descriptors_that_it_may_have(tmp_path: Path) -> None:
    """Its soft limit is raised to the hard one."""
    (tmp_path / "table").write_bytes(encode(table()))
    words = command("--table", tmp_path / "table", "--listen", f"http={LOOPBACK}:0")
    limited = ["prlimit", "--nofile=256:1024", *words]
    with subprocess.Popen(limited) as process:
        limits = Path(f"/proc/{process.pid}/limits")
        wait_until(lambda: re.search(r"Max open files +1024 +1024", limits.read_text()))
        process.terminate()
