"""gpushare's records, read and written: tables, and what is written is what is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.evaluate import Fit, evaluate
from fenka.core.inventory import Card, DeviceId, Node
from fenka.core.request import Memory, Request
from fenka.core.usage import EmptyUsage
from fenka.dialects.base import (
    CARDS,
    ContainerKind,
    ContainerUnits,
    InvalidRecord,
    SharedNode,
    parse_quantity,
    unit_name,
)
from fenka.dialects.gpushare import (
    ALLOCATION,
    IDX,
    POD,
    decode_placement,
    encode_placement,
    parse_request,
    peak_units,
    units_by_card,
)
from fenka.dialects.nodes import decode_node, encode_inventory, parse_indexes, unknown_cards

T4_MIB = 15079
GIB = 1024


def share(*sizes: int, unit_mib: int = GIB) -> SharedNode:
    """Of a node with cards of these sizes."""
    cards = tuple(Card(i, DeviceId(f"GPU-{i}"), "Tesla T4", mib) for i, mib in enumerate(sizes))
    return SharedNode(Node("n", cards, unit_mib=unit_mib))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        (4, 4),
        ("8k", 8000),
        ("1Ki", 1024),
        ("1500m", 2),
        ("1e3", 1000),
        ("0", 0),
        ("2.5", 3),
    ],
)
def test_quantity_is_parsed_as_kubernetes_does(text: str | int, value: int) -> None:
    """Whole numbers, rounded up as Kubernetes does."""
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "4 GiB", "1e", "--1", "1e999", "0x10", "٤x"])
def test_parsing_raises_invalid_record_when_text_is_no_quantity(text: str) -> None:
    """Never 0."""
    with pytest.raises(InvalidRecord):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("asks", "units"),
    [
        ([], 0),
        ([ContainerUnits("a", 3), ContainerUnits("b", 1)], 4),
        ([ContainerUnits("i", 6, ContainerKind.INIT), ContainerUnits("a", 4)], 6),
        ([ContainerUnits("i", 2, ContainerKind.INIT), ContainerUnits("a", 4)], 4),
        # A sidecar runs beside the init containers after it and beside all apps.
        (
            [
                ContainerUnits("s", 2, ContainerKind.SIDECAR),
                ContainerUnits("i", 3, ContainerKind.INIT),
                ContainerUnits("a", 4),
            ],
            6,
        ),
        (
            [
                ContainerUnits("i", 3, ContainerKind.INIT),
                ContainerUnits("s", 2, ContainerKind.SIDECAR),
                ContainerUnits("a", 1),
            ],
            3,
        ),
        (
            [
                ContainerUnits("s", 2, ContainerKind.SIDECAR),
                ContainerUnits("i", 5, ContainerKind.INIT),
                ContainerUnits("a", 4),
            ],
            7,
        ),
    ],
)
def test_peak_units_count_init_containers_and_sidecars(
    asks: list[ContainerUnits], units: int
) -> None:
    """As the scheduler counts."""
    assert peak_units(asks) == units


@pytest.mark.parametrize(
    ("allocation", "asks", "cards", "held"),
    [
        ({0: {1: 4}}, [ContainerUnits("a", 4)], [], {1: 4}),
        ({0: {1: 1}, 1: {1: 7}}, [ContainerUnits("a", 1), ContainerUnits("b", 7)], [], {1: 8}),
        ({0: {0: 2, 2: 2}}, [ContainerUnits("a", 4)], [], {0: 2, 2: 2}),
        # An init container of 6 on the card of an app of 4.
        (
            {0: {1: 4}},
            [ContainerUnits("i", 6, ContainerKind.INIT), ContainerUnits("a", 4)],
            [],
            {1: 6},
        ),
        # 10 over two cards that hold alike: 5 on each.
        (
            {0: {0: 2, 2: 2}},
            [ContainerUnits("i", 10, ContainerKind.INIT), ContainerUnits("a", 4)],
            [],
            {0: 5, 2: 5},
        ),
        # Cards that hold unlike: never more than 10 in all.
        (
            {0: {0: 1, 1: 7}},
            [ContainerUnits("i", 10, ContainerKind.INIT), ContainerUnits("a", 8)],
            [],
            {0: 2, 1: 8},
        ),
        (
            {0: {0: 1, 1: 7}},
            [ContainerUnits("i", 9, ContainerKind.INIT), ContainerUnits("a", 8)],
            [],
            {0: 2, 1: 7},
        ),
        # Init containers alone: the record names no card, another annotation does.
        ({}, [ContainerUnits("i", 6, ContainerKind.INIT), ContainerUnits("a", 0)], [2], {2: 6}),
        (
            {},
            [ContainerUnits("i", 6, ContainerKind.INIT), ContainerUnits("a", 0)],
            [0, 1],
            {0: 3, 1: 3},
        ),
        ({}, [ContainerUnits("a", 0)], [], {}),
    ],
)
def test_units_by_card_add_up_to_the_peak(
    allocation: dict[int, dict[int, int]],
    asks: list[ContainerUnits],
    cards: list[int],
    held: dict[int, int],
) -> None:
    """Containers together, at their peak."""
    assert units_by_card(allocation, asks, cards) == held


@given(
    apps=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    init=st.integers(0, 20),
    cards=st.integers(1, 3),
    unit=st.sampled_from([GIB, 256, 1]),
)
def test_placement_is_unchanged_when_encoded_and_decoded_for_any_containers(
    apps: list[int], init: int, cards: int, unit: int
) -> None:
    """Whatever the containers: the placement comes back from the annotations."""
    node = share(T4_MIB, T4_MIB, 16 * GIB, unit_mib=unit)
    asks = [ContainerUnits("i", init * cards, ContainerKind.INIT)]
    asks += [ContainerUnits(f"a{i}", units * cards) for i, units in enumerate(apps)]
    request = parse_request(asks, {"aliyun.com/gpu-count": str(cards)})
    if request is None:
        assert peak_units(asks) == 0
        return
    (verdict,) = evaluate(EmptyUsage(), request, "binpack", (node.node,))
    if isinstance(verdict, Fit):
        written = encode_placement(node, verdict.placement, asks, 1)
        assert decode_placement(node, written, asks) == verdict.placement


def test_request_is_in_the_nodes_units() -> None:
    """Units of the node, over so many cards."""
    assert parse_request([ContainerUnits("a", 4)], {}) == Request(Memory(4, None))
    two = {"aliyun.com/gpu-count": "2"}
    assert parse_request([ContainerUnits("a", 4)], two) == Request(Memory(2, None), cards=2)
    assert parse_request([ContainerUnits("a", 0)], {}) is None
    for labels, asks in (
        (two, [ContainerUnits("a", 3)]),
        (two, [ContainerUnits("a", 3), ContainerUnits("b", 1)]),
        ({"aliyun.com/gpu-count": "0"}, [ContainerUnits("a", 4)]),
        ({"aliyun.com/gpu-count": "-2"}, [ContainerUnits("a", 4)]),
        ({"aliyun.com/gpu-count": "9999"}, [ContainerUnits("a", 9999)]),
        # Python refuses to convert so many digits
        ({"aliyun.com/gpu-count": "1" * 5000}, [ContainerUnits("a", 4)]),
        ({}, [ContainerUnits("a", 10**9)]),
        ({}, [ContainerUnits("a", -4)]),
    ):
        if peak_units(asks) > 0:
            with pytest.raises(InvalidRecord):
                parse_request(asks, labels)


def test_second_generation_counts_when_both_are_recorded() -> None:
    """Where both are there."""
    annotations = {IDX: "0", POD: "4", ALLOCATION: '{"0":{"1":4}}'}
    placement = decode_placement(share(T4_MIB, T4_MIB), annotations, [ContainerUnits("a", 4)])
    assert placement is not None
    assert [(it.card, it.memory_mib) for it in placement.slices] == [(1, T4_MIB * 4 // 14)]


@pytest.mark.parametrize(
    "annotations",
    [
        {IDX: "x"},
        {IDX: "-1"},
        {IDX: "7"},
        {ALLOCATION: "{"},
        {ALLOCATION: "[]"},
        {ALLOCATION: '{"0":{"0":-4}}'},
        {ALLOCATION: '{"0":{"-1":4}}'},
        {ALLOCATION: '{"0":{"0":true}}'},
        {ALLOCATION: '{"0":{"0":"4"}}'},
        {ALLOCATION: "{}"},
        {IDX: "0", CARDS: "["},
        {IDX: "0", CARDS: '{"0":"GPU-exchanged"}'},
    ],
)
def test_decoding_raises_invalid_record_when_record_cannot_be_read(
    annotations: dict[str, str],
) -> None:
    """Said, never taken for card 0 and never for nothing."""
    with pytest.raises(InvalidRecord):
        decode_placement(share(T4_MIB), annotations, [ContainerUnits("a", 4)])


def test_node_is_decoded_with_and_without_inventory() -> None:
    """Unequal cards are read as they are; gpushare's are equal parts, in the unit that its screens guess."""
    cards = share(T4_MIB, 7611).node.cards
    annotations = {CARDS: encode_inventory(cards, GIB), "fenka.io/cordoned": "1"}
    found = decode_node("n", annotations, {"aliyun.com/gpu-mem": "21"})
    assert found is not None
    assert [(it.memory_mib, it.cordoned) for it in found.node.cards] == [
        (T4_MIB, False),
        (7611, True),
    ]
    assert found.total_units == 21
    four = {"aliyun.com/gpu-mem": "64", "aliyun.com/gpu-count": "4"}
    plain = decode_node("n", {}, four)
    assert plain is not None
    assert [it.memory_mib for it in plain.node.cards] == [16 * GIB] * 4
    assert not plain.has_inventory
    mib = decode_node("n", {}, {"aliyun.com/gpu-mem": "16276", "aliyun.com/gpu-count": "1"})
    assert mib is not None
    assert unit_name(mib.unit_mib) == "MiB"
    assert decode_node("n", annotations, {}) is None


def test_indexes_are_parsed_as_people_write_them() -> None:
    """gpushare took what it could not read for card 0."""
    assert parse_indexes("0,2") == {0, 2}
    assert parse_indexes("") == frozenset()
    assert parse_indexes("x, 1;3,,-1, 2") == {2}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0,1", ""),
        ("", ""),
        ("7", "names 7,"),
        ("0 x,-1", "names x, -1,"),
        ("9" * 4000, f"{'9' * 20},"),
    ],
)
def test_unknown_cards_are_named_when_a_person_lists_them(text: str, named: str) -> None:
    """A typing error would leave a card in use that is thought to be closed."""
    sentence = unknown_cards("fenka.io/cordoned", text, {0, 1})
    assert bool(sentence) == bool(named)
    assert named in sentence
    assert len(sentence) < 300
