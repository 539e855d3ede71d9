"""What labels say a node is for."""

import pytest

from fenka.dialects import gpu_manager, modes, whole_cards
from fenka.dialects.gpushare import WHOLE, Unreadable
from fenka.dialects.modes import EXCLUSIVE, SHARED, Mode, mode, open_to_slices
from tests.dialects.dialect_kit import pod

WITH_WHOLE = Mode(whole=True, memory=True, compute=True)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, EXCLUSIVE),
        ({"gpushare": "true"}, SHARED),
        ({"cgpu": "true", "gpushare": "true"}, SHARED),
        ({"cgpu": "false"}, EXCLUSIVE),
        ({"nvidia-device-enable": "enable"}, SHARED),
        ({"nvidia-device-enable": "disable"}, EXCLUSIVE),
        ({"gpushare": "true", "fenka.io/whole-cards": "true"}, WITH_WHOLE),
        ({"fenka.io/whole-cards": "true"}, EXCLUSIVE),
        ({"ack.node.gpu.schedule": "cgpu"}, Mode(memory=True)),
        ({"ack.node.gpu.schedule": "cgpu", "cgpu": "true"}, Mode(memory=True)),
        ({"ack.node.gpu.schedule": "share"}, Mode(memory=True, isolated=False)),
        ({"ack.node.gpu.schedule": "core_mem"}, SHARED),
        ({"ack.node.gpu.schedule": "default"}, EXCLUSIVE),
        (
            {"cgpu": "true", "cgpu.disable.isolation": "true"},
            Mode(memory=True, compute=True, isolated=False),
        ),
    ],
)
def test_modes(labels: dict[str, str], expected: Mode) -> None:
    """Of gpushare, gpu-manager and ACK, and fenka's own addition."""
    assert mode(labels) == expected
    if expected.memory or not modes.labelled(labels):
        open_to_slices(labels)
    else:
        with pytest.raises(Unreadable, match="takes it out of sharing"):
            open_to_slices(labels)


@pytest.mark.parametrize(
    "labels",
    [
        {"gpushare": "true", "cgpu": "false"},
        {"nvidia-device-enable": "enable", "cgpu": "false"},
        {"ack.node.gpu.schedule": "default", "cgpu": "true"},
        {"ack.node.gpu.schedule": "core_mem", "gpushare": "false"},
    ],
)
def test_contradictions(labels: dict[str, str]) -> None:
    """One of them must go."""
    with pytest.raises(Unreadable, match="contradict each other: keep one of them"):
        mode(labels)


def test_gpu_managers_whole_cards_come_with_its_slices() -> None:
    """`nvidia.com/gpu` on a sharing node needs its label; 100 of vcuda-core does not."""
    by_nvidia = whole_cards.demand(pod({WHOLE: 1}), 1024)
    by_tencent = gpu_manager.demand(pod({gpu_manager.CORE: 100, gpu_manager.MEMORY: 64}), 1024)
    shared = {"gpushare": "true"}
    modes.admits(shared, by_tencent)
    with pytest.raises(Unreadable, match="is for both"):
        modes.admits(shared, by_nvidia)
    modes.admits({**shared, modes.WHOLE_LABEL: "true"}, by_nvidia)
    with pytest.raises(Unreadable, match="keeps it for slices"):
        modes.admits({modes.MODE: "cgpu"}, by_tencent)
