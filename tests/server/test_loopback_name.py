"""Tests of the names of servers on a loopback address, and of who can listen at them."""

import errno
import socket

import pytest

from fenka.server.loopback_name import hold_other_address, release

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
