"""Enter a lease: bind its files where the shim and the dynamic linker look, then exec the program.

Called by the workstation's launcher in the very process that becomes the program, so that signals,
terminal and exit code need no forwarding. A mount namespace holds everything, inside a user namespace by
which the daemon knows the lease's processes. An ordinary user's has no capabilities after the exec; root's
has all, for what belongs to the namespace. What the program then sees:

    /run/fenka/lease/control        its limits, read-only
    /run/fenka/lease/libfenka.so    the shim; a bind mount pins its inode, so a rebuild cannot remove it
    /run/fenka/account/slots        its own accounting
    /run/fenka/driver/              the driver's libraries; at their own places stand the proxies
    /etc/ld.so.preload              names the shim; unlike LD_PRELOAD it survives env -i and setuid
    /etc/ld.so.cache                only with a simulated driver: finds its libraries under env -i too

Programs cannot make further user namespaces, in which they could mount over all of this, unless they are
allowed to. The kernel counts them in every namespace above, so the limit stands where the program has no
rights: an ordinary user's in the lease's own, root's in one around it.

Fair sharing, not a security boundary: root can undo this from outside, or bind another file over a mount.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import proxy, syscalls

LEASE_ROOT = Path("/run/fenka")
"""Where a program finds its lease."""

DRIVER = LEASE_ROOT / "driver"
"""Where the proxies find the driver's own libraries."""

SHIM = LEASE_ROOT / "lease" / "libfenka.so"
"""The shim as a program finds it."""

NODE = "node"
"""Below it, a simulated driver's node."""

PRELOAD = Path("/etc/ld.so.preload")
LINKER_CACHE = Path("/etc/ld.so.cache")


class IsolationError(FenkaError):
    """No private mount namespace can be made here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """A driver's libraries, by the names in proxy.LIBRARIES; the first of each is the one that is used.

    node: the directory of a simulated driver's node, or None.
    """

    libraries: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    node: Path | None = None


@dataclass(frozen=True, slots=True)
class LeaseMounts:
    """What the sandbox binds.

    directory: the lease's own, holding `lease/` and `account/`.
    shim: libfenka.so to bind.
    hidden: directories that the program must not reach by their own path (other leases' files).
    linker_cache: replaces /etc/ld.so.cache, or None.
    proxies: the directory of the proxies (docs/proxy.md), and driver: the files that they stand in for.
    user_namespaces: whether programs may make user namespaces of their own.
    """

    directory: Path
    shim: Path
    hidden: tuple[Path, ...] = ()
    linker_cache: Path | None = None
    proxies: Path | None = None
    driver: DriverFiles = field(default_factory=DriverFiles)
    user_namespaces: bool = False


def enter(mounts: LeaseMounts) -> None:
    """Move this (single-threaded) process into the lease. Raises IsolationError; then give up."""
    held = _lock_preload()
    _enter(mounts)
    if held is not None:
        os.set_inheritable(held, True)


def remove_preload() -> None:
    """Remove the empty /etc/ld.so.preload that `enter` may have made as root, if no lease needs it.

    Removing a file that is bound over drops the mounts on it in every namespace. Processes of another PID
    namespace cannot be seen: their lock counts too.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError), PRELOAD.open("r+b") as file:
        # Refused at once while anybody is in a lease: the file then stays, which does no harm.
        _lock(file.fileno(), fcntl.F_WRLCK, fcntl.F_OFD_SETLK)
        if not file.read(1) and not _preload_mounted():
            PRELOAD.unlink()


def _preload_mounted() -> bool:
    """Whether any process sees a mount over the file. Raises OSError."""
    seen: set[int] = set()
    for pid in procfs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            thread = procfs.living_thread(pid)
            number = procfs.namespace_inode(thread, "mnt")
            if number not in seen and any(it.point == PRELOAD for it in procfs.mounts(thread)):
                return True
            seen.add(number)
    return False


def _lock_preload() -> int | None:
    """Have /etc/ld.so.preload stay as long as any process has the descriptor that is returned open.

    None where there is no such file and none can be made: then nothing on the host is bound over.
    """
    while True:
        try:
            descriptor = os.open(PRELOAD, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        _lock(descriptor, fcntl.F_RDLCK, fcntl.F_OFD_SETLKW)
        found = os.fstat(descriptor)
        if found.st_nlink:
            if not found.st_size and os.geteuid() == 0:
                os.fchmod(descriptor, 0o644)  # Whatever the umask: every user's linker reads it.
            return descriptor
        os.close(descriptor)  # It was removed between open and lock.


def _lock(descriptor: int, kind: int, command: int) -> None:
    """Lock the file for as long as the open file lives, across exec and fork. Raises OSError.

    Unlike flock(2), this lets nobody lock exclusively who may only read: no user can keep others waiting.
    """
    fcntl.fcntl(descriptor, command, struct.pack("@hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def _enter(mounts: LeaseMounts) -> None:
    own_users = _unshare()
    _mount_all(mounts)
    if own_users:
        _drop_privileges(user_namespaces=mounts.user_namespaces)


def _mount_all(mounts: LeaseMounts) -> None:
    # Slave, not private: disks that are mounted later on the host still appear inside.
    _mount(None, Path("/"), syscalls.RECURSIVE | syscalls.SLAVE)
    preload = _preload_text()
    layer = mounts.directory / "etc"
    _provide_lease_root(mounts.directory / "run")
    _mount(mounts.directory / "lease", LEASE_ROOT / "lease", syscalls.BIND)
    _mount(mounts.shim, SHIM, syscalls.BIND)
    if mounts.proxies is not None:
        _mount_proxies(mounts.directory / "driver", mounts.proxies, mounts.driver)
    _read_only(LEASE_ROOT / "lease")
    _mount(mounts.directory / "account", LEASE_ROOT / "account", syscalls.BIND)
    _provide_etc(layer, mounts.linker_cache)
    for hidden in mounts.hidden:
        _mount(None, hidden, syscalls.RDONLY, kind="tmpfs", data="mode=0755,size=4k")
    if PRELOAD.read_text() != preload:
        raise IsolationError(f"{PRELOAD} could not be put in place; see `fenka doctor`")


def _mount_proxies(layer: Path, proxies: Path, driver: DriverFiles) -> None:
    """Have the driver's own names lead to the shim, for programs that load libraries before those of
    /etc/ld.so.preload: what LD_PRELOAD names comes first."""
    _mount(layer, DRIVER, syscalls.BIND)
    for name in proxy.NEXT_LIBRARIES:
        _mount(proxies / name, SHIM.parent / name, syscalls.BIND)
    if driver.node is not None:
        _mount(driver.node, DRIVER / NODE, syscalls.BIND)
    for name, (first, *_) in driver.libraries.items():
        _mount(first, DRIVER / name, syscalls.BIND)
    _read_only(DRIVER)
    for name, files in driver.libraries.items():
        for file in files:
            _mount(proxies / name, file, syscalls.BIND)


def prepare(directory: Path, linker_cache: Path | None) -> None:
    """Write what `enter` binds besides the two files: called by the daemon when it makes a lease."""
    for name in (SHIM.name, *proxy.NEXT_LIBRARIES):
        (directory / "lease" / name).touch(mode=0o644)
    (directory / "driver" / NODE).mkdir(parents=True)
    for name in proxy.LIBRARIES:
        (directory / "driver" / name).touch(mode=0o644)
    for name in ("lease", "account", "driver"):
        (directory / "run" / name).mkdir(parents=True, exist_ok=True)
    layer = directory / "etc"
    layer.mkdir(exist_ok=True)
    (layer / PRELOAD.name).write_text(_preload_text())
    if linker_cache is not None:
        # A layer of an overlay cannot hold a link that leaves it.
        (layer / LINKER_CACHE.name).write_bytes(linker_cache.read_bytes())


def probe() -> str | None:
    """Try an isolated start in a child process: None if it works, else why it does not."""
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
        why_not = answer.read().decode()
    os.waitpid(child, 0)
    return why_not or None


def inside_lease() -> bool:
    """Whether this process is in a lease."""
    return (LEASE_ROOT / "lease" / "control").exists()


def _preload_text() -> str:
    """The host's own preloads stay: someone wants them."""
    ours = str(SHIM)
    try:
        lines = PRELOAD.read_text().split()
    except FileNotFoundError:
        lines = []
    return "\n".join([*(line for line in lines if line != ours), ours]) + "\n"


def _unshare() -> bool:
    """A mount namespace of our own, and whether there is a user namespace of our own too."""
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        _unshare_checked(syscalls.NEW_USER | syscalls.NEW_MOUNTS)
        # The kernel wants setgroups denied before an unprivileged process may map its group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return True
    try:
        _unshare_all_users()
    except OSError:
        # Where root can make no user namespace, its programs cannot either.
        _unshare_checked(syscalls.NEW_MOUNTS)
        return False
    return True


def _unshare_all_users() -> None:
    """New user and mount namespaces in which everybody is who they are outside. Raises OSError.

    Only a process above a user namespace may map more than one user there: a child does it.
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
        syscalls.unshare(syscalls.NEW_USER | syscalls.NEW_MOUNTS)
        os.write(send, b"g")
    finally:
        os.close(send)
        _, status = os.waitpid(mapper, 0)
    if status:
        raise IsolationError(
            "root's users cannot be mapped into a user namespace; see `fenka doctor`"
        )


def _drop_privileges(*, user_namespaces: bool) -> None:
    """What the program is not to have, in a namespace that `_unshare` has made."""
    if os.geteuid() != 0:
        if not user_namespaces:
            _limit_namespaces("user", 0)
        # A file's capabilities would count in this namespace.
        syscalls.drop_capabilities()
    elif not user_namespaces:
        _limit_namespaces("user", 1)
        _limit_namespaces("time", 0)
        try:
            # It has no rights over the one that counts, and cannot take away the mounts that it inherits.
            _unshare_all_users()
        except OSError as why:
            raise IsolationError(f"no user namespace can be made here ({why.strerror})") from None


def _limit_namespaces(kind: str, number: int) -> None:
    """So many more namespaces of this kind may be made in this user namespace and those below it."""
    limit = Path(f"/proc/sys/user/max_{kind}_namespaces")
    try:
        limit.write_text(str(number))
    except OSError as why:
        if kind == "time" and isinstance(why, FileNotFoundError):
            return  # The kernel is older than these.
        raise IsolationError(
            f"programs in the lease could undo its limits in a user namespace of their own, for {limit} "
            f"cannot be written here ({why.strerror}): mount /proc writable, or accept that with "
            "--allow-user-namespaces"
        ) from None


def _provide_lease_root(layer: Path) -> None:
    """Make /run/fenka/lease, account and driver exist."""
    try:
        for name in ("lease", "account", "driver"):
            (LEASE_ROOT / name).mkdir(parents=True, exist_ok=True)
    except OSError:
        if LEASE_ROOT.is_dir():
            _mount(layer, LEASE_ROOT, syscalls.BIND)
        else:
            _rebuild_run(layer)


def _rebuild_run(layer: Path) -> None:
    """Without the right to write to /run: a /run of our own, with every entry of the old one in it."""
    run = LEASE_ROOT.parent
    entries = list(os.scandir(run))
    # The old /run is reached through this descriptor once the new one covers it.
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
        _mount(source, target, syscalls.BIND | syscalls.RECURSIVE)
    os.close(old)
    LEASE_ROOT.mkdir()
    _mount(layer, LEASE_ROOT, syscalls.BIND)


def _provide_etc(layer: Path, linker_cache: Path | None) -> None:
    """Bind over what exists; where ld.so.preload does not, overlay /etc."""
    if not PRELOAD.exists():
        _overlay_etc(layer)
        return
    _mount(layer / PRELOAD.name, PRELOAD, syscalls.BIND)
    _read_only(PRELOAD)
    if linker_cache is not None:
        _mount(layer / LINKER_CACHE.name, LINKER_CACHE, syscalls.BIND)
        _read_only(LINKER_CACHE)


def _overlay_etc(layer: Path) -> None:
    """Read-only, which takes nothing from a program that may not write to /etc anyway."""
    etc = PRELOAD.parent
    below = [mount.point for mount in procfs.mounts() if etc in mount.point.parents]
    kept = [(point, os.open(point, os.O_PATH)) for point in below]
    _mount("overlay", etc, syscalls.RDONLY, kind="overlay", data=f"lowerdir={layer}:{etc}")
    for point, descriptor in kept:
        _mount(Path(f"/proc/self/fd/{descriptor}"), point, syscalls.BIND)
        os.close(descriptor)


def _read_only(target: Path) -> None:
    # A remount inside a user namespace must repeat the flags that the mount is locked with.
    inherited = os.statvfs(target).f_flag & ~syscalls.RDONLY & 0xF
    _mount(None, target, syscalls.BIND | syscalls.REMOUNT | syscalls.RDONLY | inherited)


def _unshare_checked(flags: int) -> None:
    try:
        syscalls.unshare(flags)
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
        syscalls.mount(source, target, flags, kind, data)
    except OSError as why:
        raise IsolationError(
            f"cannot mount {target} for the lease: {why.strerror}; see `fenka doctor`"
        ) from None
