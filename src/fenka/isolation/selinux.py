"""Labels what containers of any pod use, where SELinux is on.

There the process of a container may only use files of its own types. Files that a node's programs create in
/run and /var have others. The runtime does not label what CDI mounts.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

LABEL = "system_u:object_r:container_file_t:s0"
"""Containers may read, write and execute it. Without categories it is of no pod alone."""

_ATTRIBUTE = "security.selinux"


def is_on(proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel runs SELinux, enforcing or not."""
    try:
        return "selinuxfs" in (proc / "filesystems").read_text().split()
    except OSError:
        return False


def admit_containers(directory: Path, proc: Path = Path("/proc")) -> None:
    """Let containers use a directory and all that is in it; do nothing without SELinux.

    No program of a container may write there yet. Raises OSError if a file cannot be labelled.
    """
    if not is_on(proc):
        return
    for path in _tree(directory):
        try:
            os.setxattr(path, _ATTRIBUTE, LABEL.encode() + b"\0", follow_symlinks=False)
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"SELinux is on, and {path} cannot be labelled {LABEL} ({error.strerror}): "
                "containers could not use it; run the node program as spc_t, on a file system with labels",
            ) from None


def _tree(directory: Path) -> Iterator[Path]:
    yield directory
    for parent, directories, files in os.walk(directory):
        yield from (Path(parent, name) for name in (*directories, *files))
