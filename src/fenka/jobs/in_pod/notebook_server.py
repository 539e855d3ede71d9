"""Runs a Jupyter server, and ends it when its slice has not been used for a time. It needs only Python 3.5.

Without a command, the image's own Jupyter is started: JupyterLab, else the classic notebook. Its password is
the variable PASSWORD. Only a hash in a file that nobody else can read reaches the server: neither its command
line nor the kernels' environment has the password.

fenka counts the time in which the slice's programs use its cards on the lease's control page. A kernel that
is alive but has not used a card counts as idle. Where nothing is counted (whole cards, drivers that measure
no processes), Jupyter ends idle kernels and then itself.
"""

import argparse
import ctypes
import hashlib
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

NOT_FOUND = 127
ENDED_BY_SIGNAL = 143
"""After SIGTERM the notebook has not ended by itself, though Jupyter then exits with 0."""

TERMINATE_S = 20.0
"""Between SIGTERM and SIGKILL for a server whose slice is idle."""
MEASURED_WITHIN_S = 10.0
"""fenka begins to count within a second where the driver measures processes."""
STALE_NS = 60 * 10**9
"""Older counts are unknown: fenka's program on the node is being updated, for example."""
MAX_PERIOD_S = 10.0

PR_SET_PDEATHSIG = 1

_HEADER = struct.Struct("<QIIQ64sI28x")
_CARD = struct.Struct("<48sQQIIQQQI20x")
_MAGIC = 0x4C5254434B4E4546
_VERSION = 2
"""The control page: native/include/fenka/lease.h."""


class LeaseUsage:
    """How long the programs of a lease have used its cards.

    at_ns: when it was counted, by CLOCK_MONOTONIC.
    """

    def __init__(self, busy_ns: int, at_ns: int) -> None:
        self.busy_ns, self.at_ns = busy_ns, at_ns


def control_page() -> pathlib.Path:
    """Return the path of the lease's control page."""
    return pathlib.Path(os.environ.get("FENKA_LEASE", "/run/fenka")) / "lease" / "control"


def read_usage(page: pathlib.Path) -> Optional[LeaseUsage]:
    """Return what fenka has counted; None if nothing is counted."""
    try:
        data = page.read_bytes()
        magic, version, _, _, _, count = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            return None
        cards = [
            _CARD.unpack_from(data, _HEADER.size + number * _CARD.size) for number in range(count)
        ]
    except (OSError, struct.error):
        return None
    if not cards or not all(card[5] for card in cards):
        return None
    return LeaseUsage(sum(card[7] for card in cards), min(card[6] for card in cards))


class IdleClock:
    """Tells how long a slice has not been used. Times are nanoseconds of CLOCK_MONOTONIC.

    Time counts up to the last count, since the slice may have been used after it.
    """

    def __init__(self, usage: Optional[LeaseUsage], now: int) -> None:
        self._busy_ns = usage.busy_ns if usage else 0
        self._used_at = now

    def idle_ns(self, usage: Optional[LeaseUsage], now: int) -> int:
        """Return for how long the slice has not been used. While that is unknown, it counts as used."""
        if usage is None or now - usage.at_ns > STALE_NS:
            self._used_at = now
            return 0
        if usage.busy_ns > self._busy_ns:
            self._used_at = usage.at_ns
        self._busy_ns = usage.busy_ns
        return max(0, usage.at_ns - self._used_at)


def await_usage(page: pathlib.Path) -> Optional[LeaseUsage]:
    """Return the first count; None if nothing is counted."""
    deadline = time.monotonic() + MEASURED_WITHIN_S
    while page.exists() and time.monotonic() < deadline:
        usage = read_usage(page)
        if usage is not None:
            return usage
        time.sleep(0.1)
    return None


def find_jupyter() -> Optional[Tuple[List[str], bool]]:
    """Return the image's Jupyter, and whether it stands on the classic notebook's server."""
    for program, first_modern in (("jupyter-lab", 3), ("jupyter-notebook", 7)):
        path = shutil.which(program)
        if path is None:
            continue
        version = subprocess.check_output([path, "--version"]).decode().strip()
        major = version.split(".")[0]
        return [path], major.isdigit() and int(major) < first_modern
    return None


def hash_password(password: str) -> str:
    """Return a hash as all versions of Jupyter check it."""
    salt = os.urandom(16).hex()
    digest = hashlib.sha256(password.encode() + salt.encode("ascii")).hexdigest()
    return "sha256:{}:{}".format(salt, digest)


def settings(password: str, port: int, root: str, classic: bool) -> Dict[str, Any]:
    """Return Jupyter's configuration."""
    server = {
        "ip": "0.0.0.0",
        "port": port,
        "port_retries": 0,
        "open_browser": False,
        "allow_root": os.geteuid() == 0,
    }  # type: Dict[str, Any]
    if root:
        server["notebook_dir" if classic else "root_dir"] = root
    # Without a password, Jupyter prints a random token.
    hashed = hash_password(password) if password else ""
    if classic:
        return {"NotebookApp": dict(server, password=hashed)}
    return {"ServerApp": server, "PasswordIdentityProvider": {"hashed_password": hashed}}


def configure(port: int, root: str, environment: Dict[str, str]) -> Optional[Tuple[List[str], str]]:
    """Write the configuration of the image's Jupyter. Return its command and its application's name."""
    found = find_jupyter()
    if found is None:
        return None
    command, classic = found
    directory = pathlib.Path(tempfile.mkdtemp(prefix="fenka-jupyter-"))
    name = "jupyter_notebook_config.json" if classic else "jupyter_server_config.json"
    content = settings(environment.pop("PASSWORD", ""), port, root, classic)
    (directory / name).write_text(json.dumps(content))
    # Settings of the image stay, where these do not replace them.
    path = [str(directory), environment.get("JUPYTER_CONFIG_PATH", "")]
    environment["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, path))
    return command, "NotebookApp" if classic else "ServerApp"


def own_culling(idle_s: float, application: str) -> List[str]:
    """Return the options by which Jupyter itself ends idle kernels, and then itself."""
    return [
        "--MappingKernelManager.cull_idle_timeout={:.0f}".format(max(idle_s, 1)),
        "--MappingKernelManager.cull_interval={:.0f}".format(max(1, min(idle_s / 4, 300))),
        # A browser that was left open is no use.
        "--MappingKernelManager.cull_connected=True",
        "--{}.shutdown_no_activity_timeout={:.0f}".format(application, max(idle_s, 1)),
    ]


class JupyterServer:
    """A Jupyter server as a child."""

    def __init__(self, command: List[str], environment: Dict[str, str]) -> None:
        self._pid = 0
        self._signalled = self._idle = False
        signal.signal(signal.SIGTERM, self._forward)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # The terminal interrupts the server, too, which asks for confirmation.
            signal.signal(signal.SIGINT, lambda *_: None)
        # Without this program nothing would end it when its slice is idle. There are no threads yet.
        process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)  # noqa: PLW1509
        self._pid = process.pid
        if self._signalled:
            os.kill(self._pid, signal.SIGTERM)

    def _forward(self, *_: Any) -> None:
        self._signalled = True
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)

    def watch(self, idle_s: float, usage: LeaseUsage, page: pathlib.Path) -> None:
        """End the server when the slice has not been used for this time."""
        clock = IdleClock(usage, monotonic_ns())
        while clock.idle_ns(read_usage(page), monotonic_ns()) < idle_s * 1e9:
            time.sleep(min(idle_s / 10, MAX_PERIOD_S))
        print(
            "fenka: the slice has not been used for {:.0f} s, so the notebook ends; fenka start "
            "starts it again".format(idle_s),
            file=sys.stderr,
            flush=True,
        )
        self._idle = True
        os.kill(self._pid, signal.SIGTERM)
        time.sleep(TERMINATE_S)
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code, of 0 if the slice was idle. In a container, orphans end here, too."""
        while True:
            pid, status = os.wait()
            if pid == self._pid:
                break
        if self._idle:
            return 0
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return ENDED_BY_SIGNAL if self._signalled else code


def die_with_parent() -> None:
    """Have this process get SIGTERM when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def monotonic_ns() -> int:
    """Return CLOCK_MONOTONIC."""
    return int(time.monotonic() * 1e9)


def main() -> int:
    """Run the server and return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=float, default=0, help="seconds; 0: it never ends")
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--root", default="", help="the directory that the notebook shows")
    parser.add_argument("command", nargs="*", help="a configured server")
    words = parser.parse_args()
    environment = dict(os.environ)
    if words.root:
        # Kernels without a notebook's path begin where the server does.
        os.chdir(words.root)
    command, application = list(words.command), "ServerApp"
    if not command:
        configured = configure(words.port, words.root, environment)
        if configured is None:
            print("fenka: this image has no Jupyter: install jupyterlab in it", file=sys.stderr)
            return NOT_FOUND
        command, application = configured
    page, usage = control_page(), None
    if words.idle:
        usage = await_usage(page)
        if usage is None:
            print("fenka: the use of the cards is unknown, so Jupyter decides what is idle")
            command += own_culling(words.idle, application)
    server = JupyterServer(command, environment)
    if usage is not None:
        watcher = threading.Thread(target=server.watch, args=(words.idle, usage, page))
        watcher.daemon = True
        watcher.start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
