"""Notebooks of this machine: what they were started with, so that they can be started again.

The record is in the job's directory, which its user can write. A notebook's files are in its root directory.
"""

import math
from pathlib import Path
from typing import Literal

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.request import InvalidRequest
from fenka.isolation.files import read_regular_file, write_atomically
from fenka.jobs.processes import JobNotStarted
from fenka.jobs.spec import NAME, JobSpec
from fenka.workstation import paths
from fenka.workstation.client import jobs_called
from fenka.workstation.records import JobNotFound, place_of

MAX_RECORD_BYTES = 1 << 20


class NotebookRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A notebook.

    Attributes:
        spec: What it gets of the cards; its command is not the server's.
        root: The directory that it shows.
        hashed_password: As Jupyter checks it; empty for a random token in the URL.
        idle_s: It ends after so many seconds without use of its slice; None to run indefinitely.
    """

    spec: JobSpec
    root: str
    hashed_password: str = ""
    idle_s: float | None = None
    version: Literal[1] = 1


class InvalidNotebook(FenkaError):
    """A notebook's record cannot be read."""


def save(record: NotebookRecord) -> None:
    """Write the record of a notebook whose directory exists. Raises OSError."""
    write_atomically(_file(record.spec.name), msgspec.json.encode(record))


def exists(name: str) -> bool:
    """Return whether a notebook of this name was started on this machine."""
    return bool(NAME.fullmatch(name)) and _file(name).exists()


def load_stopped(name: str) -> NotebookRecord:
    """Return the record of a notebook that does not run.

    Raises JobNotFound, InvalidNotebook, JobNotStarted if it runs, OSError.
    """
    if not exists(name):
        raise JobNotFound(f"notebook {name[:80]} not found on this machine: it was never started")
    if jobs_called(paths.current(), name):
        raise JobNotStarted(f"notebook {name} runs or waits already: see fenka ps", INVALID_INPUT)
    try:
        data = read_regular_file(_file(name), MAX_RECORD_BYTES)
        record = msgspec.json.decode(data, type=NotebookRecord)
        record.spec.validate()
        usable = record.spec.name == name and 0 < (record.idle_s or 1) < math.inf
    except (msgspec.MsgspecError, InvalidRequest, RecursionError) as why:
        raise InvalidNotebook(_invalid(name, why)) from None
    if not usable:
        raise InvalidNotebook(_invalid(name, "it describes another notebook"))
    return record


def _invalid(name: str, why: object) -> str:
    return f"the record of notebook {name} is invalid ({why}): start it by fenka notebook"


def _file(name: str) -> Path:
    return place_of(name) / "notebook.json"
