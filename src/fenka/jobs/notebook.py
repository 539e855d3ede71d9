"""A Jupyter server as a local process: its command, and its URL.

The user's own Jupyter is preferred, because its kernels have the user's libraries. Otherwise the one of
`fenka[notebook]` is used.
"""

import importlib.util
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs.notebook_server import notebook_server
from fenka.jobs.ports import LOOPBACK, PortReservations

PORTS = range(8888, 65536)

_BASE_URL = re.compile(r"/([A-Za-z0-9._~@%-]+/)*[A-Za-z0-9._~@%-]*")

Settings = dict[str, dict[str, object]]
"""Jupyter's settings: by class, by name."""

READY_TIMEOUT_S = 60.0
"""A cold start of JupyterLab takes a few seconds; a minute covers a slow disk."""
POLL_INTERVAL_S = 0.05


class NoJupyter(FenkaError):
    """No Jupyter can be started; the message names what is missing."""


class NotebookFailed(FenkaError):
    """A Jupyter server was started and does not answer."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """A Jupyter server to start: `command` with `environment` added to the program's own."""

    command: list[str]
    environment: dict[str, str]
    port_locks: tuple[FileIO | socket.socket, ...]
    """Keep the port from all notebooks of fenka while the server, which inherits them, lives."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a notebook's server listens. What is not given is as in the user's Jupyter settings.

    Attributes:
        host: The IP address; empty for the settings' own, else the loopback address.
        port: The port; 0 for the settings' own, else the first free one from 8888 on.
        base_url: The path of all its URLs, for a reverse proxy; empty for the settings' own, else /.
    """

    host: str = ""
    port: int = 0
    base_url: str = ""

    @property
    def exposed(self) -> bool:
        """Return whether other machines may reach it."""
        return bool(self.host) and not ipaddress.ip_address(self.host).is_loopback

    def validate(self) -> None:
        """Raise InvalidRequest if this is no place to listen."""
        if self.host:
            try:
                ipaddress.ip_address(self.host)
            except ValueError:
                raise InvalidRequest(
                    f"invalid --host {self.host[:80]!r}: expected an IP address of this machine, as 0.0.0.0"
                ) from None
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"invalid --port {self.port}: expected a number from 1 to 65535")
        if self.base_url and not _BASE_URL.fullmatch(self.base_url):
            raise InvalidRequest(
                f"invalid --base-url {self.base_url[:80]!r}: expected a path, as /notebooks/nb/"
            )


def render(
    job_dir: Path,
    root_dir: Path,
    hashed_password: str,
    ports: PortReservations,
    idle_s: float | None = None,
    reach: Reach = Reach(),
) -> Notebook:
    """Return the server of one job. Raises NoJupyter, NoFreePort, OSError.

    The user's own settings stay. What was asked for precedes them, and they precede fenka's defaults.

    Args:
        job_dir: The job's directory, which receives the configuration.
        root_dir: The directory that the notebook shows.
        hashed_password: The password of the login page, hashed; empty for the settings' own, else a random
            token in the URL.
        ports: The user's reserved ports.
        idle_s: The server ends after so many seconds without use of its slice; None: never.
        reach: Where it listens.
    """
    command = find()
    # Jupyter tests a port, and binds it seconds later. Of two servers that meet there one ends, and its URL
    # may already lead to the other.
    port, locks = reach.port, tuple[FileIO | socket.socket, ...]()
    if port:
        locks = (ports.reserve([port], reach.host or LOOPBACK, reuse=True)[1],)
    else:
        port, locks = ports.reserve_among_users(PORTS, reach.host or LOOPBACK)
    for lock in locks:
        os.set_inheritable(lock.fileno(), True)
    defaults: Settings = {
        "ServerApp": {
            **{"ip": LOOPBACK, "port": port, "port_retries": 50},
            "allow_root": os.geteuid() == 0,
        }
    }
    server: dict[str, object] = {"open_browser": False, "root_dir": str(root_dir)}
    if reach.host:
        server["ip"] = reach.host
    if reach.port:
        server |= {"port": port, "port_retries": 0}
    if reach.base_url:
        server["base_url"] = reach.base_url
    requested: Settings = {"ServerApp": server}
    if hashed_password:
        requested["PasswordIdentityProvider"] = {"hashed_password": hashed_password}
    path = [
        _configure(job_dir / "requested", requested),
        *_users_configuration(),
        _configure(job_dir / "defaults", defaults),
    ]
    if idle_s is not None:
        watcher = [sys.executable, "-I", notebook_server.__file__]
        command = [*watcher, "--idle", f"{idle_s:g}", "--", *command]
    return Notebook(
        command=command,
        environment={
            "JUPYTER_RUNTIME_DIR": str(job_dir / "runtime"),
            "JUPYTER_CONFIG_PATH": os.pathsep.join(path),
        },
        port_locks=locks,
    )


def _configure(directory: Path, settings: Settings) -> str:
    """Write Jupyter's settings, and return the directory."""
    directory.mkdir(mode=0o700, exist_ok=True)
    file = directory / "jupyter_server_config.json"
    # Every user could read a hash on the command line.
    file.touch(mode=0o600)
    file.write_text(json.dumps(settings))
    return str(directory)


def _users_configuration() -> list[str]:
    """Return the directories of the user's own settings, those that precede the others first."""
    named = [path for path in os.environ.get("JUPYTER_CONFIG_PATH", "").split(os.pathsep) if path]
    if own := os.environ.get("JUPYTER_CONFIG_DIR"):
        return [*named, own]
    configuration = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [*named, os.path.expanduser("~/.jupyter"), os.path.join(configuration, "jupyter")]


def url(job_dir: Path) -> str | None:
    """Return the server's URL once it answers."""
    for path in sorted((job_dir / "runtime").glob("jpserver-*.json")):
        try:
            server = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        token = server.get("token")
        return f"{server['url']}lab" + (f"?token={token}" if token else "")
    return None


def await_url(pid: int, job_dir: Path, name: str) -> str:
    """Return the URL of a server in the background. Raises NotebookFailed if it does not answer in time."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (address := url(job_dir)) is None:
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            state = "ended" if ended else "does not answer"
            raise NotebookFailed(f"{name} {state}: see `fenka logs {name}`")
        time.sleep(POLL_INTERVAL_S)
    return address


def follow(pid: int, job_dir: Path, announce: Callable[[str], None]) -> int:
    """Announce the URL once there is one; return the server's wait status when it has ended."""
    while (address := url(job_dir)) is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(POLL_INTERVAL_S)
    announce(address)
    # The terminal interrupts the server, too, which asks for confirmation.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return os.waitpid(pid, 0)[1]


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent until the server handles it; until then it would die with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def find() -> list[str]:
    """Return the command of the Jupyter to start. Raises NoJupyter."""
    own = shutil.which("jupyter-lab")
    if own:
        return [own]
    if importlib.util.find_spec("jupyterlab"):
        return [sys.executable, "-Pm", "jupyterlab"]
    raise NoJupyter("no Jupyter is installed: `pip install jupyterlab`, or install fenka[notebook]")


def hash_password(password: str) -> str:
    """Hash a password with the Jupyter that will check it. Raises NoJupyter.

    Its Python may be too old for -P. From /, neither it nor an empty entry of PYTHONPATH finds the modules of
    the current directory, which may be another user's.
    """
    program = find()
    beside = Path(program[0]).parent / "python"
    python = str(beside) if len(program) == 1 and beside.exists() else sys.executable
    code = "import sys; from jupyter_server.auth import passwd; print(passwd(sys.stdin.read()))"
    result = subprocess.run(
        [python, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        input=password,
        capture_output=True,
        text=True,
        check=False,
    )
    hashed = result.stdout.strip()
    if result.returncode != 0 or not hashed:
        raise NoJupyter(f"{python} cannot hash the password: is jupyter_server installed there?")
    return hashed
