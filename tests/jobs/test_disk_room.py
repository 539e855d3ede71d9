"""Whether a directory has room: a real file system of 64 KiB, where the tests may mount one."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenka.jobs.disk_room import has_room, lack_of_room, with_directory


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Provide a full file system. Skip the test where none can be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    filler = ["dd", "if=/dev/zero", f"of={folder / 'filler'}"]
    assert subprocess.run(filler, capture_output=True, check=False).returncode == 1
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_directory_has_no_room_when_its_file_system_is_full(small: Path, tmp_path: Path) -> None:
    """Nothing of the probe is left. A directory that is to be made there has none either."""
    assert [has_room(small), has_room(small / "new" / "job"), has_room(tmp_path)] == [
        False,
        False,
        True,
    ]
    assert os.listdir(small) == ["filler"]
    assert lack_of_room(tmp_path) == ""
    assert lack_of_room(small).startswith(f"the output is lost, because {small} is on a full file")


def test_error_names_the_directory_when_the_kernel_names_no_file(
    small: Path, tmp_path: Path
) -> None:
    """A failed write has no file name. Other errors are returned as they are."""
    full = OSError(errno.ENOSPC, "No space left on device")
    assert with_directory(full, [tmp_path, small]).filename == str(small)
    assert with_directory(full, [tmp_path]) is full
    named = OSError(errno.ENOSPC, "No space left on device", "x")
    assert with_directory(named, [small]) is named
    other = OSError(errno.EIO, "Input/output error")
    assert with_directory(other, [small]) is other
