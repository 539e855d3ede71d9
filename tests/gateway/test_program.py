"""`fenka gateway` as a process: options, the table's file, metrics, crashes and its end."""

import contextlib
import http.client
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

import psutil
import pytest

from fenka.cli.main import run
from fenka.core.errors import FenkaError
from fenka.gateway import client_sockets
from fenka.isolation.lease_files import write_atomically
from fenka.jobs.routing_table import ReplicaEntry, encode
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.gateway.tables import LOOPBACK, table, version
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
    """A running gateway, whose temporary files are in a directory of its own."""

    def __init__(self, temporary: Path, *source: object) -> None:
        self.port, self.admin, self.temporary = free_port(), free_port(), temporary
        self.process = subprocess.Popen(
            command(
                *(*source, "--listen", f"http={LOOPBACK}:{self.port}"),
                *("--admin", f"{LOOPBACK}:{self.admin}"),
            ),
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        wait_until(lambda: self.process.poll() is not None or self.is_ready())

    def is_ready(self) -> bool:
        """Return whether it serves."""
        with contextlib.suppress(OSError):
            return get(self.admin, "/readyz")[0] == 200
        return False

    def metric(self, name: str) -> float | None:
        """Return a metric's value."""
        for line in get(self.admin, "/metrics")[1].decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return None

    def envoy(self) -> psutil.Process:
        """Return its Envoy."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def path(tmp_path: Path, replica: ReplicaEntry) -> Path:
    """Return the file with the table of a service with one replica."""
    path = tmp_path / "table.json"
    write_atomically(path, encode(table(version("v1", replica), generation=7)))
    return path


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Return a directory for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def program(path: Path, temporary: Path) -> Iterator[Program]:
    """Return a gateway of this service."""
    program = Program(temporary, "--table", path)
    yield program
    program.end()


def test_gateway_serves_and_reports(program: Program) -> None:
    """Requests are passed on, and counted."""
    assert [get(program.port) for _ in range(3)] == [(200, b"ok")] * 3
    assert get(program.admin, "/readyz")[0] == get(program.admin, "/healthz")[0] == 200
    assert program.metric('fenka_gateway_responses_total{status="200",version="v1"}') == 3
    seconds = 'fenka_gateway_request_seconds_bucket{le="+Inf",version="v1"}'
    wait_until(lambda: program.metric(seconds) == 3)
    assert program.metric("fenka_gateway_requests") == 0
    assert program.metric("fenka_gateway_envoy_running") == 1
    assert program.metric("fenka_gateway_envoy_starts_total") == 1
    assert program.metric("fenka_gateway_table_generation") == 7
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


# --- its end --------------------------------------------------------------------------------------------


def test_gateway_finishes_requests_when_terminated(program: Program) -> None:
    """SIGTERM loses no request, new connections are refused, and nothing of it stays."""
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(get(program.port, "/slow")))
    client.start()
    assert _Handler.begun.wait(60)
    envoy = program.envoy()
    program.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not listens(program.port))
    assert get(program.admin, "/readyz") == (503, b"the gateway ends\n")
    _Handler.held.set()
    client.join(60)
    assert answers == [(200, b"ok")]
    assert program.process.wait(60) == 0
    # Nobody may reap it yet, whose parent has ended.
    wait_until(lambda: not envoy.is_running() or envoy.status() == psutil.STATUS_ZOMBIE)
    assert list(program.temporary.iterdir()) == []


def test_kept_connections_end_when_gateway_is_terminated(path: Path, temporary: Path) -> None:
    """While it lingers, clients are served, and go elsewhere afterwards."""
    program = Program(temporary, "--table", path, "--linger", 1000)
    kept = http.client.HTTPConnection(LOOPBACK, program.port, timeout=60)
    try:
        kept.request("GET", "/")
        response = kept.getresponse()
        assert (response.getheader("connection"), response.read()) == (None, b"ok")
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: get(program.admin, "/readyz")[0] == 503)
        kept.request("GET", "/")
        response = kept.getresponse()
        assert (response.getheader("connection"), response.read()) == ("close", b"ok")
        assert get(program.port) == (200, b"ok")
    finally:
        kept.close()
        program.end()


def test_gateway_ends_though_a_request_does_not(path: Path, temporary: Path) -> None:
    """--grace bounds how long requests are finished."""
    program = Program(temporary, "--table", path, "--grace", 0.1)
    with socket.create_connection((LOOPBACK, program.port)) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _Handler.begun.wait(60)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(60) == 0
        with contextlib.suppress(ConnectionError):
            assert connection.recv(100) == b""


def test_requests_that_wait_are_finished_when_gateway_is_terminated(
    path: Path, temporary: Path, replica: ReplicaEntry
) -> None:
    """A gateway that ends keeps what it has accepted, and still follows its table."""
    write_atomically(path, encode(table()))
    program = Program(temporary, "--table", path)
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(get(program.port)))
    client.start()
    wait_until(lambda: program.metric("fenka_gateway_requests_waiting") == 1)
    program.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not listens(program.port))
    write_atomically(path, encode(table(version("v1", replica))))
    client.join(60)
    assert answers == [(200, b"ok")]
    assert program.process.wait(60) == 0


# --- crashes --------------------------------------------------------------------------------------------


def test_client_is_answered_by_the_next_gateway_when_it_comes_between_two(path: Path) -> None:
    """Whoever starts gateways keeps their socket open, so a killed one refuses no connection."""
    with client_sockets.listen(LOOPBACK, 0) as listening:
        os.set_inheritable(listening.fileno(), True)
        words = command("--table", path, "--listen", f"http=fd:{listening.fileno()}")
        port, answers = listening.getsockname()[1], list[tuple[int, bytes]]()
        for _ in range(2):
            client = threading.Thread(target=lambda: answers.append(get(port)))
            client.start()
            with subprocess.Popen(words, pass_fds=[listening.fileno()]) as process:
                client.join(60)
                envoys = psutil.Process(process.pid).children()
                process.kill()
            # What Envoy's own socket has accepted ends with it.
            psutil.wait_procs(envoys, timeout=60)
    assert answers == [(200, b"ok")] * 2


def test_envoy_ends_when_the_gateway_is_killed(program: Program) -> None:
    """No Envoy stays that would take the next one's connections."""
    envoy = program.envoy()
    program.end()
    wait_until(lambda: not envoy.is_running() or envoy.status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: not listens(program.port))


def test_envoy_is_started_again(program: Program) -> None:
    """A crash of Envoy costs the requests that it had, and no others."""
    for starts in (2, 3):
        envoy = program.envoy()
        envoy.kill()
        envoy.wait(60)
        assert get(program.port) == (200, b"ok")
        assert program.metric("fenka_gateway_envoy_starts_total") == starts
        wait_until(program.is_ready)


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


@pytest.mark.parametrize("killed", ["envoy", "gateway"])
def test_clients_get_whole_answers_or_errors_when_killed_under_load(
    program: Program, path: Path, temporary: Path, killed: str
) -> None:
    """A kill costs connections, and never a wrong answer."""
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
    again = None
    try:
        wait_until(lambda: len(answers) > 50)
        if killed == "envoy":
            program.envoy().kill()
        else:
            program.end()
            listen = f"http={LOOPBACK}:{program.port}"
            again = subprocess.Popen(command("--table", path, "--listen", listen))
        count = len(answers)
        wait_until(lambda: len(answers) > count + 50)
    finally:
        stop.set()
        for client in clients:
            client.join()
        if again:
            again.kill()
            again.wait()
    assert set(answers) == {(200, b"ok")}


def test_gateway_ends_when_envoy_does_not_start(path: Path, tmp_path: Path) -> None:
    """Its message precedes the sentence."""
    broken = tmp_path / "envoy"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'version: 0/1.40.0/Clean' || { echo oh >&2; exit 3; }\n"
    )
    broken.chmod(0o755)
    words = command("--table", path, "--listen", f"http={LOOPBACK}:0")
    environment = {**os.environ, "FENKA_ENVOY": str(broken)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert re.search(r"oh\n.*has ended with status 3: its message is above", ended.stderr, re.S)


# --- options --------------------------------------------------------------------------------------------


def test_gateway_follows_a_service_on_kubernetes(
    tmp_path: Path, temporary: Path, replica: ReplicaEntry
) -> None:
    """A gateway is ready once it knows the replicas, and routes to those of the service."""
    server = FakeApiServer()
    ports = [{"name": "http", "port": replica.ports["http"]}]
    server.put("endpointslices", endpoint_slice("v1", endpoint(LOOPBACK, "a"), ports=ports))
    with in_thread(server, tmp_path) as kubeconfig:
        source = "--service", "bert", "--namespace", "d", "--kubeconfig", kubeconfig
        program = Program(temporary, *source)
        try:
            assert get(program.port) == (200, b"ok")
        finally:
            program.end()


def test_directory_that_others_may_enter_is_refused_and_left_as_it_is(
    tmp_path: Path, path: Path
) -> None:
    """They could control Envoy by its sockets. Files of the user are not removed."""
    directory = tmp_path / "shared"
    directory.mkdir(mode=0o755)
    (directory / "thesis").touch()
    words = ["--table", str(path), "--listen", "http=127.0.0.1:0", "--directory", str(directory)]
    with pytest.raises(FenkaError, match=f"chmod 700 {directory}"):
        run(["gateway", *words])
    assert [*directory.iterdir()] == [directory / "thesis"]


def test_gateway_refuses_to_follow_two_sources(path: Path) -> None:
    """A service is either in a file or on Kubernetes."""
    listen = ["--listen", "http=127.0.0.1:0"]
    for source in ([], ["--table", str(path), "--service", "bert"]):
        with pytest.raises(FenkaError, match="use either --table FILE or --service NAME"):
            run(["gateway", *source, *listen])


def test_second_gateway_on_a_port_is_refused(program: Program, path: Path) -> None:
    """Two would share the port, and each Envoy's requests would be the other's."""
    with pytest.raises(OSError, match="Address already in use"):
        run(["gateway", "--table", str(path), "--listen", f"http={LOOPBACK}:{program.port}"])


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


def test_program_uses_all_descriptors_that_it_may_have(tmp_path: Path) -> None:
    """Its soft limit is raised to the hard one, which bounds the connections."""
    (tmp_path / "table").write_bytes(encode(table()))
    folder = tmp_path / "envoy"
    words = command("--table", tmp_path / "table", "--listen", f"http={LOOPBACK}:0")
    limited = ["prlimit", "--nofile=256:1024", *words, "--directory", str(folder)]
    with subprocess.Popen(limited) as process:
        limits = Path(f"/proc/{process.pid}/limits")
        wait_until(lambda: re.search(r"Max open files +1024 +1024", limits.read_text()))
        wait_until((folder / "envoy.json").exists)
        assert '"max_active_downstream_connections":480' in (folder / "envoy.json").read_text()
        assert folder.stat().st_mode & 0o777 == 0o700
        process.terminate()
