"""Enters a lease: mounts its files where the shim and the dynamic linker expect them.

This is fair sharing, not a security boundary: root can undo it from outside, or mount another file over a
mount.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import proxy_install, unix_client

PRELOAD = Path("/etc/ld.so.preload")


def remove() -> None:
    """Remove the empty file that `sandbox.enter` may have created as root, if no lease needs it.

    Removing a file drops the mounts over it in all namespaces. The lock also protects leases in other PID
    namespaces, whose processes are not visible.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError), PRELOAD.open("r+b") as file:
        # Fails at once while there is a lease. The file then stays, which is harmless.
        _lock(file.fileno(), fcntl.F_WRLCK, fcntl.F_OFD_SETLK)
        if not file.read(1) and not _is_mounted():
            PRELOAD.unlink()


def _is_mounted() -> bool:
    """Return whether any process sees a mount over the file. Raises OSError."""
    seen: set[int] = set()
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            thread = procfs.living_thread(pid)
            inode = procfs.namespace_inode(thread, "mnt")
            mounts = procfs.mounts(thread) if inode not in seen else ()
            if any(mount.point == PRELOAD for mount in mounts):
                return True
            seen.add(inode)
    return False


def lock_preload() -> int | None:
    """Keep /etc/ld.so.preload in place while any process has the returned descriptor open.

    Return None if the file does not exist and cannot be created: then no host file is mounted over.
    """
    while True:
        try:
            descriptor = os.open(PRELOAD, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        _lock(descriptor, fcntl.F_RDLCK, fcntl.F_OFD_SETLKW)
        status = os.fstat(descriptor)
        if status.st_nlink:
            if not status.st_size and os.geteuid() == 0:
                os.fchmod(descriptor, 0o644)  # regardless of the umask: all users' linkers read it
            return descriptor
        os.close(descriptor)  # it was removed between open and lock


def _lock(descriptor: int, kind: int, command: int) -> None:
    """Lock a file until its open file description is closed, across exec and fork. Raises OSError.

    Unlike with flock(2), users who may only read the file cannot lock it exclusively and block others.
    """
    fcntl.fcntl(descriptor, command, struct.pack("@hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


_ACL, _ACL_VERSION = "system.posix_acl_access", 2
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_READ_WRITE_ENTER, _ENTER, _NOTHING = 7, 1, 0
_NOBODY = 0xFFFFFFFF


def restrict_to_user(directory: Path, uid: int) -> None:
    """Let only this process's user and `uid` enter the directory, and only the former change it.

    `uid` gets an entry in the access control list instead of ownership, which would allow it to replace
    files. On a file system without such lists all users may enter, and the modes of the files decide. Raises
    OSError.
    """
    directory.chmod(0o700)
    if uid == os.geteuid():
        return
    entries = (
        (_OWNER, _READ_WRITE_ENTER, _NOBODY),
        (_USER, _ENTER, uid),
        (_GROUP, _NOTHING, _NOBODY),
        (_MASK, _ENTER, _NOBODY),
        (_OTHERS, _NOTHING, _NOBODY),
    )
    packed = struct.pack("<I", _ACL_VERSION) + b"".join(
        struct.pack("<HHI", *entry) for entry in entries
    )
    try:
        os.setxattr(directory, _ACL, packed)
    except OSError as why:
        if why.errno != errno.EOPNOTSUPP:
            raise
        directory.chmod(0o711)


RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, RECURSIVE = 1, 2, 4, 8, 32, 4096, 16384
SLAVE = 1 << 19
DETACH = 2
_PAGE = 4096

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000

_CAPBSET_DROP = 24

AT_FDCWD = -100
# The same on all processors; Python does not name it.
_MOVE_MOUNT, _F_EMPTY_PATH = 429, 4

_NODES_TIMEOUT_S, _MAX_NODES_BYTES, _MAX_NODES = 30, 1 << 16, 250


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, *names: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), *names)


def system_call(number: int, *arguments: object) -> int:
    """Return the result of a call that the C library has no function for. Raises OSError."""
    result: int = _libc().syscall(number, *arguments)
    _check(min(result, 0))
    return result


def unshare(flags: int) -> None:
    """Move this process to new namespaces of these kinds."""
    _check(_libc().unshare(flags))


def join_namespaces(pidfd: int, flags: int) -> None:
    """Move this process to a process's namespaces of these kinds."""
    _check(_libc().setns(pidfd, flags))


def drop_capabilities() -> None:
    """Prevent programs that this process executes from gaining capabilities, also by their file."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1):
        _check(_libc().prctl(_CAPBSET_DROP, number, 0, 0, 0))


def mount(
    source: Path | str | None, target: Path, flags: int, kind: str = "", data: str = ""
) -> None:
    """Call mount(2). kind and data: for a new file system."""
    origin = os.fsencode(source) if source is not None else (kind or "none").encode()
    _check(
        _libc().mount(
            origin,
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
        str(target),
    )


def mount_small(directory: Path, size: int) -> None:
    """Mount a tmpfs with room for one file of `size` bytes, rounded up to pages."""
    size = -(-size // _PAGE) * _PAGE
    flags = NOSUID | NODEV | NOEXEC
    mount("fenka", directory, flags, "tmpfs", f"mode=0755,size={size},nr_inodes=2")


def unmount_all(directory: Path, unmount: Callable[[Path], None]) -> None:
    """Remove all mounts on a directory, if any."""
    while True:
        try:
            unmount(directory)
        except OSError as why:
            if why.errno in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
                return
            raise


def unmount(target: Path) -> None:
    """Remove a mount at once. Open files in it stay usable."""
    _check(_libc().umount2(os.fsencode(target), DETACH), str(target))


LEASE_ROOT = Path("/run/fenka")
"""Directory of a lease inside it."""

DRIVER = LEASE_ROOT / "driver"
"""Directory of the driver's own libraries, for the proxies."""

SHIM = LEASE_ROOT / "lease" / "libfenka.so"
"""Path of the shim inside a lease."""

NODE = "node"
"""Directory of a simulated driver's node in DRIVER."""

LINKER_CACHE = Path("/etc/ld.so.cache")

NOTHING = Path(os.devnull)
"""Covers a file that must be empty."""


class IsolationError(FenkaError):
    """Programs cannot be isolated here."""


@dataclass(frozen=True, slots=True)
class LeaseMounts:
    """The sandbox's mounts. The program then sees:

        /run/fenka/lease/control        its limits, read-only
        /run/fenka/lease/libfenka.so    the shim; a bind mount pins its inode, so a rebuild cannot remove it
        /run/fenka/account/slots        its account
        /run/fenka/driver/              the driver's libraries; the proxies are mounted over their own paths
        /etc/ld.so.preload              names the shim; unlike LD_PRELOAD it survives env -i and setuid
        /etc/ld.so.cache                only with a simulated driver: finds its libraries under env -i too

    directory: the lease's directory, with `lease/` and `account/`.
    shim: the libfenka.so to mount.
    hidden: directories that the program must not reach by their own paths (other leases' files).
    linker_cache: replaces /etc/ld.so.cache, or None.
    proxies: the directory of the proxies (docs/understand/proxy.md).
    driver: the libraries that these replace, by the names in proxy.LIBRARIES. The first of each is used.
    node: the directory of a simulated driver's node, or None.
    user_namespaces: whether programs may create user namespaces.
    capabilities: the device files of its MIG instances, all in one directory; the others there are hidden.
    node_server: the socket that gives the device nodes of its cards, if they are closed to others.
    blocked: libraries that no program may load.
    unlisted: files that are missing from their directories.
    """

    directory: Path
    shim: Path
    hidden: tuple[Path, ...] = ()
    linker_cache: Path | None = None
    proxies: Path | None = None
    driver: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    node: Path | None = None
    user_namespaces: bool = False
    capabilities: tuple[Path, ...] = ()
    node_server: Path | None = None
    blocked: tuple[Path, ...] = ()
    unlisted: tuple[Path, ...] = ()


Bind = tuple[Path, Path]
"""A file or directory of this machine, and the path at which programs see it, too."""


def enter(mounts: LeaseMounts, binds: Sequence[Bind] = ()) -> None:
    """Move this single-threaded process into the lease. Raises IsolationError; the process must then end.

    The process becomes the program, so that signals, terminal and exit code need no forwarding. By its user
    namespace the daemon recognises the lease's processes. Programs cannot create further ones, in which they
    could mount over all of this, unless that is allowed: the limit is set where the program has no rights.
    """
    lock = lock_preload()
    nodes = _receive_nodes(mounts.node_server) if mounts.node_server else []
    own_users = _unshare()
    _mount_all(mounts)
    for path, descriptor in nodes:
        _move_mount(descriptor, path)
    files = [file for files in mounts.driver.values() for file in files]
    _mount_binds(binds, [LEASE_ROOT, PRELOAD, LINKER_CACHE, procfs.PROC, *files])
    if own_users:
        _drop_privileges(user_namespaces=mounts.user_namespaces)
    if lock is not None:
        os.set_inheritable(lock, True)


def _receive_nodes(server: Path) -> list[tuple[Path, int]]:
    """Return the device nodes of this process's lease, as descriptors of mounts. Raises IsolationError."""
    try:
        address, kind = os.fspath(server), socket.SOCK_SEQPACKET
        with unix_client.connect(address, _NODES_TIMEOUT_S, kind) as connection:
            connection.settimeout(_NODES_TIMEOUT_S)
            names, nodes, _, _ = socket.recv_fds(connection, _MAX_NODES_BYTES, _MAX_NODES)
    except OSError as why:
        raise IsolationError(
            f"the fenka daemon does not give the cards' device nodes ({why}): try again"
        ) from None
    paths = [Path(os.fsdecode(name)) for name in names.split(b"\0") if name]
    if not names or len(paths) != len(nodes):
        raise IsolationError(
            "the fenka daemon gives this process no device nodes, since it knows no lease of it: try again"
        )
    return [*zip(paths, nodes, strict=True)]


def _move_mount(descriptor: int, target: Path) -> None:
    """Place a detached mount, and close its descriptor. Raises IsolationError."""
    try:
        path = os.fsencode(target)
        system_call(_MOVE_MOUNT, descriptor, b"", AT_FDCWD, path, _F_EMPTY_PATH)
    except OSError as why:
        raise IsolationError(f"cannot mount {target} for the lease: {why.strerror}") from None
    finally:
        os.close(descriptor)


def enter_without_lease(binds: Sequence[Bind]) -> None:
    """Move this single-threaded process into a mount namespace with only these binds.

    Raises IsolationError; the process must then end.
    """
    own_users = _unshare()
    _mount(None, Path("/"), RECURSIVE | SLAVE)
    _mount_binds(binds, [procfs.PROC])
    if own_users:
        _drop_privileges(user_namespaces=True)


def join(pid: int) -> None:
    """Move this single-threaded process to where a program runs. Raises IsolationError, OSError."""
    kinds = {"user": NEW_USER, "mnt": NEW_MOUNTS}
    flags = 0
    for kind, flag in kinds.items():
        if procfs.namespace_inode(pid, kind) != procfs.namespace_inode("self", kind):
            flags |= flag
    if not flags:
        return
    process = os.pidfd_open(pid)
    try:
        join_namespaces(process, flags)
    except OSError as why:
        raise IsolationError(f"process {pid} cannot be joined: {why.strerror}") from None
    finally:
        os.close(process)
    if flags & NEW_USER and os.geteuid() != 0:
        drop_capabilities()


def _mount_binds(binds: Sequence[Bind], kept: Sequence[Path]) -> None:
    for source, target in binds:
        place = target.resolve()
        covered = [path for path in kept if path.is_relative_to(place)]
        if covered or place.is_relative_to(LEASE_ROOT):
            raise IsolationError(f"{target} cannot be another directory: it has files of the lease")
        _mount(source, target, BIND | RECURSIVE)


def _mount_all(mounts: LeaseMounts) -> None:
    # Slave, not private, so that disks mounted later on the host appear inside.
    _mount(None, Path("/"), RECURSIVE | SLAVE)
    text = _preload_text()
    _provide_lease_root(mounts.directory / "run")
    _mount(mounts.directory / "lease", LEASE_ROOT / "lease", BIND)
    _mount(mounts.shim, SHIM, BIND)
    if mounts.proxies is not None:
        _mount_proxies(mounts, mounts.proxies)
    _read_only(LEASE_ROOT / "lease")
    _mount(mounts.directory / "account", LEASE_ROOT / "account", BIND)
    _provide_etc(mounts.directory / "etc", mounts.linker_cache)
    for hidden in mounts.hidden:
        _mount(None, hidden, RDONLY, kind="tmpfs", data="mode=0755,size=4k")
    if mounts.capabilities:
        _hide_others(mounts.capabilities)
    for library in mounts.blocked:
        _block(library)
    for directory in dict.fromkeys(file.parent for file in mounts.unlisted):
        _unlist(directory, {file.name for file in mounts.unlisted if file.parent == directory})
    if PRELOAD.read_text() != text:
        raise IsolationError(f"{PRELOAD} could not be mounted; see `fenka doctor`")


def _hide_others(files: Sequence[Path]) -> None:
    """Hide all files of a directory but these."""
    directory = files[0].parent
    # They are covered before they can be bound.
    opened = [(directory / file.name, os.open(file, os.O_PATH)) for file in files]
    _mount(None, directory, 0, kind="tmpfs", data="mode=0755,size=4k")
    for target, descriptor in opened:
        target.touch()
        _mount(Path(f"/proc/self/fd/{descriptor}"), target, BIND)
        os.close(descriptor)
    _read_only(directory)


def _block(library: Path) -> None:
    """Make a library unloadable, unless it has been removed since: the linker finds no ELF file."""
    if library.exists():
        _mount(NOTHING, library, BIND)


def _unlist(directory: Path, hidden: Collection[str]) -> None:
    """Cover a directory with one that has all entries but the hidden ones."""
    names = [name for name in os.listdir(directory) if name not in hidden]
    old = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    _mount(None, directory, 0, kind="tmpfs", data="mode=0755,size=64k")
    for name in names:
        source, target = Path(f"/proc/self/fd/{old}/{name}"), directory / name
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
            continue
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        _mount(source, target, BIND)
    os.close(old)
    _read_only(directory)


def _mount_proxies(mounts: LeaseMounts, proxies: Path) -> None:
    """Mount the proxies over the driver's libraries.

    Libraries in a program's LD_PRELOAD come before those in /etc/ld.so.preload, and would reach the driver
    directly.
    """
    _mount(mounts.directory / "driver", DRIVER, BIND)
    for name in proxy_install.NEXT_LIBRARIES:
        _mount(proxies / name, SHIM.parent / name, BIND)
    if mounts.node is not None:
        _mount(mounts.node, DRIVER / NODE, BIND)
    for name, (first, *_) in mounts.driver.items():
        _mount(first, DRIVER / name, BIND)
    _read_only(DRIVER)
    for name, files in mounts.driver.items():
        for file in files:
            _mount(proxies / name, file, BIND)


def prepare(directory: Path, linker_cache: Path | None) -> None:
    """Create the files that `enter` mounts besides those of `files.create_lease`."""
    (directory / "driver" / NODE).mkdir(parents=True)
    for name in proxy_install.LIBRARIES:
        (directory / "driver" / name).touch(mode=0o644)
    _make_mount_points(directory / "run")
    layer = directory / "etc"
    layer.mkdir(exist_ok=True)
    (layer / PRELOAD.name).write_text(_preload_text())
    if linker_cache is not None:
        # A copy, because a layer of an overlay cannot contain a link that leaves it.
        (layer / LINKER_CACHE.name).write_bytes(linker_cache.read_bytes())


def probe() -> str | None:
    """Try to isolate a child process. Return None if that works, else the reason why not."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if _unshare():
                _drop_privileges(user_namespaces=False)
        except IsolationError as why:
            os.write(send, str(why).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as answer:
        reason = answer.read().decode()
    os.waitpid(child, 0)
    return reason or None


def inside_lease() -> bool:
    """Return whether this process is in a lease."""
    return (LEASE_ROOT / "lease" / "control").exists()


def _preload_text() -> str:
    """Return the host's own preloads, followed by the shim."""
    lines = PRELOAD.read_text().split() if PRELOAD.exists() else []
    return "\n".join([*(line for line in lines if line != str(SHIM)), str(SHIM)]) + "\n"


def _unshare() -> bool:
    """Create a mount namespace. Return whether a user namespace was created, too."""
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        _unshare_checked(NEW_USER | NEW_MOUNTS)
        # The kernel requires setgroups to be denied before an unprivileged process may map its group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return True
    try:
        _unshare_all_users()
    except OSError:
        # If root cannot create user namespaces, neither can its programs.
        _unshare_checked(NEW_MOUNTS)
        return False
    return True


def _unshare_all_users() -> None:
    """Create user and mount namespaces in which all users have their own ids. Raises OSError.

    A child writes the maps, because only a process outside of the namespace may map more than one user.
    """
    lines = [
        (kind, "".join(f"{first} {first} {count}\n" for first, _, count in map(str.split, text)))
        for kind in ("uid_map", "gid_map")
        for text in [Path(f"/proc/self/{kind}").read_text().splitlines()]
    ]
    receive, send = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        failed = 1
        try:
            os.close(send)
            if os.read(receive, 1):
                for kind, text in lines:
                    Path(f"/proc/{os.getppid()}/{kind}").write_text(text)
                failed = 0
        finally:
            os._exit(failed)
    os.close(receive)
    try:
        unshare(NEW_USER | NEW_MOUNTS)
        os.write(send, b"g")
    finally:
        os.close(send)
        _, status = os.waitpid(mapper, 0)
    if status:
        raise IsolationError(
            "root's users cannot be mapped into a user namespace; see `fenka doctor`"
        )


def _drop_privileges(*, user_namespaces: bool) -> None:
    """Drop what the program must not have, in a namespace that `_unshare` has created."""
    if os.geteuid() != 0:
        if not user_namespaces:
            _limit_namespaces("user", 0)
        # Capabilities of executable files would be effective in this namespace.
        drop_capabilities()
    elif not user_namespaces:
        _limit_namespaces("user", 1)
        _limit_namespaces("time", 0)
        try:
            # In it, the program has no rights over the limit, and cannot remove inherited mounts.
            _unshare_all_users()
        except OSError as why:
            raise IsolationError(f"no user namespace can be made here ({why.strerror})") from None


def _limit_namespaces(kind: str, number: int) -> None:
    """Limit the number of further namespaces of a kind in this user namespace and those nested in it."""
    limit = Path(f"/proc/sys/user/max_{kind}_namespaces")
    try:
        limit.write_text(str(number))
    except OSError as why:
        if kind == "time" and isinstance(why, FileNotFoundError):
            return  # the kernel has no time namespaces
        raise IsolationError(
            f"programs in the lease could undo its limits in a user namespace of their own, for {limit} "
            f"cannot be written here ({why.strerror}): mount /proc writable, or accept that with "
            "--allow-user-namespaces"
        ) from None


def _provide_lease_root(layer: Path) -> None:
    """Create /run/fenka/lease, account and driver."""
    try:
        _make_mount_points(LEASE_ROOT)
    except OSError:
        if LEASE_ROOT.is_dir():
            _mount(layer, LEASE_ROOT, BIND)
        else:
            _rebuild_run(layer)


def _make_mount_points(root: Path) -> None:
    for name in ("lease", "account", "driver"):
        (root / name).mkdir(parents=True, exist_ok=True)


def _rebuild_run(layer: Path) -> None:
    """Replace /run, if it is not writable, by a file system with all entries of the old one."""
    run = LEASE_ROOT.parent
    entries = list(os.scandir(run))
    # Reaches the old /run after the new one covers it.
    old = os.open(run, os.O_PATH | os.O_DIRECTORY)
    _mount(None, run, 0, kind="tmpfs", data="mode=0755,size=1m")
    for entry in entries:
        source, target = Path(f"/proc/self/fd/{old}/{entry.name}"), run / entry.name
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry.name, dir_fd=old))
            continue
        if entry.is_dir(follow_symlinks=False):
            target.mkdir()
        else:
            target.touch()
        _mount(source, target, BIND | RECURSIVE)
    os.close(old)
    LEASE_ROOT.mkdir()
    _mount(layer, LEASE_ROOT, BIND)


def _provide_etc(layer: Path, linker_cache: Path | None) -> None:
    """Mount files over existing ones. If ld.so.preload does not exist, overlay /etc."""
    if not PRELOAD.exists():
        _overlay_etc(layer)
        return
    _mount(layer / PRELOAD.name, PRELOAD, BIND)
    _read_only(PRELOAD)
    if linker_cache is not None:
        _mount(layer / LINKER_CACHE.name, LINKER_CACHE, BIND)
        _read_only(LINKER_CACHE)


def _overlay_etc(layer: Path) -> None:
    """Overlay /etc read-only. Ordinary users may not write to it anyway."""
    etc = PRELOAD.parent
    below = [mount.point for mount in procfs.mounts() if etc in mount.point.parents]
    opened = [(point, os.open(point, os.O_PATH)) for point in below]
    _mount("overlay", etc, RDONLY, kind="overlay", data=f"lowerdir={layer}:{etc}")
    for point, descriptor in opened:
        _mount(Path(f"/proc/self/fd/{descriptor}"), point, BIND)
        os.close(descriptor)


def _read_only(target: Path) -> None:
    # A remount inside a user namespace must repeat the mount's locked flags.
    inherited = os.statvfs(target).f_flag & ~RDONLY & 0xF
    _mount(None, target, BIND | REMOUNT | RDONLY | inherited)


def _unshare_checked(flags: int) -> None:
    try:
        unshare(flags)
    except OSError as why:
        raise IsolationError(
            f"no private mount namespace can be made here ({why.strerror}): start the daemon and the "
            "program as root, allow unprivileged user namespaces, or ask for "
            "--isolation=cooperative, which a program can undo"
        ) from None


def _mount(
    source: Path | str | None, target: Path, flags: int, kind: str = "", data: str = ""
) -> None:
    try:
        mount(source, target, flags, kind, data)
    except OSError as why:
        raise IsolationError(
            f"cannot mount {target} for the lease: {why.strerror}; see `fenka doctor`"
        ) from None
