"""Cards that belong together, and the CPUs near them, on a workstation with two pairs of cards."""

import json
import os

import pytest

from fenka.jobs.processes import JobNotStarted
from fenka.local.launch import bind_cpus
from tests.workstation.conftest import Workstation, refused

SHOW = """
import json, os
import pynvml
pynvml.nvmlInit()
handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
near = os.environ.get("FENKA_CPU_AFFINITY")
print(json.dumps([[*map(pynvml.nvmlDeviceGetUUID, handles)], near, sorted(os.sched_getaffinity(0))]))
"""


@pytest.mark.process
def test_cards_and_cpus_are_those_of_a_pair(station: Workstation) -> None:
    """The first card of a pair is taken, so that two more are the other pair, on the second socket's CPUs."""
    station.start("--simulate", "A30*4@bridges")
    show = ["--", station.interpreter, "-c", SHOW]
    uuids, _, _ = json.loads(station.ok("run", "--gpus", "4", *show))
    held = station.run("--gpus", "1", "--", "sleep", "600")
    station.ok("run", "--gpus", "1", "--", "true")
    required = station.ok("run", "--gpus", "2", "--topology", "required", "--numa", *show)
    given, near, bound = json.loads(required)
    count, open_to_us = os.cpu_count() or 1, sorted(os.sched_getaffinity(0))
    assert given == uuids[2:]
    second = range(count // 2, count)
    assert near == (f"{second[0]}-{second[-1]}" if len(second) > 1 else f"{second[0]}")
    assert bound == [cpu for cpu in open_to_us if cpu in second]
    # Without --numa it is only told.
    given, told, bound = json.loads(station.ok("run", "--gpus", "2", *show))
    assert (given, told, bound) == (uuids[2:], near, open_to_us)
    refused(
        station.fenka("run", "--gpus", "3", "--topology", "required", "--", "true"),
        2,
        "no GPU fits: 4 of 4 are without NVLink to enough others; NVLink connects no more than "
        "2 cards that fit, ask for fewer",
    )
    held.process.kill()


@pytest.mark.parametrize(
    ("near", "sentence"),
    [
        ("", "the driver does not report which CPUs are near the cards: leave out --numa"),
        (
            "100000-100003",
            "the CPUs 100000-100003, which are near the cards, are closed to this process",
        ),
    ],
)
def test_program_is_not_started_when_it_cannot_be_bound(near: str, sentence: str) -> None:
    """One sentence says what to do."""
    with pytest.raises(JobNotStarted, match=sentence):
        bind_cpus(near)
