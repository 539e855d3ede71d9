"""What holds for every dialect: which one is spoken, there and back, and no combination that crashes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.gangs import plan_gang
from fenka.core.ledger import Ledger, Tally
from fenka.core.requests import Placement
from fenka.dialects import ack, gpu_manager, hami, modes, whole_cards
from fenka.dialects.gpushare import Kind, Unreadable
from fenka.dialects.recognition import DIALECTS, WITH_HAMI, recognise
from fenka.dialects.requests import Dialect, Limits, Manifest
from tests.dialects.dialect_kit import T4_MIB, V100_MIB, pod, share

MEM, GPU = "aliyun.com/gpu-mem", "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (pod({}), None),
        (pod({"cpu": "500m", GPU: 0}), None),
        (pod({MEM: 4}), ack),
        (pod({MEM: 4, "aliyun.com/gpu-core.percentage": 30}), ack),
        (pod({"tencent.com/vcuda-core": 100}), gpu_manager),
        (pod({GPU: 1}), whole_cards),
        (pod({}, init=({GPU: 1},)), whole_cards),
        (pod({GPU: 1, "nvidia.com/gpumem": 3000}), hami),
        (pod({"nvidia.com/gpucores": 30}), hami),
    ],
)
def test_which_dialect(asked: Manifest, expected: Dialect | None) -> None:
    """HAMi's only where they are turned on: elsewhere such a pod is not fenka's."""
    assert recognise(asked, WITH_HAMI) is expected
    assert recognise(asked) is (None if expected is hami else expected)


def test_two_dialects_at_once() -> None:
    """In one container or in two."""
    for asked in (pod({MEM: 4, GPU: 1}), pod({GPU: 1}, {MEM: 4})):
        with pytest.raises(Unreadable) as why:
            recognise(asked)
        assert str(why.value) == (
            "it asks for aliyun.com/gpu-mem and for nvidia.com/gpu, which do not go together: "
            "use the names of one of them in all its containers"
        )


def test_whole_cards_beside_shared_ones() -> None:
    """One node, one ledger: a slice on card 0 leaves card 1 to who wants a whole one, and no card twice."""
    node = share(T4_MIB, T4_MIB)
    assert whole_cards.advertised(node) == {GPU: 2}
    ledger = Ledger([node.node])
    (slice_,) = ack.demand(pod({MEM: 4}), 1024)
    (card,) = whole_cards.demand(pod({GPU: 1}), 1024)
    for name, part, expected in (("s", slice_, [0]), ("w", card, [1]), ("s2", slice_, [0])):
        found = place(ledger, part.request, "binpack", [node.node])
        assert isinstance(found, Placement)
        assert [it.card for it in found.slices] == expected
        ledger.adopt(name, found)
    refused = place(ledger, card.request, "binpack", [node.node])
    assert not isinstance(refused, Placement)
    assert refused.sentence() == "0/2 GPUs fit: 1 in use, 1 taken whole"


def test_whole_cards_by_container() -> None:
    """An init container uses those of a container beside it; a sidecar has its own."""
    node = share(T4_MIB, T4_MIB, T4_MIB)
    asked = pod({GPU: 2}, {}, init=({GPU: 1},), sidecars=({GPU: 1},))
    parts = whole_cards.demand(asked, 1024)
    assert [(part.containers, part.request.cards) for part in parts] == [
        (("s0", "i0"), 1),
        (("c0",), 2),
    ]
    found = plan_gang(Tally(), [part.request for part in parts], "binpack", [node.node])
    assert isinstance(found, tuple)
    written = whole_cards.write(asked, node, found, 1)
    assert written["fenka.io/whole-cards"] == '{"s0":[0],"c0":[1,2]}'
    assert whole_cards.environment(asked, node, found, "i0") == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}
    assert whole_cards.environment(asked, node, found, "c0") == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"
    }
    assert whole_cards.environment(asked, node, found, "c1") == {}
    with pytest.raises(
        Unreadable, match=r"^its init container i0 asks for more than any container beside it"
    ):
        whole_cards.demand(pod({GPU: 1}, init=({GPU: 2},)), 1024)


NAMES = sorted({name for dialect in WITH_HAMI for name in dialect.RESOURCES})
AMOUNTS: st.SearchStrategy[str | int] = st.sampled_from(
    [0, 1, 2, 5, 10, 24, 30, 50, 99, 100, 101, 200, -1, 10**9, "4", "1k", "4Gi", "x", ""]
)
KEYS = [
    "tencent.com/vcuda-core-limit",
    "aliyun.com/gpu-count",
    *(f"{gpu_manager.INDEXES}{number}" for number in range(2)),
    whole_cards.RECORD,
    hami.ALLOCATED,
    ack.CORES,
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
def manifests(draw: st.DrawFn, names: tuple[str, ...]) -> Manifest:
    """Anything that an API server might let through, and more."""
    limits: st.SearchStrategy[dict[str, str | int]] = st.dictionaries(
        st.sampled_from(names), AMOUNTS, max_size=3
    )
    containers = [
        Limits(f"c{number}", each, kind)
        for number, (each, kind) in enumerate(
            draw(
                st.lists(
                    st.tuples(
                        limits, st.sampled_from([Kind.APP, Kind.APP, Kind.INIT, Kind.SIDECAR])
                    ),
                    max_size=3,
                )
            )
        )
    ]
    ordered = sorted(containers, key=lambda it: it.kind is Kind.APP)
    texts = st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=3)
    return Manifest(tuple(ordered), draw(texts), draw(texts))


@settings(deadline=None, max_examples=300)
@given(asked=manifests(tuple(NAMES)))
def test_no_combination_crashes(asked: Manifest) -> None:
    """It is understood, or refused in one sentence."""
    sentence = refusal(asked)
    assert sentence is None or (sentence and "\n" not in sentence)


def refusal(asked: Manifest) -> str | None:
    """What the pod is told, by whoever reads it first."""
    node = share(T4_MIB, V100_MIB)
    try:
        dialect = recognise(asked, WITH_HAMI)
        if dialect is not None:
            parts = dialect.demand(asked, node.unit_mib)
            assert parts
            dialect.read(asked, node)
            modes.admits(asked.labels, parts)
    except Unreadable as why:
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
        ({GPU: 1}, [whole_cards.RECORD]),
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
            [f"{gpu_manager.INDEXES}0", gpu_manager.CEILING],
        ),
        ({hami.MEMORY: 3000}, [hami.ALLOCATED]),
    ],
)
def test_what_is_no_record_at_all(
    text: str, limits: dict[str, int | str], annotations: list[str]
) -> None:
    """Each annotation by itself, beside one that says where the pod is."""
    for name in annotations:
        said = {"ALIYUN_COM_GPU_MEM_IDX": "0"} | {name: text}
        assert refusal(pod(limits, annotations=said)), name


@settings(deadline=None, max_examples=300)
@given(data=st.data(), which=st.sampled_from(WITH_HAMI), unit=st.sampled_from([1, 256, 1024]))
def test_there_and_back(data: st.DataObject, which: Dialect, unit: int) -> None:
    """What is written of a placement is read as that placement, on cards of two sizes."""
    asked = data.draw(manifests(which.RESOURCES))
    node = share(T4_MIB, V100_MIB, T4_MIB, unit_mib=unit)
    asked = Manifest(
        asked.containers,
        {"aliyun.com/gpu-count": data.draw(st.sampled_from(["1", "2"]))},
        {"tencent.com/vcuda-core-limit": "100"},
    )
    try:
        dialect = recognise(asked, (which,))
        if dialect is None:
            return
        parts = dialect.demand(asked, unit)
    except Unreadable:
        return
    found = plan_gang(Tally(), [part.request for part in parts], "spread", [node.node])
    if not isinstance(found, tuple):
        return
    written = dialect.write(asked, node, found, 1)
    again = Manifest(asked.containers, asked.labels, {**asked.annotations, **written})
    assert dialect.read(again, node) == found
    assert recognise(again, WITH_HAMI) is recognise(asked, WITH_HAMI)
    for part, placement in zip(parts, found, strict=True):
        for name in part.containers:
            uuids = ",".join(piece.uuid for piece in placement.slices)
            environment = dialect.environment(again, node, found, name)
            assert environment["NVIDIA_VISIBLE_DEVICES"] == uuids


def test_each_is_a_dialect() -> None:
    """Their names differ, and no two of those always understood have a resource in common."""
    assert len({dialect.NAME for dialect in WITH_HAMI}) == len(WITH_HAMI)
    names = [name for dialect in DIALECTS for name in dialect.RESOURCES]
    assert len(set(names)) == len(names)
