"""`fenka mig plan`: what it reads, what it writes, and which cases it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Completed, fenka


def a_case(**changes: Any) -> dict[str, Any]:
    """Return an A100 that is used by halves, with a request for each kind of thing."""
    shared = {"profile": "2g.10gb", "start": 0, "state": "shared"}
    case = {
        "version": 1,
        "cards": [
            {
                "id": "g0",
                "model": "A100-40G",
                "mig": True,
                "instances": [
                    {"profile": "3g.20gb", "start": 4, "state": "used"},
                    shared | {"slices": [{"memory_mib": 4000, "compute": 10}]},
                ],
            }
        ],
        "requests": [
            {"id": "r0", "profile": "1g.5gb"},
            {"id": "s0", "memory_mib": 3000, "compute": 5, "value": 1},
        ],
    }
    return case | changes


def plan(directory: Path, case: object) -> Completed:
    """Run the command."""
    path = directory / "case.json"
    path.write_text(case if isinstance(case, str) else json.dumps(case))
    return fenka("mig", "plan", "--case", str(path), "-o", "json")


def card(**changes: Any) -> dict[str, Any]:
    """Return an empty A100."""
    return {"id": "g0", "model": "A100-40G", "mig": True} | changes


def test_plan_writes_steps_and_targets(tmp_path: Path) -> None:
    """A slice joins the shared instance, the other request gets one of its own."""
    result = plan(tmp_path, a_case())
    assert (result.exit_code, json.loads(result.stdout)) == (
        0,
        {
            "version": 1,
            "steps": [{"do": "create", "card": "g0", "profile": "1g.5gb", "start": 2}],
            "served": {"r0": ["g0", 2], "s0": ["g0", 0]},
            "moved": {},
        },
    )


def test_plan_prints_sentences_when_no_format_is_asked(tmp_path: Path) -> None:
    """Steps, targets, pending requests and a sum."""
    path = tmp_path / "case.json"
    path.write_text(json.dumps(a_case(requests=[{"id": "r0", "profile": "4g.20gb"}])))
    assert fenka("mig", "plan", "--case", str(path)).stdout.splitlines() == [
        "no layout changes",
        "r0: waits",
        "0 of 1 requests served, 0 jobs moved, MIG enabled on 0 cards",
    ]


def test_plan_serves_the_greatest_value_when_values_have_many_digits(tmp_path: Path) -> None:
    """Such values have no small common denominator."""
    values = [3.0517578125123, 2.7182818284590455, 1e-7, 1.4142135623730951, 0.5772156649015329]
    values += [1.6180339887498949, 0.9159655941772191, 1.2020569031595942]
    requests = [
        {"id": f"r{number}", "profile": "1g.5gb", "value": value}
        for number, value in enumerate(values)
    ]
    result = plan(tmp_path, a_case(cards=[card()], requests=requests))
    assert result.exit_code == 0, result.stderr
    assert sorted(json.loads(result.stdout)["served"]) == [
        f"r{each}" for each in (0, 1, *range(3, 8))
    ]


def instance(profile: str, start: int, state: str = "used", **more: Any) -> dict[str, Any]:
    """Return an instance."""
    return {"profile": profile, "start": start, "state": state} | more


def test_plan_fills_the_shared_instance_with_room_when_a_case_lists_it_last(tmp_path: Path) -> None:
    """The order of a case's instances does not exchange their contents."""
    full = instance("1g.5gb", 4, "shared", slices=[{"memory_mib": 4864}])
    shared = card(instances=[full, instance("1g.5gb", 2, "shared")])
    requests = [{"id": "s0", "memory_mib": 3000}]
    result = plan(tmp_path, a_case(cards=[shared], requests=requests))
    assert json.loads(result.stdout)["served"] == {"s0": ["g0", 2]}


ME = instance("1g.5gb+me", 6)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("{", "the case is not understood: it is no valid JSON (Input data was truncated)"),
        (a_case(version=2), "version must be 1"),
        (a_case(extra=1), "extra is not known: remove it"),
        ({"version": 1, "cards": []}, "the case has no requests"),
        (a_case(allow={"moves": -1}), "allow.moves must be a whole number >= 0"),
        (a_case(allow={"moves": 1.5}), "allow.moves must be a whole number, not a number"),
        (a_case(cards=[]), "the case has no cards"),
        (a_case(cards=[card(model="T4")]), "'T4'"),
        (a_case(cards=[card(mig="true")]), "cards[0].mig must be true or false, not a text"),
        (a_case(cards=[card(), card()]), "card 'g0'"),
        (a_case(cards=[card(mig=False, instances=[ME])]), "MIG mode is off"),
        (a_case(cards=[card(instances=[instance("1g.5GB", 0)])]), "'1g.5GB'"),
        (a_case(cards=[card(instances=[instance("1g.6gb", 0)])]), "'1g.6gb'"),
        (a_case(cards=[card(instances=[instance("2g.10gb", 3)])]), "2g.10gb at 3"),
        (a_case(cards=[card(instances=[ME, instance("2g.10gb", -1)])]), "start"),
        (a_case(cards=[card(instances=[ME, instance("1g.5gb", 6)])]), "overlaps 1g.5gb+me at 6"),
        (a_case(cards=[card(instances=[ME, instance("1g.5gb+me", 0)])]), "media engines"),
        (a_case(cards=[card(instances=[instance("1g.5gb", 0, "free")])]), "state"),
        (a_case(cards=[card(instances=[instance("1g.5gb", 0, "movable")])]), "1g.5gb at 0"),
        (a_case(cards=[card(instances=[instance("1g.5gb", 0, id="a")])]), "1g.5gb at 0"),
        (
            a_case(
                cards=[
                    card(instances=[instance("1g.5gb", 0, "shared", slices=[{"memory_mib": 4865}])])
                ]
            ),
            "1g.5gb at 0",
        ),
        (a_case(requests=[{"id": "r"}]), "'r'"),
        (a_case(requests=[{"id": "r", "profile": "1g.5gb", "memory_mib": 1}]), "'r'"),
        (a_case(requests=[{"id": "r", "profile": "1g.5gb", "compute": 1}]), "'r'"),
        (a_case(requests=[{"id": "r", "profile": "mig-1g.5gb+me"}]), "'mig-1g.5gb+me'"),
        (a_case(requests=[{"id": "r", "profile": "5g.30gb"}]), "A100-40G has 1g.5gb"),
        (a_case(requests=[{"id": "r", "memory_mib": 40321}]), "'r'"),
        (a_case(requests=[{"id": "r", "memory_mib": 1, "compute": 91}]), "'r'"),
        (a_case(requests=[{"id": "r", "memory_mib": 0}]), "memory_mib"),
        (a_case(requests=[{"id": "r", "profile": "1g.5gb", "value": -1}]), "value"),
        (a_case(requests=[{"id": "r", "profile": "1g.5gb"}] * 2), "request 'r'"),
    ],
)
def test_plan_refuses_a_wrong_case_with_one_sentence(
    tmp_path: Path, case: object, named: str
) -> None:
    """It names the field, card, profile or request, and prints nothing else."""
    result = plan(tmp_path, case)
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_plan_refuses_a_file_that_does_not_end() -> None:
    """It is not read into memory."""
    result = fenka("mig", "plan", "--case", "/dev/zero")
    sentence = "fenka: /dev/zero has more than 67108864 bytes: name another file\n"
    assert (result.exit_code, result.stderr) == (2, sentence)


def test_plan_refuses_a_file_that_does_not_exist(tmp_path: Path) -> None:
    """With its name."""
    result = fenka("mig", "plan", "--case", str(tmp_path / "none.json"))
    assert (result.exit_code, "none.json" in result.stderr) == (2, True)
