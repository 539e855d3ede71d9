"""`fenka node`: its options reach the program, whose process has no libraries of the command line."""

import subprocess
import sys


def test_node_program_has_its_options_without_the_libraries_that_parsed_them() -> None:
    """A wrong option is reported by a process that imported the program, but no option parser."""
    words = ["--name", "n", "--simulated", "/nowhere", "--unit", "3"]
    ended = subprocess.run(
        [sys.executable, "-m", "fenka", "node", *words],
        env={"PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, program = ended.stderr.rpartition("| site\n")
    imported = {line.rpartition("|")[2].strip() for line in program.splitlines()}
    assert ended.returncode == 2
    assert "fenka: '3' is no unit: use GiB, MiB, or a number of them as 256MiB" in imported
    assert "fenka.node.main" in imported
    assert not imported & {"typer", "pydantic", "rich"}
