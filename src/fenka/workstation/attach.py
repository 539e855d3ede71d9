"""Runs a command beside a program of a training or a service: in its lease, with its environment."""

import os
from collections.abc import Sequence
from typing import NoReturn

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import sandbox
from fenka.workstation.launch import execute
from fenka.workstation.workload import change_directory

TERMINAL = ("TERM", "COLORTERM", "LINES", "COLUMNS")
"""Variables that describe this terminal, which is not the one that the program was started from."""


class NotRunning(FenkaError):
    """The process does not run now."""


def become(name: str, process: tuple[int, int], directory: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of a process. The command holds the lease, too.

    Args:
        name: What the process is called.
        process: The process and its start, as recorded.
        directory: The working directory.
        command: The program and its arguments.

    Raises:
        NotRunning, IsolationError, JobNotStarted: The command was not started.
    """
    pid, start_ticks = process
    environment = _environment(name, pid, start_ticks)
    environment |= {key: os.environ[key] for key in TERMINAL if key in os.environ}
    sandbox.join(pid)
    change_directory(directory)
    execute([*command], environment)


def _environment(name: str, pid: int, start_ticks: int) -> dict[str, str]:
    """Return the environment of a process that runs. Raises NotRunning."""
    try:
        content = (procfs.PROC / str(pid) / "environ").read_bytes()
        lives = procfs.lives(pid, start_ticks)
    except OSError:
        lives, content = False, b""
    if not lives:
        raise NotRunning(f"{name} is not running")
    pairs = (os.fsdecode(pair).partition("=") for pair in content.split(b"\0") if b"=" in pair)
    return {name: value for name, _, value in pairs}
