"""Test the archive of `--code`."""

import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from fenka.core.request import InvalidRequest
from fenka.jobs.archive import pack


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with code, which is no repository."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    root = tmp_path / "code"
    (root / "package").mkdir(parents=True)
    (root / "train.py").write_text("print(1)\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o700)
    (root / "package" / "model.py").write_text("")
    (root / "link").symlink_to("train.py")
    (root / "data.bin").write_bytes(b"large")
    (root / ".gitignore").write_text("*.bin\n")
    return root


def members(archive: bytes) -> dict[str, tarfile.TarInfo]:
    """Return the entries of an archive by their names."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {entry.name: entry for entry in opened}


@pytest.mark.parametrize("repository", [False, True])
def test_archive_has_what_git_does_not_ignore(directory: Path, repository: bool) -> None:
    """Also where nothing was committed, and where there is no repository."""
    if repository:
        subprocess.run(["git", "init", "-q", directory], check=True)
    entries = members(pack(str(directory)))
    assert [*entries] == [".gitignore", "link", "package/model.py", "run.sh", "train.py"]
    assert entries["link"].linkname == "train.py"
    assert (entries["run.sh"].mode, entries["train.py"].mode) == (0o755, 0o644)


def test_archive_has_the_files_when_the_path_is_relative(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the archive has the files when the path is relative."""
    monkeypatch.chdir(directory.parent)
    assert pack("code") == pack(str(directory))


def test_archive_is_the_same_when_only_times_and_owners_differ(directory: Path) -> None:
    """So that equal submissions have equal objects."""
    first = pack(str(directory))
    os.utime(directory / "train.py", (1, 1))
    (directory / "train.py").chmod(0o600)
    assert pack(str(directory)) == first


def test_ignored_file_is_packed_when_it_is_tracked(directory: Path) -> None:
    """As git has it."""
    subprocess.run(["git", "init", "-q", directory], check=True)
    subprocess.run(["git", "-C", directory, "add", "-f", "data.bin"], check=True)
    assert "data.bin" in members(pack(str(directory)))
    (directory / "data.bin").unlink()
    assert "data.bin" not in members(pack(str(directory)))


def test_part_of_a_repository_has_its_own_names(directory: Path) -> None:
    """Test that part of a repository has its own names."""
    subprocess.run(["git", "init", "-q", directory], check=True)
    assert [*members(pack(str(directory / "package")))] == ["model.py"]


def test_special_files_are_left_out(directory: Path) -> None:
    """Reading a pipe would wait for a writer."""
    os.mkfifo(directory / "pipe")
    assert "pipe" not in members(pack(str(directory)))


def test_code_is_rejected_when_it_is_too_large(directory: Path) -> None:
    """Test that code is rejected when it is too large."""
    (directory / "weights").write_bytes(random.Random(1).randbytes(3_250_000))
    with pytest.raises(InvalidRequest) as raised:
        pack(str(directory))
    assert str(raised.value) == (
        f"--code {directory} is 3.1 MiB compressed, the limit is 0.9 MiB: use --sync-mode git or --data"
    )


def test_code_is_rejected_when_a_file_is_too_large_to_be_tried(directory: Path) -> None:
    """A sparse file would fit when it is compressed, and still not be meant."""
    with (directory / "sparse").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(InvalidRequest, match="has more than 64 MiB: use --data for it"):
        pack(str(directory))


def test_ignore_file_is_not_guessed_at_when_git_is_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that ignore file is not guessed at when git is missing."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InvalidRequest, match="git is required to read"):
        pack(str(directory))
    (directory / ".gitignore").unlink()
    assert "data.bin" in members(pack(str(directory)))
