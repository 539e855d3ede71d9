"""The files of a lease, and atomic writing of files."""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from fenka import native
from fenka.core.inventory import WHOLE_COMPUTE
from fenka.core.request import ComputeMode, Slice
from fenka.core.units import MIB
from fenka.isolation import account, lease_control
from fenka.isolation.lease_control import Control, Limit
from fenka.isolation.proxy_install import NEXT_LIBRARIES
from fenka.isolation.sandbox import SHIM

_Decoded = TypeVar("_Decoded")


_ADVICE = {
    errno.ENOSPC: "make room on that file system, for bytes or inodes (`df`, `df -i`)",
    errno.EDQUOT: "your quota on that file system is used up: make room",
    errno.EROFS: "choose a directory on a file system that can be written",
    errno.EACCES: "check who owns it and the directories above it, and their modes (`ls -ld`)",
    errno.EPERM: "check who owns it and the directories above it, and their modes (`ls -ld`)",
    errno.ENOTDIR: "something there is a file where a directory is needed: remove it",
    errno.EEXIST: "something else of that name is there: remove it",
    errno.EISDIR: "a directory is there where a file is needed: name a file, or remove the directory",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
    errno.ENOMEM: "free some memory",
}


def describe_os_error(why: OSError) -> str:
    """Return a sentence for an error of the operating system: which file failed, why, and what to do."""
    if why.errno is None:
        return str(why)  # raised by fenka with its own message
    names = [str(name) for name in (why.filename, why.filename2) if name is not None]
    failure = f"cannot use {' and '.join(names)}" if names else "cannot go on"
    advice = f"; {_ADVICE[why.errno]}" if why.errno in _ADVICE else ""
    return f"{failure}: {os.strerror(why.errno)}{advice}"


@contextlib.contextmanager
def with_file_name(path: Path) -> Iterator[None]:
    """Add the file's name to errors of reading and writing, which have none."""
    try:
        yield
    except OSError as why:
        if why.errno is None or why.filename is not None:
            raise
        raise OSError(why.errno, why.strerror, str(path)) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content. Readers, also after a crash, see the old content or the new."""
    temporary = path.with_name(f".{path.name}.new")
    with with_file_name(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def open_regular_file(path: Path, *, follow_link: bool = False) -> BinaryIO:
    """Open a regular file without waiting. Raises OSError, also for other kinds of files.

    follow_link: the path may be a symbolic link, as those of mounted ConfigMaps are.
    """
    no_link = 0 if follow_link else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | no_link | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_regular_file(path: Path, max_bytes: int, *, follow_link: bool = False) -> bytes:
    """Read a regular file of at most `max_bytes` without waiting.

    Raises OSError, with the file's name, also for other kinds of files.
    """
    with with_file_name(path), open_regular_file(path, follow_link=follow_link) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{path} has more than {max_bytes} bytes, so it is damaged")
    return content


def decode_json(decoder: msgspec.json.Decoder[_Decoded], content: bytes) -> _Decoded:
    """Decode what may be damaged or hostile. Raises msgspec.DecodeError, and nothing else."""
    try:
        return decoder.decode(content)
    except RecursionError:
        raise msgspec.DecodeError("too deeply nested") from None
    except UnicodeDecodeError:
        raise msgspec.DecodeError("not UTF-8") from None


def fsync_directory(path: Path) -> None:
    """Write a directory to disk, which makes created and removed files in it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """A share of each card's time, and its meaning; 100 and hard is no limit.

    percent: 0 for each slice's own percentage, and no limit for slices without one.
    """

    percent: int = 100
    mode: ComputeMode = "hard"


def card_limits(
    slices: Iterable[Slice],
    contexts_mib: Mapping[str, int],
    compute: ComputeShare | None = None,
    compute_of: Callable[[str], int] = lambda _: WHOLE_COMPUTE,
) -> tuple[Limit, ...]:
    """Return the control page's limits for a lease's slices.

    Args:
        slices: What it may use.
        contexts_mib: Size of a process's context by card UUID.
        compute: Share of the cards' time; None for each slice's own percentage.
        compute_of: Returns the compute of a card or instance in percent of the whole card. Shares are of the
            whole card, and limits of the instance's own time.
    """
    share = compute or ComputeShare(0)

    def limit(piece: Slice) -> Limit:
        percent = share.percent or piece.compute
        if percent and share.mode != "weight":
            percent = min(max(round(100 * percent / compute_of(piece.uuid)), 1), 100)
        return Limit(
            uuid=piece.uuid,
            memory_bytes=piece.memory_mib * MIB,
            context_bytes=contexts_mib.get(piece.uuid, 0) * MIB,
            compute_percent=percent or 100,
            compute_mode=share.mode if percent else "hard",
        )

    return tuple(map(limit, slices))


def control_page(directory: Path) -> Path:
    """Return the path of a lease's control page. directory: the lease's."""
    return directory / "lease" / "control"


def account_file(directory: Path) -> Path:
    """Return the path of a lease's account. directory: the lease's."""
    return directory / "account" / "slots"


def pending_file(directory: Path) -> Path:
    """Return the path of the file that a lease has until its slice is granted. directory: the lease's.

    It holds the program of a container that has started already, which prints its text (native/shim/hold.c).
    """
    return directory / "lease" / "pending"


AFFINITY = "FENKA_CPU_AFFINITY"
"""The variable that tells a program the CPUs which are nearest to its cards, as `0-47,96-143`."""


def near_cpus(slices: Iterable[Slice], cpus: Mapping[str, Collection[int]]) -> str:
    """Return the CPUs that are nearest to the cards of some slices, as Linux lists them; empty if unknown.

    cpus: by the UUID of a card.
    """
    near = sorted({cpu for piece in slices for cpu in cpus.get(piece.card_uuid, ())})
    # In a run of consecutive CPUs the number and the place differ by the same.
    runs = groupby(enumerate(near), lambda placed: placed[1] - placed[0])
    spans = [[cpu for _, cpu in run] for _, run in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs that `near_cpus` has listed."""
    spans = (item.partition("-") for item in text.split(",") if item)
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def cpus_file(directory: Path) -> Path:
    """Return the file of a lease with its `near_cpus`. Earlier releases have none."""
    return directory / "lease" / "cpus"


def create_lease(
    directory: Path, lease: str, limits: tuple[Limit, ...], owner: int | None = None
) -> None:
    """Create a lease's control page, empty account and mount points. Raises InvalidControl, OSError.

    Args:
        directory: The lease's directory, with the directories `lease` and `account` in it.
        lease: The lease's id.
        limits: What it may use of its cards.
        owner: As for :func:`account.create`.
    """
    prepare_lease(directory, owner)
    grant_lease(directory, lease, limits)


def prepare_lease(directory: Path, owner: int | None = None) -> None:
    """Create a lease's empty account and mount points. Raises OSError. Arguments as for `create_lease`."""
    for name in (SHIM.name, *NEXT_LIBRARIES):
        (directory / "lease" / name).touch(mode=0o644)
    account.create(account_file(directory), owner)


def grant_lease(directory: Path, lease: str, limits: tuple[Limit, ...]) -> None:
    """Create a lease's control page; what was held by its lack goes on. Raises InvalidControl, OSError."""
    lease_control.write(control_page(directory), Control(lease=lease, limits=limits))
    pending_file(directory).unlink(missing_ok=True)


def install_native(target: Path, complete: Callable[[Path], None] = lambda _: None) -> Path:
    """Copy the native libraries to a directory in `target` named by their content, and return it.

    Programs may not reach fenka's own installation. `target` is never below /run, which is often mounted
    noexec. `complete` adds files derived from the libraries. Raises FileNotFoundError.
    """
    require_native()
    files = sorted(path for path in native.DIRECTORY.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    installed = target / digest
    if not installed.exists():
        fresh = installed.with_suffix(f".{os.getpid()}")
        try:
            _copy_tree(native.DIRECTORY, fresh)
            complete(fresh)
            fresh.rename(installed)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)  # Half a copy would keep the disk full.
            raise
    return installed


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a directory. Raises OSError of the first file that fails, where shutil lists all as text."""
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir()
            continue
        try:
            shutil.copy2(path, copy)
        except OSError as why:
            raise OSError(why.errno, why.strerror, str(why.filename2 or copy)) from None


def require_native() -> None:
    """Raise FileNotFoundError if this installation has no libraries."""
    shim = native.DIRECTORY / "libfenka.so"
    if not shim.exists():
        raise native.missing(shim)


# ---- SELinux ----

CONTAINER_LABEL = "system_u:object_r:container_file_t:s0"
"""Containers may read, write and execute it. Without categories it is of no pod alone."""

_SELINUX = "security.selinux"


def has_selinux(proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel runs SELinux, enforcing or not."""
    try:
        return "selinuxfs" in (proc / "filesystems").read_text().split()
    except OSError:
        return False


def admit_containers(directory: Path, proc: Path = Path("/proc")) -> None:
    """Let containers use a directory and all that is in it; do nothing without SELinux.

    There a container's process may only use files of its own types. Files that a node's programs create in
    /run and /var have others, and the runtime does not label what CDI mounts.

    No program of a container may write in the directory yet. Raises OSError if a file cannot be labelled.
    """
    if not has_selinux(proc):
        return
    for path in _tree(directory):
        try:
            os.setxattr(path, _SELINUX, CONTAINER_LABEL.encode() + b"\0", follow_symlinks=False)
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"SELinux is on, and {path} cannot be labelled {CONTAINER_LABEL} ({error.strerror}): "
                "containers could not use it; run the node program as spc_t, on a file system with labels",
            ) from None


def _tree(directory: Path) -> Iterator[Path]:
    yield directory
    for parent, directories, files in os.walk(directory):
        yield from (Path(parent, name) for name in (*directories, *files))
