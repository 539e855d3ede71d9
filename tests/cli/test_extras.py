"""Test commands where the packages of fenka's extras are not installed, as after `make build`."""

import subprocess
import sys
from pathlib import Path

import pytest

from fenka.cli.error_report import EXTRAS
from tests.fakes.certificates import fresh

BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def python(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a program without the packages of extras."""
    script = BLOCKED.replace("PACKAGES", repr(set(EXTRAS))) + program
    command = [sys.executable, "-P", "-c", script, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_of_every_command_needs_no_extra() -> None:
    """People read the help before they install anything."""
    program = """
from fenka.cli.main import ADMIN_ROWS, USERS_ROWS, run
for row in (*USERS_ROWS, *ADMIN_ROWS):
    try:
        run([row.name, "--help"])
    except SystemExit as end:
        assert not end.code, row.name
    except ModuleNotFoundError as why:
        print("missing", row.name, why.name)
"""
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("missing")] == []


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("certificates", "--make"), "cryptography"),
        (("scheduler", "--tls", "CERTIFICATES"), "cryptography"),
    ],
)
def test_command_that_needs_an_extra_says_how_to_install_it(
    tmp_path: Path, words: tuple[str, ...], package: str
) -> None:
    """One sentence."""
    program = "import sys; from fenka.cli.main import main; sys.argv[0] = 'fenka'; main()"
    fresh(tmp_path)
    done = python(program, *(str(tmp_path) if word == "CERTIFICATES" else word for word in words))
    assert done.returncode == 1
    assert done.stderr.startswith(f"fenka: {package} is not installed: `")
    assert "cryptography>=46" in done.stderr
