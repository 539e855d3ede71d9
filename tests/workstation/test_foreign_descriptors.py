"""Descriptors that strangers send must not hold the daemon."""

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenka.isolation import unix_client
from fenka.workstation import foreign_descriptors
from fenka.workstation.accepting import accepting

LINGER_S = 3600


@pytest.fixture
def poison() -> Iterator[Callable[[socket.socket], None]]:
    """Send bytes with a TCP connection whose close takes an hour, since its peer reads nothing."""
    with contextlib.ExitStack() as opened:

        def send(connection: socket.socket) -> None:
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            sender = socket.create_connection(listener.getsockname())
            opened.enter_context(listener.accept()[0])
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(b"x" * 65536)
            options = struct.pack("ii", 1, LINGER_S)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, options)
            socket.send_fds(connection, [b"x"], [sender.fileno()])
            sender.close()  # The last copy is the one in the message.

        yield send


@pytest.mark.parametrize("closed", [False, True])
async def test_loop_goes_on_when_a_stranger_sends_a_descriptor_that_lingers(
    tmp_path: Path, poison: Callable[[socket.socket], None], closed: bool
) -> None:
    """The kernel closes it when the bytes are read, or the connection is closed. Many take little longer."""
    path, done = tmp_path / "socket", asyncio.Event()
    loop = asyncio.get_running_loop()

    def serve(connection: socket.socket) -> None:
        with connection:
            if not closed:
                connection.recv(100)
        done.set()

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen()
        peers = [unix_client.connect(os.fspath(path), 5) for _ in range(20)]
        for peer in peers:
            poison(peer)
        with foreign_descriptors.interrupted(loop), accepting(server, serve, descriptors=True):
            await done.wait()
            for peer in peers:
                with peer, contextlib.suppress(ConnectionResetError):
                    assert await loop.run_in_executor(None, peer.recv, 1) == b""


async def test_descriptors_are_refused_where_nobody_expects_any(tmp_path: Path) -> None:
    """From Linux 6.16 on the kernel tells the sender."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen()
        try:
            server.getsockopt(socket.SOL_SOCKET, foreign_descriptors._SO_PASSRIGHTS)
        except OSError:
            pytest.skip("this kernel cannot refuse descriptors")
        with (
            accepting(server, socket.socket.close),
            unix_client.connect(os.fspath(path), 5) as peer,
            pytest.raises(PermissionError),
        ):
            socket.send_fds(peer, [b"x"], [0])


def test_few_signals_are_sent_when_the_loop_is_busy() -> None:
    """asyncio has room for about 270; each further one leaves lines in the log. A minute: 150 + 50 + 54."""
    elapsed_s = itertools.accumulate(foreign_descriptors.pauses())
    assert sum(1 for _ in itertools.takewhile(lambda so_far_s: so_far_s < 60, elapsed_s)) == 254
