"""Replicas' ports and other users: nobody takes one first, and nobody else gets a service's requests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fenka.hardware.peer_credentials import copy_listener, listener_uid
from fenka.jobs.local_ports import PortReservations, taken_port
from fenka.local.held_ports import HeldPorts
from tests.workstation.conftest import PROGRAMS, eventually
from tests.workstation.serving.conftest import Service
from tests.workstation.users import FIRST_UID, as_root

LEAVES = [sys.executable, str(PROGRAMS / "leaves_port.py")]


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")],
)
def test_listener_is_found_on_any_address(family: socket.AddressFamily, address: str) -> None:
    """Wildcard and IPv6 sockets get connections to the loopback address, too."""
    with socket.create_server((address, 0), family=family, dualstack_ipv6=":" in address) as server:
        port = server.getsockname()[1]
        assert listener_uid(("127.0.0.1", port)) == os.geteuid()
    assert listener_uid(("127.0.0.1", port)) is None


def test_reserved_port_is_locked_until_the_last_copy_is_closed(tmp_path: Path) -> None:
    """The file is the user's own; another reservation of the port fails while any process has it open."""
    ports = PortReservations(tmp_path / "own")
    port, lock = ports.reserve(range(40000, 50000))
    copy = os.dup(lock.fileno())
    lock.close()
    other, other_lock = ports.reserve(range(port, 50000))
    assert other > port
    os.close(copy)
    again, again_lock = ports.reserve([port])
    assert again == port
    other_lock.close()
    again_lock.close()
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_reservation_shows_nothing_to_other_users(tmp_path: Path) -> None:
    """Ports are drawn at random, and no name in /proc/net/unix has one."""
    names = Path("/proc/net/unix").read_text()
    reserved = [PortReservations(tmp_path).reserve() for _ in range(20)]
    ports = [port for port, _ in reserved]
    assert len({*ports}) == 20
    assert sorted(ports) != ports
    shown = Path("/proc/net/unix").read_text()
    # The seven columns before a name are the kernel's, and may contain a port by chance.
    old = {" ".join(line.split()[7:]) for line in names.splitlines()}
    added = " ".join({" ".join(line.split()[7:]) for line in shown.splitlines()} - old)
    assert [port for port in ports if str(port) in added] == []
    for _, lock in reserved:
        lock.close()


def test_port_is_taken_when_another_program_has_bound_it() -> None:
    """Also on another address, where a server on all addresses cannot bind it any more."""
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        port = other.getsockname()[1]
        assert taken_port([port]) == port
    assert taken_port([port]) is None


def test_port_is_left_until_the_gateway_uses_a_table_without_it() -> None:
    """Meanwhile only the copy listens there, which must not pass for the program."""
    held = HeldPorts()
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1],"
    )
    program += " flush=True); sys.stdin.readline(); s.close(); print('closed', flush=True); input()"
    words = [sys.executable, "-c", program]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        held.hold(port, server.pid)
        assert not held.is_left(port)
        print(file=server.stdin, flush=True)
        assert server.stdout.readline() == "closed\n"
        assert held.is_left(port)
        held.give_up(port)
        assert held.is_left(port)
        held.settle(routed=2, used=1)
        assert held.is_left(port)
        assert listener_uid(("127.0.0.1", port)) == os.geteuid()
        held.settle(routed=3, used=2)
        assert not held.is_left(port)
        assert listener_uid(("127.0.0.1", port)) is None
        server.stdin.close()


class Impostor:
    """Another user's program, in a process of its own. heard: what it was sent, once it has ended."""

    def __init__(self) -> None:
        self.heard = b""
        self._pid = self._pipe = 0

    def take(self, port: int) -> int:
        """Listen on a port as soon as it is free, 0 for any, and accept whoever connects. Return the port."""
        self._pipe, send = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.setresuid(FIRST_UID, FIRST_UID, FIRST_UID)
            self._serve(port, send)
        os.close(send)
        return int(os.read(self._pipe, 6))

    def _serve(self, port: int, send: int) -> NoReturn:
        with contextlib.suppress(BaseException):
            server = None
            while server is None:
                # As somebody would who waits for the port to become free.
                with contextlib.suppress(OSError):
                    server = socket.create_server(("127.0.0.1", port))
            os.write(send, b"%6d" % server.getsockname()[1])
            kept = []
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                os.set_blocking(connection.fileno(), False)
                for each in kept:
                    with contextlib.suppress(BlockingIOError):
                        os.write(send, each.recv(1 << 16))
        os._exit(0)

    def stop(self) -> None:
        """End it."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
            while part := os.read(self._pipe, 1 << 16):
                self.heard += part
            os.close(self._pipe)


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    """Another user's program."""
    impostor = Impostor()
    yield impostor
    impostor.stop()


def test_no_program_takes_a_port_while_a_copy_of_its_listener_is_open() -> None:
    """The copy is made of a descendant's socket, and tells when the program has closed its own."""
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1],"
    )
    program += " flush=True); sys.stdin.readline(); s.close(); print('closed', flush=True); input()"
    words = ["sh", "-c", f'{sys.executable} -c "$0"; true', program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        place = "127.0.0.1", int(shell.stdout.readline())
        assert copy_listener(("127.0.0.1", 1), shell.pid) is None
        copy = copy_listener(place, shell.pid)
        assert copy is not None
        assert copy.is_served()
        shell.stdin.write("\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == "closed\n"
        assert not copy.is_served()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(place)
        copy.close()
        shell.stdin.close()


@as_root
def test_other_users_get_no_request_when_a_replica_leaves_its_port(
    service: Service, tmp_path: Path, impostor: Impostor
) -> None:
    """The replica is Starting, and requests wait until its program listens again."""
    (tmp_path / "go").touch()
    service.serve("v1", "--wait", command=[*LEAVES, str(tmp_path)])
    assert service.get() == (200, "mine")
    (tmp_path / "away").touch()
    clients = [threading.Thread(target=service.answer) for _ in range(5)]
    eventually((tmp_path / "left").exists)
    for client in clients:
        client.start()
    impostor.take(int((tmp_path / "port").read_text()))
    (replica,) = eventually(lambda: service.replicas("Starting"))
    eventually(lambda: str(FIRST_UID) in service.replicas("Starting")[0]["reason"])
    impostor.stop()
    (tmp_path / "away").unlink()
    for client in clients:
        client.join()
    assert impostor.heard == b""
    assert replica["name"] == service.await_ready(1)[0]["name"]


@as_root
def test_replica_takes_another_port_when_its_own_is_taken(
    service: Service, tmp_path: Path, impostor: Impostor
) -> None:
    """Another user's program binds it before the replica does; the next start has another port."""
    service.serve("v1", command=[*LEAVES, str(tmp_path)])
    port = tmp_path / "port"
    first = impostor.take(int(eventually(lambda: port.exists() and port.read_text())))
    (tmp_path / "go").touch()
    (replica,) = service.await_ready(1)
    assert replica["restarts"] == 1
    assert replica["ports"]["http-serving"] != first
    assert service.get() == (200, "mine")
