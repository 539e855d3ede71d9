"""The chart's alerts in Prometheus' own promtool: each fires when it should, and not otherwise."""

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART

RULES = CHART / "files" / "rules.yaml"
DOCS = Path(__file__).parents[2] / "docs"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH: .ci/run unpacks Debian's"
)

SLICE = '{namespace="team",pod="tf",node="n",index="0",uuid="GPU-1"}'
CARD = '{node="n",index="0",uuid="GPU-1",model="Tesla T4"}'
LIMIT, USED = (f"fenka_container_gpu_memory_{name}_bytes{SLICE}" for name in ("limit", "used"))
OLDEST = "fenka_scheduler_waiting_oldest_seconds"
BOUND = 'fenka_scheduler_binds_total{outcome="bound"}'


@dataclass(frozen=True)
class Case:
    """An alert at a moment.

    Attributes:
        series: samples of each minute, in promtool's notation, with which it fires.
        quiet: the same, with which it does not.
        at: when both are looked at.
        summary: its sentence.
        labels: what it has beside the severity.
    """

    series: dict[str, str]
    quiet: dict[str, str]
    at: str
    summary: str
    labels: dict[str, str] = field(default_factory=dict)


def labels_of(series: str) -> dict[str, str]:
    """Return the labels of a series in Prometheus' notation."""
    inside = series.partition("{")[2].rstrip("}")
    pairs = (pair.split("=") for pair in inside.split(",") if pair)
    return {name: value.strip('"') for name, value in pairs}


def one(series: str, firing: str, quiet: str, at: str, summary: str) -> Case:
    """Return a case of one series, whose labels the alert has."""
    return Case({series: firing}, {series: quiet}, at, summary, labels_of(series))


ACTIVE = f"fenka_container_gpu_last_active_timestamp_seconds{SLICE}"
THROTTLED = f"fenka_container_gpu_throttled_seconds_total{SLICE}"
REFUSED = f"fenka_container_gpu_out_of_memory_total{SLICE}"
VIOLATIONS = 'fenka_node_violations_total{kind="memory_limit",instance="10.0.0.1:9445"}'
XIDS = 'fenka_card_xid_errors_total{node="n",index="0",uuid="GPU-1",model="Tesla T4",kind="card"}'
NOTES = XIDS.replace('kind="card"', 'kind="program"')

CASES: dict[str, Case] = {
    # Last active at 0: more than two hours ago from 2 h on, for ten minutes at 2 h 11 min.
    "FenkaHeldButIdle": one(
        *(ACTIVE, "0x140", "0+60x140", "131m"),
        "team/tf holds a slice of card 0 of n and has not used it for 2h 11m 0s",
    ),
    # 40 s of each minute are two thirds of the time, 20 s a third.
    "FenkaThrottled": one(
        *(THROTTLED, "0+40x60", "0+20x60", "45m"),
        "team/tf waits for its share of card 0 of n most of the time",
    ),
    "FenkaOutOfMemory": one(
        *(REFUSED, "0x5 1x20", "3x30", "10m"),
        "team/tf was refused memory of card 0 of n, because its slice is full",
    ),
    "FenkaViolation": one(
        *(VIOLATIONS, "0x5 2x20", "2x30", "10m"),
        "programs have exceeded limits (memory_limit), as 10.0.0.1:9445 reports",
    ),
    "FenkaNearMemoryLimit": Case(
        {USED: "4307x30", LIMIT: "4308x30"},
        {USED: "3344x30", LIMIT: "4308x30"},
        "20m",
        "team/tf uses 99.98% of its memory of card 0 of n",
        labels_of(SLICE),
    ),
    "FenkaCardLost": one(
        *(f"fenka_card_healthy{CARD}", "1x3 0x10", "1x3 0 1x10", "6m"),
        "card 0 of n (Tesla T4, GPU-1) is not usable",
    ),
    "FenkaCardHot": one(
        *(f"fenka_card_temperature_celsius{CARD}", "91x20", "91x8 60x20", "12m"),
        "card 0 of n (Tesla T4) has 91 °C",
    ),
    # A failed program says nothing about the card.
    "FenkaCardXid": Case(
        {XIDS: "0x5 1x20", NOTES: "0x5 7x20"},
        {XIDS: "1x30", NOTES: "0x5 7x20"},
        "8m",
        "card 0 of n (Tesla T4, GPU-1) reported an XID after which it cannot be used",
        labels_of(XIDS),
    ),
    # The oldest waits for two hours while nothing is bound; or the queue moves.
    "FenkaQueueStuck": Case(
        {OLDEST: "7200+60x90", BOUND: "5x90"},
        {OLDEST: "7200+60x90", BOUND: "5+1x90"},
        "80m",
        "no pod was bound for an hour, and the oldest one has waited for 3h 20m 0s",
    ),
    "FenkaNoLeader": Case(
        {'fenka_scheduler_leading{pod="a"}': "0x10", 'fenka_scheduler_leading{pod="b"}': "0x10"},
        {'fenka_scheduler_leading{pod="a"}': "0x10", 'fenka_scheduler_leading{pod="b"}': "1x10"},
        "5m",
        "no replica of fenka's scheduler leads, so no pod that requests a slice is bound",
    ),
}


def alerts() -> dict[str, Any]:
    """Return the alerts of the chart by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def promtool(*words: str) -> None:
    """Run promtool, which must succeed."""
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_rules_are_valid() -> None:
    """Their expressions and templates."""
    promtool("check", "rules", str(RULES))


def test_every_alert_has_a_case() -> None:
    """Each is tried, and says in a sentence what to do; a page that it names exists."""
    assert CASES.keys() == alerts().keys()
    for alert in alerts().values():
        runbook = alert["annotations"]["runbook"]
        pages = [word.strip("`:;.,") for word in runbook.split() if word.startswith("docs/")]
        assert pages, runbook
        for page in pages:
            assert (DOCS.parent / page).is_file(), page


@needs_promtool
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fires", [True, False])
def test_alert_fires_when_it_should(name: str, fires: bool, tmp_path: Path) -> None:
    """With its sentence, and not in the similar case."""
    case, alert = CASES[name], alerts()[name]
    expected = {
        "exp_labels": {**alert["labels"], **case.labels},
        "exp_annotations": {**alert["annotations"], "summary": case.summary},
    }
    series = case.series if fires else case.quiet
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": case.at,
                "alertname": name,
                "exp_alerts": [expected] if fires else [],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(content, allow_unicode=True))
    promtool("test", "rules", str(file))
