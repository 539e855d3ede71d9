"""What a program of a lease finds in its environment, as scripts and frameworks read it."""

import json
from typing import Any

import pytest

from tests.workstation.conftest import Workstation, eventually

SHOW = """
import ctypes, json, os, subprocess, sys, uuid
given = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
numbers = [int(name) for name in given] if given[0].isdigit() else given
cuda, devices, raw = ctypes.CDLL("libcuda.so.1"), [], (ctypes.c_ubyte * 16)()
assert cuda.cuInit(0) == 0
count = ctypes.c_int()
cuda.cuDeviceGetCount(ctypes.byref(count))
for device in range(count.value):
    cuda.cuDeviceGetUuid_v2(raw, device)
    devices.append(str(uuid.UUID(bytes=bytes(raw))))
child = subprocess.run(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], capture_output=True, text=True)
print(json.dumps([numbers, devices, child.stdout.strip()]))
"""


def shown(station: Workstation, *words: str) -> list[Any]:
    """Return the variable, the cards and a child's variable of each program of `fenka run WORDS`."""
    lines = station.ok("run", *words, "--", station.interpreter, "-c", SHOW).splitlines()
    return [json.loads(line[line.index("[[") :]) for line in lines]


def cards(station: Workstation) -> list[str]:
    """Return the UUIDs of the machine's cards, without their prefix."""
    (row,) = shown(station, "--gpus", "4")
    return list(row[1])


@pytest.mark.process
def test_lease_numbers_its_own_cards(station: Workstation) -> None:
    """The variable holds numbers from 0, whichever cards the lease has; programs do int() of them."""
    station.start("--simulate", "T4*4")
    machine = cards(station)
    held = station.run("--gpus", "1", "--", "sleep", "600")
    eventually(station.jobs)
    station.ok("run", "--gpus", "1", "--", "true")
    assert shown(station, "--gpus", "2") == [[[0, 1], machine[1:3], "0,1"]]
    station.environment["CUDA_VISIBLE_DEVICES"] = "3"
    assert shown(station, "--gpu-mem", "4") == [[[0], [machine[1]], "0"]]
    members = shown(station, "--gang", "2", "--gpus", "1")
    assert sorted(members) == sorted([[0], [uuid], "0"] for uuid in machine[1:3])
    held.process.kill()


def test_instance_of_a_card_is_number_0(station: Workstation) -> None:
    """So are a MIG instance, and a slice in one."""
    station.start("--simulate", "A100-40G", "--mig", "all")
    first, second = shown(station, "--mig", "1g.5gb") + shown(
        station, "--gpu-mem", "2", "--inside", "mig"
    )
    assert (first[0], first[2], len(first[1])) == ([0], "0", 1)
    assert (second[0], second[2], len(second[1])) == ([0], "0", 1)


def test_cooperative_lease_names_its_cards(t4: Workstation) -> None:
    """The variable is all that chooses the card there, for programs that start without the shim, too."""
    ((numbers, devices, child),) = shown(t4, "--gpu-mem", "4", "--isolation", "cooperative")
    assert numbers == [f"GPU-{devices[0]}"]
    assert child == numbers[0]
