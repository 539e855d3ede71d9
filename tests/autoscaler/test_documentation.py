"""The page about the autoscaler names its events."""

import re
from pathlib import Path

from fenka.autoscaler import buyer, orders, reclaim, scale_in

PAGE = (Path(__file__).parents[2] / "docs" / "do" / "autoscale-watch.md").read_text()


def test_events_of_the_documentation_are_those_of_the_program() -> None:
    """Each of them, and no other."""
    section = PAGE.partition("## Events")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(Fenka\w+)`", section, re.MULTILINE)) == {
        buyer.SCALE_OUT,
        buyer.NO_SCALE_OUT,
        orders.NEVER_JOINED,
        orders.UNHELPFUL_OFFER,
        reclaim.RECLAIM,
        scale_in.SCALE_IN,
    }
