"""Runs commands of `fenka` in the tests' own process."""

import contextlib
import io
from dataclasses import dataclass

from fenka.cli.error_report import report_errors
from fenka.cli.main import run


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command left."""

    exit_code: object
    stdout: str
    stderr: str


def fenka(*words: str) -> Completed:
    """Run a command with these words."""
    stdout, stderr = io.StringIO(), io.StringIO()
    exit_code: object = 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            with report_errors():
                run(words)
        except SystemExit as end:
            exit_code = end.code or 0
    return Completed(exit_code, stdout.getvalue(), stderr.getvalue())
