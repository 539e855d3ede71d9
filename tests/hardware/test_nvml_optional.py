"""Answers that a driver does not have, cards that are lost, and memory that the driver keeps for itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from fenka.core.mig.geometry import TABLES
from fenka.core.units import MIB
from fenka.hardware.card_spec import MODELS, BadSpec, parse_spec
from fenka.hardware.nvml import Driver, Hardware, XidListener, read_memory
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeClient, MakeNode

OPTIONAL = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetNumGpuCores",
)
MISSING = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "UNKNOWN", "NO_DATA")
LOST = ("GPU_IS_LOST", "TIMEOUT", "RESET_REQUIRED")


def failing(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a query of NVML fail for the node's first card."""
    real: Callable[..., Any] = getattr(pynvml, name)

    def call(handle: Any, *arguments: Any, **named: Any) -> Any:
        if pynvml.nvmlDeviceGetIndex(handle) == 0:
            raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
        return real(handle, *arguments, **named)

    monkeypatch.setattr(pynvml, name, call)


def read_all(driver: Driver) -> list[str]:
    """Call everything that reads the driver, and return the cards that have readings."""
    cards = driver.cards()
    driver.processes()
    driver.links()
    for card in cards:
        driver.cpus(card.uuid)
        driver.pci_device(card.uuid)
        driver.geometry(card.uuid)
        driver.busy_samples(card.uuid, 0)
    with Hardware(lambda: driver).in_use():
        XidListener(Hardware(lambda: driver)).__exit__()
    return [reading.uuid for reading in driver.readings()]


@pytest.mark.parametrize("code", MISSING)
def test_card_is_kept_when_an_optional_answer_is_missing(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """What a card does not report is unknown, whatever the driver's word for that is."""
    with Driver.open(make_node("A100-40G,T4").library_dir) as driver:
        uuids = read_all(driver)
        for name in OPTIONAL:
            with monkeypatch.context() as patch:
                failing(name, code, patch)
                assert read_all(driver) == uuids, name
                assert len(driver.cards()) == 2, name


@pytest.mark.parametrize("code", LOST)
@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates"])
def test_only_the_lost_card_is_missing_when_a_card_does_not_answer(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    """The driver answers for the other, and is not taken for lost itself."""
    with Driver.open(make_node("A100-40G,T4").library_dir) as driver:
        second = driver.cards()[1].uuid
        failing(name, code, monkeypatch)
        assert [reading.uuid for reading in driver.readings()] == [second]


def test_memory_is_unknown_when_the_card_shares_that_of_the_machine(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """NVML supports no memory query of a GB10; CUDA states the size, and processes have theirs."""
    node = make_node("GB10")
    program = make_client(node).enter()
    program.do("ok(d.cuMemAlloc(3 << 20))", "0")
    assert program.do("0", "ok(d.cuDeviceTotalMem(0))") == 122570 * MIB
    with Driver.open(node.library_dir) as driver:
        (card,), (reading,), (process,) = driver.cards(), driver.readings(), driver.processes()
        assert (card.model, card.memory_mib, reading.used_mib) == ("NVIDIA GB10", 0, None)
        assert process.used_mib == 4  # in pages of 2 MiB
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))


def test_reserve_is_not_given_away_when_the_driver_keeps_one(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    """A T4 of 15360 MiB has 450 MiB less for programs, and both versions of the query add up."""
    node = make_node("T4-550")
    program = make_client(node).enter()
    assert program.do("p = ok(d.cuMemAlloc(14910 << 20))", "int(d.cuMemAlloc(1 << 20)[0])") == 2
    with Driver.open(node.library_dir) as driver:
        assert driver.cards()[0].memory_mib == driver.readings()[0].used_mib == 14910
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        first = pynvml.nvmlDeviceGetMemoryInfo(handle)
        second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert (first.total, first.used, first.free) == (15360 * MIB, 15360 * MIB, 0)
    assert (second.total, second.reserved, second.used, second.free) == (
        *(15360 * MIB, 450 * MIB),
        *(14910 * MIB, 0),
    )


def test_reserve_is_left_out_of_the_total_when_the_driver_is_older(tmp_path: Path) -> None:
    """Drivers before 510 have no second version of the query, and their total is what programs can have."""
    spec = tmp_path / "cards.toml"
    spec.write_text('version = 1\ndriver_version = "470.1"\n[[card]]\nmodel = "T4-550"\n')
    node = SimulatedNode.create(tmp_path / "node", parse_spec(str(spec)))
    node.start()
    try:
        with Driver.open(node.library_dir) as driver:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == 14910 * MIB
            with pytest.raises(pynvml.NVMLError_FunctionNotFound):
                pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            memory = read_memory(handle)
            assert memory is not None
            assert memory.total_mib == driver.cards()[0].memory_mib == 14910
    finally:
        node.stop()


@pytest.mark.parametrize("missing", ["nvmlDeviceGetMemoryInfo", None])
def test_profiles_are_named_or_unknown_when_the_driver_names_none(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    """Before driver 520 names are computed from the card's total, the reserve included."""
    real: Callable[..., Any] = pynvml.nvmlDeviceGetGpuInstanceProfileInfo

    def first_version(handle: Any, number: int, version: int = 2) -> Any:
        if version != 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return real(handle, number, version)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetGpuInstanceProfileInfo", first_version)
    if missing:
        failing(missing, "NOT_SUPPORTED", monkeypatch)
    with Driver.open(make_node("H100-80G").library_dir) as driver:
        geometry = driver.geometry(driver.cards()[0].uuid)
        names = [profile.name for profile in geometry.profiles] if geometry else []
    assert sorted(names) == (
        [] if missing else sorted(profile.name for profile in TABLES["H100-80G"].profiles)
    )


def test_every_model_has_room_for_its_largest_instance() -> None:
    """The reserve is no part of any MIG instance."""
    for model in MODELS.values():
        sizes = [profile.memory_mib for profile in TABLES[model.mig].profiles] if model.mig else []
        assert max(sizes, default=0) <= model.usable_mib, model.key


def test_reserve_is_refused_when_it_leaves_nothing(tmp_path: Path) -> None:
    """In one sentence."""
    path = tmp_path / "cards.toml"
    path.write_text('version = 1\n[[card]]\nmodel = "T4"\nreserved_mib = 15079\n')
    with pytest.raises(BadSpec, match="reserved_mib must be less than the card's memory of 15079"):
        parse_spec(str(path))
