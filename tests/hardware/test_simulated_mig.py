"""MIG of simulated cards, by NVIDIA's own nvidia-smi 535 and through NVML."""

import re
import subprocess
from collections.abc import Callable
from ctypes import byref, c_uint
from pathlib import Path

import pynvml
import pytest

from fenka.core.mig.geometry import TABLES
from fenka.hardware.card_spec import MODELS, NodeError
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeNode
from tests.hardware.test_nvidia_smi import Smi, binary, smi, spec_of

__all__ = ["binary", "smi"]

NOT_SUPPORTED, IN_USE, INSUFFICIENT = 3, 19, 23


@pytest.fixture
def node(binary: Path, tmp_path: Path, make_node: MakeNode) -> SimulatedNode:
    """An A100, a T4, an A30, and an A100 whose halves are exchanged in ids."""
    models = ("A100-40G", "T4", "A30", 'A100-40G"\nmig_mirrored = true\nname = "Mirrored')
    cards = "".join(f'[[card]]\nmodel = "{model}"\n' for model in models)
    return make_node(spec_of(binary, tmp_path, cards))


def enable(smi: Smi, *cards: int) -> None:
    """Enable MIG."""
    for card in cards:
        assert smi("-i", str(card), "-mig", "1").returncode == 0


def created(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the ids of the GPU instances that nvidia-smi created."""
    return [int(number) for number in re.findall(r"created GPU instance ID +(\d+)", done.stdout)]


@pytest.mark.parametrize(
    ("profiles", "ids", "mirrored"),
    [
        ("19,19,14", [13, 11, 3], [9, 7, 5]),
        ("9,19,14,19", [2, 7, 4, 8], [1, 11, 6, 12]),
        ("14,19,19,19,19,19", [5, 13, 7, 8, 9, 10], [3, 9, 11, 12, 13, 14]),
    ],
)
def test_driver_chooses_the_places_that_hardware_chose(
    smi: Smi, profiles: str, ids: list[int], mirrored: list[int]
) -> None:
    """The sequences of NVIDIA's guide, also where the halves are exchanged in ids."""
    enable(smi, 0, 3)
    assert created(smi("mig", "-i", "0", "-cgi", profiles)) == ids
    assert created(smi("mig", "-i", "3", "-cgi", profiles)) == mirrored


def test_creation_fails_with_nvmls_code_when_nothing_is_left(smi: Smi) -> None:
    """What was created before stays."""
    enable(smi, 0)
    done = smi("mig", "-i", "0", "-cgi", "19,19,14,9")
    assert (done.returncode, created(done)) == (INSUFFICIENT, [13, 11, 3])
    assert smi("mig", "-i", "0", "-cgi", "19:6").returncode == INSUFFICIENT
    assert smi("mig", "-i", "0", "-cgi", "9:1").returncode == 2


def test_instances_are_as_many_as_the_card_has_slices(smi: Smi) -> None:
    """Seven on an A100 and four on an A30; the next one is refused."""
    enable(smi, 0, 2)
    assert len(created(smi("mig", "-i", "0", "-cgi", ",".join(["1g.5gb"] * 7), "-C"))) == 7
    assert created(smi("mig", "-i", "2", "-cgi", ",".join(["1g.6gb"] * 4), "-C")) == [3, 4, 5, 6]
    assert smi("mig", "-i", "0", "-cgi", "1g.5gb").returncode == INSUFFICIENT
    assert smi("mig", "-i", "2", "-cgi", "1g.6gb").returncode == INSUFFICIENT


def test_screens_show_instances_with_their_ids(smi: Smi) -> None:
    """The list, the table and the list of compute instances."""
    enable(smi, 0)
    assert smi("mig", "-i", "0", "-cgi", "3g.20gb,2g.10gb", "-C").returncode == 0
    listed = re.findall(r"MIG (\S+) +Device +(\d): \(UUID: (MIG-[0-9a-f-]{36})\)", smi("-L").stdout)
    assert [entry[:2] for entry in listed] == [("3g.20gb", "0"), ("2g.10gb", "1")]
    table = smi().stdout
    assert re.search(r"\|  0    2   0   0  \| +0MiB / 20096MiB +\| 42 ", table)
    assert re.search(r"\|  0    3   0   1  \| +0MiB /  9984MiB +\| 28 ", table)
    assert re.search(r"\| +0 +2 +MIG 3g.20gb +2 +0 +0:3 +\|", smi("mig", "-lci").stdout)
    assert smi("-q", "-x").stdout.count("<mig_device>") == 2


def test_instance_with_compute_instances_is_in_use(smi: Smi) -> None:
    """They go first."""
    enable(smi, 0)
    smi("mig", "-i", "0", "-cgi", "9", "-C")
    assert smi("mig", "-i", "0", "-dgi").returncode == IN_USE
    assert smi("mig", "-i", "0", "-dci").returncode == 0
    assert smi("mig", "-i", "0", "-dgi").returncode == 0
    assert smi("mig", "-i", "0", "-lgi").stdout.count("3g.20gb") == 0


def test_uuid_is_the_same_when_the_instance_is_created_again(smi: Smi) -> None:
    """It names card, place and shape, and no life of an instance."""
    enable(smi, 0)
    seen = []
    for _ in range(2):
        smi("mig", "-i", "0", "-cgi", "14", "-C")
        seen.append(re.findall(r"MIG-[0-9a-f-]{36}", smi("-L").stdout))
        smi("mig", "-i", "0", "-dci")
        smi("mig", "-i", "0", "-dgi")
    assert seen[0] == seen[1] != []


def test_mode_stays_pending_when_the_card_has_instances(smi: Smi) -> None:
    """It is a success with a warning; without them the mode changes."""
    enable(smi, 0)
    smi("mig", "-i", "0", "-cgi", "19")
    done = smi("-i", "0", "-mig", "0")
    assert (done.returncode, "pending" in done.stdout) == (0, True)
    assert "19" in smi("mig", "-i", "0", "-lgi").stdout
    smi("mig", "-i", "0", "-dgi")
    assert smi("-i", "0", "-mig", "0").returncode == 0
    query = ("--query-gpu=mig.mode.current,mig.mode.pending", "--format=csv,noheader")
    assert smi("-i", "0", *query).stdout == "Disabled, Disabled\n"
    assert smi("-i", "1", *query).stdout == "[N/A], [N/A]\n"


def test_provoked_faults_refuse_what_would_succeed(smi: Smi, node: SimulatedNode) -> None:
    """A pending switch until the card is recovered, and creations that fail."""
    node.set_mig_pending(0, pending=True)
    assert "pending" in smi("-i", "0", "-mig", "1").stdout
    node.recover(0)
    node.fail_mig(0, 1)
    assert smi("mig", "-i", "0", "-cgi", "19").returncode == INSUFFICIENT
    assert created(smi("mig", "-i", "0", "-cgi", "19")) == [13]
    with pytest.raises(NodeError, match="no MIG"):
        node.fail_mig(1, 1)


def code(call: Callable[[], object]) -> int:
    """Return NVML's code of a call."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def test_nvml_answers_by_its_own_codes(smi: Smi, node: SimulatedNode) -> None:
    """With MIG disabled, with a card that has none, and with an instance in place of a card."""
    library = pynvml
    with Driver.open(node.library_dir):
        card, other = (library.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
        assert library.nvmlDeviceGetMaxMigDeviceCount(card) == 0
        assert code(lambda: library.nvmlDeviceGetMigMode(other)) == NOT_SUPPORTED
        assert library.nvmlDeviceGetGpuInstanceProfileInfo(card, 0).id == 19
        assert code(lambda: library.nvmlDeviceGetGpuInstanceProfileInfo(card, 5)) == NOT_SUPPORTED
        assert code(lambda: library.nvmlDeviceGetGpuInstanceProfileInfo(card, 99)) == 2
        assert code(lambda: library.nvmlDeviceGetGpuInstanceById(card, 1)) == NOT_SUPPORTED
        enable(smi, 0)
        smi("mig", "-i", "0", "-cgi", "9", "-C")
        assert library.nvmlDeviceGetMaxMigDeviceCount(card) == 7
        instance = library.nvmlDeviceGetMigDeviceHandleByIndex(card, 0)
        assert code(lambda: library.nvmlDeviceGetMigDeviceHandleByIndex(card, 1)) == 6
        assert code(lambda: library.nvmlDeviceGetMigDeviceHandleByIndex(card, 7)) == 2
        assert library.nvmlDeviceGetName(instance) == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
        assert library.nvmlDeviceGetMemoryInfo(instance).total == 20096 << 20
        assert library.nvmlDeviceGetAttributes(instance).multiprocessorCount == 42
        assert code(lambda: library.nvmlDeviceGetAttributes(card)) == NOT_SUPPORTED
        assert code(lambda: library.nvmlDeviceGetMigMode(instance)) == 2
        assert code(lambda: library.nvmlDeviceGetUtilizationRates(card)) == NOT_SUPPORTED
        uuid = library.nvmlDeviceGetUUID(instance)
        found = library.nvmlDeviceGetHandleByUUID(uuid)
        assert library.nvmlDeviceGetUUID(found) == uuid
        gpu = library.nvmlDeviceGetGpuInstanceById(card, 2)
        smi("mig", "-i", "0", "-dci")
        smi("mig", "-i", "0", "-dgi")
        info = library.c_nvmlGpuInstanceInfo_t()
        stale = library._nvmlGetFunctionPointer("nvmlGpuInstanceGetInfo")
        assert stale(gpu, byref(info)) == 2
        count = c_uint()
        assert stale(gpu, byref(count)) == 2


def test_change_of_instances_is_an_event(smi: Smi, node: SimulatedNode) -> None:
    """Of the mode and of the geometry; cards without MIG have none."""
    change = pynvml.nvmlEventMigConfigChange
    with Driver.open(node.library_dir):
        card, other = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(card, change, events)
        assert code(lambda: pynvml.nvmlDeviceRegisterEvents(other, change, events)) == NOT_SUPPORTED
        enable(smi, 0)
        assert pynvml.nvmlEventSetWait_v2(events, 5000).eventType == change
        smi("mig", "-i", "0", "-cgi", "19")
        assert pynvml.nvmlEventSetWait_v2(events, 5000).eventType == change
        pynvml.nvmlEventSetFree(events)


def test_card_has_no_geometry_when_its_model_has_no_mig(make_node: MakeNode) -> None:
    """A T4."""
    with Driver.open(make_node("T4").library_dir) as driver:
        assert driver.geometry(driver.cards()[0].uuid) is None


@pytest.mark.parametrize("model", [model.key for model in MODELS.values() if model.mig])
def test_every_divisible_model_reports_its_profiles(make_node: MakeNode, model: str) -> None:
    """The geometry that is read through NVML is the one in the core's table."""
    with Driver.open(make_node(model).library_dir) as driver:
        geometry = driver.geometry(driver.cards()[0].uuid)
    expected = TABLES[MODELS[model].mig]
    assert geometry
    assert set(geometry.profiles) == set(expected.profiles)
    assert (geometry.compute, geometry.sms) == (expected.compute, expected.sms)
