"""Which requests a node's mode admits beside its pods, and which its cards could ever hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.node_admission import (
    AdmissionRule,
    admission_rule,
    admits,
    fits_when_empty,
    labels,
    mode_labels,
    node_kind,
    resident_compute,
)
from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.core.inventory import Card, Node
from fenka.core.request import Memory, Request
from fenka.dialects import ack, gpushare, lease_records
from fenka.dialects.base import CORE_MODE, NVIDIA_GPU
from fenka.dialects.lease_records import LeaseReport
from fenka.dialects.nodes import MODE_LABEL
from tests.builders import T4_MIB, Json, a_node, a_pod, on_card
from tests.core.builders import card, exact, node, piece, units, whole

MEMORY: Json = {gpushare.MEMORY: "4"}
COMPUTE: Json = {gpushare.MEMORY: "4", ack.CORE: "50"}
WEIGHT: Json = {**COMPUTE, CORE_MODE: "weight"}
"""Limits, and the annotation."""


def of(limits: Json, **given: object) -> Pod:
    """Return a pod with these limits."""
    pod = a_pod("p", 0, **given)
    limits = dict(limits)
    if mode := limits.pop(CORE_MODE, None):
        pod.metadata.annotations = {**pod.metadata.annotations, CORE_MODE: mode}
    pod.spec.containers[0].resources.limits = limits
    return pod


def cluster(mode: str, *residents: Json) -> ClusterState:
    """Return node n in this mode, with a pod for each of these limits."""
    pods = [
        of(limits, node="n", uid=f"u{number}", annotations=on_card(0, 4))
        for number, limits in enumerate(residents)
    ]
    given_labels = {MODE_LABEL: mode} if mode else {}
    return ClusterState([a_node("n", T4_MIB, T4_MIB, labels=given_labels)], pods)


@pytest.mark.parametrize(
    ("mode", "residents", "limits", "expected"),
    [
        # without a label, memory and compute share a node, in any mix
        ("", [], MEMORY, True),
        ("", [COMPUTE], MEMORY, True),
        # ACK's core_mem takes either, but not both kinds at once
        ("core_mem", [], MEMORY, True),
        ("core_mem", [], COMPUTE, True),
        ("core_mem", [COMPUTE], COMPUTE, True),
        ("core_mem", [COMPUTE], MEMORY, False),
        ("core_mem", [MEMORY], COMPUTE, False),
        ("core_mem", [MEMORY, COMPUTE], MEMORY, False),
        # a weight is compute too, although none is reserved for it
        ("core_mem", [COMPUTE], WEIGHT, True),
        ("core_mem", [WEIGHT], COMPUTE, True),
        ("core_mem", [WEIGHT], MEMORY, False),
        ("core_mem", [MEMORY], WEIGHT, False),
        ("", [MEMORY], WEIGHT, True),
        ("cgpu", [], WEIGHT, False),
        # a pod with whole cards shares them with nobody, so it is of neither kind
        ("core_mem", [{NVIDIA_GPU: "1"}], MEMORY, True),
        # ACK's cgpu and share are memory alone
        ("cgpu", [], MEMORY, True),
        ("cgpu", [], COMPUTE, False),
        ("share", [], COMPUTE, False),
        # whole cards need the node's consent
        ("cgpu", [], {NVIDIA_GPU: "1"}, False),
        ("default", [], MEMORY, False),
    ],
)
def test_node_admits_a_request_when_its_mode_and_pods_allow_it(
    mode: str, residents: list[Json], limits: Json, expected: bool
) -> None:
    """The modes one by one are node_modes' own tests; here the node's pods count too."""
    state = cluster(mode, *residents)
    assert admits(state, "n", of(limits).demand(state.dialects).parts) is expected


def test_residents_are_not_read_when_the_mode_does_not_depend_on_them() -> None:
    """Only nodes with ACK's label keep kinds of pods apart."""
    assert resident_compute(cluster("", MEMORY, COMPUTE), "n") == set()
    assert resident_compute(cluster("core_mem", MEMORY, COMPUTE), "n") == {False, True}


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((units(14),), True),
        ((units(15),), False),
        # together: 14 + 14 on two cards, a third has none
        ((units(14),) * 2, True),
        ((units(14),) * 3, False),
        # 7 + 7 on one card, twice
        ((units(7),) * 4, True),
        ((units(8),) * 3, False),
        ((units(7, cards=2),) * 2, True),
        ((units(1, cards=3),), False),
        ((whole(2),), True),
        ((whole(), exact(T4_MIB)), True),
        ((whole(2), exact(1)), False),
    ],
)
def test_requests_fit_an_empty_node_when_its_cards_hold_them_together(
    requests: tuple[Request, ...], expected: bool
) -> None:
    """Two T4 of 14 units."""
    assert fits_when_empty(requests, node(T4_MIB, T4_MIB)) is expected


@pytest.mark.parametrize("out", [card(healthy=False), card(cordoned=True)])
def test_card_counts_when_it_would_be_repaired(out: Card) -> None:
    """A pod may wait for a card that is out of service, if it is told so."""
    closed = Node("a", (out,))
    assert not fits_when_empty((units(1),), closed)
    assert fits_when_empty((units(1),), closed, repaired=True)
    assert not fits_when_empty((units(15),), closed, repaired=True)


def test_units_of_the_node_count_when_nodes_of_equal_cards_differ_in_units() -> None:
    """15 units of a T4 are too many in GiB, and few in MiB."""
    request = Request(Memory(15, unit_mib=None))
    assert not fits_when_empty((request,), node(T4_MIB))
    assert fits_when_empty((request,), replace(node(T4_MIB), unit_mib=1))


UNMIXED = "ack.node.gpu.schedule=core_mem does not mix, and pods {} a share of compute are there"


@pytest.mark.parametrize(
    ("mode", "residents", "limits", "sentence", "unresolvable"),
    [
        # the mode itself: nobody's end helps
        ("cgpu", [], COMPUTE, "shares out memory alone, not compute", True),
        ("cgpu", [MEMORY], COMPUTE, "shares out memory alone, not compute", True),
        ("share", [], {NVIDIA_GPU: "1"}, "keeps it for slices", True),
        # only the pods that are there: they may end
        ("core_mem", [COMPUTE], MEMORY, UNMIXED.format("with"), False),
        ("core_mem", [MEMORY], COMPUTE, UNMIXED.format("without"), False),
        # the labels take the node out of sharing
        ("default", [MEMORY], MEMORY, "takes it out of sharing", True),
        # a mode that nobody serves
        ("quantum", [], MEMORY, "is none of cgpu, core_mem, default, share, topology", True),
    ],
)
def test_rejection_is_unresolvable_when_no_pods_end_would_help(
    mode: str, residents: list[Json], limits: Json, sentence: str, unresolvable: bool
) -> None:
    """kube-scheduler preempts only where evictions can help."""
    state = cluster(mode, *residents)
    rule = admission_rule(state, "n")
    rejection = rule.rejection(of(limits).demand(state.dialects).parts)
    assert rejection is not None
    assert sentence in rejection.sentence
    assert rejection.unresolvable is unresolvable


@pytest.mark.parametrize(
    ("mode", "residents", "limits", "by_mode"),
    [
        # pods of the other kind are there, the mode alone would admit it
        ("core_mem", [COMPUTE], MEMORY, True),
        ("core_mem", [COMPUTE], COMPUTE, True),
        ("cgpu", [], COMPUTE, False),
        ("cgpu", [COMPUTE], MEMORY, True),
        ("", [COMPUTE], MEMORY, True),
    ],
)
def test_mode_alone_decides_when_the_node_is_taken_for_empty(
    mode: str, residents: list[Json], limits: Json, by_mode: bool
) -> None:
    """A pod may be queued for a node whose present pods exclude it."""
    state = cluster(mode, *residents)
    rule = admission_rule(state, "n")
    parts = of(limits).demand(state.dialects).parts
    assert (rule.rejection_by_mode(parts) is None) is by_mode


@pytest.mark.parametrize(
    ("residents", "expected"),
    [
        ([], set()),
        ([MEMORY], {False}),
        ([COMPUTE], {True}),
        ([MEMORY, COMPUTE], {False, True}),
        # whole cards are of neither kind
        ([{NVIDIA_GPU: "1"}], set()),
        ([{NVIDIA_GPU: "1"}, MEMORY], {False}),
        # nor is a pod that has no slice: its request cannot be read
        ([{gpushare.MEMORY: "4", "tencent.com/vcuda-memory": "16"}], set()),
    ],
)
def test_residents_are_of_the_kinds_that_hold_slices(
    residents: list[Json], expected: set[bool]
) -> None:
    """On a node in mode core_mem."""
    assert resident_compute(cluster("core_mem", *residents), "n") == expected


def test_pod_has_compute_when_any_of_its_slices_has() -> None:
    """Two slices of one pod as its node reports them: one of memory alone, one with compute."""
    slices = (piece(0, 1024, 0, name="n"), piece(1, 1024, 30, name="n"))
    report = {lease_records.REPORT: lease_records.encode_report(LeaseReport({"u0": slices}))}
    state = cluster("core_mem", MEMORY)
    mode = {MODE_LABEL: "core_mem"}
    state.set_node(a_node("n", T4_MIB, T4_MIB, labels=mode, annotations=report))
    assert resident_compute(state, "n") == {True}


def test_unknown_node_has_no_labels_and_no_residents() -> None:
    """Its pods may be known before it is."""
    state = ClusterState([], [of(MEMORY, node="n", uid="u", annotations=on_card(0, 4))])
    assert labels(state, "n") == {}
    assert resident_compute(state, "n") == set()
    assert admission_rule(state, "n") == AdmissionRule(None, (), frozenset())


def test_only_labels_of_the_mode_are_in_the_rule() -> None:
    """Nodes whose other labels differ share one rule: a cluster has few."""
    names = {"zone": "a", "gpushare": "true", MODE_LABEL: "core_mem", "app": "x"}
    expected = (("gpushare", "true"), (MODE_LABEL, "core_mem"))
    assert mode_labels(names) == expected
    assert mode_labels(dict(reversed(names.items()))) == expected
    assert mode_labels({}) == ()


@pytest.mark.parametrize(
    ("other", "equal", "equal_when_repaired"),
    [
        (card(), True, True),
        (card(node="b"), True, True),
        # out of service for now
        (card(healthy=False), False, True),
        (card(cordoned=True), False, True),
        (card(healthy=False, cordoned=True), False, True),
        # another card
        (card(memory_mib=T4_MIB - 1), False, False),
        (card(model="Tesla P4"), False, False),
        (replace(card(), compute=50), False, False),
    ],
)
def test_nodes_are_of_one_kind_when_they_could_hold_the_same(
    other: Card, equal: bool, equal_when_repaired: bool
) -> None:
    """Compared with a node of one T4 in service."""
    ours, others = Node("a", (card(),)), Node("b", (other,))
    assert (node_kind(ours) == node_kind(others)) is equal
    same = node_kind(ours, repaired=True) == node_kind(others, repaired=True)
    assert same is equal_when_repaired


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 15), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_repair_only_adds_room(
    states: list[tuple[bool, bool]], sizes: list[tuple[int, int]]
) -> None:
    """What fits the cards in service fits the repaired node too; if all are in service, both agree."""
    cards = [
        card(index, healthy=healthy, cordoned=cordoned)
        for index, (healthy, cordoned) in enumerate(states)
    ]
    present = Node("a", tuple(cards))
    requests = [units(size, cards=count) for size, count in sizes]
    now, repaired = (fits_when_empty(requests, present, repaired=value) for value in (False, True))
    assert repaired or not now
    if all(healthy and not cordoned for healthy, cordoned in states):
        assert now == repaired
    in_service = Node("a", tuple(it for it in cards if it.healthy and not it.cordoned))
    assert now == (bool(in_service.cards) and fits_when_empty(requests, in_service))


def test_pod_is_of_neither_kind_when_one_of_its_cards_is_whole() -> None:
    """Its node reports a whole card and a slice of another one."""
    slices = (piece(0, T4_MIB, 100, name="n"), piece(1, 1024, 30, name="n"))
    report = {lease_records.REPORT: lease_records.encode_report(LeaseReport({"u0": slices}))}
    state = cluster("core_mem", MEMORY)
    mode = {MODE_LABEL: "core_mem"}
    state.set_node(a_node("n", T4_MIB, T4_MIB, labels=mode, annotations=report))
    assert resident_compute(state, "n") == set()
