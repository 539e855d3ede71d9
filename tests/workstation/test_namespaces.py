"""Sandboxes inside a lease: programs in PID namespaces of their own."""

import subprocess
import sys

import pytest

from tests.workstation.conftest import HOLD, Workstation

NESTED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

SANDBOX_THEN_ALL = """
import json, subprocess, sys
nested, hold = sys.argv[1].split(), sys.argv[2:]
first = subprocess.Popen([*nested, *hold, "4000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
one = json.loads(first.stdout.readline())
first.kill()
first.wait()
second = subprocess.run([*nested, *hold, "4000"], input=b"", capture_output=True)
print(json.dumps([one["cards"][0]["result"], json.loads(second.stdout)["cards"][0]["result"]]), flush=True)
"""


@pytest.mark.skipif(
    subprocess.run([*NESTED, "true"], check=False, capture_output=True).returncode != 0,
    reason="PID namespaces need root here",
)
def test_memory_is_free_when_a_sandbox_was_killed(t4: Workstation) -> None:
    """Two sandboxes in succession can each use the whole lease."""
    words = [sys.executable, "-c", SANDBOX_THEN_ALL, " ".join(NESTED), *HOLD]
    assert t4.run("--gpu-mem", "4", "--", *words).report() == [0, 0]
