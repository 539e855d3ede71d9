"""Closes the device nodes of cards to everybody but leases, which get nodes of their own.

The machine's nodes become root's, with mode 0600. A lease's node is another inode with the same number, in a
file system that only root can enter. Programs get a copy of its mount over the machine's node, in their own
mount namespace only. A card that a program has opened before stays open.

The driver's nvidia-modprobe may make a node again, for all users. So the nodes are closed again and again.
"""

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from fenka.core.errors import FenkaError
from fenka.isolation import sandbox
from fenka.isolation.lease_files import decode_json, read_regular_file, write_atomically
from fenka.isolation.mount_handles import copy_mount

PARAMETERS = Path("/proc/driver/nvidia/params")
"""The driver's own settings, of which two say how nvidia-modprobe makes nodes."""

CLOSED, OPEN = 0o600, 0o666
CARD = re.compile(r"nvidia([0-9]+)")
_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""Nodes that all cards share. They stay as they are; leases get their own, too, since the driver's settings
may make them root's."""

_MAX_BYTES = 1 << 20


class InvalidClosedFile(FenkaError):
    """The record of the nodes is damaged. The message says what to do."""


class FormerNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node before it was closed."""

    path: str
    mode: int
    uid: int
    gid: int


class ClosedFile(msgspec.Struct, forbid_unknown_fields=True):
    """All nodes that were closed."""

    nodes: list[FormerNode]
    version: Literal[1] = 1


_decoder = msgspec.json.Decoder(ClosedFile)


def reopened_by_driver(parameters: str) -> bool:
    """Return whether nvidia-modprobe opens nodes to all users. parameters: the text of PARAMETERS."""
    values = dict(re.findall(r"^(\w+): (\d+)$", parameters, re.MULTILINE))
    return (
        values.get("ModifyDeviceFiles") != "0"
        and int(values.get("DeviceFileMode", OPEN)) & 0o077 > 0
    )


class ClosedNodes:
    """The nodes in one directory. Only root can use it."""

    def __init__(self, directory: Path, own: Path, record: Path) -> None:
        """Args:
        directory: Where the machine's nodes are.
        own: The directory of the leases' nodes; need not exist.
        record: The file that says what the nodes were.
        """
        self._directory, self._own, self._record = directory, own, record
        self._mounted = False
        self._known: list[FormerNode] | None = None

    def close(self) -> list[Path]:
        """Close the nodes that are open, and return them. Raises InvalidClosedFile, OSError."""
        if not self._mounted:
            self._mount()
        closed = list[Path]()
        for path, status in self._nodes():
            self._provide(path.name, status)
            private = stat.S_IMODE(status.st_mode) == CLOSED and status.st_uid == status.st_gid == 0
            if CARD.fullmatch(path.name) and not private:
                self._remember(path, status)
                os.chown(path, 0, 0, follow_symlinks=False)
                path.chmod(CLOSED)
                closed.append(path)
        return closed

    def reopen(self) -> None:
        """Make the nodes what they were before; nothing if they were not closed.

        Raises InvalidClosedFile, OSError.
        """
        for node in self._former():
            path = Path(node.path)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISCHR(path.lstat().st_mode):
                    os.chown(path, node.uid, node.gid, follow_symlinks=False)
                    path.chmod(node.mode)
        self._record.unlink(missing_ok=True)
        self._known = None
        if self._own.exists():
            sandbox.unmount_all(self._own, sandbox.unmount)
            self._own.rmdir()
        self._mounted = False

    def record(self) -> None:
        """Write the record, also after the file was removed. Raises InvalidClosedFile, OSError."""
        if former := self._former():
            self._write(former)

    def copies(self, minors: Collection[int] | None = None) -> Iterator[tuple[Path, int]]:
        """Yield the machine's nodes, with descriptors of detached mounts of a lease's own. Raises OSError.

        minors: the cards' numbers; None for all. Nodes that all cards share come with them.
        """
        for path, _ in self._nodes():
            card = CARD.fullmatch(path.name)
            if minors is None or card is None or int(card[1]) in minors:
                yield path, copy_mount(self._own / path.name, device=True)

    def _nodes(self) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._directory)):
                if CARD.fullmatch(name) or name in _SHARED:
                    path = self._directory / name
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        if stat.S_ISCHR(status.st_mode):
                            yield path, status

    def _mount(self) -> None:
        # An earlier daemon's; leases have copies.
        self._own.mkdir(mode=0o700, exist_ok=True)
        sandbox.unmount_all(self._own, sandbox.unmount)
        flags = sandbox.NOSUID | sandbox.NOEXEC
        sandbox.mount("fenka", self._own, flags, "tmpfs", "mode=0700,size=64k,nr_inodes=512")
        self._mounted = True

    def _provide(self, name: str, status: os.stat_result) -> None:
        """Make a lease's node, unless it is there. The driver may have got another number."""
        path = self._own / name
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_rdev == status.st_rdev:
                return
            path.unlink()
        os.mknod(path, stat.S_IFCHR | OPEN, status.st_rdev)
        path.chmod(OPEN)  # regardless of the umask

    def _former(self) -> list[FormerNode]:
        if self._known is None:
            self._known = self._read()
        return self._known

    def _read(self) -> list[FormerNode]:
        try:
            return decode_json(_decoder, read_regular_file(self._record, _MAX_BYTES)).nodes
        except FileNotFoundError:
            return []
        except msgspec.MsgspecError as why:
            raise InvalidClosedFile(
                f"{self._record} is not understood ({why}): it says what the cards' device nodes were before "
                "they were closed; remove it, and set their owner and mode"
            ) from None

    def _write(self, former: list[FormerNode]) -> None:
        write_atomically(self._record, msgspec.json.encode(ClosedFile(former)))

    def _remember(self, path: Path, status: os.stat_result) -> None:
        if any(node.path == str(path) for node in self._former()):
            return
        mode = stat.S_IMODE(status.st_mode)
        former = [*self._former(), FormerNode(str(path), mode, status.st_uid, status.st_gid)]
        self._write(former)
        self._known = former
