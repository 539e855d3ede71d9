"""Thaws the processes of a paused container, which otherwise do not end.

With control groups of version 1, SIGKILL waits until a frozen process is thawed. With version 2 it does not.
"""

import contextlib
import os
from pathlib import Path

from fenka.procfs import PROC

_ROOT = Path("/sys/fs/cgroup/freezer")


def thaw(pid: int, group: str) -> bool:
    """Thaw the control group of a process, and return whether it was frozen.

    Args:
        pid: A process that is to end.
        group: The container's own group. Only this one and those below it are thawed, since a group above
            may have others' processes.
    """
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "cgroup").read_bytes().splitlines():
            _, names, path = line.split(b":", 2)
            place = os.fsdecode(path)
            if b"freezer" not in names.split(b",") or not _within(place, group):
                continue
            state = _ROOT / place.lstrip("/") / "freezer.state"
            if state.read_text().strip() != "THAWED":
                state.write_text("THAWED")
                return True
    return False


def _within(place: str, group: str) -> bool:
    return bool(group.strip("/")) and (place == group or place.startswith(f"{group}/"))
