"""A machine that runs: started, saved, restored, and used over ssh."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vm.guest_disk import KEY, LOGIN_MAC, GuestDisk

Found = TypeVar("Found")

KERNEL = "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0 mitigations=off tsc=reliable"
PATIENCE_S = 1800.0
"""For a script, a login, or a change that a test waits for, on a machine that is busy with other work."""


class GuestError(Exception):
    """The machine does not do what it should; the text says what."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ssh(port: int, user: str) -> list[str]:
    """Return the words of a command that logs a user in at a port of the loopback device."""
    words = ["ssh", "-q", "-i", str(KEY), "-p", str(port)]
    for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ConnectTimeout=60"):
        words += ["-o", option]
    return [*words, f"{user}@127.0.0.1"]


class Guest(ABC):
    """A machine that runs, and how it is used over ssh."""

    @abstractmethod
    def start(self) -> None:
        """Switch the machine on with an unchanged disk, and wait until users can log in."""

    @abstractmethod
    def save(self, name: str) -> None:
        """Save the machine as it is."""

    @abstractmethod
    def restore(self, name: str) -> None:
        """Go on with what :meth:`save` saved under this name."""

    @abstractmethod
    def lose_power(self) -> None:
        """Let the machine lose power and boot again, and wait until users can log in."""

    @abstractmethod
    def reboot(self) -> None:
        """Reboot in order, and wait until users can log in."""

    @abstractmethod
    def close(self) -> None:
        """Switch the machine off."""

    @abstractmethod
    def login(self, user: str) -> list[str]:
        """Return the words of a command that logs a user in."""

    @abstractmethod
    def _check(self) -> None:
        """Raise GuestError if the machine is switched off."""

    def boot_id(self) -> str:
        """Return what distinguishes this boot from others."""
        return self.run("cat /proc/sys/kernel/random/boot_id").strip()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Wait until root can log in. Raises GuestError."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.run("true", within_s=90)
                if ready():
                    return
            except (GuestError, subprocess.TimeoutExpired):
                self._check()
            if time.monotonic() > deadline:
                raise GuestError("nobody can log in")
            time.sleep(0.3)

    def run(self, script: str, user: str = "root", within_s: float = PATIENCE_S) -> str:
        """Run a script of the shell in a session of a user's, and return its output.

        Raises GuestError with what it printed if it fails.
        """
        done = self.attempt(script, user, within_s)
        if done.returncode:
            raise GuestError(
                f"{user}: `{script}` failed with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def attempt(
        self, script: str, user: str = "root", within_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, and return what it did."""
        return subprocess.run(
            [*self.login(user), script],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=within_s,
            check=False,
        )

    def until(self, script: str, expected: Callable[[str], Found], user: str = "root") -> Found:
        """Repeat a script until `expected` returns a true value for what it prints, and return that."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = self.attempt(script, user)
            found = expected(done.stdout)
            if found:
                return found
            if time.monotonic() > deadline:
                raise GuestError(f"`{script}` still prints:\n{done.stdout}{done.stderr}")
            time.sleep(0.5)


@dataclass
class QemuGuest(Guest):
    """A virtual machine.

    Attributes:
        disk: What it is started from, which is not changed.
        folder: Its changes and its sockets.
        second: The image of another disk.
        enter: The words of a command that runs another one in the network of the machine's devices.
        devices: Further options of qemu's.
        memory_mib: The machine's memory.
        writable: Whether the machine changes the second disk, too. Then it cannot be saved.
    """

    disk: GuestDisk
    folder: Path
    second: Path
    enter: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    memory_mib: int = 2048
    writable: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _port: int = field(default_factory=_free_port)

    def start(self) -> None:
        """Switch the machine on with an unchanged disk, and wait until users can log in."""
        overlay = self.folder / "disk.qcow2"
        overlay.unlink(missing_ok=True)
        command = ("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw")
        subprocess.run([*command, "-b", self.disk.folder / "disk.ext4", overlay], check=True)
        self._launch()
        self.wait()

    def restore(self, name: str) -> None:
        """Go on from where :meth:`save` was called with this name."""
        if self._process is None:
            self._launch("-loadvm", name)
        else:
            self.monitor(f"loadvm {name}")
        self.wait()
        # Certificates, sessions and reports have times.
        self.run(f"date --set @{time.time():.0f} >/dev/null")

    def save(self, name: str) -> None:
        """Save memory and disk."""
        self.monitor(f"savevm {name}")

    def lose_power(self) -> None:
        """Reset the machine at once, and wait until users can log in again.

        qemu goes on: a killed one may lose tables of its overlay.
        """
        before = self.boot_id()
        self.monitor("system_reset")
        self.wait(lambda: self.boot_id() != before)

    def reboot(self) -> None:
        """Reboot in order, and wait until users can log in again."""
        before = self.boot_id()
        with contextlib.suppress(GuestError):
            self.run("systemctl reboot")
        self.wait(lambda: self.boot_id() != before)

    def monitor(self, command: str) -> None:
        """Give a command to qemu. Raises GuestError with its answer, if it has one."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folder / "monitor"))
            with connection.makefile("rw") as lines:
                lines.readline()
                for request in (
                    {"execute": "qmp_capabilities"},
                    {"execute": "human-monitor-command", "arguments": {"command-line": command}},
                ):
                    print(json.dumps(request), file=lines, flush=True)
                    while "return" not in (answer := json.loads(lines.readline())):
                        pass
        if answer["return"]:
            raise GuestError(f"qemu: {command}: {answer['return']}")

    def login(self, user: str) -> list[str]:
        """Return the words of a command that logs a user in."""
        return [*self.enter, *ssh(self._port, user)]

    def close(self) -> None:
        """Switch the machine off."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            self._process = None

    def _check(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise GuestError(f"qemu has ended; see {self.folder / 'qemu.log'}")

    def _launch(self, *options: str) -> None:
        folder, disk = self.folder, self.disk.folder
        access = "off" if self.writable else "on"
        command = (
            *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
            *("-smp", "2", "-m", str(self.memory_mib)),
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *("-serial", f"file:{folder / 'console'}", "-device", "virtio-rng-pci"),
            *("-kernel", str(disk / "vmlinuz"), "-initrd", str(disk / "initrd"), "-append", KERNEL),
            "-drive",
            f"file={folder / 'disk.qcow2'},format=qcow2,if=none,id=root,cache=unsafe",
            *("-device", "virtio-blk-pci,drive=root"),
            "-drive",
            f"file={self.second},format=raw,if=virtio,cache=unsafe,readonly={access}",
            "-netdev",
            f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:22",
            *("-device", f"virtio-net-pci,netdev=net,mac={LOGIN_MAC},romfile="),
            *("-qmp", f"unix:{folder / 'monitor'},server,nowait", *self.devices, *options),
        )
        with (folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self.enter, "nice", "-n", os.environ.get("FENKA_VM_NICE", "15"), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
