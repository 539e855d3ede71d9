"""What holds for every dialect: which one is spoken, there and back, and no combination that crashes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.gangs import place_gang
from fenka.core.ledger import Ledger
from fenka.core.request import Placement
from fenka.core.usage import UsageTotals
from fenka.dialects import ack, gpu_manager, hami, nodes, nvidia, pod_records
from fenka.dialects.base import (
    CORE_MODE,
    ContainerKind,
    ContainerRequest,
    Dialect,
    InvalidRecord,
    PodRequest,
)
from fenka.dialects.mig_records import INSIDE, INSTANCE
from fenka.dialects.registry import DIALECTS, WITH_HAMI, detect
from tests.dialects.builders import T4_MIB, V100_MIB, environment, node_totals, pod, share
from tests.dialects.mig_builders import divided_node

MEM, GPU = "aliyun.com/gpu-mem", "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (pod({}), None),
        (pod({"cpu": "500m", GPU: 0}), None),
        (pod({MEM: 4}), ack),
        (pod({MEM: 4, "aliyun.com/gpu-core.percentage": 30}), ack),
        (pod({"tencent.com/vcuda-core": 100}), gpu_manager),
        (pod({GPU: 1}), nvidia),
        (pod({}, init=({GPU: 1},)), nvidia),
        (pod({GPU: 1, "nvidia.com/gpumem": 3000}), hami),
        (pod({"nvidia.com/gpucores": 30}), hami),
    ],
)
def test_dialect_is_detected_by_its_resources(asked: PodRequest, expected: Dialect | None) -> None:
    """HAMi's only where they are turned on: elsewhere such a pod is not fenka's."""
    assert detect(asked, WITH_HAMI) is expected
    assert detect(asked) is (None if expected is hami else expected)


def test_pod_is_rejected_when_it_uses_two_dialects() -> None:
    """In one container or in two."""
    for asked in (pod({MEM: 4, GPU: 1}), pod({GPU: 1}, {MEM: 4})):
        with pytest.raises(InvalidRecord) as why:
            detect(asked)
        assert str(why.value) == (
            "it asks for aliyun.com/gpu-mem and for nvidia.com/gpu, which do not go together: "
            "use the names of one of them in all its containers"
        )


def test_whole_card_is_placed_beside_shared_ones() -> None:
    """One node, one ledger: a slice on card 0 leaves card 1 to who wants a whole one, and no card twice."""
    node = share(T4_MIB, T4_MIB)
    assert node_totals(nvidia, node) == {GPU: 2}
    ledger = Ledger([node.node])
    (slice_,) = ack.parse(pod({MEM: 4}))
    (card,) = nvidia.parse(pod({GPU: 1}))
    for name, part, expected in (("s", slice_, [0]), ("w", card, [1]), ("s2", slice_, [0])):
        found = place(ledger, part.request, "binpack", [node.node])
        assert isinstance(found, Placement)
        assert [it.card for it in found.slices] == expected
        ledger.adopt(name, found)
    refused = place(ledger, card.request, "binpack", [node.node])
    assert not isinstance(refused, Placement)
    assert refused.sentence() == "no GPU fits: 1 of 2 is in use, 1 is taken whole"


def test_whole_cards_are_recorded_by_container() -> None:
    """An init container uses those of a container beside it; a sidecar has its own."""
    node = share(T4_MIB, T4_MIB, T4_MIB)
    asked = pod({GPU: 2}, {}, init=({GPU: 1},), sidecars=({GPU: 1},))
    parts = nvidia.parse(asked)
    assert [(part.containers, part.request.cards) for part in parts] == [
        (("s0", "i0"), 1),
        (("c0",), 2),
    ]
    found = place_gang(UsageTotals(), [part.request for part in parts], "binpack", [node.node])
    assert isinstance(found, tuple)
    written = nvidia.encode(asked, node, found, 1)
    assert written["fenka.io/whole-cards"] == '{"s0":[0],"c0":[1,2]}'
    assert environment(nvidia, asked, node, found, "i0") == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}
    assert environment(nvidia, asked, node, found, "c0") == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"
    }
    assert environment(nvidia, asked, node, found, "c1") == {}
    with pytest.raises(
        InvalidRecord, match=r"^its init container i0 asks for more than any container beside it"
    ):
        nvidia.parse(pod({GPU: 1}, init=({GPU: 2},)))


NAMES = sorted({name for dialect in WITH_HAMI for name in dialect.RESOURCES})
NAMES += ["nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb", "nvidia.com/mig-1g.5GB"]
AMOUNTS: st.SearchStrategy[str | int] = st.sampled_from(
    [0, 1, 2, 5, 10, 24, 30, 50, 99, 100, 101, 200, -1, 10**9, "4", "1k", "4Gi", "x", ""]
)
KEYS = [
    "tencent.com/vcuda-core-limit",
    "aliyun.com/gpu-count",
    *(f"{gpu_manager.INDEXES}{number}" for number in range(2)),
    nvidia.RECORD,
    hami.ALLOCATED,
    ack.CORES,
    INSIDE,
    INSTANCE,
    "fenka.io/cards",
    "ALIYUN_COM_GPU_MEM_IDX",
    "scheduler.framework.gpushare.allocation",
]
TEXTS = st.sampled_from(
    [
        "",
        "0",
        "1",
        "2",
        "mig",
        "3g.20gb",
        '[{"card":"GPU-0","start":4,"profile":"3g.20gb"}]',
        '[{"card":"GPU-0","start":-1,"profile":1}]',
        "0,1",
        "50",
        "-1",
        "x",
        "[]",
        "{}",
        '{"0":{"0":4}}',
        '{"c0":[0]}',
        '{"c0":["x"]}',
        "null",
        "1e400",
        "GPU-0,NVIDIA,1,1:;",
        "GPU-0,NVIDIA,1:;",
        ";;",
        '{"0":"GPU-0"}',
        '{"0":{"0":1e400}}',
        "²",
    ]
)


@st.composite
def manifests(draw: st.DrawFn, names: tuple[str, ...]) -> PodRequest:
    """Anything that an API server might let through, and more."""
    limits: st.SearchStrategy[dict[str, str | int]] = st.dictionaries(
        st.sampled_from(names), AMOUNTS, max_size=3
    )
    containers = [
        ContainerRequest(f"c{number}", each, kind)
        for number, (each, kind) in enumerate(
            draw(
                st.lists(
                    st.tuples(
                        limits,
                        st.sampled_from(
                            [
                                ContainerKind.APP,
                                ContainerKind.APP,
                                ContainerKind.INIT,
                                ContainerKind.SIDECAR,
                            ]
                        ),
                    ),
                    max_size=3,
                )
            )
        )
    ]
    ordered = sorted(containers, key=lambda it: it.kind is ContainerKind.APP)
    texts = st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=3)
    return PodRequest(tuple(ordered), draw(texts), draw(texts))


@settings(deadline=None, max_examples=300)
@given(asked=manifests(tuple(NAMES)))
def test_parsing_never_fails_otherwise_when_resources_are_combined(asked: PodRequest) -> None:
    """It is understood, or refused in one sentence."""
    sentence = refusal(asked)
    assert sentence is None or (sentence and "\n" not in sentence)


def refusal(asked: PodRequest) -> str | None:
    """What the pod is told, by whoever reads it first."""
    node = divided_node(1, whole=1)
    try:
        dialect = detect(asked, WITH_HAMI)
        if dialect is not None:
            parts = dialect.parse(asked)
            assert parts
            pod_records.decode(dialect, asked, parts, node)
            nodes.check_admission(asked.labels, parts)
    except InvalidRecord as why:
        return str(why)
    return None


@pytest.mark.parametrize(
    "text",
    [
        "1e400",
        "NaN",
        "[[]]",
        '{"c0":[1e400]}',
        '{"0":{"0":1e400}}',
        '{"0":{"0":-1}}',
        "²",
        "9" * 5000,
        "[" * 99999,
    ],
)
@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        ({GPU: 1}, [nvidia.RECORD]),
        (
            {MEM: 4, ack.CORE: 30},
            [
                "scheduler.framework.gpushare.allocation",
                "fenka.io/cards",
                "ALIYUN_COM_GPU_MEM_IDX",
            ],
        ),
        (
            {gpu_manager.CORE: 30, gpu_manager.MEMORY: 4},
            [f"{gpu_manager.INDEXES}0", gpu_manager.CEILING, CORE_MODE],
        ),
        ({hami.MEMORY: 3000}, [hami.ALLOCATED]),
    ],
)
def test_decoding_raises_invalid_record_when_text_is_no_record(
    text: str, limits: dict[str, int | str], annotations: list[str]
) -> None:
    """Each annotation by itself, beside one that says where the pod is."""
    for name in annotations:
        said = {"ALIYUN_COM_GPU_MEM_IDX": "0"} | {name: text}
        assert refusal(pod(limits, annotations=said)), name


@settings(deadline=None, max_examples=300)
@given(data=st.data(), which=st.sampled_from(WITH_HAMI), unit=st.sampled_from([1, 256, 1024]))
def test_placement_is_unchanged_when_encoded_and_decoded_in_any_dialect(
    data: st.DataObject, which: Dialect, unit: int
) -> None:
    """What is written of a placement is read as that placement, on cards of two sizes."""
    asked = data.draw(manifests(which.RESOURCES))
    node = share(T4_MIB, V100_MIB, T4_MIB, unit_mib=unit)
    asked = PodRequest(
        asked.containers,
        {"aliyun.com/gpu-count": data.draw(st.sampled_from(["1", "2"]))},
        {"tencent.com/vcuda-core-limit": "100"},
    )
    try:
        dialect = detect(asked, (which,))
        if dialect is None:
            return
        parts = dialect.parse(asked)
    except InvalidRecord:
        return
    found = place_gang(UsageTotals(), [part.request for part in parts], "spread", [node.node])
    if not isinstance(found, tuple):
        return
    written = dialect.encode(asked, node, found, 1)
    again = PodRequest(asked.containers, asked.labels, {**asked.annotations, **written})
    assert dialect.decode(again, parts, node) == found
    assert detect(again, WITH_HAMI) is detect(asked, WITH_HAMI)
    for part, placement in zip(parts, found, strict=True):
        for name in part.containers:
            uuids = ",".join(piece.uuid for piece in placement.slices)
            variables = environment(dialect, again, node, found, name)
            assert variables["NVIDIA_VISIBLE_DEVICES"] == uuids


def test_modules_have_every_member_of_a_dialect() -> None:
    """Their names differ, and no two of those always understood have a resource in common."""
    assert len({dialect.NAME for dialect in WITH_HAMI}) == len(WITH_HAMI)
    names = [name for dialect in DIALECTS for name in dialect.RESOURCES]
    assert len(set(names)) == len(names)
