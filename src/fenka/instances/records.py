"""The records of the instances that fenka has created. All others belong to an administrator.

A UUID is no identity: an instance that is created again at the same place has the same one. So a record has a
number of its own.
"""

from pathlib import Path
from typing import Literal

import msgspec

from fenka.core.errors import FenkaError
from fenka.isolation.files import (
    decode_json,
    describe_os_error,
    read_regular_file,
    write_atomically,
)

MAX_FILE_BYTES = 1 << 20

Stage = Literal["intended", "created", "ready", "emptying", "removing", "lost"]
"""intended: a GPU instance may exist, without a compute instance. created: it exists. ready: so does its
compute instance. emptying: this one is being destroyed. removing: so is the GPU instance. lost: somebody else
destroyed it, and a lease still names it."""


class InvalidRecords(FenkaError):
    """The file of records is damaged."""


class InstanceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance.

    Attributes:
        card: The card's UUID.
        profile: The profile's name.
        start: The first slice of the card's memory axis.
        generation: A number that no other instance of this machine had since it was started.
        stage: How far its creation or destruction has come.
        gpu_instance: The driver's id; None before it exists.
        uuid: The device's, once it is ready.
        kept: Whether it stays while nobody uses it.
    """

    card: str
    profile: str
    start: int
    generation: int
    stage: Stage = "intended"
    gpu_instance: int | None = None
    uuid: str = ""
    kept: bool = False


class RecordFile(msgspec.Struct, forbid_unknown_fields=True):
    """All records. boot: instances never outlive the machine's start. last: the last generation."""

    boot: str
    last: int = 0
    records: list[InstanceRecord] = []
    version: Literal[1] = 1


def load(path: Path, boot: str) -> RecordFile:
    """Return the records of this boot; none if there is no file. Raises InvalidRecords."""
    try:
        recorded = decode_json(
            msgspec.json.Decoder(RecordFile), read_regular_file(path, MAX_FILE_BYTES)
        )
    except FileNotFoundError:
        return RecordFile(boot)
    except OSError as why:
        raise InvalidRecords(
            f"{describe_os_error(why)}; it records which instances are fenka's"
        ) from None
    except msgspec.DecodeError as why:
        raise InvalidRecords(
            f"{path} is not understood ({why}): remove it, and destroy fenka's instances with `nvidia-smi "
            "mig -dci` and `-dgi`, for they count as an administrator's then"
        ) from None
    return recorded if recorded.boot == boot else RecordFile(boot)


def save(path: Path, records: RecordFile) -> None:
    """Write the records to disk. Raises OSError."""
    write_atomically(path, msgspec.json.encode(records))
