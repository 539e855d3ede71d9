"""The level of a program's log, as its process writes it."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from fenka.server.program import start_log
start_log(sys.argv[1], times=False)
for name in ("fenka.scheduler.server", "aiohttp.access"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("%s of %s", level, name.partition(".")[0])
"""


@pytest.mark.parametrize(
    ("level", "own"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_level_is_that_of_fenkas_own_lines(level: str, own: list[str]) -> None:
    """Libraries would write thousands of lines of their own at `debug`."""
    command = [sys.executable, "-c", PROGRAM, level]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [*(f"{name} of fenka" for name in own)]
    lines += [f"{name} of aiohttp" for name in ("info", "warning", "error")]
    assert [line.partition(" ")[2] for line in done.stderr.splitlines()] == lines


def test_log_has_no_escape_sequences_when_a_message_has() -> None:
    """A policy's refusal may repeat what a tenant has written, in a message and in an exception's text."""
    program = r"""
import logging
from fenka.server.program import start_log
start_log("info", times=False)
text = "\x1b[2J\u202e\nERROR forged"
log = logging.getLogger("fenka.scheduler.server")
log.warning("refused: %s", text)
try:
    raise ValueError(text)
except ValueError:
    log.exception("failed")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == r"WARNING refused: \x1b[2J\u202e\nERROR forged"
    assert all(line.isprintable() for line in lines)
