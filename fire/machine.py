"""A machine of the storm's own: root's daemon at /run/fenka, /etc and users, apart from everybody else's.

The storm runs again inside new namespaces. /run and /tmp begin empty, /etc and /var/lib are copied on write,
the network is a loopback, and every process ends with the first one. Nothing of the machine around changes.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
HERE = Path("/mnt")
"""Where the repository stands inside: its real place may be closed to ordinary users."""
INSIDE = "FENKA_FIRE_INSIDE"
NAMESPACES = (
    "--mount",
    "--net",
    "--pid",
    "--ipc",
    "--uts",
    "--fork",
    "--mount-proc",
    "--kill-child",
)


class CannotRun(Exception):
    """The storm cannot run here; the message says why and what to do."""


def run_inside(arguments: list[str]) -> int:
    """Run `python -m fire ARGUMENTS` in a machine of its own; the exit code. Raises CannotBurn."""
    if os.geteuid() != 0:
        raise CannotRun("the storm makes namespaces and users: run it as root")
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        raise CannotRun(f"no namespaces can be made here: {probe.stderr.strip()}")
    command = ["unshare", *NAMESPACES, sys.executable, "-m", "fire", *arguments]
    environment = os.environ | {INSIDE: "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def isolate_files() -> None:
    """Give this namespace its own files. Called once, inside."""
    for words in (
        ["--bind", str(REPOSITORY), str(HERE)],
        ["-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"],
    ):
        _mount(*words)
    for place in ("/etc", "/var/lib"):
        layer = Path("/run/layers") / place.strip("/").replace("/", "-")
        (layer / "upper").mkdir(parents=True)
        (layer / "work").mkdir()
        options = f"lowerdir={place},upperdir={layer}/upper,workdir={layer}/work"
        _mount("-t", "overlay", "-o", options, "overlay", place)
    _open_python()
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _open_python() -> None:
    """Show Python's own files to ordinary users where they stand in a home directory closed to them."""
    prefix = Path(sys.base_prefix).resolve()
    closed = [parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & 0o001]
    if not closed:
        return
    kept = os.open(prefix, os.O_PATH)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed[0]))
    prefix.mkdir(parents=True)
    subprocess.run(
        ["mount", "-c", "--bind", f"/proc/self/fd/{kept}", str(prefix)], check=True, pass_fds=[kept]
    )
    os.close(kept)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def environment() -> dict[str, str]:
    """What users' commands find: the repository where it stands inside, nothing of ours."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return kept | {"PYTHONPATH": f"{HERE}/src", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}


PYTHON = str(HERE / ".venv" / "bin" / "python")
FENKA = [PYTHON, "-m", "fenka"]
