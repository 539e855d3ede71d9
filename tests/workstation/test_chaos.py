"""Processes are killed at random: nothing leaks, no card is overcommitted, and no request is stuck."""

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fenka.hardware.nvml import Driver
from tests.workstation.conftest import HOLD, Program, Workstation, eventually

KILLS = 30
CARD_MIB = 15079


def leased(station: Workstation) -> list[int]:
    """Return the MiB by card from the control pages, which the shims enforce."""
    from fenka.isolation import lease_control

    held: dict[str, int] = {}
    for page in (station.root / "leases").glob("*/lease/control"):
        try:
            limits = lease_control.read(page).limits
        except (FileNotFoundError, NotADirectoryError):
            continue  # It was given back while we looked.
        for limit in limits:
            held[limit.uuid] = held.get(limit.uuid, 0) + (limit.memory_bytes >> 20)
    return list(held.values())


def start(station: Workstation, chance: random.Random, number: int) -> Program:
    """Start a program of a random size that fills half of its slice, or a gang of two."""
    units = chance.choice([1, 2, 4, 7, 14])
    mib = str(units * 500)
    if chance.random() < 0.3:
        words = ["--gang", "2", "--gpu-mem", str(min(units, 7)), "--name", f"p{number}"]
        return station.run(*words, "--", "sh", "-c", "echo begun; exec sleep 1000")
    words = ["--gpu-mem", str(units), "--name", f"p{number}", "--", *HOLD, mib]
    return station.run(*words)


def strike(station: Workstation, chance: random.Random) -> None:
    """Kill the daemon, a client or a program, or end a program normally (not a gang's)."""
    alive = [program for program in station.programs if program.process.poll() is None]
    kind = chance.choice(["daemon", "program", "program", "peace"])
    if kind == "daemon":
        try:
            station.kill_daemon()
        except (ProcessLookupError, ValueError, FileNotFoundError):
            return  # It is dead already, and the next one has not come up yet.
    elif alive and kind == "program":
        os.kill(chance.choice(alive).pid, signal.SIGKILL)
    elif alive:
        chosen = chance.choice(alive).process
        assert chosen.stdin
        chosen.stdin.close()


def settle(program: Program) -> None:
    """Wait until the program reports its memory, or its client that it waits."""
    pipes = [pipe for pipe in (program.process.stdout, program.process.stderr) if pipe]
    select.select(pipes, [], [], 5)


@pytest.mark.parametrize(("seed", "calm"), [(1, False), (2, False), (3, True), (4, True)])
def test_cards_are_never_overcommitted_when_programs_and_daemons_are_killed(
    station: Workstation, seed: int, calm: bool
) -> None:
    """After every kill the slices fit the cards; at the end everything is free."""
    chance = random.Random(seed)
    station.start("--simulate", "T4*2")
    for number in range(KILLS):
        if len([program for program in station.programs if program.process.poll() is None]) < 6:
            program = start(station, chance, number)
            if calm:
                settle(program)
        strike(station, chance)
        assert all(mib <= CARD_MIB for mib in leased(station))
    for program in station.programs:
        program.process.kill()
        program.process.wait()
    subprocess.run(
        [sys.executable, "-m", "fenka", "daemon", "--background", "--simulate", "T4*2"],
        env=station.environment,
        capture_output=True,
        check=False,  # One of the programs may have started it again.
    )
    eventually(lambda: station.fenka("ps", "-o", "json").stdout.strip() == "[]")
    assert list((station.root / "leases").iterdir()) == []
    (node,) = json.loads(station.ok("top", "node", "-o", "json"))
    assert [(card["allocated"], card["total"]) for card in node["cards"]] == [(0, 14), (0, 14)]
    with Driver.open(Path(station.root / "simulated" / "lib")) as driver:
        eventually(lambda: [reading.used_mib for reading in driver.readings()] == [0, 0])
    whole = [station.run("--gpu-mem", "14", "--", *HOLD, "14000") for _ in range(2)]
    assert [program.report()["cards"][0]["result"] for program in whole] == [0, 0]
