"""Labels of files for containers. The attribute is a real one; the tests' kernel need not run SELinux."""

import os
from pathlib import Path

import pytest

from fenka.isolation import lease_files


@pytest.fixture
def with_selinux(tmp_path: Path) -> Path:
    """Return a /proc of a kernel with SELinux."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "filesystems").write_text("nodev\tsysfs\nnodev\tselinuxfs\n\text4\n")
    return proc


def label_of(path: Path) -> str:
    """Return the label of a file, or of a link itself; "" without one."""
    try:
        return os.getxattr(path, "security.selinux", follow_symlinks=False).decode().rstrip("\0")
    except OSError:
        return ""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory with a file, a directory and a link that leads out of it."""
    directory = tmp_path / "lease"
    (directory / "account").mkdir(parents=True)
    (directory / "account" / "slots").touch()
    outside = tmp_path / "outside"
    outside.touch()
    (directory / "link").symlink_to(outside)
    try:
        os.setxattr(outside, "security.selinux", b"system_u:object_r:etc_t:s0\0")
    except OSError as error:
        pytest.skip(f"this file system has no labels, or this user may not write them: {error}")
    return directory


def test_containers_may_use_everything_below_a_directory_where_selinux_is_on(
    tree: Path, with_selinux: Path
) -> None:
    """A link is labelled itself, so that nothing outside changes."""
    lease_files.admit_containers(tree, with_selinux)
    for path in (tree, tree / "account", tree / "account" / "slots", tree / "link"):
        assert label_of(path) == lease_files.CONTAINER_LABEL, path
    assert label_of(tree.parent / "outside") == "system_u:object_r:etc_t:s0"


def test_nothing_is_labelled_where_selinux_is_off(tree: Path, tmp_path: Path) -> None:
    """Most kernels do not know the file system; a /proc that cannot be read counts as one."""
    (tmp_path / "filesystems").write_text("nodev\tsysfs\n")
    for proc in (tmp_path, tmp_path / "missing"):
        lease_files.admit_containers(tree, proc)
    assert label_of(tree) != lease_files.CONTAINER_LABEL


def test_a_file_that_cannot_be_labelled_is_one_sentence(tmp_path: Path, with_selinux: Path) -> None:
    """A lease without labels would be a container that does not start, for no visible reason."""
    with pytest.raises(OSError, match="cannot be labelled system_u:object_r:container_file_t:s0"):
        lease_files.admit_containers(tmp_path / "missing", with_selinux)
