"""Resizing by annotation: requests, the record, and what it makes of a placement."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.request import Memory, Slice
from fenka.dialects.base import InvalidRecord
from fenka.dialects.resize_records import (
    STATUS,
    ResizeRequest,
    ResizeStatus,
    decode_request,
    decode_status,
    encode_request,
    encode_status,
)

GIB = 1024
A, B = "GPU-a", "GPU-b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu-mem=6", {"": ResizeRequest(Memory(6, GIB))}),
        ("gpu-core=40", {"": ResizeRequest(compute=40)}),
        ("gpu-core=40%", {"": ResizeRequest(compute=40)}),
        ("gpu-core=0", {"": ResizeRequest(compute=0)}),
        ("gpu-mem=4096MiB,gpu-core=30", {"": ResizeRequest(Memory(4096), 30)}),
        (" gpu-core = 30 , gpu-mem = 4GiB ;", {"": ResizeRequest(Memory(4096), 30)}),
        (
            "x: gpu-mem=6; y-2: gpu-core=20",
            {"x": ResizeRequest(Memory(6, GIB)), "y-2": ResizeRequest(compute=20)},
        ),
        ("x:gpu-mem=6", {"x": ResizeRequest(Memory(6, GIB))}),
    ],
)
def test_resize_request_is_decoded(text: str, expected: dict[str, ResizeRequest]) -> None:
    """A number counts units of the node."""
    assert decode_request(text, GIB) == expected


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
        ("x: gpu-mem=6; x: gpu-core=7", "annotation fenka.io/resize names x twice"),
        ("gpu-mem=6; gpu-core=7", "annotation fenka.io/resize names the container twice"),
        (
            "gpu-mem=6; x: gpu-core=7",
            "annotation fenka.io/resize names some containers and not others: write x: gpu-mem=6; "
            "y: gpu-core=20",
        ),
        (
            "gpu-mem=6GB",
            "annotation fenka.io/resize: 'GB' in '6GB' is no unit: write 6GiB",
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
def test_resize_request_is_rejected_when_it_is_not_understood(text: str, sentence: str) -> None:
    """Are told what to write."""
    with pytest.raises(InvalidRecord) as why:
        decode_request(text, GIB)
    assert str(why.value) == sentence


@pytest.mark.parametrize(
    ("container", "memory", "core", "text"),
    [
        ("", "6", None, "gpu-mem=6"),
        ("x", "4096MiB", 0, "x: gpu-mem=4096MiB,gpu-core=0"),
        ("", "", 40, "gpu-core=40"),
    ],
)
def test_resize_request_is_encoded(
    container: str, memory: str, core: int | None, text: str
) -> None:
    """As they are read."""
    assert encode_request(container, memory, core) == text
    assert set(decode_request(text, GIB)) == {container}


GOLDEN = (
    '{"version":1,"pod":"u1","holds":[{"card":0,"uuid":"GPU-a","memoryMiB":6462,"compute":40}],'
    '"containers":{"main":[{"card":0,"uuid":"GPU-a","memoryMiB":6462,"compute":40}]},"request":"gpu-mem=6"}'
)
PIECE = Slice(0, DeviceId(A), 6462, 40)
KNOWN = ResizeStatus("u1", (PIECE,), {"main": (PIECE,)}, "gpu-mem=6")


def test_status_has_its_wire_format() -> None:
    """As it stands on pods; one of another pod counts for nothing."""
    assert encode_status(KNOWN) == GOLDEN
    assert decode_status({STATUS: GOLDEN}) == decode_status({STATUS: GOLDEN}, "u1") == KNOWN
    assert decode_status({STATUS: GOLDEN}, "u2") is None
    assert decode_status({}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "Invalid enum value 2 - at `$.version`"),
        ({"more": 1}, "Object contains unknown field `more`"),
        ({"holds": {}}, "Expected `array`, got `object` - at `$.holds`"),
        ({"holds": [1]}, "Expected `object`, got `int` - at `$.holds[0]`"),
        ({"holds": [{"card": 0}]}, "Object missing required field `uuid` - at `$.holds[0]`"),
        (
            {"holds": [{"card": 0, "uuid": A, "memoryMiB": -1, "compute": 0}]},
            "Expected `int` >= 0 - at `$.holds[0].memoryMiB`",
        ),
        (
            {"holds": [{"card": 0, "uuid": A, "memoryMiB": 1, "compute": 0}] * 2},
            "a card is named twice",
        ),
        ({"containers": []}, "Expected `object`, got `array` - at `$.containers`"),
        ({"request": 1}, "Expected `str`, got `int` - at `$.request`"),
        ({"pod": None}, "Expected `str`, got `null` - at `$.pod`"),
    ],
)
def test_decoding_raises_invalid_record_when_record_is_impossible(
    change: dict[str, object], said: str
) -> None:
    """Are not guessed at."""
    text = json.dumps({**json.loads(GOLDEN), **change})
    with pytest.raises(InvalidRecord) as why:
        decode_status({STATUS: text})
    assert str(why.value) == f"annotation fenka.io/resized is not understood: {said}"


@pytest.mark.parametrize("text", ["", "x", "[]", "1", "[" * 100_000])
def test_decoding_raises_invalid_record_when_text_is_no_status(text: str) -> None:
    """Neither crash nor count."""
    with pytest.raises(InvalidRecord):
        decode_status({STATUS: text})


slices = st.builds(
    Slice,
    st.integers(0, 3),
    st.sampled_from([A, B]),
    st.integers(0, 1 << 40),
    st.integers(0, 100),
)
cards = st.lists(slices, max_size=4, unique_by=lambda it: it.card).map(tuple)


@given(
    st.builds(
        ResizeStatus, st.text(), cards, st.dictionaries(st.text(), cards, max_size=3), st.text()
    )
)
def test_status_is_unchanged_when_encoded_and_decoded(record: ResizeStatus) -> None:
    """Whatever is in it."""
    assert decode_status({STATUS: encode_status(record)}) == record


@given(st.text())
def test_any_text_is_a_resize_request_or_invalid(text: str) -> None:
    """It is the user's to write."""
    with contextlib.suppress(InvalidRecord):
        assert decode_request(text, GIB)
