"""Processes that get the PID of another one that has ended."""

import subprocess
from pathlib import Path

ATTEMPTS = 20
"""Others may be given the number that was asked for."""


def start_with_pid(pid: int) -> subprocess.Popen[bytes] | None:
    """Start a process with this PID; None where that cannot be had."""
    for _ in range(ATTEMPTS):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            return None
        started = subprocess.Popen(["sleep", "1000"])
        if started.pid == pid:
            return started
        started.kill()
        started.wait()
    return None
