"""Serve a peak on a workstation beside a training that backfills: scenario of a cluster, without one."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fire
from e2e.cluster import wait_until
from e2e.scenarios.backfilling import attempts, steps
from e2e.scenarios.jobs import PROGRAMS as TRAININGS
from e2e.scenarios.services import PROGRAMS
from e2e.scenarios.serving.load import read
from tests.ports import free_port
from tests.workstation.conftest import Workstation, workstation_at

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

UNITS, MOST = 4, 3
"""Units of a replica and of a member of the training, and how many slices of this size a card of 14 has."""
PHASES = ("10x10", "200x30", "10x5")
SAMPLE_S = 0.5
USAGE = Path(fire.__file__).parent / "driver_usage.py"


@contextmanager
def sampled(station: Workstation) -> Iterator[list[int]]:
    """Yield the numbers of processes that use the card, by the driver, at times inside the block."""
    done, counts = threading.Event(), list[int]()
    libraries = {"LD_LIBRARY_PATH": str(station.root / "simulated" / "lib")}

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            program = [sys.executable, str(USAGE)]
            cards = json.loads(subprocess.check_output(program, env=os.environ | libraries))
            counts.append(sum(len(card["processes"]) for card in cards.values()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()


def ready(station: Workstation) -> int:
    """Return how many replicas accept requests."""
    shown = json.loads(station.ok("serve", "get", "--local", "model", "-o", "json"))
    return int(shown["availableInstances"])


def test_peak_evicts_the_gang_of_a_workstation_which_goes_on_afterwards(tmp_path: Path) -> None:
    """A card has room for three slices: at first a replica and two members, in the peak three replicas."""
    port, requests = free_port(), tmp_path / "requests"
    with workstation_at([]) as station:
        station.start("--simulate", "T4")
        options = ["--gpu-core=30", "--replicas=1..3", "--target=1", "--down-after=5s", "--wait"]
        ports = [f"--restful-port={port}", "--health-path=/healthz"]
        program = [sys.executable, str(PROGRAMS / "model_server.py"), "--version=v1"]
        serve = ("serve", "custom", "--local", "--name=model", "--version=v1", *ports, *options)
        station.ok(*serve, f"--gpu-mem={UNITS}", "--", *program)
        submit = ("submit", "pytorch", "--local", "--name=gang", "--backfill", "--workers=2")
        training = [sys.executable, str(TRAININGS / "backfilling.py")]
        checkpoints = f"--env=CHECKPOINTS={tmp_path}"
        station.ok(*submit, f"--gpu-mem={UNITS}", checkpoints, "--", *training)
        folder = str(tmp_path)
        wait_until("steps of both members", lambda: attempts(folder) == [0, 0], 120)
        with sampled(station) as counts:
            load = [sys.executable, str(PROGRAMS / "load.py"), f"http://127.0.0.1:{port}"]
            with subprocess.Popen([*load, str(requests), *PHASES]) as client:
                wait_until("three replicas", lambda: ready(station) == MOST, 120)
            wait_until("the next attempt", lambda: min(attempts(folder)) >= 1, 180)
        assert client.returncode == 0
        for name in ("serve delete --local model", "delete --local gang"):
            station.ok(*name.split())
    assert [request for request in read(requests) if not request.right] == []
    assert max(counts) == MOST
    for rank in (0, 1):
        numbers = [each["step"] for each in steps(folder, rank)]
        assert numbers == list(range(1, len(numbers) + 1))
