"""What labels say a node is for."""

import pytest

from fenka.dialects import gpu_manager, node_modes, nvidia
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord, NodeMode
from fenka.dialects.node_modes import EXCLUSIVE, SHARED, check_shared, node_mode
from tests.dialects.builders import pod

WITH_WHOLE = NodeMode(whole=True, memory=True, compute=True)


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
        ({"ack.node.gpu.schedule": "cgpu"}, NodeMode(memory=True)),
        ({"ack.node.gpu.schedule": "cgpu", "cgpu": "true"}, NodeMode(memory=True)),
        ({"ack.node.gpu.schedule": "share"}, NodeMode(memory=True, isolated=False)),
        ({"ack.node.gpu.schedule": "core_mem"}, SHARED),
        ({"ack.node.gpu.schedule": "default"}, EXCLUSIVE),
        (
            {"cgpu": "true", "cgpu.disable.isolation": "true"},
            NodeMode(memory=True, compute=True, isolated=False),
        ),
    ],
)
def test_mode_is_read_from_labels(labels: dict[str, str], expected: NodeMode) -> None:
    """Of gpushare, gpu-manager and ACK, and fenka's own addition."""
    assert node_mode(labels) == expected
    if expected.memory or not node_modes.has_mode_label(labels):
        check_shared(labels)
    else:
        with pytest.raises(InvalidRecord, match="takes it out of sharing"):
            check_shared(labels)


@pytest.mark.parametrize(
    "labels",
    [
        {"gpushare": "true", "cgpu": "false"},
        {"nvidia-device-enable": "enable", "cgpu": "false"},
        {"ack.node.gpu.schedule": "default", "cgpu": "true"},
        {"ack.node.gpu.schedule": "core_mem", "gpushare": "false"},
    ],
)
def test_mode_is_rejected_when_labels_contradict(labels: dict[str, str]) -> None:
    """One of them must go."""
    with pytest.raises(InvalidRecord, match="contradict each other: keep one of them"):
        node_mode(labels)


def test_gpu_managers_whole_card_is_admitted_when_slices_are() -> None:
    """`nvidia.com/gpu` on a sharing node needs its label; 100 of vcuda-core does not."""
    by_nvidia = nvidia.parse(pod({NVIDIA_GPU: 1}))
    by_tencent = gpu_manager.parse(pod({gpu_manager.CORE: 100, gpu_manager.MEMORY: 64}))
    shared = {"gpushare": "true"}
    node_modes.check_admission(shared, by_tencent)
    with pytest.raises(InvalidRecord, match="is for both"):
        node_modes.check_admission(shared, by_nvidia)
    node_modes.check_admission({**shared, node_modes.WHOLE_LABEL: "true"}, by_nvidia)
    with pytest.raises(InvalidRecord, match="keeps it for slices"):
        node_modes.check_admission({node_modes.MODE_LABEL: "cgpu"}, by_tencent)
