"""Tests of the names of servers on a loopback address, and of who can listen at them."""

import errno
import socket

import pytest

from fenka.dashboard.surroundings import ServiceNames
from fenka.server.loopback_name import hold_other_address, release
from fenka.views.workloads import ServiceVersion, ServingPort

FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


def _listening(address: str, port: int = 0) -> socket.socket:
    return socket.create_server((address, port), family=FAMILIES[address])


@pytest.mark.parametrize(("own", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_nobody_listens_at_the_other_address_when_it_is_held(own: str, other: str) -> None:
    """Browsers try both addresses; a connection to the held one is refused, until it is released."""
    with _listening(own) as server:
        port = server.getsockname()[1]
        held = hold_other_address(own, port)
        with pytest.raises(OSError, match="already in use"):
            _listening(other, port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port))
        release(held)
        _listening(other, port).close()


def test_holding_fails_when_another_program_listens() -> None:
    """The error is that of a port in use, so callers draw another port."""
    in_use = f"Errno {errno.EADDRINUSE}"
    with _listening("::1") as stranger, pytest.raises(OSError, match=in_use):
        hold_other_address("127.0.0.1", stranger.getsockname()[1])


def test_service_keeps_its_address_when_a_stranger_listens_under_its_name() -> None:
    """A browser would ask the stranger first, so the page links to 127.0.0.1."""
    with _listening("127.0.0.1") as server:
        ports = (ServingPort("RESTFUL", server.getsockname()[1]),)
        version = ServiceVersion(
            *("chat", "alice", "1", "custom", "v1", 1, 1, 0.0), address="127.0.0.1", ports=ports
        )
        with _listening("::1", ports[0].port):
            assert ServiceNames().rename([version]) == [version]
        names = ServiceNames()
        (named,) = names.rename([version])
        assert named.address.endswith(".localhost")
        assert names.rename([version]) == [named]
        with pytest.raises(OSError, match="already in use"):
            _listening("::1", ports[0].port)
        assert names.rename([]) == []
        _listening("::1", ports[0].port).close()
