"""Unix sockets of JupyterHub's servers, at paths where nobody but their user can ever listen.

A port of the loopback address is free for every user once its server has ended. A Unix socket is not, if only
its user can enter its directory. The hub's proxy is root's, so it must not follow a path that a user can
change: it could lead to a socket to which only root may connect. The proxy therefore connects to a second
name (hard link) of the socket, in a directory of root's. It stays with this socket, whose owner is checked.

    DIRECTORY/users/UID/NAME    the server listens here; the user's directory
    DIRECTORY/links/UID-NAME    the proxy connects here; root's directory
"""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fenka.hardware.peer_credentials import socket_listener_uid
from fenka.workstation.paths import SOCKET_PATH_BYTES, UnsafeDirectory

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

TRIAL = "new-"
"""Begins the name of a link that was not checked yet."""


@dataclass(frozen=True, slots=True)
class HubSocket:
    """The socket of one server.

    Attributes:
        directory: Root's; its users may read and enter it.
        uid: The server's user.
        name: A file name, which no other server of this user has.
    """

    directory: Path
    uid: int
    name: str

    @property
    def path(self) -> Path:
        """The path at which the server listens."""
        return self.directory / "users" / str(self.uid) / self.name

    @property
    def link(self) -> Path:
        """The path at which root connects."""
        return self.directory / "links" / f"{self.uid}-{self.name}"

    def prepare(self) -> None:
        """Make the directories, and remove an earlier server's link. Raises UnsafeDirectory, OSError."""
        longest = len(os.fsencode(self.link)) + len(TRIAL)
        if longest > SOCKET_PATH_BYTES:
            raise UnsafeDirectory(
                f"paths of sockets in {self.directory} are longer than {SOCKET_PATH_BYTES} bytes: "
                "set c.FenkaSpawner.socket_directory to a shorter one"
            )
        for path, mode in (
            (self.directory, 0o755),
            (self.path.parent.parent, 0o755),
            (self.link.parent, 0o700),
        ):
            path.mkdir(mode, parents=True, exist_ok=True)
            self._check(path)
        with contextlib.suppress(FileExistsError):
            self.path.parent.mkdir(0o700)
        # Its parent is root's, so the name cannot lead elsewhere.
        os.chown(self.path.parent, self.uid, -1, follow_symlinks=False)
        self.remove()

    def publish(self) -> bool:
        """Return whether the user's server listens; if so, root can connect to the link. Raises OSError."""
        # Under another name at first: the link leads to nothing that was not checked.
        trial = self.link.with_name(f"{TRIAL}{self.link.name}")
        trial.unlink(missing_ok=True)
        try:
            os.link(self.path, trial, follow_symlinks=False)
        except (FileNotFoundError, PermissionError):
            return False  # Not there yet, or a directory.
        try:
            found = trial.lstat()
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != self.uid:
                return False
            if socket_listener_uid(str(trial)) != self.uid:
                return False
            trial.replace(self.link)
        finally:
            trial.unlink(missing_ok=True)
        return True

    def remove(self) -> None:
        """Let nobody connect any more. Raises OSError."""
        self.link.unlink(missing_ok=True)

    @staticmethod
    def _check(path: Path) -> None:
        """Raise UnsafeDirectory if somebody else could replace what is in this directory."""
        found = path.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.geteuid()
            or found.st_mode & OTHERS_MAY_WRITE
        ):
            raise UnsafeDirectory(
                f"{path} must be a directory that belongs to the hub's user and that nobody else can write: "
                "change it, or set c.FenkaSpawner.socket_directory to another one"
            )
