"""The divided cards of a Node, as an annotation, and the shared node that is made of them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId
from fenka.core.mig.geometry import TABLES, Geometry, Place
from fenka.dialects.base import InvalidRecord
from fenka.dialects.mig_records import (
    INSTANCES,
    DividedCard,
    InstanceState,
    decode_instances,
    encode_instances,
)
from fenka.dialects.nodes import decode_node, encode_inventory, with_unhealthy
from tests.dialects.mig_builders import A100, A100_MIB

MEM = "aliyun.com/gpu-mem"
CARDS = tuple(Card(number, DeviceId(f"GPU-{number}"), "A100", A100_MIB) for number in range(3))


def place(profile: str, start: int, geometry: Geometry = A100) -> Place:
    """Return a place of a profile."""
    return Place(geometry.by_name[profile], start)


def record(*divided: DividedCard) -> dict[str, str]:
    """Return the annotations of a node with three cards, of which these are divided."""
    inventory = {"fenka.io/cards": encode_inventory(CARDS, 1024)}
    return inventory | ({INSTANCES: encode_instances(divided)} if divided else {})


HALVES = DividedCard(
    DeviceId("GPU-1"), A100, True, {place("3g.20gb", 4): "own", place("4g.20gb", 0): "foreign"}
)


def test_record_of_divided_cards_is_as_written() -> None:
    """Golden: each geometry once, cards by its number, instances by their start."""
    small = replace(TABLES["A30"], profiles=TABLES["A30"].profiles[:1])
    one = DividedCard(DeviceId("GPU-0"), small, True, {place("1g.6gb", 3, small): "own"})
    two = DividedCard(
        DeviceId("GPU-1"),
        small,
        False,
        {place("1g.6gb", 2, small): "leaving", place("1g.6gb", 0, small): "foreign"},
    )
    text = encode_instances([one, two])
    assert text == (
        '{"geometries":[{"model":"A30","compute":4,"sms":56,'
        '"profiles":[["1g.6gb",14,0,1,1,[0,1,2,3],4,5952,14]]}],'
        '"cards":[{"uuid":"GPU-0","geometry":0,"onDemand":true,"instances":[["1g.6gb",3,"own"]]},'
        '{"uuid":"GPU-1","geometry":0,"onDemand":false,'
        '"instances":[["1g.6gb",0,"foreign"],["1g.6gb",2,"leaving"]]}]}'
    )
    assert decode_instances({INSTANCES: text}) == (one, two)
    assert decode_instances({}) == ()


STATES: st.SearchStrategy[InstanceState] = st.sampled_from(["own", "leaving", "foreign"])


@st.composite
def divided_cards(draw: st.DrawFn) -> list[DividedCard]:
    """Return cards of known models with any instances; whether they overlap is the driver's matter."""
    cards = []
    for number in range(draw(st.integers(0, 3))):
        geometry = TABLES[draw(st.sampled_from(sorted(TABLES)))]
        starts = st.sampled_from(geometry.places)
        instances = draw(st.dictionaries(starts, STATES, max_size=4))
        cards.append(
            DividedCard(DeviceId(f"GPU-{number}"), geometry, draw(st.booleans()), instances)
        )
    return cards


@given(divided=divided_cards())
def test_divided_cards_are_unchanged_when_encoded_and_decoded(divided: list[DividedCard]) -> None:
    """Cards of one model have the same object for it, so that what is computed of it is computed once."""
    found = decode_instances({INSTANCES: encode_instances(divided)})
    assert list(found) == divided
    models = {card.geometry.model: card.geometry for card in found}
    assert all(card.geometry is models[card.geometry.model] for card in found)


def changed(path: tuple[str | int, ...], value: object) -> str:
    """Return the record of HALVES with one value changed."""
    decoded = json.loads(encode_instances([HALVES]))
    inner: Any = decoded
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(decoded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 99_999,
        changed(("cards", 0, "geometry"), 1),
        changed(("cards", 0, "geometry"), -1),
        changed(("cards", 0, "instances", 0, 0), "5g.9gb"),
        changed(("cards", 0, "instances", 0, 1), 16),
        changed(("cards", 0, "instances", 0, 2), "mine"),
        changed(("cards", 0, "instances", 0), []),
        changed(("cards", 0, "other"), 1),
        changed(("geometries", 0, "sms"), 0),
        changed(("geometries", 0, "profiles", 0, 4), 17),
        changed(("geometries", 0, "profiles", 0, 5), [99]),
        changed(("geometries", 0, "profiles", 0, 7), 1e400),
    ],
)
def test_record_of_divided_cards_is_rejected_when_it_is_none(text: str) -> None:
    """One sentence of bounded length that names the annotation."""
    with pytest.raises(
        InvalidRecord, match=r"^annotation fenka.io/instances is not understood"
    ) as why:
        decode_instances({INSTANCES: text})
    assert len(str(why.value)) < 300


# --- the shared node --------------------------------------------------------------------------------


def test_node_has_instances_for_pods_beside_its_cards() -> None:
    """An administrator's instance only takes its place. 42 of 108 multiprocessors are 38 percent."""
    shared = decode_node("n", record(HALVES), {MEM: "120"})
    assert shared is not None
    assert shared.shares_cards
    assert [(card.uuid, card.divided) for card in shared.node.cards] == [
        ("GPU-0", False),
        ("GPU-1", True),
        ("GPU-2", False),
        ("GPU-1/4/3g.20gb", False),
    ]
    instance = shared.node.cards[3]
    assert (instance.index, instance.parent, instance.start) == (1, "GPU-1", 4)
    assert (instance.memory_mib, instance.compute) == (20096, 38)
    assert shared.division.geometries == {"GPU-1": A100}
    assert shared.division.taken == {"GPU-1": {place("4g.20gb", 0): "is an administrator's"}}
    assert not shared.division.fixed
    # 3 · 40: the card has as many units as before it was divided.
    assert shared.total_units == 120
    assert [shared.card_units(index) for index in range(4)] == [40, 40, 40, 0]


def test_node_without_slices_shares_its_divided_cards_alone() -> None:
    """The kubelet gives the others away whole, and fenka's scheduler does not know to whom."""
    shared = decode_node("n", record(HALVES), {"nvidia.com/gpu": "2"})
    assert shared is not None
    assert not shared.shares_cards
    assert [card.uuid for card in shared.node.cards] == ["GPU-1", "GPU-1/4/3g.20gb"]
    assert decode_node("n", record(), {"nvidia.com/gpu": "3"}) is None
    nothing = {INSTANCES: encode_instances([])}
    assert decode_node("n", record() | nothing, {"nvidia.com/gpu": "3"}) is None
    # Without an inventory nobody knows which cards the record is of.
    assert decode_node("n", {INSTANCES: encode_instances([HALVES])}, {}) is None


def test_divided_card_that_the_node_does_not_have_is_ignored() -> None:
    """The card was taken out, and the record is written a moment later."""
    shared = decode_node("n", record(replace(HALVES, uuid=DeviceId("GPU-9"))), {MEM: "120"})
    assert shared is not None
    assert [card.uuid for card in shared.node.cards] == ["GPU-0", "GPU-1", "GPU-2"]
    assert not shared.division.geometries


def test_instances_are_closed_when_their_card_is() -> None:
    """By an annotation of the Node, and by the health of the card."""
    annotations = {**record(HALVES), "fenka.io/cordoned": "1"}
    shared = decode_node("n", annotations, {MEM: "120"})
    assert shared is not None
    assert [card.cordoned for card in shared.node.cards] == [False, True, False, True]
    unhealthy = with_unhealthy(shared, frozenset({1}))
    assert [card.healthy for card in unhealthy.node.cards] == [True, False, True, False]


def test_card_takes_no_new_instances_when_only_layouts_create_them() -> None:
    """Its instances serve pods all the same."""
    shared = decode_node("n", record(replace(HALVES, on_demand=False)), {MEM: "120"})
    assert shared is not None
    assert shared.division.fixed == {"GPU-1"}
    assert shared.node.cards[-1].uuid == "GPU-1/4/3g.20gb"


@settings(deadline=None, max_examples=300)
@given(
    data=st.data(), other=st.text(max_size=3) | st.sampled_from(["0", "-1", "1e400", "null", "[]"])
)
def test_node_is_read_or_rejected_when_a_part_of_its_record_changes(
    data: st.DataObject, other: str
) -> None:
    """Nothing but InvalidRecord; what is read has the instances of its own cards only."""
    text = encode_instances([HALVES])
    first = data.draw(st.integers(0, len(text)))
    last = data.draw(st.integers(first, min(first + 8, len(text))))
    annotations = {**record(), INSTANCES: text[:first] + other + text[last:]}
    try:
        shared = decode_node("n", annotations, {MEM: "120"})
    except InvalidRecord:
        return
    assert shared is not None
    assert {card.parent for card in shared.node.cards} <= {None, *shared.division.geometries}
