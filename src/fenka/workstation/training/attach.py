"""Runs a command beside a process of a training."""

from collections.abc import Sequence
from typing import NoReturn

from fenka.workstation import attach, records
from fenka.workstation.records import JobNotFound


def run(name: str, instance: str, command: Sequence[str]) -> NoReturn:
    """Become this command in the lease of an instance: the chief's if none is named.

    It is ended when the training ends or starts again.

    Raises JobNotFound, InvalidRecord, NotRunning, IsolationError, JobNotStarted.
    """
    record = records.load(records.directory_of(name))
    process = record.instance(instance)
    if process is None:
        raise JobNotFound(
            f"job {name} has no instance {instance[:80]}: fenka get {name} lists them"
        )
    if process.ended_at is not None:
        raise attach.NotRunning(f"{process.name} is not running")
    attach.become(process.name, (process.pid, process.start_ticks), record.directory, command)
