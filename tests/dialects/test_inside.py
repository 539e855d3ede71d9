"""Slices inside MIG instances (`fenka.io/inside`), in every dialect of slices."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.request import Placement, Slice
from fenka.dialects import ack, gpu_manager, hami, nvidia_mig, pod_records
from fenka.dialects.base import CARDS, CORE_MODE, NVIDIA_GPU, Dialect, InvalidRecord, PodRequest
from fenka.dialects.card_records import fallback_placement
from fenka.dialects.mig_records import INSIDE, INSTANCE, with_instances
from fenka.dialects.registry import WITH_HAMI, annotation_names, detect, option_names
from tests.dialects.builders import pod
from tests.dialects.mig_builders import divided_node, placed, with_records

MEM, CORE, COUNT = "aliyun.com/gpu-mem", ack.CORE, "aliyun.com/gpu-count"
MIG = {INSIDE: "mig"}
QUARTER: dict[str, int | str] = {gpu_manager.CORE: 20, gpu_manager.MEMORY: 16}
REQUESTS: list[tuple[Dialect, dict[str, int | str]]] = [
    (ack, {MEM: 4}),
    (ack, {MEM: 4, CORE: 10}),
    (gpu_manager, QUARTER),
    (hami, {hami.COUNT: 1, hami.MEMORY: 3000, hami.CORES: 10}),
    (hami, {hami.COUNT: 1, hami.PERCENT: 50}),
]


@pytest.mark.parametrize(("dialect", "limits"), REQUESTS)
@pytest.mark.parametrize("profile", ["mig", "3g.20gb", "1g.5gb+me"])
def test_slices_are_inside_instances_when_the_annotation_says_so(
    dialect: Dialect, limits: dict[str, int | str], profile: str
) -> None:
    """Nothing else of the request changes."""
    (plain,) = dialect.parse(pod(limits))
    (inside,) = dialect.parse(pod(limits, annotations={INSIDE: profile}))
    assert plain.request.instance == ""
    assert inside.request.instance == profile
    assert (inside.request.memory, inside.request.compute) == (
        plain.request.memory,
        plain.request.compute,
    )


def test_annotation_of_slices_inside_is_an_option_of_every_dialect() -> None:
    """So pods that differ in it alone are parsed apart, and the scheduler keeps it of bound pods."""
    assert all(INSIDE in option_names((dialect,)) for dialect in WITH_HAMI)
    assert {INSIDE, INSTANCE} <= annotation_names()[0]


def test_mode_of_compute_holds_inside_instances() -> None:
    """A ceiling and a weight, as on cards."""
    (part,) = ack.parse(pod({MEM: 4, CORE: 20}, annotations={**MIG, CORE_MODE: "weight"}))
    assert (part.weight, part.request.compute, part.request.instance) == (20, 0, "mig")
    (part,) = gpu_manager.parse(pod(QUARTER, annotations={**MIG, gpu_manager.CEILING: "30"}))
    assert (part.burst_percent, part.request.compute, part.request.instance) == (30, 20, "mig")


@pytest.mark.parametrize(
    ("limits", "labels", "text", "sentence"),
    [
        (
            {MEM: 4},
            {},
            "MIG",
            "annotation fenka.io/inside: 'MIG' is no MIG profile: names are like 1g.5gb",
        ),
        ({MEM: 4}, {}, "", "annotation fenka.io/inside: '' is no MIG profile"),
        ({MEM: 4}, {}, "3g.20GB", "'3g.20GB' is no MIG profile: write 3g.20gb"),
        (
            {MEM: 4},
            {},
            "nvidia.com/mig-1g.5gb.me",
            "is no MIG profile; the profile of that resource is 1g.5gb+me",
        ),
        ({MEM: 4}, {}, "1c.3g.20gb", "which fenka does not create: ask for 3g.20gb, or for"),
        ({MEM: 4}, {}, "x" * 9999, f"annotation fenka.io/inside: '{'x' * 40}' is no MIG profile"),
        (
            {gpu_manager.CORE: 200},
            {},
            "mig",
            "annotation fenka.io/inside is mig, and container c0 requests whole cards: request a slice, or "
            "leave the annotation out",
        ),
        ({hami.COUNT: 1, hami.CORES: 100}, {}, "mig", "container c0 requests whole cards"),
        ({NVIDIA_GPU: 1}, {}, "mig", "container c0 requests whole cards"),
        (
            {MEM: 4},
            {COUNT: "2"},
            "3g.20gb",
            "annotation fenka.io/inside is 3g.20gb, and container c0 requests slices of 2 cards: request "
            "one, since CUDA connects no two instances",
        ),
    ],
)
def test_annotation_is_rejected_when_slices_cannot_be_inside(
    limits: dict[str, int | str], labels: dict[str, str], text: str, sentence: str
) -> None:
    """One sentence, whatever its length."""
    asked = pod(limits, labels=labels, annotations={INSIDE: text})
    dialect = detect(asked, WITH_HAMI)
    assert dialect is not None
    with pytest.raises(InvalidRecord) as why:
        dialect.parse(asked)
    assert sentence in str(why.value)
    assert len(str(why.value)) < 300


# --- records ----------------------------------------------------------------------------------------


def bound(
    dialect: Dialect, limits: Mapping[str, int | str], annotations: Mapping[str, str] = MIG
) -> tuple[PodRequest, tuple[Placement, ...]]:
    """Return a pod that is placed on a node of two divided cards, with its records."""
    asked, shared = pod(dict(limits), annotations=dict(annotations)), divided_node(2)
    placements = placed(asked, shared)
    assert placements is not None
    written = pod_records.encode(dialect, asked, shared, placements, 7)
    return with_records(asked, written), placements


def test_record_names_the_physical_card_and_the_place_on_it() -> None:
    """Golden. The first instance is half a card at its end; 4 of its 19 units are 4 · 20096 / 19 MiB."""
    asked, placements = bound(ack, {MEM: 4, CORE: 20})
    assert placements[0].slices == (Slice(0, DeviceId("GPU-0/4/3g.20gb"), 4230, 20),)
    assert {name: text for name, text in asked.annotations.items() if name != INSIDE} == {
        "ALIYUN_COM_GPU_MEM_IDX": "0",
        "ALIYUN_COM_GPU_MEM_POD": "4",
        "ALIYUN_COM_GPU_MEM_DEV": "19",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "7",
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
        "scheduler.framework.gpushare.allocation": '{"0":{"0":4}}',
        "gpushare.alibabacloud.com/core-percentage": '{"0":{"0":20}}',
        "fenka.io/cards": '{"0":"GPU-0"}',
        "fenka.io/instance": '[{"card":"GPU-0","start":4,"profile":"3g.20gb"}]',
    }


def test_hamis_record_has_the_uuid_of_the_physical_card() -> None:
    """Its own tools know no other."""
    asked, _ = bound(hami, {hami.COUNT: 1, hami.MEMORY: 3000, hami.CORES: 10})
    assert asked.annotations[hami.ALLOCATED] == "GPU-0,NVIDIA,3000,10:;"


@pytest.mark.parametrize(("dialect", "limits"), REQUESTS)
def test_environment_names_no_device_of_an_instance(
    dialect: Dialect, limits: dict[str, int | str]
) -> None:
    """The node knows its UUID; the card's would show a container more than its slice."""
    asked, placements = bound(dialect, limits)
    shared = divided_node(2)
    slices = pod_records.container_slices(dialect, asked, shared, placements, "c0")
    assert slices == placements[0].slices
    variables = pod_records.environment(dialect, asked, shared, slices, "c0")
    assert not any("GPU-0" in text for text in variables.values())
    assert "NVIDIA_VISIBLE_DEVICES" not in variables
    if dialect is ack:
        assert variables["ALIYUN_COM_GPU_MEM_DEV"] == "19"
    assert pod_records.container_slices(dialect, asked, shared, placements, "c9") == ()


def test_containers_may_share_an_instance() -> None:
    """As they may share a card. 16 of the half's 78 blocks of 256 MiB are 16 · 20096 / 78 MiB."""
    asked, shared = pod(QUARTER, QUARTER, annotations=MIG), divided_node(1)
    placements = (Placement("n", (Slice(0, DeviceId("GPU-0/4/3g.20gb"), 4122, 20),)),) * 2
    written = pod_records.encode(gpu_manager, asked, shared, placements, 1)
    again = with_records(asked, written)
    assert pod_records.decode(gpu_manager, again, gpu_manager.parse(again), shared) == placements


def test_containers_may_be_in_instances_of_one_card() -> None:
    """Both have the card's index in gpu-manager's records, and their own instance in fenka's."""
    asked = pod(QUARTER, QUARTER, annotations={INSIDE: "2g.10gb"})
    shared = divided_node(1)
    placements = (
        Placement("n", (Slice(0, DeviceId("GPU-0/4/2g.10gb"), 4096, 20),)),
        Placement("n", (Slice(0, DeviceId("GPU-0/2/2g.10gb"), 4096, 20),)),
    )
    written = pod_records.encode(gpu_manager, asked, shared, placements, 1)
    assert written[f"{gpu_manager.INDEXES}0"] == written[f"{gpu_manager.INDEXES}1"] == "0"
    again = with_records(asked, written)
    assert pod_records.decode(gpu_manager, again, gpu_manager.parse(again), shared) == placements
    assert [
        pod_records.container_slices(gpu_manager, again, shared, placements, name)[0].uuid
        for name in ("c0", "c1")
    ] == ["GPU-0/4/2g.10gb", "GPU-0/2/2g.10gb"]


@settings(deadline=None, max_examples=200)
@given(
    data=st.data(),
    profile=st.sampled_from(["mig", "1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"]),
    unit=st.sampled_from([1, 256, 1024]),
)
def test_placement_is_unchanged_when_encoded_and_decoded(
    data: st.DataObject, profile: str, unit: int
) -> None:
    """Whatever the dialect, the instances, and how many containers there are."""
    dialect, limits = data.draw(st.sampled_from(REQUESTS))
    containers = data.draw(st.integers(1, 1 if dialect is ack else 3))
    asked = pod(*[limits] * containers, annotations={INSIDE: profile})
    shared = divided_node(2, whole=1, unit_mib=unit)
    placements = placed(asked, shared)
    if placements is None:
        return
    written = pod_records.encode(dialect, asked, shared, placements, 1)
    again = with_records(asked, written)
    # The scheduler's state has the instances of pods as cards already; a fresh reading has not.
    for node in (shared, with_instances(shared, [it.slices[0].uuid for it in placements])):
        assert pod_records.decode(dialect, again, dialect.parse(again), node) == placements
    for number, placement in enumerate(placements):
        slices = pod_records.container_slices(dialect, again, shared, placements, f"c{number}")
        assert slices == placement.slices


PLACES = st.lists(
    st.fixed_dictionaries(
        {
            "card": st.sampled_from(["GPU-0", "GPU-1", "GPU-2", "", "/", "GPU-0/4", "n/0"]),
            "start": st.sampled_from([0, 1, 4, 6, 15]),
            "profile": st.sampled_from(["3g.20gb", "1g.5gb", "1g.5gb+me", "", "/"]),
        }
    ),
    max_size=3,
).map(json.dumps)
TEXTS = PLACES | st.sampled_from(
    ["", "null", "[]", "{}", '{"0":{"0":4}}', "0", "9" * 5000, "[" * 9999]
)
BOUND = [(dialect, *bound(dialect, limits)) for dialect, limits in REQUESTS]
"""Each request as a pod with its records, and its placements."""
KEYS = [
    INSTANCE,
    CARDS,
    INSIDE,
    hami.ALLOCATED,
    f"{gpu_manager.INDEXES}0",
    "ALIYUN_COM_GPU_MEM_IDX",
    "scheduler.framework.gpushare.allocation",
]


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_decoding_raises_invalid_record_only_when_annotations_are_hostile(
    data: st.DataObject,
) -> None:
    """What is accepted is on instances of the node, no more than requested."""
    dialect, asked, placements = data.draw(st.sampled_from(BOUND))
    forged = data.draw(st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=3))
    removed = data.draw(st.sets(st.sampled_from(KEYS), max_size=2))
    kept = {name: text for name, text in asked.annotations.items() if name not in removed}
    asked = PodRequest(asked.containers, asked.labels, {**kept, **forged})
    shared = divided_node(2, whole=1)
    try:
        parts = dialect.parse(asked)
        found = pod_records.decode(dialect, asked, parts, shared)
        if found is None:
            return
        slices = pod_records.container_slices(dialect, asked, shared, found, "c0")
        if slices:
            pod_records.environment(dialect, asked, shared, slices, "c0")
    except InvalidRecord:
        return
    (placement,) = found
    most = placements[0].slices[0]
    for piece in placement.slices:
        if parts[0].request.instance:
            assert piece.uuid.startswith(("GPU-0/", "GPU-1/"))
        else:
            assert piece.uuid == "GPU-2"
        assert piece.compute <= most.compute


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({INSIDE: ""}, "its annotation fenka.io/inside was removed: write it again"),
        (
            {INSIDE: "1g.5gb"},
            "instance 'GPU-0/4/3g.20gb' is not one of '1g.5gb', which it asks for",
        ),
        ({INSTANCE: "[]"}, "has 0 different instances, it asks for 1"),
        ({"scheduler.framework.gpushare.allocation": '{"0":{"1":4}}'}, "card 1 is not one of"),
        ({CARDS: '{"0":"GPU-7"}'}, "card 0 was 'GPU-7' and is now 'GPU-0'"),
    ],
)
def test_record_is_rejected_when_it_was_changed_after_binding(
    change: dict[str, str], sentence: str
) -> None:
    """An empty text stands for an annotation that was removed."""
    asked, _ = bound(ack, {MEM: 4})
    changed = {name: text for name, text in {**asked.annotations, **change}.items() if text}
    asked = PodRequest(asked.containers, {}, changed)
    with pytest.raises(InvalidRecord) as why:
        pod_records.decode(ack, asked, ack.parse(asked), divided_node(2))
    assert sentence in str(why.value)


def test_record_without_its_instance_is_no_record() -> None:
    """A pod that another scheduler has placed by gpushare's names alone has no instance."""
    asked, _ = bound(ack, {MEM: 4})
    annotations = {name: text for name, text in asked.annotations.items() if name != INSTANCE}
    asked = PodRequest(asked.containers, {}, annotations)
    assert pod_records.decode(ack, asked, ack.parse(asked), divided_node(2)) is None


@pytest.mark.parametrize(("card", "accepted"), [(0, False), (1, True)])
def test_record_of_a_slice_is_rejected_when_its_card_is_divided(card: int, accepted: bool) -> None:
    """A program on a divided card would not see it."""
    asked = pod({MEM: 4}, annotations={"ALIYUN_COM_GPU_MEM_IDX": str(card)})
    shared = divided_node(1, whole=1)
    if accepted:
        found = pod_records.decode(ack, asked, ack.parse(asked), shared)
        assert found is not None
        assert found[0].slices[0].uuid == "GPU-1"
        return
    with pytest.raises(InvalidRecord, match="the pod's card 0 is divided into instances"):
        pod_records.decode(ack, asked, ack.parse(asked), shared)


def test_record_of_a_slice_is_rejected_when_it_names_an_instance_that_it_is_not_for() -> None:
    """HAMi's record names devices by id, which an owner of a pod can write."""
    shared = with_instances(divided_node(1), [DeviceId("GPU-0/0/1g.5gb")])
    asked = pod(
        {hami.COUNT: 1, hami.MEMORY: 300}, annotations={hami.ALLOCATED: "GPU-0/0/1g.5gb,N,300,0:;"}
    )
    with pytest.raises(InvalidRecord, match="the pod's card 0 is divided into instances"):
        pod_records.decode(hami, asked, hami.parse(asked), shared)


def test_pod_without_a_record_counts_on_what_it_asks_for() -> None:
    """An instance that is there, or else nothing; a slice of a card not on a divided one."""
    shared = divided_node(1, whole=1)
    inside, plain = ack.parse(pod({MEM: 4}, annotations=MIG)), ack.parse(pod({MEM: 4}))
    assert fallback_placement(shared, inside)[0].slices == ()
    assert fallback_placement(shared, plain)[0].slices[0].uuid == "GPU-1"
    there = with_instances(shared, [DeviceId("GPU-0/0/3g.20gb")])
    assert fallback_placement(there, inside)[0].slices[0].uuid == "GPU-0/0/3g.20gb"
    asked = nvidia_mig.parse(pod({"nvidia.com/mig-1g.5gb": 1}, {"nvidia.com/mig-3g.20gb": 1}))
    assert [len(it.slices) for it in fallback_placement(there, asked)] == [0, 1]
