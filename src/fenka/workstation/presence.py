"""Notices that the files by which clients find a daemon are gone, and makes them again for the next one.

systemd-logind removes a user's runtime directory at the last logout. A daemon that was started outside of the
session lives on. It answers at a name in the abstract namespace meanwhile, and records everything in the
directory once it can be made again. Then it starts itself again there, as it would after a kill.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.workstation.admission import BACKLOG
from fenka.workstation.files import lock_runtime
from fenka.workstation.lifetime import log
from fenka.workstation.paths import Runtime

_INHERITED = "FENKA_NAME_SOCKET"
"""Variable with the descriptor of the socket at the name."""

PERIOD_S = 1.0
"""Between two checks."""


@dataclass(slots=True)
class Presence:
    """The files of one daemon.

    Attributes:
        runtime: Its directory.
        record: Writes all that the next daemon needs. Raises OSError.
    """

    runtime: Runtime
    record: Callable[[], None]
    _inodes: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _reported: bool = False

    def begin(self) -> None:
        """Remember the files, once clients can connect."""
        self._inodes = {path: _inode(path) for path in (self.runtime.socket, self.runtime.lock)}

    def restored(self) -> bool:
        """Return whether the files were gone, and everything is recorded again for the next daemon."""
        if all(_inode(path) == inode for path, inode in self._inodes.items()):
            return False
        if not self._reported:
            log(f"{self.runtime.root} has been removed: programs go on, and it is made again")
            self._reported = True
        try:
            with lock_runtime(self.runtime):
                self.record()
        except (FenkaError, OSError):
            return False  # It cannot be made yet: its user is not logged in.
        return True


def listen(runtime: Runtime) -> socket.socket | None:
    """Listen at the directory's name, or go on with the socket that :func:`pass_on` has passed on.

    Return None if another process has the name, which any user can take.
    """
    inherited = os.environ.pop(_INHERITED, "")
    if inherited:
        os.set_inheritable(int(inherited), False)
        return socket.socket(fileno=int(inherited))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(runtime.name)
        server.listen(BACKLOG)
    except OSError as why:
        server.close()
        log(f"cannot be found if {runtime.root} is removed: {why.strerror}")
        return None
    return server


def pass_on(server: socket.socket | None) -> dict[str, str]:
    """Let the program that replaces this one listen, too. Return what its environment needs for that.

    Clients that connect meanwhile wait, instead of starting another daemon.
    """
    if server is None:
        return {}
    os.set_inheritable(server.fileno(), True)
    return {_INHERITED: str(server.fileno())}


def _inode(path: Path) -> tuple[int, int]:
    try:
        status = path.lstat()
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino
