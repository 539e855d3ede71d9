"""Archives whose bytes depend on nothing but their content."""

import gzip
import tarfile
from collections.abc import Iterable
from pathlib import Path


def write_archive(target: Path, files: Iterable[tuple[str, Path]], epoch: int) -> None:
    """Write a .tar.gz of root's files.

    Args:
        target: the archive.
        files: the name in the archive, and the file that is copied. Executable files stay executable.
        epoch: the time of all files, in seconds since 1970.
    """
    with (
        target.open("wb") as written,
        gzip.GzipFile("", "wb", 6, written, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = path.stat().st_size, epoch
            member.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            member.uname = member.gname = "root"
            with path.open("rb") as content:
                archive.addfile(member, content)


def files_below(folder: Path, prefix: str = "") -> list[tuple[str, Path]]:
    """Return all files below a folder, with their names in an archive."""
    return [
        (f"{prefix}{path.relative_to(folder)}", path)
        for path in folder.rglob("*")
        if path.is_file()
    ]
