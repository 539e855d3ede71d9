"""Host names to which a service answers: a page that leads its own name to the machine gets nothing."""

from pathlib import Path

import pytest

from fenka.gateway.main import GatewayOptions, InvalidOptions
from fenka.local.service_supervisor import OWN_NAMES
from tests.gateway.harness import FakeReplica, installation

OWN = (
    "127.0.0.1",
    "127.0.0.1:8000",
    "localhost",
    "LocalHost:1",
    "0123456789abcdef.localhost:8000",
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "[::1]",
    "10.0.0.1",
)


async def test_service_answers_to_its_own_names_only() -> None:
    """Whatever the port, since a tunnel may have another one. Foreign names reach no replica."""
    replica = FakeReplica()
    async with installation(replica, hosts=OWN_NAMES) as served, served.client() as client:
        for host in OWN:
            status, _ = await client.fetch(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert status == 200, host
        for host in FOREIGN:
            answer = await client.fetch(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert answer == (
                421,
                b"this service answers to 127.0.0.1, localhost, *.localhost, not to this host name\n",
            ), host
        upgrade = b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        assert (await client.fetch(b"GET / HTTP/1.1\r\nHost: evil.example\r\n" + upgrade))[0] == 421
    assert len(replica.heads) == len(OWN)
    assert b"\r\nhost: 127.0.0.1:8000\r\n" in replica.heads[1]


async def test_absolute_target_is_a_name_like_the_host_field() -> None:
    """Its host replaces the field, so the field cannot hide it."""
    replica = FakeReplica()
    async with installation(replica, hosts=OWN_NAMES) as served, served.client() as client:
        foreign = b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await client.fetch(foreign))[0] == 421
        own = b"GET http://localhost/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
        assert (await client.fetch(own))[0] == 200
    assert len(replica.heads) == 1


@pytest.mark.parametrize("name", ["", "*", "a b", "a:80", "*.*.a", "-a", "a/b", "a\n", "x" * 300])
def test_invalid_host_is_refused(name: str) -> None:
    """Envoy would not start with some of them, and would answer to all names with others."""
    with pytest.raises(InvalidOptions, match="expected a host name without a port"):
        GatewayOptions(listen=[], table=Path("t"), host=[name]).hosts()
