"""The files that every lease is made of, and how they are written so that a crash leaves no half."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fenka import native
from fenka.core.requests import Slice
from fenka.isolation import account, control
from fenka.isolation.control import Control, Limit, Mode

MIB = 1 << 20


def write_atomically(path: Path, content: bytes) -> None:
    """Readers and a crash see the old content or the new one, nothing between."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def fsync_directory(path: Path) -> None:
    """Have the names in it on the disk: a new or removed file is only safe then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Compute:
    """A share of each card's time, and what it means; 100 and hard is no limit.

    percent: 0 for each slice's own, and where that has none there is no limit.
    """

    percent: int = 100
    mode: Mode = "hard"


def limits_of(
    slices: Iterable[Slice], contexts_mib: Mapping[str, int], compute: Compute | None = None
) -> tuple[Limit, ...]:
    """What the control page says of a lease's slices; as for :func:`create_lease`."""
    given = compute or Compute(0)

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
    compute: Compute | None = None,
    owner: int | None = None,
) -> None:
    """The control page and an empty account, in `lease/` and `account/` of a directory that has both.

    contexts_mib: what a process's context takes, by card UUID. compute: None where each slice's own
    percentage says all. owner: as for :func:`account.create`. Raises BadControl, OSError.
    """
    limits = limits_of(slices, contexts_mib, compute)
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
