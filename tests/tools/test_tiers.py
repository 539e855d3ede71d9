"""Which tests `make test-fast` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import FAST, TESTS, is_slow, starts_processes


@pytest.mark.parametrize(
    ("module", "starts"),
    [
        ("workstation/conftest.py", True),
        ("workstation/serving/test_ports.py", True),  # imports a helper that does
        ("conftest.py", False),
        ("builders.py", False),
    ],
)
def test_modules_that_start_processes_are_known(module: str, starts: bool) -> None:
    """By their names and those of their helpers."""
    assert starts_processes(TESTS / module) is starts


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("cloud/aws/conftest.py", True),
        ("cloud/aws/test_aws.py", True),
        ("cloud/conftest.py", False),  # there is none
        ("cloud/test_simulated.py", False),
    ],
)
def test_modules_that_take_seconds_are_known(module: str, slow: bool) -> None:
    """By the libraries that they import."""
    assert is_slow(TESTS / module) is slow


def test_unmarked_test_fails_when_it_starts_a_process(tmp_path: Path) -> None:
    """A test outside of this folder is never marked."""
    (tmp_path / "conftest.py").write_text(
        "from tests.tiers import Tiers\n"
        "def pytest_configure(config): config.pluginmanager.register(Tiers())\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import subprocess\ndef test_starts(): subprocess.run(['true'])\ndef test_none(): pass\n"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            "/dev/null",
            "-m",
            FAST,
            str(tmp_path),
        ],
        cwd=TESTS.parent,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "2 passed, 1 error" in result.stdout
    assert "starts processes without the marker `process` (subprocess.Popen true)" in result.stdout
