"""The runtime directory of a workstation's daemon, and how clients find it.

One directory holds all files of one daemon. `FENKA_RUNTIME` names it. By default it is /run/fenka for root
(one daemon for all users) and $XDG_RUNTIME_DIR/fenka for other users. A user whose machine has a system
daemon uses that one.

Clients load a library that the daemon names, so a directory is used only if no other user can have created or
replaced it. It must belong to this user (the system's to root), and all directories above it must belong to
root or this user and be writable by nobody else, or be sticky like /tmp.
"""

import contextlib
import errno
import hashlib
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.isolation import unix_client
from fenka.jobs.local_ports import PortReservations

SYSTEM = Path("/run/fenka")

SYSTEM_STATE = Path("/var/lib/fenka")
"""The files of the system's daemon that outlive reboots."""

SYSTEM_OPTIONS = Path("/etc/fenka/daemon.toml")
"""The options of the system's daemon. Where it exists, root runs one."""

# macOS has no O_PATH. No daemon runs there, but the commands of clusters look for one.
_O_PATH = getattr(os, "O_PATH", os.O_RDONLY)

SYSTEM_UNIT = Path("/usr/lib/systemd/system/fenka.service")
"""Runs the system's daemon where fenka's package is installed."""

SOCKET_PATH_BYTES = 107
"""The kernel's limit."""


class UnsafeDirectory(FenkaError):
    """The runtime directory cannot be trusted or used."""


class _RuntimePath:
    """The path of a file or directory in a runtime directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, runtime: "Runtime", _: type) -> Path:
        return runtime.root / self._name


@dataclass(frozen=True, slots=True)
class Runtime:
    """The paths below one runtime directory."""

    root: Path

    socket = _RuntimePath("daemon.sock")
    """The daemon's Unix socket."""
    containers = _RuntimePath("containers.sock")
    """Where the hook of containers connects (native/hook)."""
    nodes = _RuntimePath("nodes.sock")
    """Where a process that enters a lease gets its cards' device nodes, if they are closed to others."""
    own_nodes = _RuntimePath("nodes")
    """The leases' device nodes, which only root can reach by this path."""
    closed_nodes = _RuntimePath("closed-nodes.json")
    """The machine's device nodes, as they were before they were closed."""
    lock = _RuntimePath("daemon.lock")
    """Locked (flock) by the running daemon."""
    config = _RuntimePath("config.json")
    """The daemon's options, so that a client can start it again."""
    state = _RuntimePath("state.json")
    """All jobs."""
    instances = _RuntimePath("instances.json")
    """The MIG instances that the daemon has created."""
    layouts = _RuntimePath("layouts.json")
    """Layouts that wait for something to end."""
    card_errors = _RuntimePath("card-errors.json")
    """Errors of cards that have not been reset since."""
    log = _RuntimePath("daemon.log")
    """Output of a background daemon."""
    leases = _RuntimePath("leases")
    """Contains one directory for each lease."""
    linker_configuration = _RuntimePath("ld.so.conf")
    """Names the simulated driver's libraries to ldconfig."""
    linker_cache = _RuntimePath("ld.so.cache")
    """The dynamic linker's cache inside leases, with a simulated driver."""
    simulated = _RuntimePath("simulated")
    """The simulated node's directory."""

    def lease(self, job: str) -> Path:
        """Return the directory of one job's lease."""
        return self.leases / job

    def former_nodes(self) -> list[Path]:
        """Return the directories of simulated nodes of other builds, which may have programs still."""
        return sorted(self.root.glob("simulated-*"))

    @property
    def options(self) -> Path:
        """The file with its daemon's options. Raises UnsafeDirectory."""
        if self.system:
            return SYSTEM_OPTIONS
        return _home("XDG_CONFIG_HOME", ".config", "options") / "fenka" / "daemon.toml"

    @property
    def users(self) -> Path:
        """The file with caps of its daemon's users. Raises UnsafeDirectory."""
        return self.options.with_name("users.toml")

    @property
    def name(self) -> str:
        """The address in the abstract namespace at which its daemon answers without a directory."""
        digest = hashlib.blake2b(os.fsencode(self.root), digest_size=16)
        return f"\0fenka/daemon/{digest.hexdigest()}"

    @property
    def system(self) -> bool:
        """Whether every user of the machine may use this daemon."""
        return self.root == SYSTEM

    @property
    def foreign(self) -> bool:
        """Whether another user starts and stops this daemon."""
        return self.system and os.geteuid() != 0

    @property
    def owners(self) -> frozenset[int]:
        """Users whose daemon may serve here: root for the system's, else this process's user."""
        return _roots() if self.system else frozenset({os.geteuid()})

    def create(self) -> None:
        """Create the directory, or check that it can be trusted. Raises UnsafeDirectory."""
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
            if why.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # Another directory of the same disk would not help.
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
            directory = os.open(self.root, _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError:
            raise UnsafeDirectory(
                f"{self.root} is a symbolic link or no directory: remove it, or name another directory "
                "in FENKA_RUNTIME"
            ) from None
        status = os.fstat(directory)
        if status.st_uid in self.owners and not status.st_mode & OTHERS_WRITE:
            return directory
        os.close(directory)
        raise UnsafeDirectory(
            f"{self.root} belongs to user {status.st_uid} or is writable by others: remove it, or "
            "name another directory in FENKA_RUNTIME"
        )

    def answers(self) -> bool:
        """Return whether a daemon listens on the socket of a trusted directory."""
        with contextlib.suppress(OSError, UnsafeDirectory), contextlib.ExitStack() as opened:
            directory = self.open()
            opened.callback(os.close, directory)
            connect(directory).close()
            return True
        return False

    def established(self) -> bool:
        """Return whether a daemon answers here, or was started and not stopped, or has options of root's."""
        if self.system and SYSTEM_OPTIONS.exists():
            return True
        try:
            os.close(self.open())
        except (OSError, UnsafeDirectory):
            return False
        return self.config.exists() or self.answers()


def system_start() -> str:
    """Return how root starts the system's daemon, for a sentence."""
    if SYSTEM_UNIT.exists():
        return "`systemctl start fenka` (`systemctl status fenka` says why it does not run)"
    return "`fenka daemon --background`"


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

CONNECT_TIMEOUT_S = 10
"""For room in a daemon's queue of connections."""


def check_parents(path: Path) -> None:
    """Check that no other user can replace `path`.

    Raises UnsafeDirectory, OSError.
    """
    trusted = _roots() | {os.geteuid()}
    for directory in reversed(path.parents):
        status = directory.lstat()
        closed = status.st_mode & stat.S_ISVTX or not status.st_mode & OTHERS_WRITE
        if status.st_uid in trusted and closed and stat.S_ISDIR(status.st_mode):
            continue
        raise UnsafeDirectory(
            f"{path} cannot be trusted, because {directory} belongs to user {status.st_uid} or is writable "
            "by others: use a directory below your own"
        )


def connect(directory: int) -> socket.socket:
    """Connect to the daemon of the runtime directory with this descriptor. Raises OSError."""
    return connect_to(f"/proc/self/fd/{directory}/daemon.sock")


def connect_to(address: str) -> socket.socket:
    """Connect to a daemon. Raises OSError."""
    return unix_client.connect(address, CONNECT_TIMEOUT_S)


def _roots() -> frozenset[int]:
    """Return root's uid. A user namespace without root shows another uid for it."""
    return frozenset({0, os.stat("/").st_uid})


def own() -> Runtime:
    """Return the runtime directory of a daemon that this user starts."""
    named = os.environ.get("FENKA_RUNTIME")
    return Runtime(_resolve_parents(Path(named))) if named else _default()


def _default() -> Runtime:
    if os.geteuid() == 0:
        return Runtime(SYSTEM)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Runtime(
        _resolve_parents(Path(session) / "fenka" if session else Path(f"/tmp/fenka-{os.geteuid()}"))
    )


def current() -> Runtime:
    """Return the runtime directory of the daemon that this user's commands use.

    The system's is used even while its daemon is down, because its leases go on.
    """
    runtime = own()
    if os.environ.get("FENKA_RUNTIME") or runtime.system or runtime.answers():
        return runtime
    system = Runtime(SYSTEM)
    return system if system.established() else runtime


def jobs_directory() -> Path:
    """Return the directory of this user's detached programs' logs."""
    return _state_directory() / "jobs"


def written_directories() -> list[Path]:
    """Return the directories in which this user's commands write."""
    with contextlib.suppress(UnsafeDirectory):
        return [_state_directory(), own().root]
    return []


def services_directory() -> Path:
    """Return the directory of this user's services."""
    return _state_directory() / "services"


def directory_names(home: Callable[[], Path]) -> list[str]:
    """Return the names of all directories of a kind of jobs, sorted."""
    try:
        return sorted(os.listdir(home()))
    except (FileNotFoundError, NotADirectoryError, PermissionError, UnsafeDirectory):
        # One that may not be read is another user's, with whom this one shares a home directory.
        return []


def dashboard_file() -> Path:
    """Return the file in which this user's dashboard keeps its URL, with its token."""
    return _state_directory() / "dashboard"


def port_reservations() -> PortReservations:
    """Return the ports that this user's jobs have reserved."""
    return PortReservations(_state_directory())


def history_file(runtime: Runtime) -> Path:
    """Return the file in which a daemon records ended jobs.

    It is kept when the directories of sessions are removed, and over reboots.
    """
    if runtime.system:
        directory = SYSTEM_STATE
    elif runtime == _default():
        directory = _home_directory()
    else:
        directory = runtime.root
    return directory / "ended.jsonl"


def history_database(runtime: Runtime) -> Path:
    """Return the database of a daemon's history. Other machines may have the directory, too."""
    return history_file(runtime).with_name(f"history-{os.uname().nodename}.db")


def compose_file(project: str) -> Path:
    """Return the file that names who pays for a project of Compose. Raises UnsafeDirectory."""
    digest = hashlib.sha256(project.encode(errors="replace")).hexdigest()
    return _home_directory() / "compose" / f"{digest[:32]}.json"


def _state_directory() -> Path:
    named = os.environ.get("FENKA_RUNTIME")
    return _resolve_parents(Path(named)) if named else _home_directory()


def _home_directory() -> Path:
    return _resolve_parents(_home("XDG_STATE_HOME", ".local/state", "logs")) / "fenka"


def _home(variable: str, default: str, content: str) -> Path:
    """Return a directory of the user's that the variable names, or one below HOME. Raises UnsafeDirectory."""
    try:
        return Path(os.environ.get(variable) or Path.home() / default)
    except RuntimeError:
        raise UnsafeDirectory(
            f"user {os.geteuid()} has no home directory for {content}: set HOME or {variable}"
        ) from None


def _resolve_parents(path: Path) -> Path:
    """Return the path with the links in its parents followed. Whether to trust the result is checked
    later."""
    path = path.absolute()
    return path.parent.resolve() / path.name


def machine_address() -> str:
    """Return this machine's first IPv4 address that other machines could use."""
    import psutil

    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return "127.0.0.1"
