"""Reads the loss of trainings from their TensorBoard files, which TensorBoard itself need not be there for.

A file is a sequence of records: a length of 8 bytes, its checksum, an Event of Protocol Buffers, its
checksum. Only the fields of scalars are decoded. TensorBoard's own reader would bring gRPC and a web server.

The files are what a program has written, so they may be anything: sizes and times are bounded, and what is no
record ends a file.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fenka.isolation.lease_files import open_regular_file
from fenka.local.records import TrainingRecord

Point = tuple[int, float]
"""A step and a value."""

MAX_READ = 4 << 20
"""Bytes that one look reads of a training."""
MAX_RECORD = 1 << 20
"""Larger records are images or graphs, and are skipped."""
MAX_FILES, MAX_FOLDERS = 64, 256
MAX_TAGS = 16
POINTS = 200
"""Of a curve. When there are twice as many, every second one goes."""

_HEAD, _TAIL = struct.Struct("<Q4x"), 4
_TENSOR_FLOAT, _TENSOR_DOUBLE = 1, 2
"""TensorFlow's numbers of types."""


@dataclass(slots=True)
class _EventFile:
    offset: int = 0
    ended: bool = False


@dataclass(slots=True)
class LossReader:
    """Follows the files below one directory. Each look reads what is new, up to a limit."""

    folder: Path
    _files: dict[Path, _EventFile] = field(default_factory=dict)
    _curves: dict[str, list[Point]] = field(default_factory=dict)

    def read(self) -> list[Point]:
        """Return the curve of the loss so far; empty without one."""
        left = MAX_READ
        for path in _event_files(self.folder):
            file = self._files.setdefault(path, _EventFile())
            if left > 0 and not file.ended:
                left -= self._read_file(path, file, left)
        names = sorted(self._curves, key=_rank)
        return list(self._curves[names[0]]) if names else []

    def _read_file(self, path: Path, file: _EventFile, limit: int) -> int:
        """Read what is new, and return how many bytes that was."""
        try:
            with open_regular_file(path) as opened:
                data = os.pread(opened.fileno(), limit, file.offset)
        except OSError:
            file.ended = True
            return 0
        at = 0
        while at + _HEAD.size <= len(data):
            (size,) = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + size + _TAIL
            if size > MAX_RECORD:
                # A length that no file can have is no length.
                file.ended |= size > 1 << 40
                at = end
                break
            if end > len(data):
                break
            with suppress(ValueError):
                self._add(data[at + _HEAD.size : end - _TAIL])
            at = end
        file.offset += at
        return len(data)

    def _add(self, event: bytes) -> None:
        """Add the scalars of an event. Raises ValueError if it is none."""
        step, summaries = 0, list[bytes]()
        for number, value in _fields(event):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for number, value in _fields(summary):
                if number == 1 and isinstance(value, bytes):
                    self._add_scalar(step, value)

    def _add_scalar(self, step: int, value: bytes) -> None:
        tag, scalar = "", None
        for number, part in _fields(value):
            if number == 1 and isinstance(part, bytes):
                tag = part[:200].decode(errors="replace")
            elif number == 2 and isinstance(part, float):
                scalar = part
            elif number == 8 and isinstance(part, bytes):
                scalar = _tensor_scalar(part)
        known = tag in self._curves or len(self._curves) < MAX_TAGS
        finite = scalar is not None and abs(scalar) < 1e300
        if "loss" not in tag.lower() or not known or not finite or not 0 <= step < 1 << 53:
            return
        assert scalar is not None
        curve = self._curves.setdefault(tag, [])
        if curve and step <= curve[-1][0]:
            # A training that began again from a checkpoint repeats its steps.
            curve[:] = [point for point in curve if point[0] < step]
        curve.append((step, scalar))
        if len(curve) > 2 * POINTS:
            del curve[1:-1:2]


def _rank(tag: str) -> tuple[bool, int, str]:
    """Order the tags of losses: that of a training before that of a validation, the shortest first."""
    lowered = tag.lower()
    return any(word in lowered for word in ("val", "eval", "test")), len(tag), tag


def _event_files(folder: Path) -> list[Path]:
    """Return the event files below a directory in their order, without following links."""
    found: list[Path] = []
    for number, (place, folders, names) in enumerate(os.walk(folder)):
        if number >= MAX_FOLDERS or len(found) >= MAX_FILES:
            break
        folders.sort()
        found += [Path(place, name) for name in sorted(names) if ".tfevents." in name]
    return found[:MAX_FILES]


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field of a message of Protocol Buffers. Raises ValueError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
            case 1:
                yield key >> 3, _number("<d", message, at)
                at += 8
            case 2:
                size, at = _varint(message, at)
                if at + size > len(message):
                    raise ValueError("a field is longer than its message")
                yield key >> 3, message[at : at + size]
                at += size
            case 5:
                yield key >> 3, _number("<f", message, at)
                at += 4
            case _:
                raise ValueError("no such kind of field")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return an integer and where it ends. Raises ValueError."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer does not end")


def _number(form: str, message: bytes, at: int) -> float:
    """Return a number at a place. Raises ValueError."""
    try:
        (value,) = struct.unpack_from(form, message, at)
    except struct.error:
        raise ValueError("a number does not end") from None
    return float(value)


def _tensor_scalar(tensor: bytes) -> float | None:
    """Return the only number of a tensor, as TensorFlow 2 writes scalars; None if it has another shape."""
    kind, content = 0, b""
    for number, value in _fields(tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            content = value
        elif number == 5 and isinstance(value, float):
            return value
    form = {_TENSOR_FLOAT: "<f", _TENSOR_DOUBLE: "<d"}.get(kind)
    if form is None or len(content) != struct.calcsize(form):
        return None
    return _number(form, content, 0)


def log_folder(record: TrainingRecord) -> Path:
    """Return where a training writes its TensorBoard files, as this machine sees it."""
    folder = Path(record.directory, record.spec.logdir)
    for source, target in record.binds:
        if folder.is_relative_to(target):
            return Path(source, folder.relative_to(target))
    return folder


class LossReaders:
    """The readers of several trainings, by their names; those that are gone are forgotten."""

    def __init__(self) -> None:
        self._readers: dict[str, LossReader] = {}

    def read(self, folders: Sequence[tuple[str, Path]]) -> dict[str, list[Point]]:
        """Return the curves of trainings by name. folders: name and directory of each."""
        self._readers = {
            name: known
            if (known := self._readers.get(name)) and known.folder == folder
            else LossReader(folder)
            for name, folder in folders
        }
        return {name: reader.read() for name, reader in self._readers.items()}
