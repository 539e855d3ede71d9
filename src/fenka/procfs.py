"""Reads processes, namespaces and mounts from /proc.

Only files that the kernel writes are read: no process can block the reader, and none controls their content
except its own name and paths. So everything is read as bytes. Files behind `/proc/PID/root` or a process's
memory, which its owner may delay, are not opened here.
"""

import contextlib
import fcntl
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROC = Path("/proc")

_ALL_USERS = [b"0", b"0", b"4294967295"]
_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704
_DEEPEST = 64
"""The kernel nests user namespaces 32 deep."""

_EXIT_CODE = 49
"""Index of a stat file's field 52 after the process's name."""

_PIDFD_INFO_BYTES = 64
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_EXIT_CODE = 60
"""Of struct pidfd_info in linux/pidfd.h: its size, the request, the flag, and the exit code's offset."""

_MOUNTS_BYTES = 16 << 20
"""Bounds what a process can make others read. The kernel's own limit is 100,000 mounts."""

_LISTEN = b"0A"
"""State of a listening socket."""

_OCTAL = re.compile(rb"\\([0-7]{3})")

_REMOVED = b"//deleted"
"""Follows the root of a mount in mountinfo whose directory has been removed."""


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def pids() -> list[int]:
    """Return all processes that this one sees."""
    return [int(name) for name in os.listdir(PROC) if name.isdecimal()]


def start_ticks(pid: int | str, proc: Path = PROC) -> int | None:
    """Return the start time in clock ticks after boot (field 22 of stat); None if there is no living process.

    PIDs are reused. With its start time a PID names one process until the next boot. Raises OSError.
    """
    fields = _stat(proc / str(pid))
    # A zombie may never be reaped. A first thread that ended leaves the others running.
    if fields is None or (fields[0] in b"ZX" and int(fields[17]) <= 1):
        return None
    return int(fields[19])


def process_name(pid: int, proc: Path = PROC) -> str:
    """Return the name of a process, at most 15 characters that can be printed; empty if it has ended."""
    try:
        name = (proc / str(pid) / "comm").read_bytes()
    except OSError:
        return ""
    return "".join(
        character for character in os.fsdecode(name.strip())[:15] if character.isprintable()
    )


def users_of(file: Path) -> set[int]:
    """Return the processes that have a file open, as far as this one may see that."""
    found, path = set[int](), str(file)
    for pid in pids():
        with contextlib.suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link) == path:
                        found.add(pid)
    return found


def lives(pid: int, started: int) -> bool:
    """Return whether the process of this PID lives and is the one that started then. Raises OSError."""
    return start_ticks(pid) == started


def exit_status(descriptor: int, pid: int, started: int) -> int | None:
    """Return the wait status of a process that has ended, whoever its parent is; None if it is not known.

    While it is a zombie, /proc has it. After its parent has reaped it, kernels from 6.15 on tell it to those
    who opened a pidfd before.

    Args:
        descriptor: Its pidfd.
        pid: The process.
        started: When it started, in clock ticks after boot.
    """
    fields = _stat(PROC / str(pid))
    if fields is not None and fields[0] in b"ZX" and int(fields[19]) == started:
        # Without the right to inspect it the kernel prints 0. The link has the same condition.
        with contextlib.suppress(OSError):
            os.readlink(PROC / str(pid) / "ns/user")
            return int(fields[_EXIT_CODE])
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
        if struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("<i", info, _PIDFD_INFO_EXIT_CODE)[0])
    return None


def send_signal(pid: int, number: int, is_meant: Callable[[], bool]) -> bool:
    """Send a signal to a process, and return whether it was sent.

    Args:
        pid: The process. Another one may have taken the PID by now.
        number: The signal.
        is_meant: Returns whether the current process of the PID is the one that should get it.
    """
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor is older than this answer. If another process has taken the PID in between, the
            # descriptor's process has ended, and the kernel sends nothing.
            if is_meant():
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False


def living_thread(pid: int) -> str:
    """Return the path below /proc of a process, or of another thread if its first one has ended."""
    threads = PROC / str(pid) / "task"
    fields = _stat(threads / str(pid))
    if fields is None or fields[0] not in b"ZX":
        return str(pid)
    try:
        others = [name for name in os.listdir(threads) if name != str(pid)]
    except (FileNotFoundError, ProcessLookupError):
        others = []
    return f"{pid}/task/{others[0]}" if others else str(pid)


def parent_pid(pid: int) -> int | None:
    """Return the parent process; None if there is no such process."""
    fields = _stat(PROC / str(pid))
    return int(fields[1]) if fields else None


_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends: prctl(2), PR_SET_PDEATHSIG."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def children(pid: int) -> list[int]:
    """Return the children of a process with one thread, also those that have ended; none if it is gone."""
    try:
        return [*map(int, (PROC / f"{pid}/task/{pid}/children").read_bytes().split())]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _stat(process: Path) -> list[bytes] | None:
    """Return the fields of a stat file after the process's name; None if there is no process."""
    try:
        return (process / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def real_uid(pid: int) -> int | None:
    """Return the user who started a process, whatever rights its program has; None if there is none."""
    try:
        return user_ids(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def user_ids(pid: int) -> list[int]:
    """Return the real, effective, saved and file system user IDs of a process. Raises OSError."""
    return [int(uid) for uid in _status(pid, b"Uid:")]


def with_descendants(pid: int) -> Iterator[int]:
    """Yield a process and its descendants, as far as `children` finds them."""
    left = [pid]
    while left:
        yield (process := left.pop())
        left += children(process)


def users_below(pid: int) -> set[int]:
    """Return the effective users of a process and of its descendants."""
    users = set[int]()
    for process in with_descendants(pid):
        with contextlib.suppress(OSError, IndexError):
            users.add(user_ids(process)[1])
    return users


def descriptors_of_socket(pid: int, inode: int) -> list[int]:
    """Return the descriptors of a socket that a process has; none if it is gone or may not be inspected."""
    folder, name = PROC / str(pid) / "fd", f"socket:[{inode}]"
    found = list[int]()
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(folder / number) == name:
                    found.append(int(number))
    return found


def namespace_pids(pid: int | str, proc: Path = PROC) -> list[int]:
    """Return the PID of a process in our PID namespace, and in each namespace below it down to its own.

    Two zeros if the kernel does not report it. Raises OSError.
    """
    return [int(number) for number in _status(pid, b"NSpid:", proc)] or [0, 0]


def _status(pid: int | str, name: bytes, proc: Path = PROC) -> list[bytes]:
    for line in (proc / str(pid) / "status").read_bytes().splitlines():
        if line.startswith(name):
            return line.split()[1:]
    return []


def listeners() -> dict[int, int]:
    """Return the TCP ports on which programs of this network namespace listen, with their users.

    A port where several users listen, on different addresses, is left out. Raises OSError.
    """
    users = dict[int, set[int]]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (PROC / "self/net" / table).read_bytes().splitlines()[1:]:
                _, local, _, state, _, _, _, owner, *_ = line.split()
                if state == _LISTEN:
                    users.setdefault(int(local.rpartition(b":")[2], 16), set()).add(int(owner))
    return {port: min(uids) for port, uids in users.items() if len(uids) == 1}


# --- user namespaces --------------------------------------------------------------------------------


def namespace_inode(pid: int | str, kind: str) -> int:
    """Return the inode of a process's namespace, which may be reused after the namespace. Raises OSError."""
    return os.stat(PROC / str(pid) / "ns" / kind).st_ino


def maps_all_users(pid: int | str = "self") -> bool:
    """Return whether the user namespace of a process maps all users to themselves, as the machine's does.

    Any user may read that. Raises OSError.
    """
    return (PROC / str(pid) / "uid_map").read_bytes().split() == _ALL_USERS


def in_other_user_namespace(pid: int) -> bool:
    """Return whether a process is in another user namespace than ours, by its map of users.

    This distinguishes only the machine's namespace from others: in another one the result is False. Leases of
    root map all users, too; root can inspect those by other means. Raises OSError.
    """
    try:
        return maps_all_users() and not maps_all_users(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_namespace(pid: int, kind: str) -> int:
    """Return a descriptor that keeps the inode of a namespace from being reused. Raises OSError."""
    return os.open(PROC / str(pid) / "ns" / kind, os.O_RDONLY | os.O_CLOEXEC)


def user_namespace_owner(pid: int) -> int | None:
    """Return the user who made the outermost user namespace below ours that a process is in.

    A user may give processes there thousands of other user IDs (/etc/subuid). Return None for a process that
    is in ours or not below it. Raises OSError.
    """
    own, owner = namespace_inode("self", "user"), None
    with contextlib.closing(_outwards(open_namespace(pid, "user"))) as namespaces:
        for descriptor in namespaces:
            if os.fstat(descriptor).st_ino == own:
                return owner
            result = fcntl.ioctl(descriptor, _NS_GET_OWNER_UID, bytes(4))
            owner = int.from_bytes(result, sys.byteorder)
    return None


def _outwards(descriptor: int) -> Generator[int, None, None]:
    """Yield descriptors of a user or PID namespace and of those around it that may be seen; close them."""
    try:
        for _ in range(_DEEPEST):
            yield descriptor
            try:
                above = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            except PermissionError:
                return  # Not below ours.
            os.close(descriptor)
            descriptor = above
    finally:
        os.close(descriptor)


class NamespaceAncestry:
    """Finds the nearest of some user or PID namespaces that a process is in, directly or nested.

    A process enters such a namespace by making it, by birth, or with the rights of its owner. It can leave it
    only for a nested one, whatever it does with chroot, mounts or its identity. An object serves one scan:
    inodes are cached.
    """

    def __init__(self, kind: Literal["user", "pid"], known: Mapping[int, str]) -> None:
        """Args:
        kind: Of the namespaces.
        known: Their names by inode.
        """
        self._kind, self._known = kind, known
        self._own = namespace_inode("self", kind)
        self._names: dict[int, str | None] = {self._own: known.get(self._own)}

    def name(self, pid: int) -> str | None:
        """Return the name of the nearest known one. Raises OSError."""
        number = namespace_inode(pid, self._kind)
        if number not in self._names:
            self._names[number] = self._climb(open_namespace(pid, self._kind))
        return self._names[number]

    def is_ours(self, pid: int) -> bool:
        """Return whether a process is in our namespace itself. Raises OSError."""
        return namespace_inode(pid, self._kind) == self._own

    def _climb(self, descriptor: int) -> str | None:
        with contextlib.closing(_outwards(descriptor)) as namespaces:
            for namespace in namespaces:
                number = os.fstat(namespace).st_ino
                if number in self._known or number == self._own:
                    return self._known.get(number)
        return None


# --- control groups ---------------------------------------------------------------------------------

_CGROUPS = Path("/sys/fs/cgroup")
_DEVICES = _CGROUPS / "devices"
"""Where version 1 of control groups has the rules for devices. Without it, version 2 has them."""


def cgroup(pid: int) -> str:
    """Return a process's control group below `cgroup_directory`; empty if it is not known. Raises OSError."""
    name = b"devices" if _DEVICES.is_dir() else b""
    for line in (PROC / str(pid) / "cgroup").read_bytes().splitlines():
        _, names, path = line.split(b":", 2)
        if name in names.split(b","):
            return os.fsdecode(path)
    return ""


def cgroup_directory(group: str) -> Path:
    """Return the directory of a control group, which exists as long as the group."""
    root = _DEVICES if _DEVICES.is_dir() else _CGROUPS
    return root / group.lstrip("/")


def cgroup_inode(group: str) -> int:
    """Return the inode of a control group, which is not reused; 0 if there is no such group."""
    try:
        return cgroup_directory(group).stat().st_ino
    except OSError:
        return 0


def cgroup_of_one(pid: int) -> str:
    """Return a process's control group if it is the only one in there; else nothing. Raises OSError.

    That of a session or a service, whose other processes do not belong to it, is none.
    """
    group = cgroup(pid)
    if group.strip("/"):
        with contextlib.suppress(FileNotFoundError):
            members = (cgroup_directory(group) / "cgroup.procs").read_bytes().split()
            return group if [*map(int, members)] == [pid] else ""
    return ""


def nearest_cgroup(group: str, known: Mapping[str, str]) -> str | None:
    """Return the name of the nearest known control group that a group is, or is below."""
    while group.strip("/"):
        if group in known:
            return known[group]
        group = group.rpartition("/")[0]
    return None


# --- mounts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of mountinfo. device and root identify the mounted directory; one that has been removed keeps
    the path that it had.
    """

    id: int
    device: str
    root: Path
    point: Path
    optional: tuple[str, ...] = ()


def mounts(pid: int | str = "self", proc: Path = PROC) -> Iterator[MountPoint]:
    """Yield the mounts below a process's root directory. Later ones lie over earlier ones. Raises OSError."""
    with (proc / str(pid) / "mountinfo").open("rb") as file:
        text = file.read(_MOUNTS_BYTES)
    for line in text.splitlines():
        identity, _, device, root, point, *rest = line.split()[: line.split().index(b"-")]
        yield MountPoint(
            int(identity),
            device.decode(),
            _path(root.removesuffix(_REMOVED)),
            _path(point),
            tuple(map(os.fsdecode, rest[1:])),
        )


def _path(field: bytes) -> Path:
    """Decode a path, in which the kernel writes some characters in octal."""
    return Path(os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field)))


def mount_source(directory: Path) -> tuple[str, Path]:
    """Return device and path of a directory, as mountinfo has them wherever it is bound. Raises OSError."""
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
