"""Packs the directory of `--code`: without what .gitignore lists, and the same bytes for the same files."""

import gzip
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path

from fenka.core.request import InvalidRequest
from fenka.core.units import MIB

LIMIT_BYTES = 900 * 1024
"""A ConfigMap has at most 1 MiB."""


_STOP_BYTES = 64 * MIB
"""Nothing larger is packed only to tell its size."""


_GIT_TIMEOUT_S = 60


def pack(directory: str) -> bytes:
    """Return the archive of a directory. Raises InvalidRequest, OSError."""
    root = Path(directory)
    if not root.is_dir():
        raise InvalidRequest(f"--code {directory} is not a directory")
    data = _Sink(directory)
    # Neither times, owners nor the archive's own name are in it.
    with (
        gzip.GzipFile("", "wb", 6, data, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in files(root):
            _add(archive, root, name)
    packed = data.getvalue()
    if len(packed) > LIMIT_BYTES:
        raise _too_large(directory, f"{len(packed) / MIB:.1f}")
    return packed


class _Sink(io.BytesIO):
    """Receives an archive, up to a size."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def write(self, data: object, /) -> int:
        if self.tell() > _STOP_BYTES:
            raise _too_large(self._directory, f"more than {_STOP_BYTES >> 20}")
        return super().write(data)  # type: ignore[arg-type]


def _too_large(directory: str, mib: str) -> InvalidRequest:
    return InvalidRequest(
        f"--code {directory} is {mib} MiB compressed, the limit is {LIMIT_BYTES / MIB:.1f} MiB: use "
        "--sync-mode git or --data"
    )


def files(root: Path) -> list[bytes]:
    """Return the files below a directory that git would not ignore, sorted."""
    try:
        listed = _git_files(root)
    except FileNotFoundError:
        if (root / ".gitignore").exists():
            raise InvalidRequest(
                f"git is required to read {root}/.gitignore: install it, or use --data"
            ) from None
        paths = (Path(base, name) for base, _, names in os.walk(root) for name in names)
        listed = [os.fsencode(path.relative_to(root)) for path in paths]
    return sorted(name for name in set(listed) if b".git" not in name.split(b"/"))


def _git_files(root: Path) -> list[bytes]:
    """Return what git lists: tracked files, and others that are not ignored."""
    root = root.absolute()  # git changes its directory before it looks for the work tree
    listing = ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    tracked = _git(["-C", str(root), *listing])
    if tracked is not None:
        return tracked
    # No repository: an empty one whose work tree is the directory.
    with tempfile.TemporaryDirectory() as empty:
        _git(["init", "-q", "--bare", empty])
        listed = _git(["--git-dir", empty, "--work-tree", str(root), "-C", str(root), *listing])
    if listed is None:
        raise InvalidRequest(f"git cannot list the files of {root}: run `git ls-files` there")
    return listed


def _git(arguments: list[str]) -> list[bytes] | None:
    """Return the names that a command of git prints; None if it fails."""
    result = subprocess.run(
        ["git", *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
    )
    return None if result.returncode else list(filter(None, result.stdout.split(b"\0")))


def _add(archive: tarfile.TarFile, root: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(root), name)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        # Tracked, and deleted in the work tree.
        return
    entry = tarfile.TarInfo(os.fsdecode(name))
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(path))
        archive.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        with open(path, "rb") as file:
            content = file.read(_STOP_BYTES + 1)
        if len(content) > _STOP_BYTES:
            raise InvalidRequest(
                f"--code: {os.fsdecode(path)} has more than {_STOP_BYTES >> 20} MiB: use --data for it"
            )
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
