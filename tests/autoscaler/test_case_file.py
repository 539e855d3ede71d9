"""Case files: what is read of them, and the sentence for each mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from fenka.autoscaler.inputs import decode_case, read_case
from fenka.core.errors import InvalidCase
from tests.autoscaler.cases import JSON, case, group, node, request


def decoded(document: object) -> Any:
    """Return the case of a document."""
    return decode_case(json.dumps(document).encode())


def test_case_has_the_defaults_when_only_what_is_required_is_given() -> None:
    """One card of a request, none of a group, no limit of anything."""
    small = {"name": "g", "price": 1, "cpu_milli": 4000, "memory_mib": 8192}
    read = decoded(case({"name": "r"}, groups=[small]))
    (of_group,), (asked,) = read.groups, read.requests
    assert (of_group.zone, of_group.capacity, of_group.pods, of_group.max) == (
        "",
        "on-demand",
        110,
        1000,
    )
    assert (of_group.stock, of_group.cards, of_group.min) == (None, (), 0)
    assert (asked.count, asked.cards, asked.memory, asked.gang) == (1, 1, None, None)
    assert (read.limits.nodes, read.limits.price, read.nodes, read.gangs) == (None, None, (), {})


def test_case_is_read_when_everything_is_given(tmp_path: Path) -> None:
    """The example of the format."""
    path = tmp_path / "case.json"
    document = case(
        request(tolerations=[{"key": "k", "operator": "Exists"}], gang="g", duration_s=3.5),
        groups=[group(taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}], stock=None)],
        nodes=[node("gpu-1", 4308, held={"cpu_milli": 500, "resources": {"x/y": 1}})],
        gangs={"g": {"zone": "same"}},
        limits={"nodes": None, "price": 7.25, "cards": {"Tesla T4": 8}},
        why="made by hand",
    )
    path.write_text(json.dumps(document))
    read = read_case(path)
    assert read.requests[0].tolerations[0].operator == "Exists"
    assert read.nodes[0].cards[0].held_mib == 4308
    assert read.gangs["g"].zone == "same"
    assert read.limits.price == 7.25


T4 = group()

MISTAKES: list[tuple[object, str]] = [
    (case(groups=[{**T4, "maxx": 3}]), "groups[0].maxx is not known: did you mean max?"),
    (
        case({**request(), "xyz": 3}, groups=[{**T4, "maxx": 3}]),
        "groups[0].maxx is not known: did you mean max?; requests[0].xyz is not known: remove it",
    ),
    (case(groups=[], limit={}), "limit is not known: did you mean limits?"),
    (case({**request(), "xyz": 3}, groups=[]), "requests[0].xyz is not known: remove it"),
    (
        case(request(memory={"unit": 3}), groups=[]),
        "requests[0].memory.unit is not known: did you mean units?",
    ),
    (
        case(groups=[], nodes=[node(held={"gpu": 1})]),
        "nodes[0].held.gpu is not known: remove it",
    ),
    (case(groups=[], gangs={"g": {"zones": "any"}}), "gangs.g.zones is not known"),
    (case(groups=[T4, T4]), "groups has 't4' 2 times: names must differ"),
    (case(request(), request(), groups=[]), "requests has 'r' 2 times: names must differ"),
    (case(groups=[{**T4, "min": 3, "max": 2}]), "groups[0] (t4).max is 2, less than its min of 3"),
    (case(groups=[{**T4, "price": -1}]), "groups[0] (t4).price is -1: it must be 0 to"),
    (case(groups=[{**T4, "price": 0.00001}]), "it may have 4 decimals"),
    (
        case(groups=[{**T4, "min": 3}], limits={"nodes": 2}),
        "limits.nodes is 2, but the groups' min",
    ),
    (
        case(groups=[{**T4, "min": 3}], limits={"price": 11.9}),
        "limits.price is 11.9, but the groups' min requires 12 an hour",
    ),
    (
        case(groups=[{**T4, "min": 3}], limits={"cards": {"Tesla T4": 2}}),
        "limits.cards.Tesla T4 is 2, but the groups' min requires 3 cards",
    ),
    (
        case(groups=[{**T4, "capacity": "cheap"}]),
        "groups[0].capacity must be on-demand or spot, not 'cheap'",
    ),
    (case(groups=[{**T4, "cpu_milli": -1}]), "groups[0] (t4).cpu_milli is -1: it must be 0 to"),
    (case(groups=[{"name": "g"}]), "groups[0] has no cpu_milli"),
    (case(request(count=-1), groups=[]), "requests[0] (r).count is -1: it must be 0 to"),
    (case(request(compute=101), groups=[]), "compute is a percentage of one card"),
    (case(request(whole=True), groups=[]), "a whole card comes with all its memory"),
    (case(request(memory={"units": 1, "mib": 1}), groups=[]), "has both units and mib"),
    (
        case(request(cards=True), groups=[]),
        "requests[0].cards must be a whole number, not true or false",
    ),
    (case(groups=[], nodes=[node("new:t4:0")]), "names of new nodes begin so"),
    (
        {**case(groups=[]), "format": "fenka.plan/2"},
        "format must be fenka.plan/1, not 'fenka.plan/2'",
    ),
    ([], "the case must be an object, not a list"),
]


@pytest.mark.parametrize(("document", "sentence"), MISTAKES)
def test_case_is_refused_with_a_sentence_when_it_has_a_mistake(
    document: JSON, sentence: str
) -> None:
    """The sentence names the field."""
    with pytest.raises(InvalidCase) as why:
        decoded(document)
    assert sentence in str(why.value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b'"' + b"[" * 100_000, b"\xff", b"[" * 100_000, b"1e999"]
)
def test_case_is_refused_when_it_is_no_json(text: bytes) -> None:
    """Whatever it is instead."""
    with pytest.raises(InvalidCase):
        decode_case(text)
