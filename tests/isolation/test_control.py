"""Encoding and decoding of the control page."""

import os
import re
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fenka.isolation import lease_control
from fenka.isolation.lease_control import Control, InvalidControl, Limit, constant, layout

UUIDS = tuple(f"GPU-00000000-0000-0000-0000-0000000000{i:02x}" for i in range(16))
SAMPLE = Control(
    "alice-7", (Limit(UUIDS[1], 4 << 30, 300 << 20, 50), Limit(UUIDS[0], 2 << 30)), generation=6
)


def test_page_has_the_golden_bytes() -> None:
    """A page written by one version of fenka is read by the shim of another: its bytes do not change."""
    page = bytearray(4096)
    page[0:8] = b"FENKCTRL"
    struct.pack_into("<IIQ", page, 8, 2, 4096, 6)
    page[24:31] = b"alice-7"
    struct.pack_into("<I", page, 88, 2)
    page[120:160] = UUIDS[1].encode()
    struct.pack_into("<QQI", page, 168, 4 << 30, 300 << 20, 50)
    page[240:280] = UUIDS[0].encode()
    struct.pack_into("<QQI", page, 288, 2 << 30, 0, 100)
    assert lease_control.encode(SAMPLE) == bytes(page)


sizes = st.integers(1, (1 << 64) - 1)
limits = st.builds(Limit, st.just(""), sizes, st.integers(0, (1 << 64) - 1), st.integers(1, 100))
lease_ids = st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=63)
controls = st.builds(
    lambda lease, limits, order, generation: Control(
        lease,
        tuple(replace(limit, uuid=uuid) for limit, uuid in zip(limits, order, strict=False)),
        2 * generation,
    ),
    lease_ids,
    st.lists(limits, min_size=1, max_size=16),
    st.permutations(UUIDS),
    st.integers(0, (1 << 63) - 1),
)


@given(controls)
def test_decode_returns_what_was_encoded(page: Control) -> None:
    """Every control that can be written is read back as it was."""
    assert lease_control.decode(lease_control.encode(page)) == page


def is_feedback(offset: int) -> bool:
    """Return whether the byte belongs to feedback, which is no limit."""
    ffi = layout()
    first, size = (
        ffi.offsetof("struct fenka_control", "cards"),
        ffi.sizeof("struct fenka_card_limit"),
    )
    begin, end = (
        ffi.offsetof("struct fenka_card_limit", name) for name in ("feedback_seq", "reserved")
    )
    card, within = divmod(offset - first, size)
    since = ffi.offsetof("struct fenka_control", "yielding_since")
    return bool(
        0 <= offset - since < 8 or (0 <= card < len(SAMPLE.limits) and begin <= within < end)
    )


@given(st.integers(0, 4095), st.integers(0, 7))
def test_decode_differs_or_fails_when_any_bit_is_flipped(offset: int, bit: int) -> None:
    """A flipped bit is an error or another control, never the same one."""
    page = bytearray(lease_control.encode(SAMPLE))
    assume(not is_feedback(offset))
    page[offset] ^= 1 << bit
    try:
        assert lease_control.decode(bytes(page)) != SAMPLE
    except InvalidControl as error:
        assert str(error)  # noqa: PT017


WRONG: dict[str, tuple[Control, str]] = {
    "no lease": (replace(SAMPLE, lease=""), "the lease id '' is not 1 to 63 ASCII characters"),
    "long lease": (replace(SAMPLE, lease="x" * 64), "is not 1 to 63 ASCII characters"),
    "odd": (replace(SAMPLE, generation=3), "generation 3 means that the page is half written"),
    "no cards": (replace(SAMPLE, limits=()), "0 cards is not 1 to 16"),
    "too many": (replace(SAMPLE, limits=SAMPLE.limits * 9), "18 cards is not 1 to 16"),
    "twice": (replace(SAMPLE, limits=SAMPLE.limits[:1] * 2), "a card is named twice"),
    "index": (replace(SAMPLE, limits=(Limit("0", 1),)), "'0' is not the UUID of a card"),
    "nothing": (replace(SAMPLE, limits=(Limit(UUIDS[0], 0),)), "0 bytes of memory on"),
    "no share": (
        replace(SAMPLE, limits=(Limit(UUIDS[0], 1, 0, 0),)),
        "is not 1 to 100 %",
    ),
    "negative": (replace(SAMPLE, limits=(Limit(UUIDS[0], 1, -1),)), "is not a size"),
}


@pytest.mark.parametrize(("wrong", "says"), WRONG.values(), ids=WRONG)
def test_encode_fails_when_the_shim_would_reject_the_page(
    tmp_path: Path, wrong: Control, says: str
) -> None:
    """A wrong control is refused with a sentence, and leaves no file."""
    with pytest.raises(InvalidControl, match=re.escape(says)):
        lease_control.write(tmp_path / "control", wrong)
    assert list(tmp_path.iterdir()) == []


BROKEN: dict[str, tuple[int, str, int, str]] = {
    "magic": (0, "<Q", 1, "magic is 0x1, expected"),
    "version": (8, "<I", 1, "version is 0x1, expected 0x2"),
    "bytes": (12, "<I", 1, "bytes is 0x1, expected 0x1000"),
    "odd": (16, "<Q", 7, "half written"),
    "cards": (88, "<I", 17, "states 17 cards"),
    "reserved": (92, "<I", 1, "holds bytes in fields that this version does not know"),
    "behind": (4092, "<I", 1, "holds bytes in fields that this version does not know"),
    "an unused card": (400, "<I", 1, "holds bytes in fields that this version does not know"),
}


@pytest.mark.parametrize(("offset", "kind", "value", "says"), BROKEN.values(), ids=BROKEN)
def test_error_names_the_page_when_it_is_invalid(
    tmp_path: Path, offset: int, kind: str, value: int, says: str
) -> None:
    """Reading says which file, and what is wrong with it."""
    page = bytearray(lease_control.encode(SAMPLE))
    struct.pack_into(kind, page, offset, value)
    path = tmp_path / "control"
    path.write_bytes(page)
    with pytest.raises(InvalidControl) as error:
        lease_control.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert says in str(error.value)


@pytest.mark.parametrize("size", [0, 4095, 4097])
def test_decode_fails_when_the_size_is_wrong(tmp_path: Path, size: int) -> None:
    """No shorter or longer file is a page."""
    path = tmp_path / "control"
    path.write_bytes(lease_control.encode(SAMPLE).ljust(size, b"\0")[:size])
    with pytest.raises(InvalidControl, match=f"is {size} bytes, a control page has 4096"):
        lease_control.read(path)


def test_write_replaces_the_file_atomically(tmp_path: Path) -> None:
    """A reader has the old page or the new one; others may read it, only its owner may write."""
    path = tmp_path / "control"
    lease_control.write(path, SAMPLE)
    with path.open("rb") as before:
        lease_control.write(path, replace(SAMPLE, lease="bob"))
        assert lease_control.decode(before.read()).lease == "alice-7"
    assert lease_control.read(path).lease == "bob"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["control"]


def test_update_keeps_the_inode(tmp_path: Path) -> None:
    """Programs that have mapped the page see the new limits, and a generation two higher."""
    path = tmp_path / "control"
    lease_control.write(path, SAMPLE)
    inode = path.stat().st_ino
    wanted = replace(SAMPLE, limits=(Limit(UUIDS[1], 1 << 30), SAMPLE.limits[1]), generation=0)
    in_force = lease_control.update(path, wanted)
    assert in_force == replace(wanted, generation=8)
    assert lease_control.read(path) == in_force
    assert path.stat().st_ino == inode


def test_update_repairs_the_page_when_a_writer_was_killed(tmp_path: Path) -> None:
    """After a writer died half-way the page is unreadable; the next update makes it whole."""
    path = tmp_path / "control"
    lease_control.write(path, SAMPLE)
    with path.open("r+b") as file:
        file.seek(layout().offsetof("struct fenka_control", "generation"))
        file.write(struct.pack("<Q", 7))
    with pytest.raises(InvalidControl, match="half written"):
        lease_control.read(path)
    assert lease_control.update(path, SAMPLE).generation == 8
    assert lease_control.read(path) == replace(SAMPLE, generation=8)


def test_update_fails_when_cards_or_lease_differ(tmp_path: Path) -> None:
    """Which cards, in which order, and whose lease it is cannot change under running programs."""
    path = tmp_path / "control"
    lease_control.write(path, SAMPLE)
    for other in (replace(SAMPLE, limits=SAMPLE.limits[::-1]), replace(SAMPLE, lease="bob")):
        with pytest.raises(InvalidControl):
            lease_control.update(path, other)
    assert lease_control.read(path) == SAMPLE


def test_reader_sees_no_mixture_when_the_page_is_updated(tmp_path: Path) -> None:
    """Two limits that are always written together are always read together, or not at all."""
    path = tmp_path / "control"
    stop = threading.Event()
    lease_control.write(path, SAMPLE)

    def keep_writing() -> None:
        size = 1
        while not stop.is_set():
            size += 1
            both = tuple(Limit(uuid, size) for uuid in (UUIDS[1], UUIDS[0]))
            lease_control.update(path, replace(SAMPLE, limits=both))

    writer = threading.Thread(target=keep_writing)
    writer.start()
    whole = 0
    try:
        while whole < 200:
            try:
                seen = lease_control.read(path)
            except InvalidControl:
                continue
            if seen.generation > 6:
                assert seen.limits[0].memory_bytes == seen.limits[1].memory_bytes
                whole += 1
    finally:
        stop.set()
        writer.join()


def test_constants_are_read_from_the_header() -> None:
    """Python and C share one definition, and one page."""
    assert constant("FENKA_CONTROL_BYTES") == 4096
    assert layout().sizeof("struct fenka_control") <= 4096
    assert constant("FENKA_MAX_CARDS") == len(layout().new("struct fenka_control *").cards)
    assert os.sysconf("SC_PAGE_SIZE") >= 4096
