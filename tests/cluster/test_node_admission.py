"""Which requests a node's mode admits beside its pods, and which its cards could ever hold."""

from dataclasses import replace

import pytest

from fenka.cluster.node_admission import admits, fits_when_empty, resident_compute
from fenka.cluster.objects import Pod
from fenka.cluster.state import ClusterState
from fenka.core.inventory import Card, Node
from fenka.core.request import Memory, Request
from fenka.dialects import ack, gpushare
from fenka.dialects.base import NVIDIA_GPU
from fenka.dialects.node_modes import MODE_LABEL
from tests.builders import T4_MIB, Json, a_node, a_pod, on_card
from tests.core.builders import card, exact, node, units, whole

MEMORY: Json = {gpushare.MEMORY: "4"}
COMPUTE: Json = {gpushare.MEMORY: "4", ack.CORE: "50"}


def of(limits: Json, **given: object) -> Pod:
    """Return a pod with these limits."""
    pod = a_pod("p", 0, **given)
    pod.spec.containers[0].resources.limits = limits
    return pod


def cluster(mode: str, *residents: Json) -> ClusterState:
    """Return node n in this mode, with a pod for each of these limits."""
    pods = [
        of(limits, node="n", uid=f"u{number}", annotations=on_card(0, 4))
        for number, limits in enumerate(residents)
    ]
    labels = {MODE_LABEL: mode} if mode else {}
    return ClusterState([a_node("n", T4_MIB, T4_MIB, labels=labels)], pods)


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
