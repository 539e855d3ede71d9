"""ACK's names: a share of compute, several cards, and the modes of nodes."""

import pytest

from fenka.core.evaluate import place
from fenka.core.request import Memory, Placement, Request
from fenka.core.usage import UsageTotals
from fenka.dialects import ack, nodes, nvidia
from fenka.dialects.ack import CORE
from fenka.dialects.base import Dialect, InvalidRecord, PodRequest
from fenka.dialects.gpushare import MEMORY
from fenka.dialects.nodes import MODE_LABEL
from tests.dialects.builders import T4_MIB, environment, node_totals, pod, share

NODE = share(T4_MIB, T4_MIB)


def cards(count: str, *containers: dict[str, int | str]) -> PodRequest:
    """With the label that shares the units out."""
    return pod(*containers, labels={"aliyun.com/gpu-count": count})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (pod({MEMORY: 4}), Request(Memory(4, None))),
        (pod({MEMORY: 4, CORE: 30}), Request(Memory(4, None), compute=30)),
        # two containers are on one card: 4 + 2 units, 30 + 20 percent
        (pod({MEMORY: 4, CORE: 30}, {MEMORY: 2, CORE: 20}), Request(Memory(6, None), compute=50)),
        # an init container has ended by then: the larger of 8 and 4, of 10 and 30
        (
            pod({MEMORY: 4, CORE: 30}, init=({MEMORY: 8, CORE: 10},)),
            Request(Memory(8, None), compute=30),
        ),
        # 8 units on 2 cards
        (cards("2", {MEMORY: 8}), Request(Memory(4, None), cards=2)),
        (pod({MEMORY: 4, CORE: 100}), Request(Memory(4, None), compute=100)),
    ],
)
def test_request_is_the_pods_peak_per_card(asked: PodRequest, expected: Request) -> None:
    """Of the pod as a whole, per card."""
    (part,) = ack.parse(asked)
    assert part.request == expected


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            pod({CORE: 30}),
            "container c0 asks for aliyun.com/gpu-core.percentage without aliyun.com/gpu-mem: "
            "ask for both in each container",
        ),
        (
            pod({MEMORY: 4, CORE: 30}, {MEMORY: 4}),
            "container c1 asks for aliyun.com/gpu-mem without aliyun.com/gpu-core.percentage: "
            "ask for both in each container",
        ),
        (
            pod({MEMORY: 4, CORE: 33}),
            "container c0 asks for 33 of aliyun.com/gpu-core.percentage: ask for 5 to 100, in steps of 5",
        ),
        (
            pod({MEMORY: 4, CORE: 105}),
            "container c0 asks for 105 of aliyun.com/gpu-core.percentage: ask for 5 to 100, in steps of 5",
        ),
        (
            pod({MEMORY: 4, CORE: 60}, {MEMORY: 4, CORE: 60}),
            "its containers ask for 120 of aliyun.com/gpu-core.percentage together: one card has 100",
        ),
        (
            cards("2", {MEMORY: 8, CORE: 20}),
            "it asks for aliyun.com/gpu-core.percentage and, by its label aliyun.com/gpu-count, for 2 cards: "
            "a share of compute is of one card, leave out one of the two",
        ),
        (cards("3", {MEMORY: 8}), "its units cannot be shared out evenly over 3 cards"),
        (cards("two", {MEMORY: 8}), "label aliyun.com/gpu-count is 'two', not a number of cards"),
    ],
)
def test_contradictory_pod_is_rejected_with_one_sentence(asked: PodRequest, sentence: str) -> None:
    """With what to do instead."""
    with pytest.raises(InvalidRecord) as why:
        ack.parse(asked)
    assert str(why.value) == sentence


GOLDEN = {
    "ALIYUN_COM_GPU_MEM_IDX": "0",
    "ALIYUN_COM_GPU_MEM_POD": "6",
    "ALIYUN_COM_GPU_MEM_DEV": "14",
    "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
    "scheduler.framework.gpushare.allocation": '{"0":{"0":4},"2":{"0":2}}',
    "gpushare.alibabacloud.com/core-percentage": '{"0":{"0":30},"2":{"0":20}}',
    "fenka.io/cards": '{"0":"GPU-0"}',
}


def test_placement_is_unchanged_when_encoded_and_decoded() -> None:
    """gpushare's, and the share of compute in the same shape."""
    asked = pod({MEMORY: 4, CORE: 30}, {}, {MEMORY: 2, CORE: 20})
    (part,) = ack.parse(asked)
    found = place(UsageTotals(), part.request, "binpack", [NODE.node])
    assert isinstance(found, Placement)
    written = ack.encode(asked, NODE, [found], 1_700_000_000_000_000_000)
    assert written == GOLDEN
    again = PodRequest(asked.containers, {}, GOLDEN)
    assert ack.decode(again, [part], NODE) == (found,)
    # 15079 · 6 // 14 = 6462
    assert [(it.memory_mib, it.compute) for it in found.slices] == [(6462, 50)]
    assert environment(ack, again, NODE, [found], "c2") == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "ALIYUN_COM_GPU_MEM_IDX": "0",
        "ALIYUN_COM_GPU_MEM_POD": "6",
        "ALIYUN_COM_GPU_MEM_DEV": "14",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "2",
    }
    assert environment(ack, again, NODE, [found], "c1") == {}


def test_acks_annotation_is_left_out_when_no_compute_is_requested() -> None:
    """gpushare's pods stay as they are."""
    asked = pod({MEMORY: 4})
    (part,) = ack.parse(asked)
    found = place(UsageTotals(), part.request, "binpack", [NODE.node])
    assert isinstance(found, Placement)
    assert ack.CORES not in ack.encode(asked, NODE, [found], 1)


def test_node_advertises_units_of_each_card() -> None:
    """14 + 14 units, 100 percent of each card."""
    assert node_totals(ack, NODE) == {MEMORY: 28, CORE: 200}


SLICE, WITH_COMPUTE, WHOLE = (
    pod({MEMORY: 4}),
    pod({MEMORY: 4, CORE: 30}),
    pod({"nvidia.com/gpu": 1}),
)


@pytest.mark.parametrize(
    ("mode", "sentences"),
    [
        # memory alone, memory with compute, whole cards
        (None, [None, None, "keeps it for slices: fenka.io/whole-cards=true is for both"]),
        ("default", ["keeps it for whole cards", "keeps it for whole cards", None]),
        ("topology", ["keeps it for whole cards", "keeps it for whole cards", None]),
        (
            "cgpu",
            [
                None,
                "shares out memory alone, not compute",
                "keeps it for slices: fenka.io/whole-cards=true is for both",
            ],
        ),
        (
            "share",
            [
                None,
                "shares out memory alone, not compute",
                "keeps it for slices: fenka.io/whole-cards=true is for both",
            ],
        ),
        ("core_mem", [None, None, "keeps it for slices: fenka.io/whole-cards=true is for both"]),
        ("mig", ["is none of cgpu, core_mem, default, share, topology"] * 3),
    ],
)
def test_mode_admits_the_pods_it_is_for(mode: str | None, sentences: list[str | None]) -> None:
    """By the label of the node."""
    labels = {} if mode is None else {MODE_LABEL: mode}
    dialects: list[Dialect] = [ack, ack, nvidia]
    for asked, dialect, sentence in zip(
        [SLICE, WITH_COMPUTE, WHOLE], dialects, sentences, strict=True
    ):
        parts = dialect.parse(asked)
        if sentence is None:
            nodes.check_admission(labels, parts)
            continue
        with pytest.raises(InvalidRecord) as why:
            nodes.check_admission(labels, parts)
        said = f"its label {MODE_LABEL}={mode}" if mode else "its owner"
        assert str(why.value) == f"{said} {sentence}"


def test_pod_is_rejected_when_core_mem_node_has_the_other_kind() -> None:
    """On nodes of core_mem only: elsewhere nothing is promised."""
    core_mem = {MODE_LABEL: "core_mem"}
    with_compute, without = ack.parse(WITH_COMPUTE), ack.parse(SLICE)
    nodes.check_admission(core_mem, with_compute, [True, True])
    nodes.check_admission(core_mem, without, [False])
    nodes.check_admission({}, without, [True])
    with pytest.raises(
        InvalidRecord, match=r"does not mix, and pods without a share of compute are there$"
    ):
        nodes.check_admission(core_mem, with_compute, [True, False])
    with pytest.raises(
        InvalidRecord, match=r"does not mix, and pods with a share of compute are there$"
    ):
        nodes.check_admission(core_mem, without, [True])
