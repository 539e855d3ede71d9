"""The sizes that users type."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.request import MAX_MEMORY_MIB, Memory
from fenka.formats.quantities import InvalidSize, parse_memory, parse_unit

GIB = 1024
EXAMPLES = "write 4 for units of the card, or 4096MiB"
TOO_MUCH = "MiB of GPU memory is more than any card has"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", Memory(4, GIB)),
        ("04", Memory(4, GIB)),
        (" 4\n", Memory(4, GIB)),
        ("4.0", Memory(4, GIB)),
        ("4.00GiB", Memory(4096)),
        ("4096MiB", Memory(4096)),
        ("4096Mi", Memory(4096)),
        # 4 * 1024 = 4096
        ("4GiB", Memory(4096)),
        ("4Gi", Memory(4096)),
        ("4 GiB", Memory(4096)),
        # 16 TiB, the most: 16384 * 1024 = 16777216
        ("16384", Memory(16384, GIB)),
        ("16384GiB", Memory(MAX_MEMORY_MIB)),
    ],
)
def test_size_is_parsed(text: str, expected: Memory) -> None:
    """A bare number counts units, a number with a unit is exact."""
    assert parse_memory(text, GIB) == expected


def test_number_counts_units_when_it_has_no_suffix() -> None:
    """In a world of MiB, 512 is 512 MiB."""
    assert parse_memory("512", 1) == Memory(512)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", f"'' is no size: {EXAMPLES}"),
        (" ", f"' ' is no size: {EXAMPLES}"),
        ("abc", f"'abc' is no size: {EXAMPLES}"),
        ("nan", f"'nan' is no size: {EXAMPLES}"),
        ("inf", f"'inf' is no size: {EXAMPLES}"),
        ("1e3", f"'1e3' is no size: {EXAMPLES}"),
        ("0x10", f"'0x10' is no size: {EXAMPLES}"),
        ("1_000", f"'1_000' is no size: {EXAMPLES}"),
        ("4,5", f"'4,5' is no size: {EXAMPLES}"),
        ("4 5", f"'4 5' is no size: {EXAMPLES}"),
        ("4.", f"'4.' is no size: {EXAMPLES}"),
        ("+4", f"'+4' is no size: {EXAMPLES}"),
        ("--4", f"'--4' is no size: {EXAMPLES}"),
        ("GiB", f"'GiB' is no size: {EXAMPLES}"),
        ("4GiB;ls", f"'4GiB;ls' is no size: {EXAMPLES}"),
        # digits, but not those of ASCII
        ("１", f"'１' is no size: {EXAMPLES}"),
        ("٤", f"'٤' is no size: {EXAMPLES}"),
        ("4GB", "'GB' in '4GB' is no unit: write 4GiB"),
        ("4G", "'G' in '4G' is no unit: write 4GiB"),
        ("4MB", "'MB' in '4MB' is no unit: write 4MiB"),
        ("4gib", "'gib' in '4gib' is no unit: write 4GiB"),
        ("1.5GB", "'GB' in '1.5GB' is no unit: use MiB or GiB"),
        ("4k", "'k' in '4k' is no unit: use MiB or GiB"),
        ("0", "'0' is no amount of memory: ask for more than nothing"),
        ("-4", "'-4' is no amount of memory: ask for more than nothing"),
        ("0MiB", "'0MiB' is no amount of memory: ask for more than nothing"),
        ("-0.5", "'-0.5' is no amount of memory: ask for more than nothing"),
        ("0.0", "'0.0' is no amount of memory: ask for more than nothing"),
        # 1.5 * 1024 = 1536
        ("1.5", "'1.5' is not a whole number of units: write 1536MiB"),
        ("1.5GiB", "'1.5GiB' is not a whole number of units: write 1536MiB"),
        # 0.5 * 1024 = 512
        (".5", "'.5' is not a whole number of units: write 512MiB"),
        ("2.7MiB", "'2.7MiB' is not a whole number of units: write 2MiB"),
        # 0.0001 * 1024 = 0.1 -> 0, which would be refused in turn
        ("0.0001", "'0.0001' is not a whole number of units: write 1MiB"),
        # 16 TiB are 16384 GiB; 16385 * 1024 = 16778240
        ("16385", f"'16385' is no amount of memory: 16778240 {TOO_MUCH}"),
        ("16385GiB", f"'16385GiB' is no amount of memory: 16778240 {TOO_MUCH}"),
        # 99999999999 * 1024
        ("99999999999", f"'99999999999' is no amount of memory: 102399999998976 {TOO_MUCH}"),
        # 16384.5 * 1024 = 16777728: not advice, for it would be refused in turn
        ("16384.5", f"'16384.5' is no amount of memory: 16777728 {TOO_MUCH}"),
        ("9999999999999", "'9999999999999' has too many digits to be a size"),
        ("0.0000000000001", "'0.0000000000001' has too many digits to be a size"),
    ],
)
def test_size_is_rejected_with_advice_when_it_is_invalid(text: str, sentence: str) -> None:
    """Each is refused with exactly one sentence, which says what to write."""
    with pytest.raises(InvalidSize) as caught:
        parse_memory(text, GIB)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5", "9" * 5000 + "GiB", "x" * 5000])
def test_long_text_is_cut_when_it_is_quoted(text: str) -> None:
    """A size of thousands of characters is refused like any other, in a sentence that can be read."""
    with pytest.raises(InvalidSize) as caught:
        parse_memory(text, GIB)
    assert str(caught.value).startswith(f"'{text[:20]}")
    assert len(str(caught.value)) < 200


@settings(deadline=None)
@given(text=st.text(max_size=12) | st.text("0123456789.-+ GMiB", max_size=12))
def test_any_text_is_a_size_or_invalid(text: str) -> None:
    """Nothing else ever comes out, and the sentence is one line."""
    sentence = ""
    try:
        assert 0 < parse_memory(text, GIB).nominal_mib(GIB) <= MAX_MEMORY_MIB
    except InvalidSize as why:
        sentence = str(why)
    assert len(sentence.splitlines()) <= 1


@settings(deadline=None)
@given(amount=st.integers(1, 16384), unit=st.sampled_from(["", "MiB", "Mi", "GiB", "Gi"]))
def test_size_is_unchanged_when_written_and_parsed(amount: int, unit: str) -> None:
    """What is written of an amount and a unit is read as that much."""
    memory = parse_memory(f"{amount}{unit}", GIB)
    scale = 1 if unit.startswith("M") else GIB
    assert memory.nominal_mib(GIB) == amount * scale
    assert memory.unit_mib == (1 if unit else GIB)


@settings(deadline=None)
@given(number=st.decimals(0, 20, places=3))
def test_advice_is_a_valid_size_when_size_is_a_fraction(number: Decimal) -> None:
    """What the sentence tells to write is a size: what was meant, in MiB rounded down."""
    try:
        memory = parse_memory(f"{number}GiB", GIB)
    except InvalidSize as why:
        if number == 0:
            return
        memory = parse_memory(str(why).rpartition("write ")[2], GIB)
    assert memory == Memory(max(int(number * GIB), 1))


@pytest.mark.parametrize(("text", "expected"), [("GiB", 1024), ("MiB", 1), ("256MiB", 256)])
def test_unit_is_parsed(text: str, expected: int) -> None:
    """Worlds count in GiB, in MiB, or in some of them."""
    assert parse_unit(text) == expected


@pytest.mark.parametrize("text", ["", "gib", "GB", "Gi", "0MiB", "-1GiB", "1.5GiB", "256"])
def test_unit_is_rejected_when_it_is_invalid(text: str) -> None:
    """Nothing else, and no short forms."""
    with pytest.raises(InvalidSize) as caught:
        parse_unit(text)
    assert str(caught.value) == f"{text!r} is no unit: use GiB, MiB, or a number of them as 256MiB"
