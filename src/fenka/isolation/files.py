"""The files that every lease is made of, and how they are written so that a crash leaves no half."""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fenka import native
from fenka.core.request import Slice
from fenka.isolation import account, control
from fenka.isolation.control import ComputeMode, Control, Limit

MIB = 1 << 20


_ADVICE = {
    errno.ENOSPC: "make room on that file system, for bytes or inodes (`df`, `df -i`)",
    errno.EDQUOT: "your quota on that file system is used up: make room",
    errno.EROFS: "choose a directory on a file system that can be written",
    errno.EACCES: "check who owns it and the directories above it, and their modes (`ls -ld`)",
    errno.EPERM: "check who owns it and the directories above it, and their modes (`ls -ld`)",
    errno.ENOTDIR: "something there is a file where a directory is needed: remove it",
    errno.EEXIST: "something else of that name is there: remove it",
    errno.EISDIR: "a directory is there where a file is needed: remove it",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
    errno.ENOMEM: "free some memory",
}


def describe_os_error(why: OSError) -> str:
    """What failed, where, and what to do; for errors that are no bug and have no better words."""
    if why.errno is None:
        return str(why)  # Raised by fenka, with words of its own.
    names = [str(name) for name in (why.filename, why.filename2) if name is not None]
    where = f"cannot use {' and '.join(names)}" if names else "cannot go on"
    advice = f"; {_ADVICE[why.errno]}" if why.errno in _ADVICE else ""
    return f"{where}: {os.strerror(why.errno)}{advice}"


@contextlib.contextmanager
def with_file_name(path: Path) -> Iterator[None]:
    """Have the file's name in errors of reading and writing, which come without one."""
    try:
        yield
    except OSError as why:
        if why.errno is None or why.filename is not None:
            raise
        raise OSError(why.errno, why.strerror, str(path)) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Readers and a crash see the old content or the new one, nothing between."""
    temporary = path.with_name(f".{path.name}.new")
    with with_file_name(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def read_regular_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes, whatever else may be there; never waits.

    Raises OSError, with the file's name.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    with with_file_name(path), open(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path} has more than {most} bytes, so it is damaged")
    return content


def fsync_directory(path: Path) -> None:
    """Have the names in it on the disk: a new or removed file is only safe then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """A share of each card's time, and what it means; 100 and hard is no limit.

    percent: 0 for each slice's own, and where that has none there is no limit.
    """

    percent: int = 100
    mode: ComputeMode = "hard"


def card_limits(
    slices: Iterable[Slice], contexts_mib: Mapping[str, int], compute: ComputeShare | None = None
) -> tuple[Limit, ...]:
    """What the control page says of a lease's slices; as for :func:`create_lease`."""
    given = compute or ComputeShare(0)

    def limit(piece: Slice) -> Limit:
        percent = given.percent or piece.compute
        return Limit(
            uuid=piece.uuid,
            memory_bytes=piece.memory_mib * MIB,
            context_bytes=contexts_mib.get(piece.uuid, 0) * MIB,
            compute_percent=percent or 100,
            compute_mode=given.mode if percent else "hard",
        )

    return tuple(map(limit, slices))


def create_lease(
    directory: Path,
    lease: str,
    slices: Iterable[Slice],
    contexts_mib: Mapping[str, int],
    compute: ComputeShare | None = None,
    owner: int | None = None,
) -> None:
    """The control page and an empty account, in `lease/` and `account/` of a directory that has both.

    contexts_mib: what a process's context takes, by card UUID. compute: None where each slice's own
    percentage says all. owner: as for :func:`account.create`. Raises InvalidControl, OSError.
    """
    limits = card_limits(slices, contexts_mib, compute)
    control.write(directory / "lease" / "control", Control(lease=lease, limits=limits))
    account.create(directory / "account" / "slots", owner)


def install_native(target: Path, complete: Callable[[Path], None] = lambda _: None) -> Path:
    """A copy of the native libraries that programs can load: a directory in `target` named by its content.

    Programs may not reach where fenka itself is installed. `target` is never below /run, which is often
    mounted noexec. `complete` adds what is derived from the libraries. Raises FileNotFoundError.
    """
    require_native()
    files = sorted(path for path in native.DIRECTORY.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    installed = target / digest
    if not installed.exists():
        fresh = installed.with_suffix(f".{os.getpid()}")
        shutil.copytree(native.DIRECTORY, fresh)
        complete(fresh)
        fresh.rename(installed)
    return installed


def require_native() -> None:
    """Raises FileNotFoundError where the libraries are not built."""
    if not (native.DIRECTORY / "libfenka.so").exists():
        raise FileNotFoundError(f"{native.DIRECTORY / 'libfenka.so'} is missing: run `make build`")
