"""The sockets on which clients connect, without Envoy."""

import socket

import pytest

from fenka.gateway import client_sockets
from tests.gateway.tables import LOOPBACK


def test_port_of_another_program_is_refused() -> None:
    """Also if that would share the port: a gateway of the same user."""
    with client_sockets.listen(LOOPBACK, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            client_sockets.listen(LOOPBACK, port)
    with socket.create_server((LOOPBACK, port)), pytest.raises(OSError, match="already in use"):
        client_sockets.listen(LOOPBACK, port)


def test_port_is_free_afterwards() -> None:
    """A gateway starts again at once on the port that it had, also after connections."""
    with client_sockets.listen(LOOPBACK, 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)):
            connection, _ = first.accept()
            connection.close()
    with client_sockets.listen(LOOPBACK, port) as second:
        assert second.getsockname()[1] == port


def test_second_socket_of_an_address_gets_all_connections() -> None:
    """Envoy's, while there is one; ours otherwise."""
    with client_sockets.listen(LOOPBACK, 0) as ours:
        address = ours.getsockname()
        clients = list[socket.socket]()
        with socket.create_server(address, reuse_port=True) as envoys:
            for _ in range(50):
                clients.append(socket.create_connection(address))
                envoys.settimeout(30)
                accepted, _ = envoys.accept()
                accepted.close()
        clients.append(socket.create_connection(address))
        ours.settimeout(30)
        accepted, _ = ours.accept()
        accepted.close()
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("client", "server", "line"),
    [
        (("10.0.0.1", 5), ("10.0.0.2", 80), b"PROXY TCP4 10.0.0.1 10.0.0.2 5 80\r\n"),
        (("fd00::1", 5), ("fd00::2", 80), b"PROXY TCP6 fd00::1 fd00::2 5 80\r\n"),
    ],
)
def test_relayed_connection_begins_with_addresses(
    client: tuple[str, int], server: tuple[str, int], line: bytes
) -> None:
    """The PROXY protocol, version 1."""
    assert client_sockets.proxy_line(client, server) == line
