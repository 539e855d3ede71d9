"""Descriptors of anything that strangers send in place of a hook's."""

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.workstation.containers import hook_reader
from fenka.workstation.containers.container_request import InvalidContainer
from fenka.workstation.containers.hook_reader import HookReader
from tests.workstation.conftest import Workstation
from tests.workstation.containers.runtime import MiniContainer, send_request
from tests.workstation.users import as_root

FUSE_FILE = Path(__file__).parents[2] / "programs" / "fuse_file.py"
MNT_FORCE, MNT_DETACH = 1, 2

pytestmark = [
    as_root,
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this kernel has no FUSE"),
]


@contextlib.contextmanager
def file_that_is_never_closed(place: Path) -> Iterator[Path]:
    """A file. Only this process comes back from closing it. A child would not, so none is started with it."""
    place.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    words = [sys.executable, str(FUSE_FILE), str(os.getpid())]
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"fenka", os.fsencode(place), b"fuse", 0, options.encode()) == 0
    with subprocess.Popen(words, stdin=device) as server:
        os.close(device)
        try:
            yield place / "x"
        finally:
            libc.umount2(os.fsencode(place), MNT_FORCE)
            libc.umount2(os.fsencode(place), MNT_DETACH)
            server.kill()


def test_daemon_answers_when_a_file_that_was_sent_is_never_closed(
    t4: Workstation, tmp_path: Path
) -> None:
    """No signal ends a process that closes such a file: the daemon could not even be killed."""
    container = MiniContainer(t4)
    with file_that_is_never_closed(tmp_path / "fuse") as file:
        descriptor = os.open(file, os.O_RDONLY)
        connection, answer = send_request(t4, b"slice=4", *[descriptor] * 3)
        os.close(descriptor)
        assert b"not sealed" in answer
        connection.close()
        assert t4.jobs() == {}
        assert container.hook() == ""
    assert [*t4.jobs()] == [container.name]


async def test_user_has_one_process_for_files_that_are_never_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the user fills the machine with processes that nobody can end."""
    monkeypatch.setattr(hook_reader, "REAP_S", 0.1)
    reader, user = HookReader(), 61000

    async def read(file: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            descriptor = os.open(file, os.O_RDONLY)
            socket.send_fds(theirs, [b"slice=4"], [descriptor] * 3)
            os.close(descriptor)
            await reader.read(ours.fileno(), user)

    with file_that_is_never_closed(tmp_path / "fuse") as file:
        with pytest.raises(InvalidContainer, match="not sealed"):
            await read(file)
        with pytest.raises(InvalidContainer, match="of an earlier request"):
            await read(file)
    while reader._ending:
        await asyncio.sleep(0)
    with pytest.raises(InvalidContainer, match="not sealed"):
        await read(Path("/dev/null"))
