"""The loss of trainings, from files that TensorBoard has written and from files that are none."""

import os
import random
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.dashboard.loss_curves import (
    MAX_FILES,
    MAX_READ,
    MAX_RECORD,
    POINTS,
    LossReader,
    LossReaders,
    log_folder,
)
from fenka.jobs.training import TrainingSpec
from fenka.local.records import TrainingRecord

GOLDEN = Path(__file__).parent / "golden" / "events.out.tfevents.1.host"
"""Written by TensorBoard 2's EventFileWriter: train/loss as tensors, the others as simple values."""
CURVE = [(0, 2.0), (10, 1.0), (20, 2 / 3), (30, 0.5), (40, 0.4)]


def part(number: int, kind: int, value: bytes) -> bytes:
    """A field of a message."""
    size = bytes([len(value)]) if kind == 2 and len(value) < 128 else b""
    if kind == 2 and len(value) >= 128:
        size = bytes([len(value) & 127 | 128, len(value) >> 7])
    return bytes([number << 3 | kind]) + size + value


def record(step: int, value: float, tag: str = "loss") -> bytes:
    """A record with one scalar."""
    steps = b"".join(bytes([step >> shift & 127 | 128]) for shift in range(0, 28, 7)) + b"\0"
    scalar = part(1, 2, tag.encode()) + part(2, 5, struct.pack("<f", value))
    return framed(part(2, 0, steps) + part(5, 2, part(1, 2, scalar)))


def framed(event: bytes) -> bytes:
    """A record of an event, whose checksums nobody reads."""
    return struct.pack("<Q", len(event)) + b"csum" + event + b"csum"


def written(folder: Path, data: bytes, name: str = "events.out.tfevents.1") -> LossReader:
    """A reader of a directory with one file."""
    (folder / name).write_bytes(data)
    return LossReader(folder)


def test_curve_is_that_of_the_training_when_tensorboard_wrote_it(tmp_path: Path) -> None:
    """Not that of the validation, though it comes first; and the same again at the next look."""
    (tmp_path / "run").mkdir()
    shutil.copy(GOLDEN, tmp_path / "run")
    reader = LossReader(tmp_path)
    for _ in range(2):
        curve = reader.read()
        assert [step for step, _ in curve] == [step for step, _ in CURVE]
        assert [value for _, value in curve] == pytest.approx([value for _, value in CURVE])


def test_curve_grows_when_the_file_does_at_any_byte(tmp_path: Path) -> None:
    """A look may come while a record is written."""
    data = GOLDEN.read_bytes()
    reader = written(tmp_path, b"")
    for end in range(0, len(data) + 1, 7):
        (tmp_path / "events.out.tfevents.1").write_bytes(data[:end])
        reader.read()
    (tmp_path / "events.out.tfevents.1").write_bytes(data)
    assert len(reader.read()) == len(CURVE)


def test_steps_are_not_repeated_when_a_training_began_again(tmp_path: Path) -> None:
    """From a checkpoint at step 3."""
    reader = written(tmp_path, b"".join(record(step, 9 - step) for step in range(6)))
    reader.read()
    again = b"".join(record(step, 1.0) for step in range(3, 5))
    (tmp_path / "events.out.tfevents.2").write_bytes(again)
    assert reader.read() == [(0, 9), (1, 8), (2, 7), (3, 1), (4, 1)]


def test_curve_is_thinned_when_it_is_long(tmp_path: Path) -> None:
    """The first and the last step stay."""
    curve = written(tmp_path, b"".join(record(step, 1.0) for step in range(5000))).read()
    assert POINTS <= len(curve) <= 2 * POINTS
    assert (curve[0][0], curve[-1][0]) == (0, 4999)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 4096,
        struct.pack("<Q", 1 << 63) + b"csum",
        struct.pack("<Q", MAX_RECORD + 1) + b"csum",
        framed(b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        framed(b"\x80" * 100),
        framed(part(5, 2, part(1, 2, b"\x15\0"))),
        record(1, float("inf")),
        record(1, float("nan")),
    ],
)
def test_file_that_is_none_has_no_curve(tmp_path: Path, data: bytes) -> None:
    """Lengths that no file has, messages that do not end, numbers that are none."""
    reader = written(tmp_path, data)
    assert reader.read() == []
    assert reader.read() == []


@given(seed=st.integers(0, 10**6), cut=st.integers(0, 700))
def test_broken_files_cost_a_curve_and_nothing_else(
    seed: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Some bytes of a real file are others."""
    data = bytearray(GOLDEN.read_bytes())
    chance = random.Random(seed)
    for _ in range(10):
        data[chance.randrange(len(data))] = chance.randrange(256)
    reader = written(tmp_path_factory.mktemp("broken"), bytes(data[cut:]))
    assert len(reader.read()) <= 2 * POINTS


def test_neither_links_nor_pipes_nor_many_files_are_read(tmp_path: Path) -> None:
    """A look at them neither waits nor leaves the directory."""
    secret = tmp_path / "secret"
    secret.write_bytes(record(1, 5.0))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "events.out.tfevents.link").symlink_to(secret)
    (logs / "folder").symlink_to(tmp_path)
    os.mkfifo(logs / "events.out.tfevents.pipe")
    reader = LossReader(logs)
    assert reader.read() == []
    for number in range(2 * MAX_FILES):
        (logs / f"events.out.tfevents.0{number:03}").write_bytes(record(number, 1.0))
    assert len(reader.read()) <= MAX_FILES


def test_a_large_file_is_read_in_several_looks(tmp_path: Path) -> None:
    """A look has a limit."""
    padded = [framed(part(9, 2, b"x" * 100) * 5000) for _ in range(12)]
    reader = written(tmp_path, b"".join([*padded, record(7, 1.0)]))
    looks = 0
    while not reader.read():
        looks += 1
    assert looks == sum(map(len, padded)) // MAX_READ


def test_files_are_where_the_training_sees_them(tmp_path: Path) -> None:
    """Below its directory, or in a mount's source."""

    def training(logdir: str, binds: list[tuple[str, str]]) -> TrainingRecord:
        spec = TrainingSpec(name="t", logdir=logdir)
        return TrainingRecord("u", spec, "/home/ada/t", 0.0, "n", "a", binds=binds)

    assert log_folder(training("logs", [])) == Path("/home/ada/t/logs")
    assert log_folder(training("/logs/a", [("/data", "/logs")])) == Path("/data/a")
    assert log_folder(training("/logs", [])) == Path("/logs")


def test_readers_are_those_of_the_trainings_that_are_there(tmp_path: Path) -> None:
    """A training of the same name in another directory has its own curve."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").write_bytes(record(ord(name), 1.0))
    readers = LossReaders()
    assert readers.read([("t", tmp_path / "a")]) == {"t": [(97, 1.0)]}
    assert readers.read([("t", tmp_path / "b")]) == {"t": [(98, 1.0)]}
    assert readers.read([]) == {}
