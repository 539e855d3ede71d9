"""Explanations of pods that have a node, or have ended: what they hold, and why they do not start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.dialects import gpushare, lease_records, pod_records
from fenka.dialects.lease_records import LeaseReport, Refusal
from tests.builders import GIB, Json, node, node_json, notebooks, on_card, pod, sharing, units
from tests.cluster.explanations import data, objects, waiting


def test_slices_are_named_when_the_pod_runs() -> None:
    """It is not pending, so the answer says where its slices are."""
    answer = data(objects(nodes=[sharing("a")], pods=notebooks("a")), "notebook-1")
    assert answer["state"] == "running"
    assert answer["slices"] == ["4 units (4096 MiB) of card 0 on a"]


@pytest.mark.parametrize(
    ("written", "noted"),
    [
        ("bid-price", "its card was chosen by bid-price: of those with room its node loses"),
        ("binpack", "its card was chosen by binpack: it is on the fullest node with room"),
        ("anything\n", ""),
        ("", ""),
    ],
)
def test_note_says_why_the_card_was_chosen_when_the_record_names_the_policy(
    written: str, noted: str
) -> None:
    """Its user may write anything there, which is not repeated."""
    chosen = {**on_card(0, 4), pod_records.CHOSEN_BY: written}
    placed = pod("p", units(4), node="a", annotations=chosen)
    placed["status"]["phase"] = "Running"
    (note,) = data(objects(nodes=[sharing("a")], pods=[placed]), "p")["notes"] or [""]
    assert note.startswith(noted)
    assert bool(note) == bool(noted)


def test_notes_name_both_pods_when_a_node_refuses_one() -> None:
    """Each explanation names the other pod."""
    there, late = (pod(it, units(8), node="a", annotations=on_card(0, 8)) for it in ("p", "late"))
    another = pod("p-2", units(1), node="a", annotations=on_card(0, 1))
    late["status"]["phase"] = "Pending"
    sentence = (
        "fenka: card 0 has 14336 MiB, of which 8192 MiB are still held by default/p: these wait"
    )
    report = LeaseReport(refused={late["metadata"]["uid"]: Refusal(sentence, movable=True)})
    refusing = sharing("a")
    refusing["metadata"].setdefault("annotations", {})[lease_records.REPORT] = (
        lease_records.encode_report(report)
    )
    server = objects(nodes=[refusing], pods=[there, late, another])
    answer = data(server, "late")
    assert f"its node has refused it for more than a minute: {sentence}" in answer["notes"]
    assert any("evicted" in it for it in answer["hints"])
    in_the_way = f"default/late was placed on the same card and does not start: {sentence}"
    assert in_the_way in data(server, "p")["notes"]
    assert data(server, "p-2")["notes"] == []


def test_containers_are_named_when_they_wait() -> None:
    """The sentence is the node's, from before the container's start."""
    waits = {
        "reason": "CreateContainerConfigError",
        "message": "card 0 is still held by default/old",
    }
    status = {"containerStatuses": [{"name": "main", "state": {"waiting": waits}}]}
    started = waiting(node="a", phase="Pending", annotations=on_card(0, 4), status=status)
    answer = data(objects(nodes=[sharing("a")], pods=[started]), "p")
    assert answer["state"] == "starting"
    assert answer["containers"] == [
        "main: CreateContainerConfigError: card 0 is still held by default/old"
    ]


def test_note_says_so_when_the_extender_did_not_place_the_pod() -> None:
    """kube-scheduler is not configured, or the pod names its node itself."""
    server = objects(nodes=[sharing("a")], pods=[waiting(node="a", phase="Pending")])
    answer = data(server, "p")
    assert "it was not placed by fenka's scheduler" in answer["notes"][1]


def test_note_has_the_kubelets_reason_when_the_pod_failed() -> None:
    """It has the kubelet's words, and says that the kubelet never tries the pod again."""
    status = {"reason": "UnexpectedAdmissionError", "message": "no healthy devices present"}
    server = objects(pods=[waiting(node="a", phase="Failed", status=status)])
    answer = data(server, "p")
    assert (answer["state"], answer["notes"]) == (
        "failed",
        ["UnexpectedAdmissionError no healthy devices present"],
    )
    assert answer["hints"] == [
        "its node refused the pod when it arrived, and does not try again: if no controller made another "
        "pod, delete it and create it again"
    ]


@pytest.mark.parametrize(
    ("movable", "hints"),
    [
        (True, ["it is evicted if a controller makes another; else delete it and create it again"]),
        (False, []),
    ],
)
def test_hint_says_what_helps_when_the_node_refuses_the_pod(
    movable: bool, hints: list[str]
) -> None:
    """A pod that would be refused anywhere is not moved."""
    report = LeaseReport(refused={"u-default-p": Refusal("card 0 is taken", movable=movable)})
    refusing = sharing("a", annotations={lease_records.REPORT: lease_records.encode_report(report)})
    asked = waiting(node="a", phase="Pending", annotations=on_card(0, 4))
    answer = data(objects(nodes=[refusing], pods=[asked]), "p")
    assert answer["hints"] == hints
    assert answer["slices"] == ["4 units (4096 MiB) of card 0 on a"]


@given(
    name=st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,6}[a-z0-9])?", fullmatch=True),
    before=st.sampled_from(["", " ", "x", "-", "/", ".", ":", "("]),
    after=st.sampled_from(["", " ", "x", "-", "/", ".", ":", ",", "0"]),
)
def test_pod_is_named_in_a_sentence_only_as_a_whole_word(
    name: str, before: str, after: str
) -> None:
    """p is not p-2, nor is team.default/p; a dot in a name stands for itself."""
    sentence = f"held by{before}default/{name}{after}"
    report = LeaseReport(refused={"u-default-late-pod": Refusal(sentence)})
    refusing = sharing("a", annotations={lease_records.REPORT: lease_records.encode_report(report)})
    there = pod(name, units(4), node="a", annotations=on_card(0, 4))
    late = pod("late-pod", units(4), node="a", annotations=on_card(0, 4), phase="Pending")
    notes = data(objects(nodes=[refusing], pods=[there, late]), name)["notes"]
    separated = before in {" ", ":", "("} and after in {"", " ", ":", ","}
    assert bool(notes) == separated


SUCCESSOR = (
    "delete the pod once kube-scheduler asks the extender (docs/do/install.md): its successor gets a "
    "card"
)


@pytest.mark.parametrize(
    ("node_", "limits", "notes", "hints"),
    [
        # a pod without cards on a node that shares
        (sharing("a"), {}, ["it is on node a"], []),
        # its node shares nothing, or is not known
        (node("a"), units(4), ["it is on node a"], []),
        (sharing("b"), units(4), ["it is on node a"], []),
        # nobody knows its card
        (
            sharing("a"),
            units(4),
            [
                "it is on node a",
                "no record says on which card the pod is: it was not placed by fenka's scheduler",
            ],
            [SUCCESSOR],
        ),
    ],
)
def test_note_has_the_node_when_no_slices_are_known(
    node_: Json, limits: Json, notes: list[str], hints: list[str]
) -> None:
    """The pod runs on node a."""
    answer = data(objects(nodes=[node_], pods=[pod("p", limits, node="a")]), "p")
    assert (answer["state"], answer["slices"]) == ("running", [])
    assert (answer["notes"], answer["hints"]) == (notes, hints)


@pytest.mark.parametrize(
    ("inventory", "uuids"), [(True, [", GPU-a-1", ", GPU-a-2"]), (False, ["", ""])]
)
def test_slices_have_the_uuids_of_cards_when_the_node_names_them(
    inventory: bool, uuids: list[str]
) -> None:
    """3 units on each of two cards; gpushare's own plugin publishes no UUIDs."""
    record = {gpushare.ALLOCATION: '{"0":{"1":3,"2":3}}'}
    labels = {gpushare.COUNT: "2"}
    holding = pod("p", units(6), node="a", annotations=record, labels=labels)
    nodes = [node_json("a", *[14 * GIB] * 3, inventory=inventory)]
    assert data(objects(nodes=nodes, pods=[holding]), "p")["slices"] == [
        f"3 units (3072 MiB) of card {card} on a{uuid}"
        for card, uuid in zip((1, 2), uuids, strict=True)
    ]


WAITS: Json = {"state": {"waiting": {"reason": "ContainerCreating"}}}


@pytest.mark.parametrize(
    ("phase", "statuses", "hints"),
    [
        (
            "Pending",
            [WAITS],
            ["it starts by itself once what its containers wait for is there"],
        ),
        # it has been started before: that a container waits now is no start
        ("Running", [WAITS], []),
        ("Pending", [{"state": {}}], []),
        ("Pending", [], []),
    ],
)
def test_hint_says_that_the_pod_starts_by_itself_only_while_it_starts(
    phase: str, statuses: list[Json], hints: list[str]
) -> None:
    """Its image is pulled, or its volume is mounted."""
    containers = [{"name": f"c{number}", **each} for number, each in enumerate(statuses)]
    starting = waiting(
        node="a",
        phase=phase,
        annotations=on_card(0, 4),
        status={"containerStatuses": containers},
    )
    assert data(objects(nodes=[sharing("a")], pods=[starting]), "p")["hints"] == hints


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        (
            {"reason": "ImagePullBackOff", "message": "no such image"},
            "c: ImagePullBackOff: no such image",
        ),
        ({"reason": "ImagePullBackOff"}, "c: ImagePullBackOff"),
        ({"message": "volume"}, "c: volume"),
        ({}, "c"),
    ],
)
def test_container_is_named_with_what_is_known_of_its_wait(waits: Json, expected: str) -> None:
    """Init containers come first."""
    container = {"name": "c", "state": {"waiting": waits}}
    status = {
        "containerStatuses": [container],
        "initContainerStatuses": [{**container, "name": "i"}],
    }
    starting = waiting(node="a", phase="Pending", annotations=on_card(0, 4), status=status)
    answer = data(objects(nodes=[sharing("a")], pods=[starting]), "p")
    assert answer["containers"] == ["i" + expected[1:], expected]


def test_notes_on_others_are_in_one_order_and_leave_out_pods_that_are_gone() -> None:
    """The node reports refusals by UID; a pod's own refusal is said once, in its own words."""
    sentence = "card 0 is held by default/p"
    names = ["late-b", "late-a", "gone", "p"]
    report = LeaseReport(refused={f"u-default-{name}": Refusal(sentence) for name in names})
    refusing = sharing("a", annotations={lease_records.REPORT: lease_records.encode_report(report)})
    pods = [
        pod(name, units(4), node="a", annotations=on_card(0, 4))
        for name in ("p", "late-b", "late-a")
    ]
    assert data(objects(nodes=[refusing], pods=pods), "p")["notes"] == [
        f"its node has refused it for more than a minute: {sentence}",
        f"default/late-a was placed on the same card and does not start: {sentence}",
        f"default/late-b was placed on the same card and does not start: {sentence}",
    ]


@pytest.mark.parametrize(
    ("status", "notes"),
    [
        ({"reason": "Evicted", "message": "disk pressure"}, ["Evicted disk pressure"]),
        ({"reason": "Evicted"}, ["Evicted"]),
        ({"message": "disk pressure"}, ["disk pressure"]),
        ({}, []),
    ],
)
def test_note_is_what_is_known_of_the_end(status: Json, notes: list[str]) -> None:
    """A pod that has ended holds nothing: no slices, no hints."""
    answer = data(objects(pods=[waiting(node="a", phase="Failed", status=status)]), "p")
    assert (answer["notes"], answer["slices"], answer["hints"]) == (notes, [], [])
