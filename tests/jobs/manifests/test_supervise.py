"""Test the shell script that runs a process in its pod."""

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import psutil
import pytest

from fenka.jobs.collection import Contents
from fenka.jobs.manifests.training_manifest import render
from tests.jobs.manifests.trainings import ALONE, INDEXED
from tests.waiting import wait_until


def command(*argv: str, alone: bool = True) -> list[str]:
    """Return the command of a pod whose process is this one."""
    spec = msgspec.structs.replace(ALONE if alone else INDEXED, command=[*argv], code="")
    (job,) = render(spec, Contents()).role_jobs
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    return [word.replace("$$", "$") for word in words]


@pytest.mark.parametrize(
    ("evictions", "failures", "restarts"),
    [("", "0", 0), ("", "2", 2), ("1", "0", 1), ("9", "3", 12)],
)
def test_restarts_are_the_sum_of_evictions_and_failures_when_a_pod_is_alone(
    evictions: str, failures: str, restarts: int
) -> None:
    """The Job controller counts them apart, and an annotation that is missing is an empty variable."""
    counts = {"FENKA_EVICTIONS": evictions, "FENKA_FAILURES": failures}
    done = subprocess.run(
        command("sh", "-c", "echo $FENKA_RESTARTS"),
        env={**os.environ, **counts},
        capture_output=True,
        check=True,
    )
    assert int(done.stdout) == restarts


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exit_code_is_that_of_the_process(code: int) -> None:
    """Test that exit code is that of the process."""
    assert subprocess.run(command("sh", "-c", f"exit {code}"), check=False).returncode == code


def test_output_and_arguments_are_those_of_the_process() -> None:
    """Test that output and arguments are those of the process."""
    done = subprocess.run(
        command("printf", "%s|", "a b", "", "*", "'\"$(x)"), capture_output=True, check=True
    )
    assert done.stdout == b"a b||*|'\"$(x)|"


@pytest.mark.parametrize(
    ("on_sigterm", "code"),
    [
        # Saves its state, and has not finished all the same.
        ("exit 0", 143),
        ("exit 9", 9),
        ("sleep 0.2; exit 0", 143),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_process_that_was_terminated_has_not_succeeded(
    tmp_path: Path, on_sigterm: str, code: int, alone: bool
) -> None:
    """The kubelet sends SIGTERM to the first process only."""
    script = f"trap '{on_sigterm}' TERM; : >{tmp_path}/ready; while :; do sleep 0.05; done"
    with subprocess.Popen(command("sh", "-c", script, alone=alone)) as process:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == code


def test_process_that_was_terminated_is_not_left(tmp_path: Path) -> None:
    """Test that process that was terminated is not left."""
    script = f"trap '' TERM; : >{tmp_path}/ready; sleep 1; : >{tmp_path}/done; exit 3"
    with subprocess.Popen(command("sh", "-c", script)) as process:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
    assert (tmp_path / "done").exists()


def test_failure_of_one_of_several_is_reported_later() -> None:
    """An eviction that has caused it is reported meanwhile. SIGTERM ends the wait."""
    with subprocess.Popen(command("sh", "-c", "exit 7", alone=False)) as process:
        wait_until(lambda: "sleep" in [it.name() for it in psutil.Process(process.pid).children()])
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 7
