"""What labels say a node is for."""

import pytest

from fenka.dialects import ack, gpu_manager, nodes, nvidia, nvidia_mig
from fenka.dialects.base import NVIDIA_GPU, InvalidRecord, NodeMode, SliceRequest
from fenka.dialects.nodes import EXCLUSIVE, SHARED, NodeMigMode, check_shared, mig_mode, node_mode
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
    if expected.memory or not nodes.has_mode_label(labels):
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
    nodes.check_admission(shared, by_tencent)
    with pytest.raises(InvalidRecord, match="is for both"):
        nodes.check_admission(shared, by_nvidia)
    nodes.check_admission({**shared, nodes.WHOLE_LABEL: "true"}, by_nvidia)
    with pytest.raises(InvalidRecord, match="keeps it for slices"):
        nodes.check_admission({nodes.MODE_LABEL: "cgpu"}, by_tencent)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, NodeMigMode()),
        ({"fenka.io/mig": "off"}, NodeMigMode(labelled=True)),
        ({"fenka.io/mig": "static"}, NodeMigMode("static", labelled=True)),
        ({"fenka.io/mig": "on-demand"}, NodeMigMode("on-demand", labelled=True)),
        ({"fenka.io/mig": "on-demand.0.12"}, NodeMigMode("on-demand", frozenset({0, 12}), True)),
    ],
)
def test_mig_mode_is_read_from_the_label(labels: dict[str, str], expected: NodeMigMode) -> None:
    """Indexes are separated by dots, since a label's value has no colon or comma."""
    assert mig_mode(labels) == expected


@pytest.mark.parametrize("value", ["", "all", "on-demand.", "on-demand.a", "on-demand.99999"])
def test_mig_mode_is_rejected_when_it_is_no_mode(value: str) -> None:
    """With what to write instead."""
    with pytest.raises(InvalidRecord, match=r"is none of off, static, on-demand, and"):
        mig_mode({"fenka.io/mig": value})


ON_DEMAND = {"fenka.io/mig": "on-demand"}
GPUSHARE = {"gpushare": "true"}
EXCLUSIVE_NODE = "its owner keeps it for whole cards and whole MIG instances"
UNDIVIDED = (
    "its owner has no card divided into MIG instances: label fenka.io/mig=on-demand does that"
)


@pytest.mark.parametrize(
    ("labels", "of_instance", "of_slice"),
    [
        ({}, UNDIVIDED, UNDIVIDED),
        (GPUSHARE, UNDIVIDED, UNDIVIDED),
        ({"fenka.io/mig": "off"} | GPUSHARE, UNDIVIDED, UNDIVIDED),
        (ON_DEMAND, "", EXCLUSIVE_NODE),
        (ON_DEMAND | {"gpushare": "false"}, "", EXCLUSIVE_NODE),
        (ON_DEMAND | GPUSHARE, "", ""),
        ({"fenka.io/mig": "static"} | GPUSHARE, "", ""),
        (ON_DEMAND | GPUSHARE | {"fenka.io/mig-tenancy": "shared"}, "", ""),
        (
            ON_DEMAND | GPUSHARE | {"fenka.io/mig-tenancy": "all"},
            "",
            "its label fenka.io/mig-tenancy=all is none of namespace and shared",
        ),
        (
            ON_DEMAND | {"ack.node.gpu.schedule": "cgpu"},
            "",
            "its label ack.node.gpu.schedule=cgpu shares out memory alone, not compute",
        ),
    ],
)
def test_instances_are_admitted_by_the_label_that_divides_cards(
    labels: dict[str, str], of_instance: str, of_slice: str
) -> None:
    """Whether the node shares cards decides on slices inside instances only; the slice has compute too."""
    inside = pod({"aliyun.com/gpu-mem": 4, ack.CORE: 20}, annotations={"fenka.io/inside": "mig"})
    parts = nvidia_mig.parse(pod({"nvidia.com/mig-1g.5gb": 1})), ack.parse(inside)
    for requested, sentence in zip(parts, (of_instance, of_slice), strict=True):
        assert rejection(labels, requested) == sentence


def rejection(labels: dict[str, str], parts: tuple[SliceRequest, ...]) -> str:
    """Return why a node with these labels does not admit the requests; empty if it does."""
    try:
        nodes.check_admission(labels, parts)
    except InvalidRecord as why:
        return str(why)
    return ""


def test_node_that_shares_no_cards_is_open_when_it_divides_some() -> None:
    """Its label takes it out of sharing for slices of cards, and not for instances."""
    check_shared({"gpushare": "false"} | ON_DEMAND)
    slices = ack.parse(pod({"aliyun.com/gpu-mem": 4}))
    assert "keeps it for whole cards" in rejection({"gpushare": "false"} | ON_DEMAND, slices)
    with pytest.raises(InvalidRecord, match="takes it out of sharing"):
        check_shared({"gpushare": "false", "fenka.io/mig": "off"})


def test_slices_of_cards_are_admitted_beside_divided_ones() -> None:
    """Also where the label that divides cards cannot be read: they do not need it."""
    slices = ack.parse(pod({"aliyun.com/gpu-mem": 4}))
    assert rejection(GPUSHARE | ON_DEMAND, slices) == ""
    assert rejection(GPUSHARE | {"fenka.io/mig": "all"}, slices) == ""
    instance = nvidia_mig.parse(pod({"nvidia.com/mig-1g.5gb": 1}))
    assert "fenka.io/mig=all is none of off" in rejection({"fenka.io/mig": "all"}, instance)


def test_mig_tenancy_is_that_of_namespaces_unless_the_label_says_so() -> None:
    """Tenants of one instance share a memory bus and its faults."""
    assert nodes.mig_shared({"fenka.io/mig-tenancy": "shared"})
    assert not nodes.mig_shared({"fenka.io/mig-tenancy": "namespace"})
    assert not nodes.mig_shared({"fenka.io/mig-tenancy": "all"})
    assert not nodes.mig_shared({})
