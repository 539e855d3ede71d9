"""What tenants write on their own pods: nobody counts for more than its limits ask, or elsewhere."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Node, Pod
from fenka.cluster.pending_queue import PendingQueue
from fenka.cluster.pod_preemption import PodPreemption
from fenka.cluster.state import ClusterState
from fenka.core.backfill import complete
from fenka.core.inventory import Card, DeviceId
from fenka.core.inventory import Node as CoreNode
from fenka.core.request import COMPUTE_MODES, Slice
from fenka.dialects import (
    ack,
    base,
    gpu_manager,
    gpushare,
    hami,
    lease_records,
    nodes,
    nvidia,
    resize_records,
)
from fenka.dialects.base import InvalidRecord
from fenka.dialects.card_records import nominal_mib
from fenka.dialects.lease_records import LeaseReport, Lingering
from fenka.dialects.registry import WITH_HAMI, detect
from tests.builders import T4_MIB, a_node, pod_json
from tests.core.builders import device
from tests.fakes.evaluators import ComparedEvaluator

CARDS = 4
FORGED = Slice(0, DeviceId("GPU-n-0"), T4_MIB, 100)


def pod(limits: dict[str, int], **rest: Any) -> Pod:
    """A pod on node n whose only container has these limits."""
    made = pod_json("p", 0, node="n", uid="u", **rest)
    made["spec"]["containers"][0]["resources"] = {
        "limits": {name: str(amount) for name, amount in limits.items()}
    }
    return msgspec.convert(made, Pod)


def counted(world: ClusterState) -> tuple[int, int]:
    """MiB and percent that are held of all cards of the node."""
    used = [world.card_usage("n", device(card, "n")) for card in range(CARDS)]
    return sum(it.memory_mib for it in used), sum(it.compute for it in used)


def asked(it: Pod) -> tuple[int, int]:
    """MiB and percent that its limits ask for; nothing for a pod that no node gives anything."""
    try:
        dialect = detect(it.request, WITH_HAMI)
        parts = dialect.parse(it.request) if dialect else ()
    except InvalidRecord:
        return 0, 0
    node = CoreNode("n", (Card(0, DeviceId("GPU-n-0"), "Tesla T4", T4_MIB),))
    requests = [part.request for part in parts]
    return (
        sum(one.cards * nominal_mib(one, node, node.cards[0]) for one in requests),
        sum(one.cards * (100 if one.whole else one.compute) for one in requests),
    )


def a_world(*pods: Pod) -> ClusterState:
    """A node of four cards."""
    return ClusterState([a_node("n", *[T4_MIB] * CARDS)], pods, WITH_HAMI)


UNIT = {gpushare.MEMORY: 1}
SLICE = {gpu_manager.CORE: 10, gpu_manager.MEMORY: 4}
HAMI = {hami.COUNT: 1, hami.MEMORY: 1000, hami.CORES: 10}

LIES: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "more units than its limits": (UNIT, {gpushare.ALLOCATION: '{"0":{"0":14,"1":14}}'}),
    "containers that it has not": (UNIT, {gpushare.ALLOCATION: '{"0":{"0":1},"7":{"1":14}}'}),
    "more compute than its limits": (
        {gpushare.MEMORY: 1, ack.CORE: 5},
        {gpushare.IDX: "0", ack.CORES: '{"0":{"0":100}}'},
    ),
    "its compute on every card": (
        {gpushare.MEMORY: 4, ack.CORE: 50},
        {gpushare.ALLOCATION: '{"0":{"0":1,"1":1,"2":1,"3":1}}'},
    ),
    "a card that is not there": (UNIT, {gpushare.IDX: "99"}),
    "another node's card": (UNIT, {gpushare.IDX: "0", base.CARDS: '{"0":"GPU-other-0"}'}),
    "nonsense": (UNIT, {gpushare.ALLOCATION: "nonsense"}),
    "no record": (UNIT, {}),
    "nesting": (UNIT, {gpushare.ALLOCATION: '{"0":' * 9000}),
    "a resize": (
        UNIT,
        {
            gpushare.IDX: "0",
            resize_records.STATUS: resize_records.encode_status(
                resize_records.ResizeStatus("u", (FORGED,))
            ),
        },
    ),
    "gpu-manager's nonsense": (SLICE, {f"{gpu_manager.INDEXES}0": "x"}),
    "gpu-manager's other cards": (SLICE, {f"{gpu_manager.INDEXES}0": "0,1,2,3"}),
    "a mode": ({gpushare.MEMORY: 1, ack.CORE: 5}, {gpushare.IDX: "0", base.CORE_MODE: "x"}),
    "a mode without compute": (UNIT, {gpushare.IDX: "0", base.CORE_MODE: "weight"}),
    "gpu-manager's ceiling": (SLICE, {f"{gpu_manager.INDEXES}0": "0", gpu_manager.CEILING: "x"}),
    "HAMi's sizes": (HAMI, {hami.ALLOCATED: "GPU-n-0,NVIDIA,15079,100:;"}),
    "HAMi's nonsense": (HAMI, {hami.ALLOCATED: "GPU-n-9,NVIDIA,1,1:;"}),
    "HAMi's annotations that are not served": (HAMI, {"nvidia.com/use-gputype": "A100"}),
    "whole cards that it has not asked for": (
        {base.NVIDIA_GPU: 1},
        {nvidia.RECORD: '{"c0":[0,1,2,3]}'},
    ),
    "whole cards in nonsense": ({base.NVIDIA_GPU: 1}, {nvidia.RECORD: "x"}),
    "two dialects": ({**UNIT, **SLICE}, {gpushare.IDX: "0"}),
    "a label": (UNIT, {gpushare.IDX: "0"}),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_pod_counts_for_its_limits_when_its_record_gives_more(lie: str) -> None:
    """On all cards together."""
    limits, annotations = LIES[lie]
    labels = {gpushare.COUNT: "x"} if lie == "a label" else {}
    it = pod(limits, annotations=annotations, labels=labels)
    memory, compute = counted(a_world(it))
    # Each card rounds its units down by itself.
    assert memory <= asked(it)[0] + CARDS
    assert compute <= asked(it)[1]


NUMBERS = st.sampled_from(["0", "1", "3", "9", "-1", "x"])
TEXTS = st.one_of(
    NUMBERS,
    st.sampled_from(COMPUTE_MODES),
    st.lists(NUMBERS, max_size=4).map(",".join),
    st.dictionaries(
        st.sampled_from(["0", "1", "2", "c0", "c1", "00", "i0"]),
        st.one_of(
            st.dictionaries(NUMBERS, st.integers(-1, 20), max_size=4),
            st.lists(st.integers(-1, 5), max_size=4),
        ),
        max_size=3,
    ).map(json.dumps),
    st.lists(
        st.tuples(
            st.sampled_from([f"GPU-n-{i}" for i in range(5)]),
            st.integers(0, 20000),
            st.integers(0, 200),
        ).map(lambda it: f"{it[0]},NVIDIA,{it[1]},{it[2]}:"),
        max_size=3,
    ).map(lambda it: "".join(it) + ";"),
)
KEYS = (
    gpushare.ALLOCATION,
    gpushare.IDX,
    base.CARDS,
    ack.CORES,
    f"{gpu_manager.INDEXES}0",
    f"{gpu_manager.INDEXES}1",
    gpu_manager.CEILING,
    base.CORE_MODE,
    hami.ALLOCATED,
    nvidia.RECORD,
)


@given(
    st.sampled_from(["gpushare", "ack", "gpu-manager", "hami", "whole"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 6), max_size=2),
    st.sampled_from(["", "2", "4"]),
    st.dictionaries(st.sampled_from(KEYS), TEXTS),
)
def test_pod_counts_for_its_limits_when_annotations_are_random(
    dialect: str,
    units: list[int],
    inits: list[int],
    cards: str,
    annotations: dict[str, str],
) -> None:
    """Of any dialect, with containers of any sizes."""

    def limits(amount: int) -> dict[str, str]:
        by_name = {
            "gpushare": {gpushare.MEMORY: amount},
            "ack": {gpushare.MEMORY: amount, ack.CORE: 10 * amount},
            "gpu-manager": {gpu_manager.CORE: 10 * amount, gpu_manager.MEMORY: amount},
            "hami": {hami.COUNT: min(amount, 2), hami.MEMORY: 700 * amount, hami.CORES: amount},
            "whole": {base.NVIDIA_GPU: amount},
        }
        return {name: str(it) for name, it in by_name[dialect].items()}

    made = pod_json(
        "p",
        *units,
        init=tuple(inits) if dialect in ("gpushare", "ack") else (),
        node="n",
        uid="u",
        annotations=annotations,
        labels={gpushare.COUNT: cards} if cards else {},
    )
    for kind in ("containers", "initContainers"):
        for container in made["spec"][kind]:
            amount = int(container["resources"]["limits"][gpushare.MEMORY])
            container["resources"] = {"limits": limits(amount)}
    it = msgspec.convert(made, Pod)
    memory, compute = counted(a_world(it))
    # Each card rounds its units down by itself.
    assert memory <= asked(it)[0] + CARDS
    assert compute <= asked(it)[1]


def placed(card: int, units: int = 8) -> dict[str, str]:
    """gpushare's record."""
    return {
        gpushare.IDX: str(card),
        gpushare.ALLOCATION: json.dumps({"0": {str(card): units}}),
    }


def test_leaders_record_counts_when_the_annotation_is_changed() -> None:
    """Otherwise the next pod would be sent to a full card."""
    world = a_world()
    unbound = msgspec.convert(pod_json("p", 8, uid="u"), Pod)
    share = world.shared_node("n")
    assert share is not None
    (part,) = ack.parse(unbound.request)
    placement = gpushare.decode_placement(
        share, placed(2), unbound.request.container_units(gpushare.MEMORY)
    )
    assert part.request.memory is not None
    assert placement is not None
    world.assume(unbound, (placement,))
    for annotations in (placed(2), placed(1), placed(1, 1), {gpushare.ALLOCATION: "x"}, {}):
        world.set_pod(pod({gpushare.MEMORY: 8}, annotations=annotations))
        assert not world.is_assumed("u")
        assert [world.card_usage("n", device(card, "n")).memory_mib for card in range(CARDS)] == [
            0,
            0,
            8616,
            0,
        ]
    world.forget_pod("u")
    assert counted(world) == (0, 0)


def test_last_readable_record_counts_when_the_record_is_unreadable() -> None:
    """For a leader that did not write it."""
    world = a_world(pod({gpushare.MEMORY: 8}, annotations=placed(2)))
    world.set_pod(pod({gpushare.MEMORY: 8}, annotations={gpushare.ALLOCATION: "x"}))
    assert [world.card_usage("n", device(card, "n")).memory_mib for card in range(CARDS)] == [
        0,
        0,
        8616,
        0,
    ]
    holding = world.allocation("u")
    assert holding is not None
    assert holding.error is not None


def reporting(report: LeaseReport) -> Node:
    """The node, with what its program reports."""
    return a_node(
        "n",
        *[T4_MIB] * CARDS,
        annotations={lease_records.REPORT: lease_records.encode_report(report)},
    )


def test_nodes_report_counts_when_a_record_differs() -> None:
    """Also after a resize: more than the limits, if the node reports it."""
    there = pod({gpushare.MEMORY: 8}, annotations=placed(1))
    world = a_world(there)
    world.set_node(reporting(LeaseReport({"u": (Slice(2, DeviceId("GPU-n-2"), 12000, 30),)})))
    assert counted(world) == (12000, 30)
    assert world.card_usage("n", device(2, "n")).memory_mib == 12000
    world.set_pod(pod({gpushare.MEMORY: 8}, annotations={gpushare.ALLOCATION: "x"}))
    assert world.card_usage("n", device(2, "n")).memory_mib == 12000
    holding = world.allocation("u")
    assert holding is not None
    assert holding.error is None
    world.set_node(a_node("n", *[T4_MIB] * CARDS))
    # What the tenant wrote before is all that is left.
    assert world.card_usage("n", device(2, "n")).memory_mib == 0


def test_whole_cards_are_whole_when_the_node_reports_them() -> None:
    """Beside a slice of the same pod."""
    pieces = Slice(1, DeviceId("GPU-n-1"), T4_MIB, 100), Slice(2, DeviceId("GPU-n-2"), 1077, 10)
    world = a_world(pod({base.NVIDIA_GPU: 1}))
    world.set_node(reporting(LeaseReport({"u": pieces})))
    assert [world.card_usage("n", device(card, "n")).whole for card in range(CARDS)] == [0, 1, 0, 0]
    assert counted(world) == (T4_MIB + 1077, 110)


def test_card_is_free_when_the_report_is_about_its_predecessor() -> None:
    """Reports name cards by UUID."""
    world = a_world(pod({gpushare.MEMORY: 8}, annotations=placed(1)))
    world.set_node(reporting(LeaseReport({"u": (Slice(1, DeviceId("GPU-former"), 8616, 0),)})))
    assert counted(world) == (0, 0)


def test_allocation_stays_when_a_pod_deleted_by_force_still_runs() -> None:
    """Otherwise others would be sent to a full card; it is no victim either."""
    world = a_world(pod({gpushare.MEMORY: 8}, annotations=placed(2)))
    lingering = {"u": Lingering("team/p", (Slice(2, DeviceId("GPU-n-2"), 8616, 0),))}
    world.set_node(reporting(LeaseReport({}, lingering)))
    # The API server still shows it here: once, not twice.
    assert counted(world) == (8616, 0)
    world.forget_pod("u")
    assert world.card_usage("n", device(2, "n")).memory_mib == 8616
    (holding,) = world.allocations("n")
    assert holding.lingering
    assert holding.pod.full_name == "team/p"
    important = msgspec.convert(pod_json("v", 14, uid="v", priority=100), Pod)
    for card in (0, 1, 3):
        world.set_pod(
            msgspec.convert(
                pod_json(f"o{card}", 14, uid=f"o{card}", node="n", annotations=placed(card, 14)),
                Pod,
            )
        )
    found = PodPreemption(world, "binpack").victims(important, "n", (), {})
    assert found is not None
    assert "u" not in found.uids
    world.set_node(reporting(LeaseReport()))
    assert world.card_usage("n", device(2, "n")).memory_mib == 0


def test_other_nodes_serve_when_a_node_reports_absurd_amounts() -> None:
    """Their sum exceeds 64 bits, which arrays hold: 2 ** 53 for each of 2,000 slices."""
    world = a_world(pod({gpushare.MEMORY: 8}, annotations=placed(1)))
    world.set_node(a_node("m", T4_MIB))
    queue = PendingQueue(world, "binpack")
    slices = (Slice(1, DeviceId("GPU-n-1"), 2**53, 2**53),) * 2000
    world.set_node(reporting(LeaseReport({"u": slices})))
    waiting = msgspec.convert(pod_json("w", 14, uid="w"), Pod)
    for card in (0, 2, 3):
        held = pod_json(f"o{card}", 14, uid=f"o{card}", node="n", annotations=placed(card, 14))
        world.set_pod(msgspec.convert(held, Pod))
    assert ComparedEvaluator(world, "binpack").filter(waiting, ["m", "n"]).fitting == ["m"]
    world.set_pod(msgspec.convert(pod_json("p2", 14, uid="p2", node="m"), Pod))
    (entry,) = complete(queue.schedule([waiting], 0.0, is_pending=lambda _: True)).entries
    assert entry.why == "no GPU fits: 4 of 5 have too little memory, 1 is taken whole"


def test_other_sources_count_when_the_report_cannot_be_read() -> None:
    """A newer version of the node program may have written it."""
    world = a_world(pod({gpushare.MEMORY: 8}, annotations=placed(2)))
    world.set_node(a_node("n", *[T4_MIB] * CARDS, annotations={lease_records.REPORT: "x"}))
    assert world.card_usage("n", device(2, "n")).memory_mib == 8616


def test_node_stays_open_when_a_pod_uses_two_dialects() -> None:
    """The pod has no card, and on a node of one mode it is of neither kind."""
    world = a_world(pod({**UNIT, **SLICE}, annotations={gpushare.IDX: "0"}))
    labels = {nodes.MODE_LABEL: "core_mem"}
    world.set_node(a_node("n", *[T4_MIB] * CARDS, labels=labels))
    wanted = msgspec.convert(pod_json("v", 14, uid="v"), Pod)
    resources = wanted.spec.containers[0].resources
    resources.limits = {**resources.limits, ack.CORE: "50"}
    assert ComparedEvaluator(world, "binpack").filter(wanted, ["n"]).fitting == ["n"]
