"""Run the workstation experiment in its own namespaces, with root's daemon at /run/fenka.

The program starts itself again inside new namespaces. /run and /tmp are empty at first. /etc and /var/lib are
copy-on-write. The network is only a loopback device, and every process ends with the first one. The
surrounding machine is not changed.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
HERE = Path("/mnt")
"""The repository's path inside, since ordinary users may have no access to its real one."""
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
    """The experiment cannot run here; the message says why and what to do."""


def run_inside(arguments: list[str]) -> int:
    """Run `python -m fire ARGUMENTS` in new namespaces and return its exit code. Raises CannotRun."""
    if os.geteuid() != 0:
        raise CannotRun("creating namespaces and users needs root: run this as root")
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        raise CannotRun(f"cannot create namespaces: {probe.stderr.strip()}")
    command = ["unshare", *NAMESPACES, sys.executable, "-m", "fire", *arguments]
    environment = os.environ | {INSIDE: "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def isolate_files() -> None:
    """Mount this namespace's own files. Called once, inside."""
    for words in (
        ["--bind", str(REPOSITORY), str(HERE)],
        ["-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"],
    ):
        _mount(*words)
    for folder in ("/etc", "/var/lib"):
        layer = Path("/run/layers") / folder.strip("/").replace("/", "-")
        (layer / "upper").mkdir(parents=True)
        (layer / "work").mkdir()
        options = f"lowerdir={folder},upperdir={layer}/upper,workdir={layer}/work"
        _mount("-t", "overlay", "-o", options, "overlay", folder)
    _open_python()
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _open_python() -> None:
    """Let ordinary users read Python's files if these are in a home directory closed to them."""
    prefix = Path(sys.base_prefix).resolve()
    closed = [parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & 0o001]
    if not closed:
        return
    descriptor = os.open(prefix, os.O_PATH)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed[0]))
    prefix.mkdir(parents=True)
    subprocess.run(
        ["mount", "-c", "--bind", f"/proc/self/fd/{descriptor}", str(prefix)],
        check=True,
        pass_fds=[descriptor],
    )
    os.close(descriptor)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def environment() -> dict[str, str]:
    """Return the environment of users' commands, with the repository's path inside."""
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return inherited | {"PYTHONPATH": f"{HERE}/src", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}


PYTHON = str(HERE / ".venv" / "bin" / "python")
FENKA = [PYTHON, "-P", "-m", "fenka"]
"""As the installed command: without modules of the current directory."""
