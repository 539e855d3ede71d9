"""Which requests are possible, and the sentences for those that are not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.request import MAX_HOST, MAX_MEMORY_MIB, InvalidRequest, Memory, Request
from tests.core.builders import GIB, P4_MIB, T4_MIB, V100_MIB


@pytest.mark.parametrize(
    ("amount", "unit_mib", "sentence"),
    [
        (0, GIB, "GPU memory must be more than nothing, not 0"),
        (-4, GIB, "GPU memory must be more than nothing, not -4"),
        # 16 TiB are 16384 GiB; 16385 * 1024 = 16778240
        (16385, GIB, "16778240 MiB of GPU memory is more than any card has"),
        (MAX_MEMORY_MIB + 1, 1, "16777217 MiB of GPU memory is more than any card has"),
        (4, 0, "a unit of GPU memory must be 1 MiB or more, not 0"),
        (4, -1024, "a unit of GPU memory must be 1 MiB or more, not -1024"),
        # units of the node are at least 1 MiB each
        (2**53, None, f"{2**53} MiB of GPU memory is more than any card has"),
        (0, None, "GPU memory must be more than nothing, not 0"),
    ],
)
def test_memory_is_rejected_when_it_is_impossible(
    amount: int, unit_mib: int | None, sentence: str
) -> None:
    """Each case has one sentence."""
    with pytest.raises(InvalidRequest) as caught:
        Memory(amount, unit_mib)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("amount", "unit_mib"),
    [(1, 1), (16384, GIB), (MAX_MEMORY_MIB, 1), (1, MAX_MEMORY_MIB), (MAX_MEMORY_MIB, None)],
)
def test_memory_is_accepted_when_it_is_just_possible(amount: int, unit_mib: int | None) -> None:
    """These are the smallest and the largest amounts."""
    assert Memory(amount, unit_mib).amount == amount


@pytest.mark.parametrize(
    ("memory", "card_mib", "expected"),
    [
        # S1: 15079 * 4 // 14
        (Memory(4, GIB), T4_MIB, 4308),
        # the same units are another size on another card: 7 units, 7611 * 4 // 7
        (Memory(4, GIB), P4_MIB, 4349),
        # exact sizes are not
        (Memory(4096), T4_MIB, 4096),
        (Memory(4096), P4_MIB, 4096),
        # S5.1: 2 * 8065 = 16130
        (Memory(8065), V100_MIB, 8065),
        # a T4 has 14 units and 15079 MiB
        (Memory(14, GIB), T4_MIB, 15079),
        (Memory(15, GIB), T4_MIB, None),
        (Memory(15079), T4_MIB, 15079),
        (Memory(15080), T4_MIB, None),
        # no unit at all
        (Memory(1, GIB), 1023, None),
    ],
)
def test_memory_depends_on_the_card_only_when_it_is_in_units(
    memory: Memory, card_mib: int, expected: int | None
) -> None:
    """Exact sizes are the same on each card. None means that the card is too small."""
    assert memory.mib_on(card_mib, GIB) == expected


@pytest.mark.parametrize(
    ("memory", "node_unit", "nominal", "on_t4"),
    [
        # in the node's units: 15079 // 256 = 58, 15079 * 4 // 58 = 1039; in MiB exactly 4
        (Memory(4, None), GIB, 4096, 4308),
        (Memory(4, None), 256, 1024, 1039),
        (Memory(4, None), 1, 4, 4),
        # a unit of its own does not depend on the node: 15079 // 512 = 29, 15079 * 4 // 29 = 2079
        (Memory(4, 512), GIB, 2048, 2079),
        (Memory(4, 512), 1, 2048, 2079),
        # 58 units of 256 MiB are all of the card, 59 are more
        (Memory(58, None), 256, 14848, T4_MIB),
        (Memory(59, None), 256, 15104, None),
        # a unit that is larger than the card
        (Memory(1, None), 16000, 16000, None),
        (Memory(1, None), T4_MIB, T4_MIB, T4_MIB),
    ],
)
def test_memory_is_of_the_nodes_unit_only_when_it_has_none_of_its_own(
    memory: Memory, node_unit: int, nominal: int, on_t4: int | None
) -> None:
    """`nominal_mib` is units times unit, `mib_on` has the share of the rest too."""
    assert memory.nominal_mib(node_unit) == nominal
    assert memory.mib_on(T4_MIB, node_unit) == on_t4


@settings(deadline=None)
@given(
    amount=st.integers(1, 200), unit=st.sampled_from([1, 256, GIB]), size=st.integers(0, 200_000)
)
def test_memory_is_at_most_the_card_when_units_are_converted(
    amount: int, unit: int, size: int
) -> None:
    """It is at least what the units amount to."""
    mib = Memory(amount, unit).mib_on(size, GIB)
    if mib is not None:
        assert amount * unit <= mib <= size


FOUR = Memory(4, GIB)
TOO_MUCH = "no host has so much CPU or memory: ask for less"
NEITHER = "a whole card comes with all its memory and compute: ask for neither"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "ask for GPU memory, for compute, or for whole cards"),
        ({"memory": FOUR, "cards": 0}, "the number of cards must be 1 to 1024, not 0"),
        ({"memory": FOUR, "cards": -1}, "the number of cards must be 1 to 1024, not -1"),
        ({"whole": True, "cards": 1025}, "the number of cards must be 1 to 1024, not 1025"),
        ({"compute": 101}, "compute is a percentage of one card, 0 to 100, not 101"),
        ({"compute": -5}, "compute is a percentage of one card, 0 to 100, not -5"),
        ({"memory": FOUR, "cpu_milli": -1}, "CPU and host memory cannot be negative"),
        ({"memory": FOUR, "host_memory_mib": -1}, "CPU and host memory cannot be negative"),
        ({"memory": FOUR, "cpu_milli": MAX_HOST + 1}, TOO_MUCH),
        ({"memory": FOUR, "host_memory_mib": 2**63}, TOO_MUCH),
        ({"whole": True, "cpu_milli": 10**21}, TOO_MUCH),
        ({"whole": True, "memory": FOUR}, NEITHER),
        ({"whole": True, "compute": 30}, NEITHER),
    ],
)
def test_request_is_rejected_when_it_is_impossible(fields: dict[str, Any], sentence: str) -> None:
    """Each sentence says what would be possible."""
    with pytest.raises(InvalidRequest) as caught:
        Request(**fields)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"memory": FOUR},
        {"memory": FOUR, "compute": 40, "cards": 2},
        {"compute": 1},
        {"compute": 100},
        {"whole": True, "cards": 1024},
        {"memory": FOUR, "cpu_milli": 1 << 50, "host_memory_mib": 1 << 50},
        {"memory": FOUR, "models": frozenset({"Tesla T4"}), "cpu_milli": 1, "host_memory_mib": 1},
    ],
)
def test_request_is_accepted_when_it_is_possible(fields: dict[str, Any]) -> None:
    """Memory, compute, both, or whole cards."""
    request = Request(**fields)
    assert {name: getattr(request, name) for name in fields} == fields
