"""What the kernel says of processes, in its own words.

Every file read here is written by the kernel alone: no process can block the reader, and none can put
text into it except its own name and its own paths. So everything is read as bytes. What lies behind
`/proc/PID/root` or in a process's memory is for its owner to answer, or not: nothing here opens that.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

_ALL_USERS = [b"0", b"0", b"4294967295"]
_NS_GET_PARENT = 0xB702
_DEEPEST = 64
"""The kernel nests user namespaces 32 deep."""

_MOUNTS_BYTES = 16 << 20
"""Bounds what one process can make others read: 100,000 mounts are the kernel's own limit."""

_OCTAL = re.compile(rb"\\([0-7]{3})")


def pids() -> list[int]:
    """All processes that this one sees."""
    return [int(name) for name in os.listdir(PROC) if name.isdecimal()]


def start_ticks(pid: int | str, proc: Path = PROC) -> int | None:
    """When the process started, in clock ticks after boot (field 22 of stat); None if none lives there.

    A PID alone is used again; with its start time it names one process until the next boot. Raises OSError.
    """
    try:
        state, *fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Its parent may never reap it. But a first thread that ended leaves the others running.
    return None if state in b"ZX" and int(fields[16]) <= 1 else int(fields[18])


def living_thread(pid: int) -> str:
    """The path below /proc of the process, or of a thread that is left when its first one has ended."""
    threads = PROC / str(pid) / "task"
    try:
        if (threads / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX":
            return str(pid)
        left = [name for name in os.listdir(threads) if name != str(pid)]
    except (FileNotFoundError, ProcessLookupError):
        left = []
    return f"{pid}/task/{left[0]}" if left else str(pid)


def parent_pid(pid: int) -> int | None:
    """The process that started this one and still lives; None where there is no such process."""
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def real_uid(pid: int) -> int | None:
    """The user who started it, whatever rights its program has; None where there is no such process."""
    try:
        return int(_status(pid, b"Uid:")[0])
    except (FileNotFoundError, ProcessLookupError):
        return None


def namespace_pids(pid: int | str, proc: Path = PROC) -> list[int]:
    """Its number in our PID namespace, and in each below it down to its own. Raises OSError.

    Two zeros where the kernel does not say: then nothing is known of it.
    """
    return [int(it) for it in _status(pid, b"NSpid:", proc)] or [0, 0]


def _status(pid: int | str, name: bytes, proc: Path = PROC) -> list[bytes]:
    for line in (proc / str(pid) / "status").read_bytes().splitlines():
        if line.startswith(name):
            return line.split()[1:]
    return []


# --- user namespaces --------------------------------------------------------------------------------


def namespace_inode(pid: int | str, kind: str) -> int:
    """The number of its namespace of this kind: one while it lives, then used again. Raises OSError."""
    return os.stat(PROC / str(pid) / "ns" / kind).st_ino


def in_other_user_namespace(pid: int) -> bool:
    """Whether it is in another user namespace than ours, by its map of users, which anybody may read.

    Only the machine's own namespace can be told from others like that: for a reader elsewhere this is False.
    Root's leases map users as the machine does; root can look at those itself. Raises OSError.
    """
    try:
        theirs, ours = ((PROC / it / "uid_map").read_bytes().split() for it in (str(pid), "self"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return ours == _ALL_USERS != theirs


def open_user_namespace(pid: int) -> int:
    """A descriptor that keeps the number of its user namespace from being used again. Raises OSError."""
    return os.open(PROC / str(pid) / "ns" / "user", os.O_RDONLY | os.O_CLOEXEC)


class UserNamespaceAncestry:
    """Finds the nearest of some user namespaces that a process is in, directly or nested.

    A process enters a user namespace by making it, by birth, or with the rights of its owner, and leaves
    it only for one that is nested in it: neither chroot nor mounts nor another identity undo that.
    One look's worth: numbers are remembered.
    """

    def __init__(self, known: Mapping[int, str]) -> None:
        """known: names of user namespaces, by number."""
        self._known = known
        self._own = namespace_inode("self", "user")
        self._names: dict[int, str | None] = {self._own: known.get(self._own)}

    def name(self, pid: int) -> str | None:
        """The name of the nearest known one. Raises OSError (PermissionError where we may not look)."""
        number = namespace_inode(pid, "user")
        if number not in self._names:
            self._names[number] = self._climb(open_user_namespace(pid))
        return self._names[number]

    def is_ours(self, pid: int) -> bool:
        """Whether it is in our user namespace itself. Raises OSError."""
        return namespace_inode(pid, "user") == self._own

    def _climb(self, descriptor: int) -> str | None:
        try:
            for _ in range(_DEEPEST):
                number = os.fstat(descriptor).st_ino
                if number in self._known or number == self._own:
                    return self._known.get(number)
                try:
                    above = fcntl.ioctl(descriptor, _NS_GET_PARENT)
                except PermissionError:
                    return None  # It is not below ours.
                os.close(descriptor)
                descriptor = above
            return None
        finally:
            os.close(descriptor)


# --- mounts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. device and root say what is mounted: a directory of a file system."""

    id: int
    device: str
    root: Path
    point: Path
    optional: tuple[str, ...] = ()


def mounts(pid: int | str = "self", proc: Path = PROC) -> Iterator[Mount]:
    """What a process sees mounted below its root directory; later ones lie over earlier ones.

    Raises OSError.
    """
    with (proc / str(pid) / "mountinfo").open("rb") as file:
        text = file.read(_MOUNTS_BYTES)
    for line in text.splitlines():
        identity, _, device, root, point, *rest = line.split()[: line.split().index(b"-")]
        yield Mount(
            int(identity),
            device.decode(),
            _path(root),
            _path(point),
            tuple(map(os.fsdecode, rest[1:])),
        )


def _path(field: bytes) -> Path:
    """The kernel writes spaces and the like in octal."""
    return Path(os.fsdecode(_OCTAL.sub(lambda it: bytes([int(it[1], 8)]), field)))


def mount_source(directory: Path) -> tuple[str, Path]:
    """Device and path within it: what mountinfo says wherever this directory is bound. Raises OSError."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        text = (PROC / "self/fdinfo" / str(descriptor)).read_text()
        real = Path(os.readlink(PROC / "self/fd" / str(descriptor)))
    finally:
        os.close(descriptor)
    identity = int(text.partition("mnt_id:")[2].split()[0])
    for mount in mounts():
        if mount.id == identity:
            return mount.device, mount.root / real.relative_to(mount.point)
    raise FileNotFoundError(f"{directory}: the kernel does not say where it is mounted")
