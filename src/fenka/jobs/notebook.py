"""A Jupyter server as a local process: its command, and its URL.

The user's own Jupyter is preferred, because its kernels have the user's libraries. Otherwise the one of
`fenka[notebook]` is used.
"""

import contextlib
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.request import InvalidRequest
from fenka.installation import how_to_add_extra
from fenka.isolation.lease_files import read_regular_file
from fenka.jobs import notebook_guard
from fenka.jobs.in_pod import notebook_server
from fenka.jobs.local_ports import LOOPBACK, PortReservations
from fenka.server.loopback_name import DOMAIN, NAME_BYTES, new_name

_BASE_URL = re.compile(r"/([A-Za-z0-9._~@%-]+/)*[A-Za-z0-9._~@%-]*")

Settings = dict[str, dict[str, object]]
"""Jupyter's settings: by class, by name."""

READY_TIMEOUT_S = 300.0
"""A cold start of JupyterLab takes a few seconds, or a minute where disk and processors are busy."""
POLL_INTERVAL_S = 0.05

OWN_NAME = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}\.{DOMAIN}")
"""As `new_name` makes it."""
MAX_NAME_BYTES = 80
MAX_SERVER_FILE_BYTES = 64 << 10
"""Of Jupyter's file about a server, which has a dozen short fields."""

CONNECT_TIMEOUT_S = 1.0
"""For a server on this machine to accept a connection."""


class NoJupyter(FenkaError):
    """No Jupyter can be started; the message names what is missing."""


class NotebookFailed(FenkaError):
    """A Jupyter server was started and does not answer."""


@dataclass(frozen=True, slots=True)
class Notebook:
    """A Jupyter server to start: `command` with `environment` added to the program's own."""

    command: list[str]
    environment: dict[str, str]
    port_lock: FileIO
    """Keeps the port from the user's other jobs while the server, which inherits the lock, lives."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a notebook's server listens. Other settings are the user's Jupyter settings.

    Attributes:
        host: The IP address; empty for the settings' own, else the loopback address.
        port: The port; 0 for the settings' own, else a free one, drawn at random.
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

    The user's own settings stay. The command's options precede them, and they precede fenka's defaults.

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
    wanted = [reach.port] if reach.port else None
    port, lock = ports.reserve(wanted, reach.host or LOOPBACK, reuse=True)
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
    server |= _own_name(job_dir, new_name())
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
        port_lock=lock,
    )


def socket_path(job_dir: Path) -> Path:
    """Return the Unix socket of a job's server, for `ssh -L`."""
    return job_dir / "jupyter.sock"


def _own_name(job_dir: Path, name: str) -> dict[str, object]:
    """Have the server answer to this name alone, and return the settings of it.

    Cookies of an earlier start are of no use, for a browser may have sent them to whoever took its port.
    """
    secret = job_dir / "runtime" / "jupyter_cookie_secret"
    secret.unlink(missing_ok=True)
    socket_path(job_dir).unlink(missing_ok=True)
    directory = job_dir / "requested"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "jupyter_server_config.py").write_text(
        _LOAD_GUARD.format(
            module=notebook_guard.MODULE,
            file=notebook_guard.__file__,
            name=name,
            socket=str(socket_path(job_dir)),
        )
    )
    return {
        "local_hostnames": [name, "localhost"],
        "cookie_secret_file": str(secret),
        "jpserver_extensions": {notebook_guard.MODULE: True},
    }


_LOAD_GUARD = """\
import importlib.util
import sys

spec = importlib.util.spec_from_file_location({module!r}, {file!r})
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
guard.NAME, guard.SOCKET = {name!r}, {socket!r}
sys.modules[{module!r}] = guard
"""
"""Jupyter's settings as a program. The user's Jupyter may have another Python, without fenka."""


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


class _Server(msgspec.Struct):
    """A server of Jupyter, as its file describes it (`ServerApp.server_info` of jupyter-server 2)."""

    url: str
    hostname: str
    port: int
    sock: str = ""
    token: str | None = None
    pid: int = 0

    def address(self, runtime_dir: Path) -> str:
        """Return its URL, by the name that it answers to. Raises OSError, ValueError."""
        said = _name_of(runtime_dir, self.pid)
        parts = urlsplit(self.url)
        named = OWN_NAME.fullmatch(said)
        return urlunsplit(parts._replace(netloc=f"{said}:{self.port}")) if named else self.url


def _name_of(runtime_dir: Path, pid: int) -> str:
    """Return the text of a server's guard: its name, or the setting that has switched the guard off.

    Empty for nothing, and for a file that no guard writes: programs of the notebook may write there, too.
    """
    path = Path(notebook_guard.name_file(str(runtime_dir), pid))
    try:
        said = read_regular_file(path, MAX_NAME_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return said if OWN_NAME.fullmatch(said) or said in notebook_guard.SWITCHES else ""


def listens(place: str | tuple[str, int]) -> bool:
    """Return whether a program accepts connections at this Unix socket, or at this host and port."""
    # The last ones are for odd addresses.
    with contextlib.suppress(OSError, TypeError, ValueError, OverflowError):
        if not isinstance(place, str):
            socket.create_connection(place, CONNECT_TIMEOUT_S).close()
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            probe.connect(place)
            return True
    return False


def url(job_dir: Path) -> str | None:
    """Return the server's URL once it accepts connections."""
    for server in _servers(job_dir):
        # A setting or a program of the notebook may have written another text than a URL.
        with contextlib.suppress(OSError, ValueError):
            # It writes its file before it listens.
            if listens(server.sock or (server.hostname, server.port)):
                return f"{server.address(job_dir / 'runtime')}lab" + (
                    f"?token={server.token}" if server.token else ""
                )
    return None


def _servers(job_dir: Path) -> Iterator[_Server]:
    for path in sorted((job_dir / "runtime").glob("jpserver-*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield msgspec.json.decode(read_regular_file(path, MAX_SERVER_FILE_BYTES), type=_Server)


def unnamed_sentence(job_dir: Path, name: str, reach: Reach) -> str:
    """Return a sentence on why a server has no name of its own, and on the cost; empty if it has one.

    reach: where it was told to listen. A user who names an address gets no other one.
    """
    if reach.host:
        return ""
    for server in _servers(job_dir):
        said = _name_of(job_dir / "runtime", server.pid)
        if OWN_NAME.fullmatch(said):
            return ""
        why = (
            f"your Jupyter settings have ServerApp.{said}"
            if said
            else f"its Jupyter does not load fenka's guard: use jupyter-server 2, and see `fenka logs {name}`"
        )
        return (
            f"{name} has no host name of its own, as {why}; so a program that takes its port later may get "
            "its cookies from your browser"
        )
    return ""


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
    raise NoJupyter(f"no Jupyter is installed: {how_to_add_extra('notebook')}")


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
