"""The documentation names the autoscaler's metrics and events."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from fenka.autoscaler import buyer, orders, reclaim, scale_in
from fenka.autoscaler.metrics import PREFIX, ActivityCounts, Metrics
from tests.autoscaler.snapshots import snapshot

DOCS = Path(__file__).parents[2] / "docs"


def test_metrics_of_the_documentation_are_those_of_the_program() -> None:
    """Each of them, and no other."""
    metrics = Metrics(
        ActivityCounts(),
        snapshot,
        leading=lambda: True,
        unserved=lambda: 0,
        reclaims=lambda: {"t4": 1},
    )
    names = set()
    for family in text_string_to_metric_families(b"".join(metrics.text()).decode()):
        suffix = "_total" if family.type == "counter" else ""
        # The library adds when each histogram was made.
        if not family.name.endswith("_created"):
            names.add(family.name + suffix)
    page = (DOCS / "reference" / "metrics.md").read_text()
    assert set(re.findall(rf"^\| `({PREFIX}\w+)` ", page, re.MULTILINE)) == names


def test_events_of_the_documentation_are_those_of_the_program() -> None:
    """Each of them, and no other."""
    page = (DOCS / "do" / "autoscale-watch.md").read_text()
    section = page.partition("## Events")[2]
    assert set(re.findall(r"^\| `(Fenka\w+)`", section, re.MULTILINE)) == {
        buyer.SCALE_OUT,
        buyer.NO_SCALE_OUT,
        orders.NEVER_JOINED,
        orders.UNHELPFUL_OFFER,
        reclaim.RECLAIM,
        scale_in.SCALE_IN,
    }
