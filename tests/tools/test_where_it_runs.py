"""The page "where it runs" says tested only of versions that a recorded run has passed."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tools import where_it_runs
from tools.where_it_runs import BEGIN, END, Tried, outdated, readme, record, table, tried

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CLAIMED = REFERENCE / "where-it-runs.yaml"
CLAIMS = {"parts": [{"part": "Kubernetes", "should": "1.31", "not": "1.28"}, {"part": "helm"}]}
PASSED = Tried({"Kubernetes": "1.33.1", "containerd": "2.4.2"}, "core", 17)
FAILED = Tried({"Kubernetes": "1.30.2"}, "core", 16, failed=("test_queue",))


def test_page_and_readme_are_as_the_records_have_them() -> None:
    """If this fails: python tools/where_it_runs.py."""
    assert outdated() == []


def test_drivers_that_should_work_are_those_whose_headers_were_read() -> None:
    """The page of drivers is made from the headers: a newer one there is a newer one here."""
    read = re.findall(
        r"^\| (\d+) \| ([\d.]+) \|", (REFERENCE / "drivers.md").read_text(), re.MULTILINE
    )
    should = {it["part"]: it["should"] for it in yaml.safe_load(CLAIMED.read_text())["parts"]}
    (oldest, first), (newest, last) = read[0], read[-1]
    assert should["NVIDIA's driver"].startswith(f"{oldest} to {newest};")
    assert should["CUDA"].startswith(f"{first} to {last},")


def test_version_is_tested_only_where_no_test_failed() -> None:
    """A version with a failure is named with the test, beside the versions that are known not to work."""
    rows = table(CLAIMS["parts"], [PASSED, FAILED])
    assert rows[2] == "| Kubernetes | 1.33.1 | 1.31 | 1.30.2 (test_queue fails); 1.28 |"
    assert rows[3] == "| helm | nothing |  |  |"


def test_versions_are_sorted_by_number() -> None:
    """1.9 is before 1.10."""
    runs = [Tried({"helm": version}, "core", 1) for version in ("1.10.0", "1.9.0")]
    assert table([{"part": "helm"}], runs)[2] == "| helm | 1.9.0, 1.10.0 |  |  |"


def test_later_run_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    """Runs of other tests, or on other versions, stay."""
    records = tmp_path / "tried.yaml"
    records.write_text("[]\n")
    for run in (PASSED, FAILED, Tried(FAILED.parts, "core", 17)):
        record(run, records)
    assert [run.passed for run in tried(records)] == [17, 17]
    assert not any(run.failed for run in tried(records))


def test_readme_has_the_table_between_its_markers() -> None:
    """A README without markers stays as it is."""
    text = f"# fenka\n{BEGIN}\nold\n{END}\nrest\n"
    changed = readme(text, CLAIMS, [PASSED])
    assert "old" not in changed
    assert changed.endswith(f"{END}\nrest\n")
    assert readme(changed, CLAIMS, [PASSED]) == changed
    assert readme("# fenka\n", CLAIMS, [PASSED]) == "# fenka\n"


@pytest.mark.process
@pytest.mark.parametrize(("code", "passed"), [(0, 1), (3, 0)])
def test_run_records_how_the_command_ended(
    code: int, passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code is the command's."""
    records = tmp_path / "tried.yaml"
    records.write_text("[]\n")
    monkeypatch.setattr(where_it_runs, "RECORDS", records)
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert where_it_runs.run_recorded(["Python=3.11.7"], "the demo", command) == code
    (run,) = tried(records)
    assert (run.parts, run.passed, len(run.failed)) == ({"Python": "3.11.7"}, passed, 1 - passed)
