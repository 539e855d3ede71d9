"""Gated pods: from which of them the leader removes fenka's scheduling gate."""

from fenka.cluster.objects import QUEUE_GATE, Pod
from fenka.cluster.queue_state import RESERVATION_TTL_S
from tests.builders import T4_MIB, Json, node_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import gang, make

GATED: Json = {"schedulingGates": [{"name": QUEUE_GATE}]}


def gated(name: str, units: int, at: float = 0, **rest: object) -> Pod:
    """Return a pod with fenka's gate."""
    return make(name, units, at, spec={**GATED, **rest})


def pods_to_ungate(cluster: ExtenderHarness, most: int = 99) -> list[str]:
    """Return the names of the pods whose gate is to be removed, in order."""
    cluster.now += 1
    return [it.metadata.name for it in cluster.queue.refreshed().pods_to_ungate(most)]


def test_gate_is_removed_when_a_pod_fits_or_has_reserved_cards() -> None:
    """6 of 14 units are free: the first fits; the next four reserve cards; three more stay gated."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 8)
    cluster.set(*(gated(f"p{number}", 6, number) for number in range(8)))
    assert pods_to_ungate(cluster) == ["p0", "p1", "p2", "p3", "p4"]
    assert pods_to_ungate(cluster, 2) == ["p0", "p1"]
    for number in range(5):
        cluster.set(make(f"p{number}", 6, number))
    assert pods_to_ungate(cluster) == []


def test_first_four_are_ungated_when_there_is_no_card_to_reserve() -> None:
    """The only card is cordoned: kube-scheduler says so on the first pods, or evicts others for them."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, annotations={"fenka.io/cordoned": "0"})])
    cluster.set(*(gated(f"p{number}", 6, number) for number in range(6)))
    assert pods_to_ungate(cluster) == ["p0", "p1", "p2", "p3"]


def test_next_pod_is_ungated_at_once_when_a_card_is_released() -> None:
    """Nothing needs to be tried or rejected before."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 14)
    cluster.set(*(gated(f"p{number}", 14, number) for number in range(800)))
    first = pods_to_ungate(cluster)
    assert first == ["p0", "p1", "p2", "p3"]
    cluster.set(*(make(name, 14, int(name[1:])) for name in first))
    cluster.gone("h")
    cluster.holds("p0", 0, 14)
    assert pods_to_ungate(cluster) == ["p4"]


def test_ungated_pod_keeps_its_position_when_a_later_pod_has_no_gate() -> None:
    """The later pod does not take its card in between."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.set(gated("first", 12, 1))
    assert pods_to_ungate(cluster) == ["first"]
    cluster.set(make("first", 12, 1))
    later = make("later", 12, 2)
    cluster.set(later)
    assert "reserved" in cluster.start(later)
    assert cluster.start(make("first", 12, 1)) == "n/0"


def test_pod_is_ungated_at_once_when_it_is_not_in_the_queue() -> None:
    """It requests nothing, cannot be read, can never be on a sharing node, or requests whole cards."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.holds("h", 0, 14)
    whole = gated("whole", 0)
    whole.spec.containers[0].resources.limits = {"nvidia.com/gpu": "1"}
    unreadable = gated("unreadable", 0)
    unreadable.spec.containers[0].resources.limits = {"aliyun.com/gpu-mem": "x"}
    away = gated("away", 4, nodeSelector={"zone": "a"})
    cluster.set(gated("none", 0), unreadable, gated("large", 99), away, whole)
    assert pods_to_ungate(cluster) == ["none", "unreadable", "large", "away", "whole"]


def test_pod_stays_gated_when_it_has_a_foreign_gate_too() -> None:
    """It is not in the queue until the foreign gate is removed."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    both = make("p", 4, 1, spec={"schedulingGates": [{"name": QUEUE_GATE}, {"name": "mine"}]})
    cluster.set(both)
    assert (pods_to_ungate(cluster), cluster.queue.refreshed().entries()) == ([], ())
    cluster.set(gated("p", 4, 1))
    assert pods_to_ungate(cluster) == ["p"]


def test_all_members_are_ungated_when_a_gang_fits() -> None:
    """They are placed together."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    for name in ("g1", "g2"):
        member = gang(name, 8, 1)
        member.spec.scheduling_gates = gated("x", 8).spec.scheduling_gates
        cluster.set(member)
    assert pods_to_ungate(cluster) == ["g1", "g2"]


def test_one_member_is_ungated_when_a_gang_is_incomplete() -> None:
    """Two of three exist: the events of the first say what is missing."""
    cluster = ExtenderHarness([node_json("n", T4_MIB, T4_MIB)])
    labels = {
        "pod-group.scheduling.sigs.k8s.io/name": "g",
        "pod-group.scheduling.sigs.k8s.io/min-available": "3",
    }
    members = [make(f"g{number}", 8, number, labels=labels, spec=GATED) for number in (1, 2)]
    cluster.set(*members)
    assert pods_to_ungate(cluster) == ["g1"]
    cluster.set(make("g1", 8, 1, labels=labels))
    assert pods_to_ungate(cluster) == []


def test_gated_pod_is_forgotten_when_it_is_deleted() -> None:
    """Also one that ends while it is gated."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.set(gated("p", 4, 1), gated("q", 4, 1))
    cluster.gone("p")
    cluster.set(make("q", 4, 1, spec=GATED, phase="Failed"))
    assert pods_to_ungate(cluster) == []


def test_reservation_expires_when_the_gate_cannot_be_removed() -> None:
    """An admission policy may refuse every update. After 15 s its card is free; fenka keeps trying."""
    cluster = ExtenderHarness([node_json("n", T4_MIB)])
    cluster.set(gated("stuck", 12, 1), gated("next", 12, 2))
    assert pods_to_ungate(cluster) == ["stuck", "next"]
    cluster.set(make("next", 12, 2))
    assert "reserved" in cluster.start(make("next", 12, 2))
    cluster.now += RESERVATION_TTL_S
    assert cluster.start(make("next", 12, 2)) == "n/0"
    assert pods_to_ungate(cluster) == ["stuck"]
