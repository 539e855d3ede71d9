"""`fenka autoscaler plan`: what it prints, and its exit codes."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.autoscaler.audit import audit
from tests.autoscaler.cases import case, group, node, request
from tests.cli.command import fenka

CASE = case(
    request("r", 4, count=4),
    request("big", 15),
    groups=[group(max=10), group("full", size=3, max=3, cards=2), group("small", 3.0, cards=1)],
    nodes=[node("gpu-1", 4308 * 2)],
)


def written(tmp_path: Path, document: object = CASE) -> str:
    """Return the path of a file with this case."""
    path = tmp_path / "case.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_plan_prints_the_format_when_json_is_wanted(tmp_path: Path) -> None:
    """Fields in their order; the placements pass the audit."""
    result = fenka("autoscaler", "plan", "--case", written(tmp_path), "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert list(plan) == [
        "format",
        "nodes",
        "cost",
        "bound",
        "optimal",
        "seconds",
        "placements",
        "unserved",
    ]
    audit(CASE, plan)
    assert plan["nodes"] == [{"group": "small", "count": 1}]
    assert (plan["cost"], plan["bound"], plan["optimal"]) == (3, 3, True)
    assert plan["unserved"] == [
        {
            "request": "big",
            "count": 1,
            "why": "0/3 groups help: 3 cards too small (14 units, 15 wanted)",
        }
    ]


@pytest.mark.process
def test_terminal_shows_that_the_planner_works(tmp_path: Path) -> None:
    """Only there, and on standard error: the plan stays what programs read."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fenka",
            "autoscaler",
            "plan",
            "--case",
            written(tmp_path),
            "-o",
            "json",
        ],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
        check=True,
    )
    os.close(theirs)
    assert "planning" in os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert json.loads(done.stdout)["cost"] == 3


def test_plan_is_the_same_when_it_is_made_again(tmp_path: Path) -> None:
    """But for the seconds that it took."""
    first, second = (
        json.loads(fenka("autoscaler", "plan", "--case", written(tmp_path), "-o", "json").stdout)
        for _ in range(2)
    )
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_plan_prints_a_table_for_people(tmp_path: Path) -> None:
    """New nodes first, then those there; last who is left out."""
    lines = fenka("autoscaler", "plan", "--case", written(tmp_path)).stdout.splitlines()
    assert lines[:3] == [
        "NODE         PRICE  PODS",
        "new:small:0  3      3 x r",
        "gpu-1        -      r",
    ]
    assert lines[3].startswith("1 new nodes, 3 an hour (the best), planned in ")
    assert lines[4] == "1 of big left out: 0/3 groups help: 3 cards too small (14 units, 15 wanted)"


@pytest.mark.parametrize("limit", ["5", "0.5", "5s", "1m30s"])
def test_plan_takes_a_time_limit(tmp_path: Path, limit: str) -> None:
    """In seconds or as a duration."""
    assert (
        fenka("autoscaler", "plan", "--case", written(tmp_path), "--time-limit", limit).exit_code
        == 0
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "fenka: the case is no JSON"),
        (
            '{"format": "fenka.plan/1", "groups": [], "requests": [], "x": 1}',
            "fenka: x is not known",
        ),
    ],
)
def test_plan_exits_with_2_when_the_case_is_not_understood(
    tmp_path: Path, text: str, sentence: str
) -> None:
    """One sentence, and nothing on stdout."""
    path = tmp_path / "case.json"
    path.write_text(text)
    result = fenka("autoscaler", "plan", "--case", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_plan_exits_with_2_when_there_is_no_such_file_or_limit(tmp_path: Path) -> None:
    """As other commands do for options that are wrong."""
    assert fenka("autoscaler", "plan", "--case", str(tmp_path / "none")).exit_code == 2
    assert fenka("autoscaler", "plan", "--case", str(tmp_path)).exit_code == 2
    assert (
        fenka("autoscaler", "plan", "--case", written(tmp_path), "--time-limit", "x").exit_code == 2
    )


def test_plan_says_so_when_the_solver_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick plan stands."""
    original = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "fenka.autoscaler.solver.solve":
            raise ModuleNotFoundError(name="highspy")
        return original(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    result = fenka("autoscaler", "plan", "--case", written(tmp_path), "-o", "json")
    assert result.exit_code == 0
    assert "highspy==1.15.1`" in result.stderr
    audit(CASE, json.loads(result.stdout))


CONFIG = """
cluster: demo
provider: {kind: simulated, scenario: s.json, state: state}
limits: {nodes: 12}
groups:
- {name: t4-spot, types: [a, b], zones: [g, h], max: 10, capacity: spot}
- {name: t4, types: [a], zones: [g], max: 4}
"""


def test_check_says_what_a_configuration_allows(tmp_path: Path) -> None:
    """Without a cluster."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    result = fenka("autoscaler", "check", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{path} is valid: 2 groups, 5 offers, at most 12 nodes\n"


def test_check_exits_with_2_when_the_configuration_is_not_understood(tmp_path: Path) -> None:
    """One sentence; a missing file is one too."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("max: 4", "maxx: 4"))
    result = fenka("autoscaler", "check", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "fenka: groups[1].maxx is not known: did you mean max?\n"
    missing = fenka("autoscaler", "check", str(tmp_path / "none"))
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert missing.stderr.startswith(f"fenka: cannot use {tmp_path / 'none'}: No such file")


@pytest.mark.parametrize(
    ("provider", "group", "sentence"),
    [
        ("kind: simulated", "", "provider.scenario is missing: name a file for it"),
        ("kind: ess", "", "provider.region is missing: name the region, such as cn-beijing"),
        (
            "kind: ess, region: r",
            "",
            "group a cannot be launched: set id to a scaling group, or launchTemplate and vSwitches",
        ),
        (
            "kind: ess, region: r",
            "launchTemplate: lt, vSwitches: {h: v}",
            "group a has no vSwitch for g: set vSwitches",
        ),
        (
            "kind: aws",
            "price: 1",
            "group a has no `launchTemplate`: say it beside its types and zones",
        ),
        (
            "kind: aws",
            "id: asg",
            "group a has no `price`, and EC2 tells none of on-demand instances: add it",
        ),
        (
            "kind: karpenter",
            "price: 1",
            "group a needs `nodeClass: {group: …, kind: …, name: …}`: add it",
        ),
        (
            "kind: karpenter",
            "nodeClass: {group: g, kind: k, name: n}",
            "group a has no `price`, and NodeClaims tell none: add it",
        ),
    ],
)
def test_check_exits_with_2_when_the_provider_requires_more(
    tmp_path: Path, provider: str, group: str, sentence: str
) -> None:
    """The autoscaler would not start with it, either."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"cluster: demo\nprovider: {{{provider}}}\n"
        f"groups: [{{name: a, types: [t], zones: [g], {group}}}]\n"
    )
    result = fenka("autoscaler", "check", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"fenka: {sentence}\n"


def test_plan_exits_with_2_when_a_case_and_a_configuration_are_given(tmp_path: Path) -> None:
    """The configuration would be ignored; a directory that was named is not to be removed."""
    both = fenka("autoscaler", "plan", "--case", written(tmp_path), "--config", "config.yaml")
    assert (both.exit_code, both.stdout) == (2, "")
    assert both.stderr == (
        "fenka: --config is for a plan on the cluster: leave it out, or leave out --case\n"
    )
    folder = fenka("autoscaler", "plan", "--case", str(tmp_path))
    assert (folder.exit_code, folder.stdout) == (2, "")
    assert folder.stderr.endswith(
        "a directory is there where a file is needed: name a file, or remove the directory\n"
    )
