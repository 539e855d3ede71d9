"""HAMi's names, behind their switch."""

import pytest

from fenka.core.evaluate import place
from fenka.core.request import Memory, PercentOfCard, Placement, Request
from fenka.core.usage import UsageTotals
from fenka.dialects import hami
from fenka.dialects.base import InvalidRecord, PodRequest
from fenka.dialects.hami import CORES, COUNT, MEMORY, PERCENT
from tests.dialects.builders import T4_MIB, V100_MIB, environment, node_totals, pod, share


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({COUNT: 1, MEMORY: 3000}, Request(Memory(3000))),
        ({COUNT: 2, MEMORY: 3000, CORES: 30}, Request(Memory(3000), compute=30, cards=2)),
        ({COUNT: 1, PERCENT: 50}, Request(PercentOfCard(50))),
        # nothing is said of memory: all of it, and others may have compute
        ({COUNT: 1, CORES: 30}, Request(PercentOfCard(100), compute=30)),
        # 100 is the card for itself
        ({COUNT: 2, MEMORY: 3000, CORES: 100}, Request(whole=True, cards=2)),
    ],
)
def test_container_gets_its_slices_and_environment(
    limits: dict[str, int | str], expected: Request
) -> None:
    """For each slice, each on another card."""
    assert hami.matches(pod(limits))
    (part,) = hami.parse(pod(limits))
    assert part.request == expected


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            pod({MEMORY: 1, PERCENT: 1}),
            "container c0 asks for nvidia.com/gpumem and nvidia.com/gpumem-percentage: ask for one of them",
        ),
        (
            pod({PERCENT: 101}),
            "container c0 asks for 101 of nvidia.com/gpumem-percentage: a card has 100",
        ),
        (
            pod({MEMORY: 1}),
            "container c0 asks for memory or compute of a card without nvidia.com/gpu: "
            "add nvidia.com/gpu: 1",
        ),
        (pod({CORES: 101}), "container c0 asks for 101 of nvidia.com/gpucores: a card has 100"),
        (
            pod({MEMORY: 1}, annotations={"nvidia.com/use-gputype": "A100"}),
            "annotation nvidia.com/use-gputype is not served: choose nodes by a nodeSelector instead",
        ),
        (
            pod({MEMORY: 1}, init=({MEMORY: 1},)),
            "its init container i0 asks for nvidia.com/gpumem: only its containers can",
        ),
    ],
)
def test_contradictory_pod_is_rejected_with_one_sentence(asked: PodRequest, sentence: str) -> None:
    """With what to do instead."""
    with pytest.raises(InvalidRecord) as why:
        hami.parse(asked)
    assert str(why.value) == sentence


def test_percent_is_resolved_on_each_card() -> None:
    """15079 · 50 // 100 = 7539, 16130 · 50 // 100 = 8065; never nothing."""
    assert [PercentOfCard(50).mib_on(size, 1024) for size in (T4_MIB, V100_MIB, 1)] == [
        7539,
        8065,
        1,
    ]
    assert PercentOfCard(50) != Memory(50)


def test_placement_is_unchanged_when_encoded_and_decoded() -> None:
    """As HAMi writes them after binding; a container without cards has an empty place."""
    node = share(T4_MIB, V100_MIB)
    asked = pod({COUNT: 2, PERCENT: 50, CORES: 30}, {}, {COUNT: 1, MEMORY: 3000})
    view, placements = UsageTotals(), []
    for part in hami.parse(asked):
        found = place(view, part.request, "binpack", [node.node])
        assert isinstance(found, Placement)
        view.add(found)
        placements.append(found)
    written = hami.encode(asked, node, placements, 1_700_000_000_000_000_000)
    record = "GPU-0,NVIDIA,7539,30:GPU-1,NVIDIA,8065,30:;;GPU-0,NVIDIA,3000,0:;"
    assert written == {
        "hami.io/vgpu-devices-allocated": record,
        "hami.io/vgpu-devices-to-allocate": record,
        "hami.io/vgpu-node": "gpu-1",
        "hami.io/vgpu-time": "1700000000",
        "fenka.io/cards": '{"0":"GPU-0","1":"GPU-1"}',
    }
    again = PodRequest(asked.containers, {}, written)
    assert hami.decode(again, hami.parse(again), node) == tuple(placements)
    assert environment(hami, again, node, placements, "c0") == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "7539m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "8065m",
        "CUDA_DEVICE_SM_LIMIT": "30",
    }


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            "GPU-0,NVIDIA,x,0:;",
            "annotation hami.io/vgpu-devices-allocated is not understood: 'GPU-0,NVIDIA,x,0'",
        ),
        ("GPU-9,NVIDIA,3000,0:;", "the pod's card 'GPU-9' is not one of its node's"),
        (
            ";",
            "annotation hami.io/vgpu-devices-allocated has 0 slices for container c0, "
            "it asks for 1 on different cards",
        ),
    ],
)
def test_decoding_raises_invalid_record_when_record_is_impossible(
    record: str, sentence: str
) -> None:
    """Are told, not guessed at."""
    asked = pod({COUNT: 1, MEMORY: 3000}, annotations={hami.ALLOCATED: record})
    with pytest.raises(InvalidRecord) as why:
        hami.decode(asked, hami.parse(asked), share(T4_MIB))
    assert str(why.value) == sentence


def test_node_advertises_units_of_each_card() -> None:
    """Ten slices a card, as HAMi's plugin has by default."""
    assert node_totals(hami, share(T4_MIB, T4_MIB)) == {"nvidia.com/gpu": 20}
