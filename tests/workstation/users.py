"""Ordinary users of one machine, as children of a test that runs as root."""

import os
import pickle
import select
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FIRST_UID = 61000

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as other users needs root")


@dataclass(frozen=True, slots=True)
class User:
    """An ordinary user, by any number: the machine needs no account for it."""

    uid: int

    def do(self, function: Callable[[], Any]) -> Any:
        """Call a function in a process of this user, and return its result. Raises what it raises."""
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            answer: tuple[Any, BaseException | None]
            try:
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
                answer = (function(), None)
            except BaseException as failed:
                failed.add_note(traceback.format_exc())
                answer = (None, failed)
            with os.fdopen(send, "wb") as file:
                file.write(pickle.dumps(answer))
            os._exit(0)
        os.close(send)
        with os.fdopen(receive, "rb") as file:
            result, why = pickle.loads(file.read())
        os.waitpid(child, 0)
        if why is not None:
            raise why
        return result

    def mkdir(self, path: Path, mode: int = 0o755) -> Path:
        """Create a directory of this user."""
        path.mkdir(parents=True)
        path.chmod(mode)
        os.chown(path, self.uid, self.uid)
        return path

    def serve(self, path: Path | str) -> socket.socket:
        """Return this user's listening socket at a path or name. Nothing is read from it."""
        server = socket.socket(socket.AF_UNIX)
        saved = os.geteuid(), os.getegid()
        os.setegid(self.uid)
        os.seteuid(self.uid)
        try:
            server.bind(str(path))
            server.listen()
        finally:
            os.seteuid(saved[0])
            os.setegid(saved[1])
        if isinstance(path, Path):
            path.chmod(0o777)
        return server


def was_connected_to(server: socket.socket) -> bool:
    """Return whether a client has connected."""
    return bool(select.select([server], [], [], 0)[0])


def require_root() -> None:
    """Skip the test where it cannot become other users."""
    if os.geteuid() != 0:
        pytest.skip("acting as two users takes root")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="fenka-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def victim() -> User:
    """The user whose programs run."""
    require_root()
    return User(FIRST_UID + 2 * (os.getpid() % 2000))


@pytest.fixture
def stranger(victim: User) -> User:
    """Another user, who attacks."""
    return User(victim.uid + 1)
