"""MIG instances in pods: `nvidia.com/mig-<profile>`, and what nodes advertise of it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId, InstanceId
from fenka.core.mig.geometry import TABLES, Place
from fenka.core.mig.layouts import all_layouts
from fenka.core.units import card_units
from fenka.dialects import ack, hami, nvidia, nvidia_mig, pod_records
from fenka.dialects.base import (
    ContainerRequest,
    Dialect,
    InvalidRecord,
    NodeMode,
    PodRequest,
    driver_uuid,
)
from fenka.dialects.mig_records import (
    INSIDE,
    INSTANCE,
    DividedCard,
    InstanceState,
    with_instances,
)
from fenka.dialects.registry import (
    DIALECTS,
    WITH_HAMI,
    detect,
    leased_resources,
    names_any,
    resource_names,
)
from fenka.formats.mig_profiles import PROFILE, resource_name, resource_profile
from tests.dialects.builders import pod
from tests.dialects.mig_builders import A100, divided_node, placed, with_records

MEM, GPU = "aliyun.com/gpu-mem", "nvidia.com/gpu"
SMALL, MEDIA, HALF = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.5gb.me", "nvidia.com/mig-3g.20gb"
APART = "which do not go together: use the names of one of them in all its containers"


def rejection(asked: PodRequest) -> str:
    """Return why a pod's request is not understood; empty if it is."""
    try:
        dialect = detect(asked, WITH_HAMI)
        parts = dialect.parse(asked) if dialect else ()
    except InvalidRecord as why:
        return str(why)
    assert all(part.request.instance for part in parts)
    return ""


# --- what pods request ------------------------------------------------------------------------------


def test_instances_are_requested_for_each_container() -> None:
    """An init container has ended when the others start, so it uses one of theirs, of the same profile."""
    asked = pod({SMALL: 2}, {HALF: 1}, {}, init=({SMALL: 1},), sidecars=({MEDIA: 1},))
    parts = nvidia_mig.parse(asked)
    assert [(part.containers, part.request.cards, part.request.instance) for part in parts] == [
        (("s0",), 1, "1g.5gb+me"),
        (("c0", "i0"), 2, "1g.5gb"),
        (("c1",), 1, "3g.20gb"),
    ]
    assert all(part.request.whole for part in parts)


@pytest.mark.parametrize("dialects", [DIALECTS, WITH_HAMI])
def test_resources_of_instances_are_found_by_their_prefix(dialects: tuple[Dialect, ...]) -> None:
    """Those of no card model too, so that their sentence is seen; other names of NVIDIA's are not."""
    names = resource_names(dialects)
    assert SMALL in names
    assert "nvidia.com/mig-5g.99gb" in names
    assert "nvidia.com/migrate" not in names
    assert names_any([{"cpu": 1}, {"nvidia.com/mig-x": 1}])
    assert not names_any([{"cpu": 1, "nvidia.com/mi": 1}, {}])
    assert detect(pod({HALF: 1}), WITH_HAMI) is nvidia_mig
    assert detect(pod({HALF: 0})) is None
    assert SMALL in leased_resources(DIALECTS)
    assert ack.CORE not in leased_resources(DIALECTS)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({SMALL: -1}, f"container c0 asks for -1 of {SMALL}"),
        (
            {SMALL: "1.5"},
            f"container c0 asks for 1.5 of {SMALL}: an instance is given whole, ask for a whole number of "
            "them",
        ),
        (
            {SMALL: "500m"},
            f"container c0 asks for 500m of {SMALL}: an instance is given whole, ask for a whole number of "
            "them",
        ),
        ({SMALL: "x"}, "'x' is no quantity"),
        ({SMALL: 2000}, "the number of cards must be 1 to 1024, not 2000"),
        (
            {SMALL: 1, HALF: 1},
            f"container c0 asks for {SMALL} and for {HALF}: ask for instances of one profile in each "
            "container",
        ),
        (
            {"nvidia.com/mig-1g.5gb+me": 1},
            "container c0 asks for 'nvidia.com/mig-1g.5gb+me', which is no MIG profile: write "
            "nvidia.com/mig-1g.5gb.me",
        ),
        (
            {"nvidia.com/mig-1g.5GB": 1},
            "container c0 asks for 'nvidia.com/mig-1g.5GB', which is no MIG profile: write "
            "nvidia.com/mig-1g.5gb",
        ),
        (
            {"nvidia.com/mig-1c.3g.20gb": 1},
            "container c0 asks for 'nvidia.com/mig-1c.3g.20gb', a part of a GPU instance, which fenka does "
            "not create: ask for nvidia.com/mig-3g.20gb",
        ),
        (
            {"nvidia.com/mig-1g.5gb.shared": 2},
            "container c0 asks for 'nvidia.com/mig-1g.5gb.shared', and instances are not time-sliced: ask "
            "for nvidia.com/mig-1g.5gb, or for a slice with annotation fenka.io/inside: 1g.5gb",
        ),
        (
            {"nvidia.com/mig-small": 1},
            "container c0 asks for 'nvidia.com/mig-small', which is no MIG profile: write a name like "
            "nvidia.com/mig-1g.5gb",
        ),
        (
            {f"nvidia.com/mig-{'9' * 300}": 1},
            f"container c0 asks for 'nvidia.com/mig-{'9' * 25}', which is no MIG profile: write a name like "
            "nvidia.com/mig-1g.5gb",
        ),
        (
            {SMALL: 1, MEM: 4},
            f"it asks for {MEM} and for {SMALL}, {APART}",
        ),
        (
            {SMALL: 1, GPU: 1},
            f"it asks for {GPU} and for {SMALL}, {APART}",
        ),
        (
            {SMALL: 1, hami.COUNT: 1, hami.MEMORY: 3000},
            f"it asks for {SMALL} and for {GPU}, {APART}",
        ),
    ],
)
def test_request_for_instances_is_rejected_when_it_is_none(
    limits: dict[str, int | str], sentence: str
) -> None:
    """One sentence that says what to write instead."""
    assert rejection(pod(limits)) == sentence


def test_init_container_is_rejected_when_no_other_has_its_profile() -> None:
    """It would need an instance that nobody uses afterwards."""
    with pytest.raises(
        InvalidRecord, match="its init container i0 asks for more than any container"
    ):
        nvidia_mig.parse(pod({SMALL: 1}, init=({HALF: 1},)))


@pytest.mark.parametrize("profile", sorted({p.name for t in TABLES.values() for p in t.profiles}))
def test_profile_is_unchanged_when_named_as_resource(profile: str) -> None:
    """Kubernetes allows no plus in the name of a resource."""
    name = resource_name(profile)
    assert name in nvidia_mig.KNOWN_RESOURCES
    assert "+" not in name
    assert resource_profile(name) == profile


@given(text=st.from_regex(PROFILE, fullmatch=True) | st.text(max_size=20))
def test_resource_is_understood_only_when_it_is_a_profiles_name(text: str) -> None:
    """Whatever is understood is named so again; everything else is one sentence."""
    name = f"nvidia.com/mig-{text}"
    asked = PodRequest((ContainerRequest("c", {name: 1}),))
    sentence = rejection(asked)
    assert "\n" not in sentence
    if not sentence and not name.endswith("-"):
        (part,) = nvidia_mig.parse(asked)
        assert resource_name(part.request.instance) == name


# --- records ----------------------------------------------------------------------------------------


def test_instances_are_recorded_by_their_places() -> None:
    """Golden: in the order of the slices, which is that of places on a card, and the cards' UUIDs."""
    shared, asked = divided_node(2), pod({SMALL: 2}, {HALF: 1})
    placements = placed(asked, shared)
    assert placements is not None
    written = pod_records.encode(nvidia_mig, asked, shared, placements, 1)
    # The places that leave the most: small ones at the end of the card, the half at its beginning.
    assert written == {
        "fenka.io/instance": '[{"card":"GPU-0","start":5,"profile":"1g.5gb"},'
        '{"card":"GPU-0","start":6,"profile":"1g.5gb"},{"card":"GPU-0","start":0,"profile":"3g.20gb"}]',
        "fenka.io/cards": '{"0":"GPU-0"}',
    }
    again = with_records(asked, written)
    assert pod_records.decode(nvidia_mig, again, nvidia_mig.parse(again), shared) == placements
    slices = pod_records.container_slices(nvidia_mig, again, shared, placements, "c1")
    # 42 of 108 multiprocessors are 38 percent of the card.
    assert [(it.card, it.uuid, it.memory_mib, it.compute) for it in slices] == [
        (0, "GPU-0/0/3g.20gb", 20096, 38)
    ]
    assert pod_records.environment(nvidia_mig, again, shared, slices, "c1") == {}
    assert pod_records.decode(nvidia_mig, asked, nvidia_mig.parse(asked), shared) is None


@settings(deadline=None, max_examples=100)
@given(
    containers=st.lists(
        st.tuples(
            st.sampled_from([SMALL, MEDIA, HALF, "nvidia.com/mig-2g.10gb"]), st.integers(0, 4)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_placement_is_unchanged_when_encoded_and_decoded(containers: list[tuple[str, int]]) -> None:
    """Also once the instances are cards of the node, and also when several are on one card."""
    limits: list[dict[str, int | str]] = [{name: amount} for name, amount in containers]
    asked, shared = pod(*limits), divided_node(2)
    placements = placed(asked, shared) if detect(asked) else None
    if placements is None:
        return
    again = with_records(asked, pod_records.encode(nvidia_mig, asked, shared, placements, 1))
    parts = nvidia_mig.parse(again)
    devices = [piece.uuid for placement in placements for piece in placement.slices]
    assert len(devices) == sum(amount for _, amount in containers)
    for node in (shared, with_instances(shared, devices)):
        assert pod_records.decode(nvidia_mig, again, parts, node) == placements
    for part, placement in zip(parts, placements, strict=True):
        (name,) = part.containers
        slices = pod_records.container_slices(nvidia_mig, again, shared, placements, name)
        assert slices == placement.slices


def record(*places: tuple[str, int, str]) -> str:
    """Return the annotation with instances at these places."""
    return json.dumps([{"card": c, "start": start, "profile": name} for c, start, name in places])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            record(("GPU-9", 0, "1g.5gb")),
            "the pod's instance 'GPU-9/0/1g.5gb' is none that its node can",
        ),
        (
            record(("GPU-0", 7, "1g.5gb")),
            "the pod's instance 'GPU-0/7/1g.5gb' is none that its node can",
        ),
        (
            record(("GPU-0", 0, "5g.9gb")),
            "the pod's instance 'GPU-0/0/5g.9gb' is none that its node can",
        ),
        (
            record(("GPU-2", 0, "1g.5gb")),
            "the pod's instance 'GPU-2/0/1g.5gb' is none that its node can",
        ),
        (
            record(("GPU-0", 0, "2g.10gb")),
            "the pod's instance 'GPU-0/0/2g.10gb' is not one of '1g.5gb'",
        ),
        (
            record(),
            "annotation fenka.io/instance of the pod has 0 different instances, it asks for 1",
        ),
        (
            record(*[("GPU-0", 0, "1g.5gb")] * 2),
            "has 1 different instances, it asks for 1",
        ),
        (
            record(*[("GPU-0", 0, "1g.5gb")] * 1025),
            "is not understood: Expected `array` of length <= 1024",
        ),
        (record(("G" * 101, 0, "1g.5gb")), "is not understood: Expected `str` of length <= 100"),
        (record(("GPU-0", 99, "1g.5gb")), "is not understood: Expected `int` <= 15"),
        ("null", "is not understood"),
        ("[" * 99_999, "is not understood"),
    ],
)
def test_record_of_instances_is_rejected_when_the_node_cannot_have_them(
    text: str, sentence: str
) -> None:
    """The pod's owner can write it. Card 2 of the node is not divided."""
    asked = pod({SMALL: 1}, annotations={INSTANCE: text})
    with pytest.raises(InvalidRecord) as why:
        pod_records.decode(nvidia_mig, asked, nvidia_mig.parse(asked), divided_node(2, whole=1))
    assert sentence in str(why.value)
    assert len(str(why.value)) < 400


@pytest.mark.parametrize(
    ("device", "uuid", "parts"),
    [
        ("GPU-0", "GPU-0", None),
        ("n/0", "", None),
        ("GPU-0/4/3g.20gb", "GPU-0", ("GPU-0", 4, "3g.20gb")),
        ("n/0/4/3g.20gb", "", ("n/0", 4, "3g.20gb")),
        ("GPU-0/999/3g.20gb", "", None),
        ("GPU-0/x/3g.20gb", "", None),
        ("MIG-GPU-0/7/0", "", None),
    ],
)
def test_ids_of_instances_are_told_from_those_of_cards(
    device: str, uuid: str, parts: tuple[str, int, str] | None
) -> None:
    """A card that its plugin does not name has an id with one slash; an instance's adds two."""
    assert driver_uuid(DeviceId(device)) == uuid
    instance = InstanceId.parse(DeviceId(device))
    assert instance == (InstanceId(DeviceId(parts[0]), *parts[1:]) if parts else None)
    assert instance is None or str(instance) == device


# --- what nodes advertise ---------------------------------------------------------------------------


def test_node_advertises_what_fits_of_each_profile_alone() -> None:
    """Two A100s: each 7 of 1g.5gb, 1 with media engines, 4 with double memory, 3, 2, 1 and 1."""
    shared = divided_node(2)
    cards = [DividedCard(card.uuid, A100, True, {}) for card in shared.node.cards]
    resources = nvidia_mig.node_resources(cards)
    assert {
        name: sum(resource.units_on(shared.node, card) for card in shared.node.cards)
        for name, resource in resources.items()
    } == {
        SMALL: 14,
        MEDIA: 2,
        "nvidia.com/mig-1g.10gb": 8,
        "nvidia.com/mig-2g.10gb": 6,
        HALF: 4,
        "nvidia.com/mig-4g.20gb": 2,
        "nvidia.com/mig-7g.40gb": 2,
    }
    assert resources[MEDIA].plugin == "fenka-mig-1g.5gb.me"
    assert resources[SMALL].offered(NodeMode())


def test_card_advertises_its_instances_when_none_are_created_on_demand() -> None:
    """An administrator's are not for pods, and those that are being destroyed are not either."""
    small = A100.by_name["1g.5gb"]
    states: list[InstanceState] = ["own", "own", "leaving", "foreign"]
    there = {Place(small, start): state for start, state in enumerate(states)}
    card = divided_node(1).node.cards[0]
    resources = nvidia_mig.node_resources([DividedCard(card.uuid, A100, False, there)])
    assert resources[SMALL].units_on(divided_node(1).node, card) == 2
    assert resources[HALF].units_on(divided_node(1).node, card) == 0


def test_divided_card_is_no_whole_card() -> None:
    """It keeps its units of memory, for slices in its instances: nothing changes when it is divided."""
    shared = divided_node(1, whole=1)
    (whole,) = nvidia.NODE_RESOURCES
    assert [whole.units_on(shared.node, card) for card in shared.node.cards] == [0, 1]
    memory = ack.NODE_RESOURCES[0]
    assert [memory.units_on(shared.node, card) for card in shared.node.cards] == [40, 40]
    assert shared.total_units == 80


@pytest.mark.parametrize(
    ("model", "card_mib"), [("A100-40G", 40960), ("H100-80G", 81559), ("A30", 24576)]
)
@pytest.mark.parametrize("unit", [1, 256, 1024])
def test_units_inside_instances_are_never_more_than_those_of_the_card(
    model: str, card_mib: int, unit: int
) -> None:
    """So what the kubelet counts never rejects a slice that the scheduler has placed."""
    for layout in all_layouts(TABLES[model]):
        units = sum(card_units(place.profile.memory_mib, unit) for place in layout)
        assert units <= card_units(card_mib, unit)


def test_annotation_for_slices_is_rejected_beside_instances() -> None:
    """All of an instance is asked for already."""
    with pytest.raises(InvalidRecord) as why:
        nvidia_mig.parse(pod({SMALL: 1}, annotations={INSIDE: "mig"}))
    assert str(why.value) == (
        "annotation fenka.io/inside is mig, and container c0 requests whole instances: request a slice, or "
        "leave the annotation out"
    )
