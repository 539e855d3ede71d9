"""What tenants write on their pods reaches other people's screens: short, and without control characters."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.explain import PodExplanation, explain
from fenka.cluster.objects import Node, Pod
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS
from fenka.cluster.state import ClusterSnapshot
from fenka.dialects import (
    ack,
    base,
    gpu_manager,
    gpushare,
    hami,
    nvidia,
    resize_records,
)
from fenka.dialects.registry import WITH_HAMI
from tests.builders import T4_MIB, Json, node_json, pod, units
from tests.fakes.extender import on_t4

LONGEST = 500
"""Characters of a sentence. An event of Kubernetes has at most 1024."""

EVIL = "\x1b]0;\x07\r\n\u202e\u2028" + "x" * 5000

UNIT: Json = {gpushare.MEMORY: 1}
BOTH: Json = {gpushare.MEMORY: 1, ack.CORE: 10}
SLICE: Json = {gpu_manager.CORE: 10, gpu_manager.MEMORY: 4}
HAMI: Json = {hami.COUNT: 1, hami.MEMORY: 1000}
WHOLE: Json = {base.NVIDIA_GPU: 1}

RECORDS = [
    pytest.param(UNIT, {gpushare.IDX: EVIL}, id="gpushare's index"),
    pytest.param(UNIT, {gpushare.ALLOCATION: EVIL}, id="gpushare's record"),
    pytest.param(UNIT, {gpushare.ALLOCATION: json.dumps({EVIL: {"0": 1}})}, id="a container"),
    pytest.param(UNIT, {gpushare.ALLOCATION: json.dumps({"0": {EVIL: 1}})}, id="a card"),
    pytest.param(
        UNIT,
        {gpushare.ALLOCATION: json.dumps({"0": {str(card): 1 for card in range(3000)}})},
        id="thousands of cards",
    ),
    pytest.param(
        UNIT,
        {gpushare.ALLOCATION: json.dumps({str(number): {"0": 1} for number in range(3000)})},
        id="thousands of containers",
    ),
    pytest.param(
        UNIT, {gpushare.IDX: "0", base.CARDS: json.dumps({"0": EVIL})}, id="the UUID of its card"
    ),
    pytest.param(UNIT, {gpushare.IDX: "0", base.CARDS: EVIL}, id="the UUIDs of its cards"),
    pytest.param(UNIT, {gpushare.IDX: "0", resize_records.STATUS: EVIL}, id="a resize"),
    pytest.param(BOTH, {gpushare.IDX: "0", ack.CORES: EVIL}, id="its compute"),
    pytest.param(SLICE, {f"{gpu_manager.INDEXES}0": EVIL}, id="gpu-manager's cards"),
    pytest.param(
        SLICE, {f"{gpu_manager.INDEXES}0": ",".join(map(str, range(3000)))}, id="thousands of them"
    ),
    pytest.param(
        SLICE,
        {f"{gpu_manager.INDEXES}0": "0", base.CARDS: json.dumps({"0": EVIL})},
        id="the UUID of gpu-manager's card",
    ),
    pytest.param(SLICE, {gpu_manager.CEILING: EVIL}, id="gpu-manager's ceiling"),
    pytest.param(BOTH, {base.CORE_MODE: EVIL}, id="the mode of its compute"),
    pytest.param(HAMI, {hami.ALLOCATED: EVIL}, id="HAMi's record"),
    pytest.param(HAMI, {hami.ALLOCATED: f"{EVIL},NVIDIA,1,1:;"}, id="the UUID of HAMi's card"),
    pytest.param(HAMI, {hami.ALLOCATED: "GPU-n-0,NVIDIA,1,1:" * 3000}, id="HAMi's many cards"),
    pytest.param(HAMI, {"nvidia.com/use-gputype": EVIL}, id="a type of card"),
    pytest.param(WHOLE, {nvidia.RECORD: EVIL}, id="whole cards"),
    pytest.param(WHOLE, {nvidia.RECORD: json.dumps({EVIL: [0]})}, id="a container's whole cards"),
    pytest.param(
        WHOLE, {nvidia.RECORD: json.dumps({"main": [*range(3000)]})}, id="too many whole cards"
    ),
    pytest.param(
        WHOLE,
        {nvidia.RECORD: json.dumps({"main": [0]}), base.CARDS: json.dumps({"0": EVIL})},
        id="the UUID of a whole card",
    ),
]


def world(*pods: Json) -> ClusterSnapshot:
    """Return node n of two cards, with these pods."""
    labels = {"gpushare": "true", "fenka.io/whole-cards": "true"}
    nodes = [node_json("n", T4_MIB, T4_MIB, labels=labels)]
    return ClusterSnapshot.of(
        msgspec.convert(nodes, list[Node]), msgspec.convert(pods, list[Pod]), dialects=WITH_HAMI
    )


def sentences(explanation: PodExplanation) -> list[str]:
    """Return everything that is shown of it."""
    nodes = [reason for verdict in explanation.nodes for reason in verdict.reasons]
    return [
        explanation.summary,
        explanation.sentence,
        *explanation.notes,
        *explanation.hints,
        *explanation.slices,
        *nodes,
    ]


def check(*shown: str) -> None:
    """Fail unless all of these are short and printable."""
    assert [each for each in shown if not each.isprintable()] == []
    assert [each for each in shown if len(each) > LONGEST] == []


@pytest.mark.parametrize(("limits", "annotations"), RECORDS)
def test_owner_and_others_see_short_sentences_when_a_record_is_hostile(
    limits: Json, annotations: dict[str, str]
) -> None:
    """Notes name each wrong record of a node to everybody who asks about a pod."""
    there = world(pod("p", limits, node="n", annotations=annotations))
    check(*sentences(explain(there.pods[0], there, ())))
    other = msgspec.convert(pod("q", units(14)), Pod)
    check(*sentences(explain(other, there, ())))
    held = there.state.allocation("u-default-p")
    assert held is not None
    check(held.error or "")


@pytest.mark.parametrize(("limits", "annotations"), RECORDS)
def test_reason_is_short_when_a_pending_pod_has_a_hostile_record(
    limits: Json, annotations: dict[str, str]
) -> None:
    """It is an event of the pod, and a line of the log."""
    cluster = on_t4("a")
    pending = cluster.put(msgspec.convert(pod("p", limits, annotations=annotations), Pod))
    result = cluster.extender.filter(pending, cluster.names)
    check(*result.failed.values(), *result.unresolvable.values())
    there = world(pod("p", limits, annotations=annotations))
    check(*sentences(explain(there.pods[0], there, ())))


@pytest.mark.parametrize(
    "labels",
    [
        {NAME_LABELS[0]: "g", MINIMUM_LABEL: "9" * 63},
        {NAME_LABELS[0]: "g", MINIMUM_LABEL: "-1"},
        {NAME_LABELS[0]: "g", MINIMUM_LABEL: "0"},
        {NAME_LABELS[0]: "g", MINIMUM_LABEL: "1e3"},
        {NAME_LABELS[0]: "g" * 63, MINIMUM_LABEL: "10000"},
        {NAME_LABELS[0]: "../../x", MINIMUM_LABEL: "2"},
        {gpushare.COUNT: "9" * 63},
        {gpushare.COUNT: "0"},
        {f"l{number}": "x" * 63 for number in range(5000)},
    ],
)
def test_reason_is_short_when_labels_are_hostile(labels: dict[str, str]) -> None:
    """The API server limits a label's length, not what it says."""
    cluster = on_t4("a")
    pending = cluster.put(msgspec.convert(pod("p", units(15), labels=labels), Pod))
    check(cluster.why(pending))
    there = world(pod("p", units(4), node="n", labels=labels))
    check(*sentences(explain(there.pods[0], there, ())))


TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@settings(max_examples=60)
@given(
    st.sampled_from([UNIT, BOTH, SLICE, HAMI, WHOLE]),
    st.dictionaries(
        st.sampled_from(
            [
                gpushare.IDX,
                gpushare.ALLOCATION,
                base.CARDS,
                ack.CORES,
                f"{gpu_manager.INDEXES}0",
                gpu_manager.CEILING,
                base.CORE_MODE,
                hami.ALLOCATED,
                nvidia.RECORD,
                resize_records.STATUS,
                resize_records.REQUEST,
            ]
        ),
        st.one_of(
            TEXT,
            st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps),
            TEXT.map(lambda text: json.dumps({"0": text})),
            TEXT.map(lambda text: f"{text},NVIDIA,1,1:;"),
        ),
        max_size=4,
    ),
)
def test_sentences_are_printable_when_annotations_are_random(
    limits: Json, annotations: dict[str, str]
) -> None:
    """On a pod that runs, and on one that is pending."""
    for on in ("n", ""):
        there = world(pod("p", limits, node=on, annotations=annotations))
        check(*sentences(explain(there.pods[0], there, ())))
