"""Resizing by annotation: wishes, the record, and what it makes of a placement."""

import contextlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.requests import Memory, Placement, Slice
from fenka.dialects.gpushare import Unreadable
from fenka.dialects.resizing import (
    RECORD,
    Resized,
    Wish,
    read_record,
    read_wish,
    resized,
    write_record,
    write_wish,
)

GIB = 1024
A, B = "GPU-a", "GPU-b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu-mem=6", {"": Wish(Memory(6, GIB))}),
        ("gpu-core=40", {"": Wish(compute=40)}),
        ("gpu-core=0", {"": Wish(compute=0)}),
        ("gpu-mem=4096MiB,gpu-core=30", {"": Wish(Memory(4096), 30)}),
        (" gpu-core = 30 , gpu-mem = 4GiB ;", {"": Wish(Memory(4096), 30)}),
        (
            "x: gpu-mem=6; y-2: gpu-core=20",
            {"x": Wish(Memory(6, GIB)), "y-2": Wish(compute=20)},
        ),
        ("x:gpu-mem=6", {"x": Wish(Memory(6, GIB))}),
    ],
)
def test_what_is_wished(text: str, expected: dict[str, Wish]) -> None:
    """A number counts units of the node."""
    assert read_wish(text, GIB) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "",
            "annotation fenka.io/resize is empty: write gpu-mem=6, gpu-core=40 or both with a comma",
        ),
        (
            " ; ",
            "annotation fenka.io/resize is empty: write gpu-mem=6, gpu-core=40 or both with a comma",
        ),
        (
            "gpu-mem",
            "annotation fenka.io/resize: 'gpu-mem' is not understood: write gpu-mem=6, gpu-mem=4096MiB or "
            "gpu-core=40",
        ),
        (
            "memory=6",
            "annotation fenka.io/resize: 'memory=6' is not understood: write gpu-mem=6, gpu-mem=4096MiB or "
            "gpu-core=40",
        ),
        ("gpu-mem=6,gpu-mem=7", "annotation fenka.io/resize says gpu-mem twice for one container"),
        ("x: gpu-mem=6; x: gpu-core=7", "annotation fenka.io/resize speaks twice of x"),
        ("gpu-mem=6; gpu-core=7", "annotation fenka.io/resize speaks twice of the container"),
        (
            "gpu-mem=6; x: gpu-core=7",
            "annotation fenka.io/resize names some containers and not others: write x: gpu-mem=6; "
            "y: gpu-core=20",
        ),
        (
            "gpu-mem=6GB",
            "annotation fenka.io/resize: 'GB' in '6GB' is no unit: use MiB or GiB",
        ),
        (
            "gpu-core=101",
            "annotation fenka.io/resize: gpu-core=101 is no percentage: write 1 to 100, or 0 for no limit",
        ),
        (
            "gpu-core=-1",
            "annotation fenka.io/resize: gpu-core=-1 is no percentage: write 1 to 100, or 0 for no limit",
        ),
    ],
)
def test_wishes_that_are_not_understood(text: str, sentence: str) -> None:
    """Are told what to write."""
    with pytest.raises(Unreadable) as why:
        read_wish(text, GIB)
    assert str(why.value) == sentence


@pytest.mark.parametrize(
    ("container", "memory", "core", "text"),
    [
        ("", "6", None, "gpu-mem=6"),
        ("x", "4096MiB", 0, "x: gpu-mem=4096MiB,gpu-core=0"),
        ("", "", 40, "gpu-core=40"),
    ],
)
def test_wishes_are_written(container: str, memory: str, core: int | None, text: str) -> None:
    """As they are read."""
    assert write_wish(container, memory, core) == text
    assert set(read_wish(text, GIB)) == {container}


GOLDEN = (
    '{"version":1,"pod":"u1","holds":[{"card":0,"uuid":"GPU-a","memoryMiB":6462,"compute":40}],'
    '"containers":{"main":[{"card":0,"uuid":"GPU-a","memoryMiB":6462,"compute":40}]},"wish":"gpu-mem=6"}'
)
PIECE = Slice(0, A, 6462, 40)
KNOWN = Resized("u1", (PIECE,), {"main": (PIECE,)}, "gpu-mem=6")


def test_the_record() -> None:
    """As it stands on pods; one of another pod counts for nothing."""
    assert write_record(KNOWN) == GOLDEN
    assert read_record({RECORD: GOLDEN}) == read_record({RECORD: GOLDEN}, "u1") == KNOWN
    assert read_record({RECORD: GOLDEN}, "u2") is None
    assert read_record({}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2 is not 1"),
        ({"more": 1}, "more is not known to this version"),
        ({"holds": {}}, "{} is no list"),
        ({"holds": [1]}, "1 has no fields"),
        ({"holds": [{"card": 0}]}, "it has no uuid"),
        ({"holds": [{"card": 0, "uuid": A, "memoryMiB": -1, "compute": 0}]}, "-1 is no number"),
        (
            {"holds": [{"card": 0, "uuid": A, "memoryMiB": 1, "compute": 0}] * 2},
            "a card is named twice",
        ),
        ({"containers": []}, "'list' object has no attribute 'items'"),
        ({"wish": 1}, "1 is no text"),
        ({"pod": None}, "None is no text"),
    ],
)
def test_records_that_cannot_be(change: dict[str, object], said: str) -> None:
    """Are not guessed at."""
    text = json.dumps({**json.loads(GOLDEN), **change})
    with pytest.raises(Unreadable) as why:
        read_record({RECORD: text})
    assert str(why.value) == f"annotation fenka.io/resized is not understood: {said}"


@pytest.mark.parametrize("text", ["", "x", "[]", "1", "[" * 100_000])
def test_records_that_are_no_record(text: str) -> None:
    """Neither crash nor count."""
    with pytest.raises(Unreadable):
        read_record({RECORD: text})


def placed(*parts: Sequence[Slice]) -> tuple[Placement, ...]:
    """On one node."""
    return tuple(Placement("n", tuple(part)) for part in parts)


@pytest.mark.parametrize(
    ("holds", "before", "after"),
    [
        ([Slice(0, A, 6, 40)], placed([Slice(0, A, 4, 0)]), placed([Slice(0, A, 6, 40)])),
        # a card that the record does not name, or that was exchanged
        ([Slice(0, A, 6, 0)], placed([Slice(1, B, 4, 0)]), placed([Slice(1, B, 4, 0)])),
        ([Slice(0, A, 6, 0)], placed([Slice(0, B, 4, 0)]), placed([Slice(0, B, 4, 0)])),
        # a node that tells no UUIDs
        ([Slice(0, A, 6, 0)], placed([Slice(0, "", 4, 0)]), placed([Slice(0, "", 6, 0)])),
        # two parts on one card: 7 in all of what was 4 and 2; 3 of it
        (
            [Slice(0, A, 7, 30)],
            placed([Slice(0, A, 4, 20)], [Slice(0, A, 2, 20)]),
            placed([Slice(0, A, 4, 20)], [Slice(0, A, 3, 10)]),
        ),
        (
            [Slice(0, A, 3, 60)],
            placed([Slice(0, A, 4, 20)], [Slice(0, A, 2, 20)]),
            placed([Slice(0, A, 3, 20)], [Slice(0, A, 0, 40)]),
        ),
        # two cards, of which one is resized
        (
            [Slice(1, B, 9, 0)],
            placed([Slice(0, A, 4, 0), Slice(1, B, 4, 0)]),
            placed([Slice(0, A, 4, 0), Slice(1, B, 9, 0)]),
        ),
    ],
)
def test_what_the_record_makes_of_a_placement(
    holds: list[Slice], before: tuple[Placement, ...], after: tuple[Placement, ...]
) -> None:
    """What it says of a card is the total."""
    annotations = {RECORD: write_record(Resized("u", tuple(holds)))}
    assert resized(annotations, before, "u") == after
    assert resized(annotations, before, "v") == before
    assert resized({}, before) == before


slices = st.builds(
    Slice,
    st.integers(0, 3),
    st.sampled_from([A, B]),
    st.integers(0, 1 << 40),
    st.integers(0, 100),
)
cards = st.lists(slices, max_size=4, unique_by=lambda it: it.card).map(tuple)


@given(
    st.builds(Resized, st.text(), cards, st.dictionaries(st.text(), cards, max_size=3), st.text())
)
def test_a_record_is_read_as_it_was_written(record: Resized) -> None:
    """Whatever is in it."""
    assert read_record({RECORD: write_record(record)}) == record


@given(cards, st.lists(cards, max_size=3))
def test_totals_are_the_records(holds: tuple[Slice, ...], parts: list[tuple[Slice, ...]]) -> None:
    """However many placements share a card; nothing is below nothing, and nothing else changes."""
    before = placed(*parts)
    after = resized({RECORD: write_record(Resized("u", holds))}, before, "u")
    assert [[(it.card, it.uuid) for it in p.slices] for p in after] == [
        [(it.card, it.uuid) for it in p.slices] for p in before
    ]
    for hold in holds:
        found = [
            it for p in after for it in p.slices if (it.card, it.uuid) == (hold.card, hold.uuid)
        ]
        assert all(it.memory_mib >= 0 and it.compute >= 0 for it in found)
        if found:
            assert sum(it.memory_mib for it in found) == hold.memory_mib
            assert sum(it.compute for it in found) == hold.compute


@given(st.text())
def test_any_text_is_a_wish_or_a_sentence(text: str) -> None:
    """It is the user's to write."""
    with contextlib.suppress(Unreadable):
        assert read_wish(text, GIB)
