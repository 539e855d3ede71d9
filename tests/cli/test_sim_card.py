"""`fenka sim card`, seen through nvidia-ml-py."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime directory without anything."""
    root = Path(tempfile.mkdtemp(prefix="fenka-"))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def say(runtime: Path) -> Say:
    """`fenka sim card WORDS` in the runtime: exit code, output, complaint."""

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "fenka", "sim", "card", *words],
            env={**os.environ, "FENKA_RUNTIME": str(runtime)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def node(runtime: Path) -> Iterator[SimulatedNode]:
    """The runtime's node: a T4, and an RTX 4090, which has no ECC."""
    node = SimulatedNode.create(runtime / "simulated", parse_spec("T4,RTX4090"))
    node.start()
    yield node
    node.stop()


def test_sim_card_provokes_every_fault_and_reading(node: SimulatedNode, say: Say) -> None:
    """Each option shows in NVML, and the command says what it did."""
    with Driver.open(node.library_dir) as driver:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        uuid = driver.cards()[0].uuid

        assert say("0", "--temperature", "88") == (0, "card 0: reports 88 °C\n", "")
        assert driver.readings()[0].temperature_c == 88
        said = say(uuid, "--no-temperature")
        assert said == (0, "card 0: reports the temperature of its load\n", "")
        assert driver.readings()[0].temperature_c == 30

        assert say("0", "--xid", "61") == (0, "card 0: XID 61 reported\n", "")
        assert pynvml.nvmlEventSetWait_v2(events, 5000).eventData == 61

        said = say("0", "--ecc-errors", "2", "--corrected")
        assert said == (0, "card 0: 2 more corrected memory errors\n", "")
        assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 0, 0) == 2
        said = say("0", "--ecc-errors", "3")
        assert said == (0, "card 0: 3 more uncorrected memory errors\n", "")
        assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0) == 3
        assert pynvml.nvmlEventSetWait_v2(events, 5000).eventData == 48

        assert say("0", "--lose") == (0, "card 0: lost\n", "")
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            pynvml.nvmlDeviceGetName(handle)
        # The way back must not lead through the driver, to which the card is lost.
        assert say(uuid, "--recover") == (0, "card 0: recovered\n", "")
        assert pynvml.nvmlDeviceGetName(handle) == "Tesla T4"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["2", "--lose"], 2, "the simulated node has no card 2: it has 2, counted from 0"),
        (["GPU-1", "--lose"], 2, "the simulated node has no card GPU-1: it has 2, counted from 0"),
        (["1", "--ecc-errors", "1"], 1, "card 1 has no ECC memory, which could count errors"),
        (["0", "--xid", "0"], 2, "--xid takes 1 to 65535, not 0"),
        (["0", "--temperature", "999"], 2, "--temperature takes 0 to 200, not 999"),
        (["0", "--ecc-errors", "-1"], 2, "--ecc-errors takes 1 to 4294967295, not -1"),
        (["0", "--corrected"], 2, "--corrected requires --ecc-errors"),
        (["0", "--lose", "--recover"], 2, "--lose and --recover exclude each other"),
        (
            ["0", "--temperature", "9", "--no-temperature"],
            2,
            "--temperature and --no-temperature exclude each other",
        ),
        (
            ["0"],
            2,
            "nothing to do: give --temperature, --no-temperature, --xid, --ecc-errors, --lose, "
            "--recover, --mig-pending or --mig-failures",
        ),
    ],
)
def test_sim_card_is_refused_when_options_are_invalid(
    node: SimulatedNode, say: Say, words: list[str], code: int, sentence: str
) -> None:
    """One sentence, an exit code, and nothing was done."""
    assert say(*words) == (code, "", f"fenka: {sentence}\n")
    with Driver.open(node.library_dir) as driver:
        assert [reading.temperature_c for reading in driver.readings()] == [30, 30]


def test_sim_card_fails_when_no_simulated_node_runs(runtime: Path, say: Say) -> None:
    """A sentence that says how to get one, be it that none was made or that it has ended."""
    sentence = (
        f"fenka: no simulated node runs in {runtime}/simulated: start one with "
        "`fenka daemon --background --simulate T4`\n"
    )
    assert say("0", "--lose") == (1, "", sentence)
    SimulatedNode.create(runtime / "simulated", parse_spec("T4"))
    assert say("0", "--lose") == (1, "", sentence)
