"""What `fenka why` says of pods that request MIG instances, or slices in them."""

import json

import pytest

from fenka.cluster.explain import CHANGE_REQUEST, DIVIDE_CARDS
from fenka.dialects.mig_records import INSTANCE
from tests.builders import Json, gang_labels
from tests.cluster.explanations import data, objects
from tests.mig_builders import A100, inside_pod_json, mig_node_json, mig_pod_json

HOLDER = mig_pod_json(
    "h",
    "3g.20gb",
    node="n",
    annotations={INSTANCE: json.dumps([{"card": "GPU-n-0", "start": 0, "profile": "3g.20gb"}])},
)
NODE = mig_node_json(
    "n", "A100", "T4", present={(0, "1g.5gb", 6): "foreign"}, labels={"fenka.io/mig": "on-demand"}
)
NODE["status"]["allocatable"] |= {
    f"nvidia.com/mig-{name}": "2" for name in ("3g.20gb", "4g.20gb", "7g.40gb")
}
HELD = "0/0 3g.20gb is held by default/h, 0/6 1g.5gb is an administrator's"


@pytest.mark.parametrize(
    ("pod", "reason", "hint"),
    [
        (
            mig_pod_json("p", "4g.20gb"),
            f"no card has room for 4g.20gb: {HELD}",
            "it starts when default/h ends (20096 MiB of the instance 3g.20gb at 0 of card 0 of n)",
        ),
        (
            mig_pod_json("p", "7g.40gb"),
            f"no card has room for 7g.40gb: {HELD}",
            "no single pod's end makes room: free cards, or add a node",
        ),
        (
            mig_pod_json("p", "5g.30gb"),
            f"no card has a profile 5g.30gb: A100 has {', '.join(A100.by_name)}",
            CHANGE_REQUEST,
        ),
        (
            mig_pod_json("p", "3x3g.20gb"),
            "the cards here have at most 2 instances 3g.20gb, ask for no more",
            CHANGE_REQUEST,
        ),
        (
            inside_pod_json("p", 19),
            f"no instance has room for the slice, and none can be created: {HELD}",
            "it starts when default/h ends (20096 MiB of the instance 3g.20gb at 0 of card 0 of n)",
        ),
        (
            inside_pod_json("p", 60),
            "no instance here is large enough: the largest card has 39 units, ask for no more",
            CHANGE_REQUEST,
        ),
    ],
)
def test_pending_pod_is_told_what_holds_its_place(pod: Json, reason: str, hint: str) -> None:
    """And whose end would make room, if one's alone does."""
    explained = data(objects(nodes=[NODE], pods=[pod, HOLDER]), "p")
    assert [node["reasons"] for node in explained["nodes"]] == [[reason]]
    never = hint == CHANGE_REQUEST
    assert explained["hints"] == ([hint, DIVIDE_CARDS] if never else [hint])
    assert explained["never"] == (reason if never else "")


def test_pod_fits_where_a_place_is_free() -> None:
    """The other half of the card has a place for 2g."""
    NODE["status"]["allocatable"]["nvidia.com/mig-2g.10gb"] = "3"
    explained = data(objects(nodes=[NODE], pods=[mig_pod_json("p", "2g.10gb"), HOLDER]), "p")
    assert explained["nodes"][0]["fits"]


def test_node_without_divided_cards_says_how_to_divide_them() -> None:
    """By its label."""
    node = mig_node_json("n", "T4", labels={"fenka.io/mig": "off"})
    explained = data(objects(nodes=[node], pods=[mig_pod_json("p", "1g.5gb")]), "p")
    assert explained["nodes"][0]["reasons"] == [
        "its owner has no card divided into MIG instances: label fenka.io/mig=on-demand does that"
    ]


def test_placed_pod_shows_its_instance() -> None:
    """By profile and place."""
    explained = data(objects(nodes=[NODE], pods=[HOLDER]), "h")
    assert explained["slices"] == ["20096 MiB of the instance 3g.20gb at 0 of card 0 on n, GPU-n-0"]


@pytest.mark.parametrize(
    ("inside", "where"),
    [("mig", "a MIG instance of one card"), ("2g.10gb", "an instance 2g.10gb of one card")],
)
def test_summary_says_that_slices_are_in_an_instance(inside: str, where: str) -> None:
    """Of any profile, or of one."""
    explained = data(objects(nodes=[NODE], pods=[inside_pod_json("p", 4, inside)]), "p")
    assert explained["summary"] == (
        f"default/p is pending: it asks for 4 units of aliyun.com/gpu-mem on {where}."
    )


def test_record_that_no_card_can_have_holds_nothing() -> None:
    """Its owner can write it; the sentence says what is wrong."""
    for place in (("GPU-n-0", 3, "3g.20gb"), ("GPU-n-9", 0, "3g.20gb"), ("GPU-n-0", 0, "7g.40gb")):
        record = json.dumps([dict(zip(("card", "start", "profile"), place, strict=True))])
        holder = mig_pod_json("x", "3g.20gb", node="n", annotations={INSTANCE: record})
        explained = data(objects(nodes=[NODE], pods=[mig_pod_json("p", "4g.20gb"), holder]), "p")
        assert explained["nodes"][0]["fits"], explained
        assert any("default/x on n: " in note for note in explained["notes"])


def test_gang_is_told_that_it_cannot_be_in_instances() -> None:
    """As the extender says."""
    pod = mig_pod_json("p", "4g.20gb", labels=gang_labels("g", 2))
    explained = data(objects(nodes=[NODE], pods=[pod]), "p")
    assert explained["hints"] == [
        "the members of a gang cannot be in MIG instances: CUDA connects no two of them"
    ]
