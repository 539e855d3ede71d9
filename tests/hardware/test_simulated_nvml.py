"""What monitoring programs ask of NVML: many values by one call, clocks as text, and places."""

from collections.abc import Iterator

import pynvml
import pytest

from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from tests.hardware.client import MakeNode

BOOST_MHZ, MEMORY_MHZ, POWER_MW = 1590, 5001, 70_000


@pytest.fixture
def t4(node: SimulatedNode) -> Iterator[object]:
    """Return NVML's handle of a node's only card."""
    with Driver.open(node.library_dir):
        yield pynvml.nvmlDeviceGetHandleByIndex(0)


def test_fields_are_answered_one_by_one(t4: object) -> None:
    """Those that a card has agree with their own functions; the others are not supported."""
    wanted = [
        pynvml.NVML_FI_DEV_ECC_CURRENT,
        pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT,
        pynvml.NVML_FI_DEV_POWER_INSTANT,
        pynvml.NVML_FI_DEV_POWER_MAX_LIMIT,
        pynvml.NVML_FI_DEV_MEMORY_TEMP,
    ]
    values = pynvml.nvmlDeviceGetFieldValues(t4, wanted)
    assert [value.nvmlReturn for value in values] == [0, 0, 0, 0, pynvml.NVML_ERROR_NOT_SUPPORTED]
    assert [value.value.uiVal for value in values[:4]] == [
        pynvml.nvmlDeviceGetEccMode(t4)[0],
        0,
        pynvml.nvmlDeviceGetPowerUsage(t4),
        POWER_MW,
    ]


def test_performance_states_have_the_clocks_of_the_card(t4: object) -> None:
    """An idle card is in the slowest state, and the fastest one has its highest clocks."""
    states = pynvml.nvmlDeviceGetSupportedPerformanceStates(t4)
    assert states == [pynvml.NVML_PSTATE_0, pynvml.NVML_PSTATE_8]
    assert pynvml.nvmlDeviceGetPerformanceState(t4) == states[-1]
    assert [
        pynvml.nvmlDeviceGetMinMaxClockOfPState(t4, kind, states[0])[1]
        for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    ] == [BOOST_MHZ, MEMORY_MHZ]
    assert f"perf=1, nvclock={BOOST_MHZ}," in pynvml.nvmlDeviceGetPerformanceModes(t4)


def test_only_the_fixed_power_limit_can_be_set(t4: object) -> None:
    """A limit outside of the constraints is invalid; one inside would change the card."""
    answers = []
    for milliwatts in (1000, POWER_MW // 2, POWER_MW):
        try:
            answers.append(pynvml.nvmlDeviceSetPowerManagementLimit(t4, milliwatts))
        except pynvml.NVMLError as error:
            answers.append(error.value)
    assert answers == [pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED, None]


def test_cards_near_a_cpu_are_those_of_its_socket(make_node: MakeNode) -> None:
    """Each card is near the CPUs of its affinity, and only near those."""
    with Driver.open(make_node("A100-40G*4@nvswitch").library_dir):
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(4)]
        near = [set(pynvml.nvmlDeviceGetCpuAffinity(handle, 1)) for handle in handles]
        for cpu in (0, 1):
            shown = {
                pynvml.nvmlDeviceGetUUID(handle)
                for handle in pynvml.nvmlSystemGetTopologyGpuSet(cpu)
            }
            assert shown == {
                pynvml.nvmlDeviceGetUUID(handle)
                for handle, masks in zip(handles, near, strict=True)
                if next(iter(masks)) >> cpu & 1
            }
        links = pynvml.nvmlDeviceGetFieldValues(handles[0], [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT])
        assert links[0].value.uiVal == 12
        assert pynvml.nvmlDeviceGetVirtualizationMode(handles[0]) == 0
        assert pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handles[0]) == 4
