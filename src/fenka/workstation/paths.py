"""Where a workstation's daemon keeps its things, and how a client finds them.

One runtime directory holds everything of one daemon:

    daemon.sock   clients connect here          daemon.lock   held by the living daemon
    config.json   how it was started            state.json    leases and waiters, for a restart
    leases/ID/    the files of one lease        daemon.log    what it printed, when it runs behind
    simulated/    the simulated node, if any

`FENKA_RUNTIME` names it; else it is /run/fenka for root (one daemon for all users) and
$XDG_RUNTIME_DIR/fenka for anybody else. A user whose machine has a system daemon uses that one.
"""

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/run/fenka")

SOCKET_PATH_BYTES = 107
"""The kernel's limit."""


class UnsafeDirectory(Exception):
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

    def create(self) -> None:
        """Make the directory, or check that it is ours. Raises UnsafeDirectory."""
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise UnsafeDirectory(
                f"{self.root} is too long a path for a socket: name a shorter one in FENKA_RUNTIME"
            )
        self.root.mkdir(mode=0o755 if self.system else 0o700, parents=True, exist_ok=True)
        found = self.root.stat()
        # In a world-writable place somebody else may have been first.
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise UnsafeDirectory(
                f"{self.root} belongs to user {found.st_uid} or is writable by others: remove it, or "
                "name another directory in FENKA_RUNTIME"
            )
        # Of other users' leases not even the names.
        self.leases.mkdir(mode=0o711, exist_ok=True)

    def answers(self) -> bool:
        """Whether a daemon listens on the socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True


def own() -> Runtime:
    """The runtime directory of a daemon that this user starts."""
    named = os.environ.get("FENKA_RUNTIME")
    if named:
        return Runtime(Path(named).absolute())
    if os.geteuid() == 0:
        return Runtime(SYSTEM)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Runtime(Path(session) / "fenka" if session else Path(f"/tmp/fenka-{os.geteuid()}"))


def current() -> Runtime:
    """The runtime directory whose daemon this user's commands talk to."""
    mine = own()
    if os.environ.get("FENKA_RUNTIME") or mine.system:
        return mine
    system = Runtime(SYSTEM)
    return system if system.answers() and not mine.answers() else mine


def jobs_directory() -> Path:
    """Where this user's detached programs write their logs."""
    named = os.environ.get("FENKA_RUNTIME")
    if named:
        return Path(named).absolute() / "jobs"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fenka" / "jobs"
