"""Another user takes the address of a server that has ended, or takes it first, and gets no requests."""

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.jupyterhub.hub import ADA, BEN, CONFIG, PROXY, PYTHON_PROXY, Hub, hub_on
from tests.waiting import wait_until
from tests.workstation.shared_machine import PYTHON, shared_machine

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SOCKETS = "/var/lib/fenka-jupyterhub"

LISTEN = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Stranger(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a stranger")
    def log_message(self, *_): pass
class Server(HTTPServer):
    def server_bind(self):
        import socketserver
        socketserver.TCPServer.server_bind(self)
server = Server(("127.0.0.1", int(sys.argv[1])), Stranger)
print("ready", flush=True)
server.serve_forever()
"""
"""A program of another user, which answers whatever comes."""


@pytest.fixture(scope="module", params=[PROXY, PYTHON_PROXY], ids=["sockets", "ports"])
def patient_hub(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Hub]:
    """A hub which never asks by itself whether servers run, with a proxy that reaches Unix sockets or not."""
    log = tmp_path_factory.mktemp("hub") / "log"
    with shared_machine() as machine:
        machine.ok(0, "daemon", "--background", "--simulate", "T4")
        config = CONFIG.replace(repr(PROXY), repr(request.param))
        assert repr(request.param) in config
        config += "c.Spawner.poll_interval = 0\nc.JupyterHub.allow_named_servers = True\n"
        with hub_on(machine, log, config) as hub:
            yield hub


@pytest.fixture
def hub(patient_hub: Hub) -> Iterator[Hub]:
    """The hub without servers."""
    yield patient_hub
    patient_hub.stop("ada")


def listening_ports(hub: Hub, uid: int) -> set[int]:
    """Return the ports on which a user's programs listen."""
    rows = [line.split() for line in hub.machine.read("/proc/self/net/tcp").splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if (row[3], row[7]) == ("0A", str(uid))}


def try_to_listen(hub: Hub, port: int) -> bool:
    """Return whether ben's program could listen on a port. It goes on if so."""
    program = subprocess.Popen(
        hub.machine.words(BEN, PYTHON, "-c", LISTEN, str(port)),
        env=hub.machine.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    hub.machine.programs.append(program)
    assert program.stdout
    return program.stdout.readline() == "ready\n"


@pytest.mark.parametrize("profile", ["4", "none"])
def test_nobody_can_take_the_address_of_a_server_that_was_killed(hub: Hub, profile: str) -> None:
    """The proxy still leads there, since the hub has not seen the end."""
    server = hub.started("ada", profile)
    ports = listening_ports(hub, ADA)
    assert bool(ports) == (repr(PYTHON_PROXY) in hub.config)
    hub.machine.run(f"kill -9 {server['pid']}")
    wait_until(lambda: not hub.machine.lives(server["pid"]))
    assert [port for port in ports if try_to_listen(hub, port)] == []
    if not ports:
        for script in (
            f"ls {SOCKETS}/users/{ADA}",
            f"ls {SOCKETS}/links",
            f"touch {SOCKETS}/users/x",
        ):
            assert subprocess.run(
                hub.machine.words(BEN, "sh", "-c", script), check=False
            ).returncode
        assert hub.ask("ada", "/user/ada/")["status"] == 503
    hub.stop("ada")
    assert all(try_to_listen(hub, port) for port in ports)


def test_address_stays_protected_when_the_hub_was_restarted(hub: Hub) -> None:
    """The next hub takes copies of the sockets, too."""
    server = hub.started("ada", "4")
    ports = listening_ports(hub, ADA)
    hub.kill()
    hub.start()
    assert hub.server("ada")["pid"] == server["pid"]
    hub.machine.run(f"kill -9 {server['pid']}")
    wait_until(lambda: not hub.machine.lives(server["pid"]))
    assert [port for port in ports if try_to_listen(hub, port)] == []


def test_real_server_listens_where_the_proxy_leads(hub: Hub) -> None:
    """JupyterHub's own program, whose API needs no login."""
    config = hub.config
    hub.end()
    hub.config += f'c.Spawner.cmd = ["{PYTHON}", "-m", "jupyterhub.singleuser"]\n'
    hub.start()
    try:
        hub.choose("ada", "2")
        assert hub.progress("ada")[-1]["message"] == "Server ready at /user/ada/"
        answer = hub.ask("ada", "/user/ada/api")
        assert "version" in json.loads(answer["text"])
    finally:
        hub.stop("ada")
        hub.end()
        hub.config = config
        hub.start()


def test_server_is_refused_when_another_user_has_its_port_first(hub: Hub) -> None:
    """The stranger answers, but the hub sees whose program listens."""
    config = hub.config
    hub.end()
    hub.config += "c.Spawner.port = 61234\nc.FenkaSpawner.unix_sockets = False\n"
    hub.start()
    try:
        assert try_to_listen(hub, 61234)
        said = hub.choose("ada", "none")["text"]
        if "spawn-error-msg" not in said:
            said = hub.progress("ada")[-1]["message"]
        assert "another user" in said
        assert "listens on port 61234: start the server again" in said
        assert "a stranger" not in hub.ask("ada", "/user/ada/")["text"]
    finally:
        hub.end()
        hub.config = config
        hub.start()
