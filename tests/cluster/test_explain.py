"""Explanations of pods: why one is pending, where it is, and what would help."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster import explain
from fenka.cluster.explain import CHANGE_REQUEST
from fenka.cluster.objects import QUEUE_GATE
from tests.builders import node, on_card, pod, sharing, units, unschedulable
from tests.cluster.explanations import data, objects, waiting
from tests.fakes.api_server import Json


def verdicts(answer: dict[str, Any]) -> dict[str, list[str]]:
    """Return the reasons by node."""
    return {it["node"]: it["reasons"] for it in answer["nodes"]}


def test_each_node_has_its_reason_when_the_pod_does_not_fit() -> None:
    """Every rule about nodes has its own sentence."""
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    nodes = [
        sharing("away", ready="Unknown"),
        sharing("both", labels={"cgpu": "false"}, resources={"aliyun.com/gpu-mem": 0}),
        sharing("cordoned", unschedulable=True),
        sharing("crowded", resources={"pods": 1}),
        sharing("fits"),
        node("labelled", labels={"cgpu": "true"}),
        node("plain"),
        sharing("sick", annotations={"fenka.io/cordoned": "0"}, cards=2),
        sharing("tainted", taints=[taint]),
        sharing("unreadable", annotations={"fenka.io/cards": "[]"}),
    ]
    pods = [
        waiting(),
        pod("q", units(12), node="sick", annotations=on_card(1, 12)),
        pod("r", node="crowded"),
    ]
    found = verdicts(data(objects(nodes=nodes, pods=pods), "p"))
    assert {name: reasons for name, reasons in found.items() if name != "unreadable"} == {
        "away": ["not ready"],
        "both": ["the labels gpushare=true and cgpu=false contradict each other: keep one of them"],
        "cordoned": ["cordoned"],
        "crowded": ["has 1 of 1 pods"],
        "fits": [],
        "labelled": [
            "is labelled to share, but its kubelet offers no aliyun.com/gpu-mem: the node's events and "
            "the log of fenka's node pod there say why"
        ],
        "plain": ["shares no GPU (aliyun.com/gpu-mem is 0)"],
        "sick": ["card 0: cordoned", "card 1: too little memory (2 of 14 units free)"],
        "tainted": ["taint gpu=yes:NoSchedule is not tolerated"],
    }
    assert "annotation fenka.io/cards of node unreadable" in found["unreadable"][0]


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, False),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "a"}}, True),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "b"}}, False),
    ],
)
def test_node_fits_when_taints_are_tolerated_and_labels_match(spec: Json, fits: bool) -> None:
    """kube-scheduler has the same rules."""
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    nodes = [sharing("a", taints=[taint], labels={"zone": "a"})]
    answer = data(objects(nodes=nodes, pods=[waiting(spec=spec)]), "p")
    assert answer["nodes"][0]["fits"] is fits


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [
        ("In", ["8", "9"], True),
        ("NotIn", ["8"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["7"], True),
        ("Gt", ["8"], False),
        ("Lt", ["10"], True),
        ("Lt", ["8"], False),
    ],
)
def test_node_fits_when_the_affinity_matches(operator: str, values: list[str], fits: bool) -> None:
    """Each operator is tried on a node labelled gen=8."""
    term = {"matchExpressions": [{"key": "gen", "operator": operator, "values": values}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    spec = {"affinity": {"nodeAffinity": required}}
    server = objects(nodes=[sharing("a", labels={"gen": "8"})], pods=[waiting(spec=spec)])
    assert data(server, "p")["nodes"][0]["fits"] is fits


def test_hints_name_the_smallest_pods_first_when_their_end_makes_room() -> None:
    """Both cards are too full; by the kubelet's sum over both there would be room."""
    pods = [
        waiting(6),
        pod("big", units(10), node="a", annotations=on_card(0, 10)),
        pod("mid", units(6), node="a", annotations=on_card(1, 6)),
        pod("small", units(3), node="a", annotations=on_card(1, 3)),
    ]
    answer = data(objects(nodes=[sharing("a", cards=2)], pods=pods), "p")
    # Card 0: 4 free, card 1: 5 free; 9 by the sum.
    assert answer["sentence"] == "no GPU fits: 2 of 2 have too little memory"
    assert answer["hints"] == [
        "it starts when default/small ends (3 units on card 1 of a)",
        "it starts when default/mid ends (6 units on card 1 of a)",
        "it starts when default/big ends (10 units on card 0 of a)",
    ]


@settings(deadline=None)
@given(
    held=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 14)), max_size=12),
    amount=st.integers(1, 28),
    cards=st.integers(1, 2),
)
def test_hints_are_those_of_trying_each_pod_when_nodes_are_full(
    held: list[tuple[int, int]], amount: int, cards: int
) -> None:
    """Pods that hold less than a card lacks are not tried; that changes no hint."""
    placed = [
        pod(f"p{i}", units(size), node=f"n{at // 3}", annotations=on_card(at % 3, size))
        for i, (at, size) in enumerate(held)
    ]
    asked = waiting(amount * cards, labels={"aliyun.com/gpu-count": str(cards)})
    nodes = [sharing(name, cards=3) for name in ("n0", "n1")]
    cluster = objects(nodes=nodes, pods=[asked, *placed])
    quick = data(cluster, "p")["hints"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain._SharedCards, "_may_make_room", lambda self, name: self._held[name])
        assert data(cluster, "p")["hints"] == quick


@pytest.mark.parametrize(
    ("limits", "help_"),
    [
        (waiting(15), "the largest card has 14 units, ask for no more"),
        (
            waiting(9, labels={"aliyun.com/gpu-count": "3"}),
            "ask for fewer cards, no node has more than 2 that fit",
        ),
        (
            waiting(9, labels={"aliyun.com/gpu-count": "2"}),
            "cannot be shared out evenly over 2 cards",
        ),
    ],
)
def test_hint_says_so_when_the_pod_can_never_start(limits: Json, help_: str) -> None:
    """No pod's end would help, so the hint says what to request instead."""
    server = objects(nodes=[sharing("a", cards=2)], pods=[limits])
    answer = data(server, "p")
    assert answer["hints"][0] == CHANGE_REQUEST
    found = answer["never"]
    assert help_ in found


def test_hint_names_the_labels_when_no_node_shares() -> None:
    """New users forget them first."""
    (found,) = data(objects(nodes=[node("a")], pods=[waiting()]), "p")["hints"]
    assert found == "no node shares its GPUs: label one gpushare=true or cgpu=true"


def test_pod_is_pending_when_it_has_fenkas_gate() -> None:
    """Nodes are evaluated for it like for any pending pod."""
    blocked = unschedulable("Scheduling is blocked due to non-empty scheduling gates")
    blocked["conditions"][0]["reason"] = "SchedulingGated"
    gated = waiting(spec={"schedulingGates": [{"name": QUEUE_GATE}]}, status=blocked)
    answer = data(objects(nodes=[sharing("a")], pods=[gated]), "p")
    assert (answer["state"], answer["message"]) == ("pending", "")
    assert any(QUEUE_GATE in note and "fenka queue" in note for note in answer["notes"])
    assert [it["fits"] for it in answer["nodes"]] == [True]


def test_pod_is_gated_when_it_has_a_foreign_gate() -> None:
    """The scheduler does not try it."""
    gated = waiting(spec={"schedulingGates": [{"name": "team/quota"}]})
    answer = data(objects(nodes=[sharing("a")], pods=[gated]), "p")
    assert answer["state"] == "gated"
    assert answer["hints"] == ["its scheduling gates must be removed by their owner: team/quota"]


def test_hint_names_the_holder_when_whole_cards_are_taken() -> None:
    """Scenario S1's first screen: one card, two replicas."""
    pods = [
        pod("first", {"nvidia.com/gpu": 1}, node="a"),
        pod("p", {"nvidia.com/gpu": 1}),
    ]
    nodes = [node("a", resources={"nvidia.com/gpu": 1}), node("cpu")]
    answer = data(objects(nodes=nodes, pods=pods), "p")
    assert verdicts(answer) == {
        "a": ["whole cards: 1 asked, 0 of 1 free"],
        "cpu": ["offers no nvidia.com/gpu"],
    }
    assert answer["hints"] == ["it starts when default/first ends (1 whole cards of a)"]


def test_note_names_a_record_when_it_cannot_be_read() -> None:
    """The pod's request counts although its card is unknown, which is why others wait."""
    pods = [waiting(), pod("odd", units(12), node="a", annotations={"ALIYUN_COM_GPU_MEM_IDX": "?"})]
    answer = data(objects(nodes=[sharing("a", cards=2)], pods=pods), "p")
    (_, note) = answer["notes"]
    assert note.startswith("default/odd on a: annotation ALIYUN_COM_GPU_MEM_IDX is '?'")


def test_note_names_a_card_when_it_is_overcommitted() -> None:
    """gpushare takes such a card for a huge free one."""
    pods = [
        waiting(),
        *(pod(f"o{n}", units(10), node="a", annotations=on_card(0, 10)) for n in (1, 2)),
    ]
    answer = data(objects(nodes=[sharing("a")], pods=pods), "p")
    assert "card 0 of a is overcommitted: 20480 of 14336 MiB" in answer["notes"]


def test_hint_refers_to_the_scheduler_when_the_pod_requests_no_gpu() -> None:
    """fenka does not place such a pod."""
    answer = data(objects(nodes=[sharing("a")], pods=[pod("p")]), "p")
    assert answer["summary"].endswith(
        "asks for no GPU (aliyun.com/gpu-mem in no container's limits)."
    )
    assert answer["hints"] == [
        "nothing of fenka's keeps it: the scheduler's message has the reason"
    ]


def warning(reason: str, message: str, minute: int) -> Json:
    """Return an event of the pod."""
    return {
        "metadata": {"name": f"{reason}{minute}", "namespace": "default"},
        "involvedObject": {"name": "p", "uid": "u-default-p"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-01-01T00:{minute:02}:00Z",
    }


def test_events_are_the_newest_of_each_reason_when_there_are_many() -> None:
    """kube-scheduler's current message is not repeated, and its events end with the pod's placement."""
    events = [
        warning("FailedScheduling", "0/2 nodes, before", 1),
        warning("FailedScheduling", "0/1 nodes, now", 2),
        warning("FenkaUnschedulable", "fenka: no GPU fits", 3),
    ]
    pending = waiting(status=unschedulable("0/1 nodes, now"))
    server = objects(nodes=[sharing("a", 2)], pods=[pending], events=events)
    assert data(server, "p")["events"] == ["FenkaUnschedulable: fenka: no GPU fits"]
    placed = waiting(node="a", phase="Pending", annotations=on_card(0, 4))
    server = objects(
        nodes=[sharing("a")],
        pods=[placed],
        events=[*events, warning("FailedMount", "no such volume", 4)],
    )
    assert data(server, "p")["events"] == ["FailedMount: no such volume"]


def test_extender_is_named_when_its_sentence_is_in_the_message() -> None:
    """Its sentence in kube-scheduler's message shows that it was asked."""
    message = "0/1 nodes are available: 1 no GPU fits: 2 of 2 have too little memory."
    server = objects(nodes=[sharing("a")], pods=[waiting(status=unschedulable(message))])
    assert data(server, "p")["extender"] == "the extender was asked, and says no"


FOREIGN = {"schedulingGates": [{"name": "team/quota"}]}
FENKAS = {"schedulingGates": [{"name": QUEUE_GATE}]}
BOTH_GATES = {"schedulingGates": [{"name": QUEUE_GATE}, {"name": "team/quota"}]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "pending"),
        ({"spec": FENKAS}, "pending"),
        ({"spec": FOREIGN}, "gated"),
        ({"spec": BOTH_GATES}, "gated"),
        ({"node": "a", "phase": "Pending"}, "starting"),
        ({"node": "a"}, "running"),
        ({"node": "a", "phase": "Unknown"}, "unknown"),
        ({"node": "a", "phase": "Succeeded"}, "succeeded"),
        # evicted before it was placed
        ({"phase": "Failed"}, "failed"),
    ],
)
def test_state_is_that_of_the_pods_life(given: Json, expected: str) -> None:
    """Whatever it is, the summary has it, and a pod that is being deleted is terminating."""
    for ending, state in ((False, expected), (True, "terminating")):
        asked = waiting(**given)
        if ending:
            asked["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        answer = data(objects(nodes=[sharing("a")], pods=[asked]), "p")
        assert answer["state"] == state
        assert answer["summary"].startswith(f"default/p is {state}: it asks for ")


@pytest.mark.parametrize(
    ("limits", "labels", "expected"),
    [
        ({"nvidia.com/gpu": 1}, {}, "1 whole card (nvidia.com/gpu)"),
        ({"nvidia.com/gpu": 2}, {}, "2 whole cards (nvidia.com/gpu)"),
        (units(4), {}, "4 units of aliyun.com/gpu-mem on one card"),
        (
            units(4),
            {"aliyun.com/gpu-count": "2"},
            "4 units of aliyun.com/gpu-mem on 2 cards of one node",
        ),
        (
            {**units(4), "aliyun.com/gpu-core.percentage": 30},
            {},
            "4 units of aliyun.com/gpu-mem on one card, and 30 of aliyun.com/gpu-core.percentage",
        ),
        (
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000},
            {},
            "1 of nvidia.com/gpu and 3000 of nvidia.com/gpumem",
        ),
        (
            {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 8},
            {},
            "50 of tencent.com/vcuda-core and 8 of tencent.com/vcuda-memory",
        ),
        (units(4), {"aliyun.com/gpu-count": "two"}, "cards in a way that cannot be read"),
        ({**units(4), "nvidia.com/gpu": 1}, {}, "cards in a way that cannot be read"),
    ],
)
def test_summary_has_the_request_in_the_words_of_its_dialect(
    limits: Json, labels: dict[str, str], expected: str
) -> None:
    """As its user wrote it."""
    answer = data(objects(nodes=[sharing("a")], pods=[pod("p", limits, labels=labels)]), "p")
    assert answer["summary"] == f"default/p is pending: it asks for {expected}."


@pytest.mark.parametrize(
    ("limits", "labels", "reason"),
    [
        (units("many"), {}, "'many' is no quantity"),
        (units(-4), {}, "container main asks for -4 of aliyun.com/gpu-mem"),
        (units(4), {"aliyun.com/gpu-count": "9" * 63}, "not a number of cards"),
        ({**units(4), "nvidia.com/gpu": 1}, {}, "which do not go together"),
    ],
)
def test_hint_has_the_reason_when_the_request_cannot_be_read(
    limits: Json, labels: dict[str, str], reason: str
) -> None:
    """Its owner has to correct it; no node's verdict would help."""
    answer = data(objects(nodes=[sharing("a")], pods=[pod("p", limits, labels=labels)]), "p")
    assert answer["hints"] == [CHANGE_REQUEST]
    assert reason in answer["never"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", ""),
        ("0/1 nodes are available: 1 node(s) had untolerated taint", ""),
        ("1 Insufficient cpu.", ""),
        ("1 Insufficient aliyun.com/gpu-mem.", "kube-scheduler says no by itself"),
        ("1 Insufficient nvidia.com/gpu.", "kube-scheduler says no by itself"),
        ("1 Insufficient GPU Memory in one device.", "the extender was asked"),
        ("The node a is not for GPU share, need skip", "the extender was asked"),
        # both, for different nodes
        ("1 Insufficient aliyun.com/gpu-mem, 1 no GPU fits", "the extender was asked"),
        ("1 Insufficient aliyun.com/gpu-mem, 1 0/2 GPUs fit", "the extender was asked"),
    ],
)
def test_message_shows_whether_the_extender_was_asked(message: str, expected: str) -> None:
    """By its own phrases, and by the resources that kube-scheduler counts itself."""
    asked = waiting(status=unschedulable(message))
    answer = data(objects(nodes=[sharing("a")], pods=[asked]), "p")
    assert answer["message"] == message
    assert answer["extender"].startswith(expected)
    assert bool(answer["extender"]) == bool(expected)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("default-scheduler", "default-scheduler has not reported on it yet"),
        ("", "the scheduler has not reported on it yet"),
    ],
)
def test_note_says_so_when_no_scheduler_has_reported(scheduler: str, expected: str) -> None:
    """The pod may be new, or names a scheduler that nobody runs."""
    answer = data(objects(nodes=[sharing("a")], pods=[waiting(scheduler=scheduler)]), "p")
    (note,) = answer["notes"]
    assert note.startswith(expected)


def test_only_the_newest_warnings_are_shown_when_there_are_many() -> None:
    """Five, the newest first; what is no warning is not shown."""
    events = [warning(f"Reason{minute}", "text", minute) for minute in range(8)]
    events[7]["type"] = "Normal"
    answer = data(objects(nodes=[sharing("a")], pods=[waiting()], events=events), "p")
    assert answer["events"] == [f"Reason{minute}: text" for minute in (6, 5, 4, 3, 2)]


@pytest.mark.parametrize(
    ("mode", "expected"), [("hard", ""), ("soft", ", as a soft share"), ("weight", ", as a weight")]
)
def test_summary_has_the_mode_of_the_compute(mode: str, expected: str) -> None:
    """Nothing is added for a hard share."""
    limits = {**units(4), "aliyun.com/gpu-core.percentage": 30}
    pods = [pod("p", limits, annotations={"fenka.io/core-mode": mode})]
    answer = data(objects(nodes=[sharing("a")], pods=pods), "p")
    request = "4 units of aliyun.com/gpu-mem on one card, and 30 of aliyun.com/gpu-core.percentage"
    assert answer["summary"] == f"default/p is pending: it asks for {request}{expected}."
