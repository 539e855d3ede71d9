"""Runs a command beside a process of a training: in its lease, with its environment and directory."""

import os
from collections.abc import Sequence
from typing import NoReturn

from fenka import procfs
from fenka.core.errors import FenkaError
from fenka.isolation import sandbox
from fenka.workstation import records
from fenka.workstation.launch import execute
from fenka.workstation.records import InstanceRecord, JobNotFound

TERMINAL = ("TERM", "COLORTERM", "LINES", "COLUMNS")
"""Variables that describe this terminal, which is not the one that the training was submitted from."""


class NotRunning(FenkaError):
    """The process does not run now."""


def run(name: str, instance: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of an instance: the chief's if none is named.

    The command holds the lease, too. It is ended when the training ends or starts again.

    Raises JobNotFound, InvalidRecord, NotRunning, IsolationError, JobNotStarted.
    """
    record = records.load(records.directory_of(name))
    process = record.instance(instance)
    if process is None:
        raise JobNotFound(
            f"job {name} has no instance {instance[:80]}: fenka get {name} lists them"
        )
    environment = _environment(process)
    environment |= {key: os.environ[key] for key in TERMINAL if key in os.environ}
    sandbox.join(process.pid)
    os.chdir(record.directory)
    execute([*command], environment)


def _environment(process: InstanceRecord) -> dict[str, str]:
    """Return the environment of a process that runs. Raises NotRunning."""
    try:
        content = (procfs.PROC / str(process.pid) / "environ").read_bytes()
        lives = procfs.lives(process.pid, process.start_ticks)
    except OSError:
        lives, content = False, b""
    if not lives or process.ended_at is not None:
        raise NotRunning(f"{process.name} is not running")
    pairs = (os.fsdecode(pair).partition("=") for pair in content.split(b"\0") if b"=" in pair)
    return {name: value for name, _, value in pairs}
