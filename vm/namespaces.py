"""A machine that is no virtual one: systemd in namespaces of its own, on this machine's kernel.

It boots in seconds. Its cgroup v2 has only the controllers that this machine does not use in v1, which may be
none. It has no power to lose: its processes are killed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from vm.guest import Guest, GuestError, ssh

ENTER = Path(__file__).with_name("enter.sh")
HALT = signal.SIGRTMIN + 3
ENTER_GROUP = 'echo 0 > "$0"/cgroup.procs && exec "$@"'


@dataclass
class NamespaceGuest(Guest):
    """Processes on an overlay of a folder.

    Attributes:
        root: The files that it is started from, which are not changed.
        folder: Its changes.
        packages: The folder that it sees as /mnt.
    """

    root: Path
    folder: Path
    packages: Path
    _process: subprocess.Popen[bytes] | None = None
    _init: int = 0
    _below: str = ""
    _group: Path = Path()

    def start(self) -> None:
        """Start systemd without changes."""
        self._reset()
        self._launch()

    def save(self, name: str) -> None:
        """Kill everything, keep the changes, and start again."""
        self.close()
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self.folder / "changes", self.folder / name, symlinks=True)
        self._launch()

    def restore(self, name: str) -> None:
        """Boot with the changes that were saved."""
        self.close()
        self._reset()
        self._launch(name)

    def lose_power(self) -> None:
        """Kill everything at once. What was written stays."""
        self.close()
        self._launch(self._below)

    def reboot(self) -> None:
        """End systemd in order, as a reboot does, and start it again."""
        self._signal(HALT)
        self._launch(self._below)

    def login(self, user: str) -> list[str]:
        """Return the words of a command that logs a user in."""
        return ["nsenter", "--target", str(self._init), "--net", *ssh(22, user)]

    def close(self) -> None:
        """Kill everything."""
        if self._process is not None:
            self._signal(signal.SIGKILL)

    def _check(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise GuestError(f"systemd has ended; see {self.folder / 'log'}")

    def _reset(self) -> None:
        for name in ("changes", "work", "root"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(mode=0o755, parents=True)

    def _launch(self, below: str = "") -> None:
        """Start systemd. below: the changes below those of this run."""
        self._below = below
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        lower = ":".join(
            str(path) for path in (self.folder / below, self.root) if path != self.folder
        )
        self._group = _control_groups() / f"fenka-vm-{uuid.uuid4()}"
        self._group.mkdir()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("sh", "-c", ENTER_GROUP, self._group),
                    *(
                        "unshare",
                        "--mount",
                        "--pid",
                        "--fork",
                        "--net",
                        "--uts",
                        "--ipc",
                        "--cgroup",
                    ),
                    *("--kill-child", ENTER, lower, self.folder, self.packages),
                    self.folder / "boot_id",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while not (found := children.read_text().split()):
            self._check()
        self._init = int(found[0])
        self.wait()

    def _signal(self, number: int) -> None:
        """Send a signal to systemd, and wait until nothing is left of it."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init, number)
        self._process.wait()
        for folder, _, _ in os.walk(self._group, topdown=False):
            os.rmdir(folder)


def _control_groups() -> Path:
    """Return where this machine has mounted cgroup v2. Raises GuestError."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    raise GuestError("this machine has no cgroup v2: mount -t cgroup2 none FOLDER")
