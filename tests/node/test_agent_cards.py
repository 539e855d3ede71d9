"""Annotations of the Node in which people list cards, wrongly."""

from pathlib import Path

import pytest

from fenka.dialects.nodes import CORDONED
from fenka.node.node_api import RESET
from tests.node.harness import card, node_harness
from tests.waiting import until


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({CORDONED: "7"}, f"{CORDONED} names 7, and this node has the cards 0, 1"),
        ({CORDONED: "0 and 1"}, f"{CORDONED} names and, and"),
        ({RESET: "x"}, f"{RESET} names x, and"),
    ],
)
async def test_unknown_card_is_an_event_once_when_an_annotation_names_it(
    library: Path, written: dict[str, str], named: str
) -> None:
    """The card that was meant stays in use, and nobody would know."""
    labels = {"gpushare": "true"}
    async with node_harness(card(0), card(1), library=library, labels=labels) as node:
        await node.ready()
        node.annotate(**written)
        await node.agent.reconcile()
        await node.agent.reconcile()
        await until(
            lambda: [event for event in node.api.events if event["reason"] == "FenkaCardIndexes"]
        )
    notes = [event["note"] for event in node.api.events if event["reason"] == "FenkaCardIndexes"]
    assert len(notes) == 1
    assert named in notes[0]


async def test_no_event_when_all_cards_are_known(library: Path) -> None:
    """A blank beside the comma is no mistake."""
    labels = {"gpushare": "true"}
    async with node_harness(card(0), card(1), library=library, labels=labels) as node:
        await node.ready()
        node.annotate(**{CORDONED: "0, 1"})
        await node.agent.reconcile()
        await node.agent.reconcile()
        assert not [event for event in node.api.events if event["reason"] == "FenkaCardIndexes"]
