"""Where a workstation's daemon keeps its things, and how a client finds them.

One runtime directory holds everything of one daemon:

    daemon.sock   clients connect here          daemon.lock   held by the living daemon
    config.json   how it was started            state.json    leases and waiters, for a restart
    leases/ID/    the files of one lease        daemon.log    what it printed, when it runs behind
    simulated/    the simulated node, if any

`FENKA_RUNTIME` names it; else it is /run/fenka for root (one daemon for all users) and
$XDG_RUNTIME_DIR/fenka for anybody else. A user whose machine has a system daemon uses that one.

A daemon tells its clients which library to load, so a directory is used only if no other user can have
made or replaced it: it belongs to this user (the system's: to root), and everything above it belongs to
root or this user and is closed to others, or sticky as /tmp is.
"""

import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from fenka.core.errors import FenkaError

SYSTEM = Path("/run/fenka")

SOCKET_PATH_BYTES = 107
"""The kernel's limit."""


class UnsafeDirectory(FenkaError):
    """The runtime directory cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The paths below one runtime directory."""

    root: Path

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket."""
        return self.root / "daemon.sock"

    @property
    def lock(self) -> Path:
        """Locked (flock) by the living daemon."""
        return self.root / "daemon.lock"

    @property
    def config(self) -> Path:
        """How the daemon was started, so that a client can start it again."""
        return self.root / "config.json"

    @property
    def state(self) -> Path:
        """The ledger and the queue."""
        return self.root / "state.json"

    @property
    def log(self) -> Path:
        """What a daemon in the background prints."""
        return self.root / "daemon.log"

    @property
    def leases(self) -> Path:
        """One directory a lease."""
        return self.root / "leases"

    def lease(self, job: str) -> Path:
        """The directory of one job's lease."""
        return self.leases / job

    @property
    def simulated(self) -> Path:
        """The simulated node's directory."""
        return self.root / "simulated"

    @property
    def system(self) -> bool:
        """Whether every user of the machine may use this daemon."""
        return self.root == SYSTEM

    @property
    def foreign(self) -> bool:
        """Whether somebody else starts and stops this daemon."""
        return self.system and os.geteuid() != 0

    @property
    def owners(self) -> frozenset[int]:
        """The users whose daemon may serve here: root for the system's, else this process's user."""
        return _roots() if self.system else frozenset({os.geteuid()})

    def create(self) -> None:
        """Make the directory, or check that it is ours. Raises UnsafeDirectory."""
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise UnsafeDirectory(
                f"{self.root} is too long a path for a socket: name a shorter one in FENKA_RUNTIME"
            )
        if self.foreign:
            raise UnsafeDirectory(
                f"{self.root} is for the machine's daemon, which only root starts: leave FENKA_RUNTIME "
                "unset for a daemon of your own"
            )
        try:
            self.root.mkdir(mode=0o755 if self.system else 0o700, parents=True, exist_ok=True)
        except OSError as why:
            raise UnsafeDirectory(
                f"{self.root} cannot be made ({why.strerror}): name another directory in FENKA_RUNTIME"
            ) from None
        os.close(self.open())
        # Of other users' leases not even the names.
        self.leases.mkdir(mode=0o711, exist_ok=True)
        # Mount points of leases, for those who may not make them where they enter one.
        for name in ("lease", "account", "driver") if self.system else ():
            (self.root / name).mkdir(mode=0o755, exist_ok=True)

    def open(self) -> int:
        """Open the directory after checking it. Raises UnsafeDirectory, OSError."""
        check_parents(self.root)
        try:
            directory = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError:
            raise UnsafeDirectory(
                f"{self.root} is a symbolic link or no directory: remove it, or name another directory "
                "in FENKA_RUNTIME"
            ) from None
        found = os.fstat(directory)
        if found.st_uid in self.owners and not found.st_mode & OTHERS_WRITE:
            return directory
        os.close(directory)
        raise UnsafeDirectory(
            f"{self.root} belongs to user {found.st_uid} or is writable by others: remove it, or "
            "name another directory in FENKA_RUNTIME"
        )

    def answers(self) -> bool:
        """Whether a daemon listens on the socket, in a directory that can be trusted."""
        try:
            directory = self.open()
        except (OSError, UnsafeDirectory):
            return False
        try:
            connect(directory).close()
        except OSError:
            return False
        finally:
            os.close(directory)
        return True

    def established(self) -> bool:
        """Whether a daemon answers here, or one that was started here has not been stopped."""
        try:
            os.close(self.open())
        except (OSError, UnsafeDirectory):
            return False
        return self.config.exists() or self.answers()


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

CONNECT_TIMEOUT_S = 10
"""How long a connection may wait for room in a daemon's queue of connections."""


def check_parents(path: Path) -> None:
    """Check that no other user can put something else in the place of `path`.

    Raises UnsafeDirectory, OSError.
    """
    trusted = _roots() | {os.geteuid()}
    for directory in reversed(path.parents):
        found = directory.lstat()
        closed = found.st_mode & stat.S_ISVTX or not found.st_mode & OTHERS_WRITE
        if found.st_uid in trusted and closed and stat.S_ISDIR(found.st_mode):
            continue
        raise UnsafeDirectory(
            f"{path} cannot be trusted, because {directory} belongs to user {found.st_uid} or is writable "
            "by others: use a directory below your own"
        )


def connect(directory: int) -> socket.socket:
    """Connect to the daemon of the runtime directory with this descriptor. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A process that takes no connections must not hold up who asks.
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECT_TIMEOUT_S, 0)
        )
        connection.connect(f"/proc/self/fd/{directory}/daemon.sock")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
    except OSError:
        connection.close()
        raise
    return connection


def _roots() -> frozenset[int]:
    """Root's number. In a user namespace without root, the kernel shows another one for it."""
    return frozenset({0, os.stat("/").st_uid})


def own() -> Runtime:
    """The runtime directory of a daemon that this user starts."""
    named = os.environ.get("FENKA_RUNTIME")
    if named:
        return Runtime(_resolve_parents(Path(named)))
    if os.geteuid() == 0:
        return Runtime(SYSTEM)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Runtime(
        _resolve_parents(Path(session) / "fenka" if session else Path(f"/tmp/fenka-{os.geteuid()}"))
    )


def current() -> Runtime:
    """The runtime directory whose daemon this user's commands talk to.

    While root's daemon is away it is still the one to use: its leases go on.
    """
    mine = own()
    if os.environ.get("FENKA_RUNTIME") or mine.system or mine.answers():
        return mine
    system = Runtime(SYSTEM)
    return system if system.established() else mine


def jobs_directory() -> Path:
    """Where this user's detached programs write their logs."""
    named = os.environ.get("FENKA_RUNTIME")
    if named:
        return _resolve_parents(Path(named)) / "jobs"
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise UnsafeDirectory(
            f"user {os.geteuid()} has no home directory for logs: set HOME or XDG_STATE_HOME"
        ) from None
    return _resolve_parents(Path(state)) / "fenka" / "jobs"


def _resolve_parents(path: Path) -> Path:
    """The path with the links above it followed once; whether to trust what it leads to is checked later."""
    path = path.absolute()
    return path.parent.resolve() / path.name
