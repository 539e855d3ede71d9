"""OpenCost's own messages, from its Go module, read the JSON of `fenka usage -o opencost`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fenka.views.usage_exports import opencost_json
from tests.hardware.test_go_nvml import build
from tests.views.test_usage_exports import BILL

pytestmark = pytest.mark.process

CLIENT = Path(__file__).parent.parent / "go-opencost-client"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reader over OpenCost's messages, built."""
    return build(CLIENT, tmp_path_factory.mktemp("go") / "client", cgo=False)


def read(program: Path, responses: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Run the reader."""
    return subprocess.run(
        [program], input=json.dumps(responses), capture_output=True, text=True, check=False
    )


def test_opencost_reads_each_day_when_a_bill_is_given(program: Path) -> None:
    """Dates, currency, domain, the number of costs, and their sum."""
    result = read(program, opencost_json(*BILL))
    assert result.stdout.splitlines() == [
        "2026-11-01 EUR fenka 6 8.5440",
        "2026-11-02 EUR fenka 1 8.4000",
        "2026-11-30 EUR fenka 1 1.2500",
    ], result.stderr


def test_opencost_refuses_a_field_when_it_has_none_of_that_name(program: Path) -> None:
    """So a field that were misspelt above would be an error."""
    responses = opencost_json(*BILL)
    responses[0]["costs"][0]["billed"] = 1
    assert 'unknown field "billed"' in read(program, responses).stderr
