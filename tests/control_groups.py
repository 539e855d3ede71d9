"""Control groups that a test makes for itself, and processes in them that open device nodes."""

import contextlib
import os
import re
import secrets
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fenka.isolation.device_access import _CGROUP_DEVICE, _PROG_DETACH, _bpf, _own_programs
from tests.waiting import wait_until

_ROOT = Path("/sys/fs/cgroup")

_PROGRAM = """
import os, stat, sys
for line in sys.stdin:
    path, *device = line.split()
    try:
        if device:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*map(int, device)))
        else:
            os.close(os.open(path, os.O_RDONLY))
    except OSError as why:
        print(why.errno, flush=True)
    else:
        print(0, flush=True)
"""


def hierarchies() -> dict[str, Path]:
    """Return the roots of the mounted hierarchies that can close devices, by their version."""
    places = {"v1": _ROOT / "devices", "v2": _ROOT / "unified"}
    if (_ROOT / "cgroup.controllers").exists():
        places["v2"] = _ROOT
    return {
        version: place for version, place in places.items() if (place / "cgroup.procs").exists()
    }


def unused_major() -> int:
    """Return a major number for experiments that has no driver here."""
    devices = Path("/proc/devices").read_text().partition("Block")[0]
    used = {int(number) for number in re.findall(r"^ *([0-9]+) ", devices, re.MULTILINE)}
    return next(number for number in range(240, 255) if number not in used)


@contextlib.contextmanager
def make_group(hierarchy: Path) -> Iterator[Path]:
    """Make a group directly below the root, and remove it with all below it."""
    group = hierarchy / f"fenka-test-{secrets.token_hex(6)}"
    group.mkdir()
    try:
        yield group
    finally:
        # Processes that have ended leave their group some time later.
        for directory, _, _ in os.walk(group, topdown=False):
            wait_until(partial(_remove, Path(directory)))


def remove_programs(group: Path) -> None:
    """Take fenka's device programs off a group, as other programs of root's could."""
    with contextlib.ExitStack() as opened:
        directory = os.open(group, os.O_RDONLY)
        opened.callback(os.close, directory)
        for program in _own_programs(directory, opened):
            _bpf(_PROG_DETACH, struct.pack("=IIII", directory, program, _CGROUP_DEVICE, 0))


def _remove(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True


class Inside:
    """A process that opens device nodes, or makes them, as the test says."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self.open(Path("/dev/null")) == 0  # It has started.

    def __enter__(self) -> "Inside":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def enter(self, group: Path) -> None:
        """Move it to a group."""
        (group / "cgroup.procs").write_text(str(self.pid))

    def open(self, path: Path) -> int:
        """Return the error number of its attempt; 0 if it has opened the node."""
        return self._ask(str(path))

    def make_node(self, path: Path, major: int, minor: int) -> int:
        """Return the error number of its attempt; 0 if it has made the node."""
        return self._ask(f"{path} {major} {minor}")

    def _ask(self, line: str) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())
