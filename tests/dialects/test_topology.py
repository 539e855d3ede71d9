"""How cards are connected, in a node's inventory; `fenka.io/topology` of pods, in every dialect's names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId, Links
from fenka.dialects import gpu_manager, gpushare, hami
from fenka.dialects.base import CARDS, NVIDIA_GPU, TOPOLOGY, InvalidRecord
from fenka.dialects.nodes import decode_node, encode_inventory
from fenka.dialects.registry import WITH_HAMI, detect
from tests.dialects.builders import T4_MIB, pod

CARDS_OF_NODE = [Card(index, DeviceId(f"GPU-{index}"), "Tesla T4", T4_MIB) for index in range(3)]
LINKS = Links(("GPU-0", "GPU-1", "GPU-2"), bytes([0, 1, 6, 1, 0, 6, 6, 6, 0]))
ALLOCATABLE = {gpushare.MEMORY: "42"}


def decoded(text: str) -> Links | None:
    """What a scheduler reads of an inventory."""
    shared = decode_node("n", {CARDS: text}, ALLOCATABLE)
    assert shared is not None
    return shared.node.links


def test_inventory_has_a_row_for_each_card() -> None:
    """Of digits, in the order of the list."""
    text = encode_inventory(CARDS_OF_NODE, 1024, links=LINKS)
    assert [card["links"] for card in json.loads(text)["cards"]] == ["016", "106", "660"]
    assert decoded(text) == LINKS


def test_inventory_is_that_of_the_last_release_when_distances_are_unknown() -> None:
    """Without rows."""
    text = encode_inventory(CARDS_OF_NODE, 1024)
    assert "links" not in text
    assert decoded(text) is None


def test_card_that_the_driver_no_longer_shows_is_far_from_all() -> None:
    """A lost card stays in the inventory."""
    part = Links(("GPU-0", "GPU-2"), bytes([0, 1, 1, 0]))
    rows = json.loads(encode_inventory(CARDS_OF_NODE, 1024, links=part))["cards"]
    assert [card["links"] for card in rows] == ["061", "606", "160"]


@pytest.mark.parametrize(
    ("rows", "links"),
    [
        # One card without a row, as after a rollback that kept a part.
        (["016", "106", ""], None),
        # Distances of a later release count as the longest.
        (["019", "109", "990"], LINKS),
    ],
)
def test_other_rows_are_read(rows: list[str], links: Links | None) -> None:
    """As far as they are complete."""
    assert decoded(with_rows(rows)) == links


@pytest.mark.parametrize("rows", [["01", "10", "66"], ["0163"] * 3, ["01x"] * 3, ["0" * 63] * 3])
def test_rows_of_other_cards_are_refused(rows: list[str]) -> None:
    """The annotation is not understood."""
    with pytest.raises(InvalidRecord, match=r"annotation fenka\.io/cards of node n"):
        decoded(with_rows(rows))


def with_rows(rows: list[str]) -> str:
    """An inventory with these rows."""
    inventory = json.loads(encode_inventory(CARDS_OF_NODE, 1024))
    for card, row in zip(inventory["cards"], rows, strict=True):
        card["links"] = row
    return json.dumps(inventory)


@given(st.lists(st.text("0123456789 x", max_size=4), min_size=3, max_size=3))
def test_any_rows_are_read_or_refused(rows: list[str]) -> None:
    """No other error."""
    try:
        links = decoded(with_rows(rows))
    except InvalidRecord:
        return
    assert links is None or len(links.distances) == 9


# ---- pods ----

SEVERAL: list[dict[str, int | str]] = [
    {gpu_manager.CORE: 200},
    {NVIDIA_GPU: 2},
    {NVIDIA_GPU: 2, hami.MEMORY: 4000},
]


def asked_for(
    *containers: dict[str, int | str], topology: str, cards: str = ""
) -> list[tuple[bool, bool]]:
    """Whether each part of a pod needs NVLink, and whether its node is chosen by connections."""
    labels = {gpushare.COUNT: cards} if cards else {}
    asked = pod(*containers, annotations={TOPOLOGY: topology}, labels=labels)
    dialect = detect(asked, WITH_HAMI)
    assert dialect is not None
    return [(part.request.linked, part.request.near) for part in dialect.parse(asked)]


@pytest.mark.parametrize("limits", SEVERAL)
def test_required_is_of_all_dialects(limits: dict[str, int | str]) -> None:
    """Of a container with several cards."""
    assert asked_for(limits, topology="required") == [(True, True)]
    assert asked_for(limits, topology="preferred") == [(False, True)]


def test_required_is_of_units_on_several_cards() -> None:
    """In ACK's names."""
    assert asked_for({gpushare.MEMORY: 8}, topology="required", cards="2") == [(True, True)]


def test_container_with_one_card_needs_no_link() -> None:
    """Beside one with two."""
    parts = asked_for({NVIDIA_GPU: 1}, {NVIDIA_GPU: 2}, topology="required")
    assert parts == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("limits", "topology", "sentence"),
    [
        ({NVIDIA_GPU: 2}, "nvlink", "'nvlink': write one of preferred, required"),
        ({NVIDIA_GPU: 2}, "x" * 200, f"{'x' * 40}': write one of"),
        ({NVIDIA_GPU: 1}, "required", "no container requests several cards: request more than one"),
        ({gpushare.MEMORY: 4}, "required", "no container requests several cards"),
        ({"nvidia.com/mig-1g.5gb": 2}, "required", "no container requests several cards"),
    ],
)
def test_what_cannot_be_is_refused(
    limits: dict[str, int | str], topology: str, sentence: str
) -> None:
    """With what to write instead."""
    with pytest.raises(InvalidRecord, match=sentence):
        asked_for(limits, topology=topology)
