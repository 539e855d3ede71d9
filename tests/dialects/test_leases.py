"""What nodes report: its form, its size, and that nothing unreadable is believed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.dialects.base import InvalidRecord
from fenka.dialects.lease_records import (
    MAX_CHARACTERS,
    REPORT,
    LeaseReport,
    Lingering,
    Refusal,
    decode_report,
    encode_report,
)

A, B = "GPU-a", "GPU-b"
GOLDEN = (
    '{"version":1,"cards":["GPU-a","GPU-b"],'
    '"pods":{"u1":[[0,0,4308,0],[1,1,4308,30]]},'
    '"lingering":{"u2":["ns/gone",[[1,1,1077,0]]]},'
    '"refused":{"u3":["fenka: no room",true]}}'
)


def test_report_has_its_wire_format() -> None:
    """Other versions of fenka read it: it changes with its version only."""
    report = LeaseReport(
        {"u1": (Slice(0, DeviceId(A), 4308, 0), Slice(1, DeviceId(B), 4308, 30))},
        {"u2": Lingering("ns/gone", (Slice(1, DeviceId(B), 1077, 0),))},
        {"u3": Refusal("fenka: no room", movable=True)},
    )
    assert encode_report(report) == GOLDEN
    assert decode_report({REPORT: GOLDEN}) == report
    assert decode_report({}) is None


uids = st.uuids().map(str)
slices = st.lists(
    st.builds(
        Slice,
        st.integers(0, 15),
        st.sampled_from([A, B]),
        st.integers(0, 10**6),
        st.integers(0, 100),
    ),
    max_size=3,
).map(tuple)


@given(
    st.builds(
        LeaseReport,
        st.dictionaries(uids, slices, max_size=3),
        st.dictionaries(uids, st.builds(Lingering, st.text(max_size=9), slices), max_size=3),
        st.dictionaries(uids, st.builds(Refusal, st.text(max_size=9), st.booleans()), max_size=3),
    )
)
def test_report_is_unchanged_when_encoded_and_decoded(report: LeaseReport) -> None:
    """Whatever is in it."""
    assert decode_report({REPORT: encode_report(report)}) == report


def test_report_fits_when_500_pods_have_two_cards_each() -> None:
    """The kubelet's own limit is 110 pods; all annotations of an object have 256 KiB."""
    uuids = [f"GPU-00000000-0000-0000-0000-{number:012}" for number in range(16)]
    pods = {
        f"00000000-0000-0000-0000-{number:012}": (
            Slice(number % 16, DeviceId(uuids[number % 16]), 150_000, 100),
            Slice((number + 1) % 16, DeviceId(uuids[(number + 1) % 16]), 150_000, 100),
        )
        for number in range(500)
    }
    refused = {uid: Refusal("x" * 1000, movable=True) for uid in pods}
    assert len(encode_report(LeaseReport(pods))) < 64_000
    # Sentences go first.
    assert len(encode_report(LeaseReport(pods, {}, refused))) < MAX_CHARACTERS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "1",
        "[" * 100_000,
        "{}",
        GOLDEN.replace('"version":1', '"version":2'),
        GOLDEN.replace("[0,0,4308,0]", "[9,0,4308,0]"),
        GOLDEN.replace("[0,0,4308,0]", "[0,0,-1,0]"),
        GOLDEN.replace("[0,0,4308,0]", "[0,0,4308]"),
        json.dumps({**json.loads(GOLDEN), "pods": []}),
    ],
)
def test_decoding_raises_invalid_record_when_text_is_no_report(text: str) -> None:
    """It is refused as a whole."""
    with pytest.raises(InvalidRecord):
        decode_report({REPORT: text})
