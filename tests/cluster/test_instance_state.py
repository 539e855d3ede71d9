"""What the cluster's state shows of divided cards, from records, reports and assumptions."""

import json

import msgspec
import pytest

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.state import ClusterState
from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.core.usage import NO_USAGE
from fenka.dialects import lease_records, mig_records, nodes
from fenka.dialects.lease_records import LeaseReport, Lingering
from tests.builders import a_pod
from tests.mig_builders import Present, inside_pod, mig_node, mig_node_json, mig_pod


def record(*places: tuple[int, int, str]) -> dict[str, str]:
    """Return the annotation of a pod with these instances of node n: card, start, profile."""
    listed = [
        {"card": f"GPU-n-{card}", "start": start, "profile": profile}
        for card, start, profile in places
    ]
    return {mig_records.INSTANCE: json.dumps(listed)}


def instance(start: int, profile: str, card: int = 0) -> DeviceId:
    """Return the id of an instance of node n."""
    return DeviceId(f"GPU-n-{card}/{start}/{profile}")


def shown(cluster: ClusterState) -> list[str]:
    """Return the instances of node n, with a star on those that pods hold."""
    shared = cluster.shared_node("n")
    assert shared is not None
    return [
        f"{card.index}/{card.start} {card.profile}"
        + "*" * bool(cluster.card_usage("n", card.uuid).holders)
        for card in shared.node.cards
        if card.parent is not None
    ]


HELD = Slice(0, instance(0, "4g.20gb"), 20096, 51)


def test_records_show_instances_that_the_node_has_not_created_yet() -> None:
    """Idle ones in their way are not shown: they will be destroyed. A foreign one is no card at all."""
    node = mig_node(
        "n",
        "A100",
        present={(0, "1g.5gb", 0): "own", (0, "1g.5gb", 6): "own", (0, "1g.5gb", 5): "foreign"},
    )
    cluster = ClusterState([node])
    assert shown(cluster) == ["0/0 1g.5gb", "0/6 1g.5gb"]
    cluster.set_pod(mig_pod("p", "4g.20gb", node="n", annotations=record((0, 0, "4g.20gb"))))
    assert shown(cluster) == ["0/0 4g.20gb*", "0/6 1g.5gb"]
    cluster.forget_pod("u-default-p")
    assert shown(cluster) == ["0/0 1g.5gb", "0/6 1g.5gb"]


def test_report_of_the_node_precedes_the_record() -> None:
    """Its owner has written another place since; and what ended stays until the node has let go of it."""
    report = LeaseReport(
        {"u-default-p": (HELD,)},
        {"gone": Lingering("ns/gone", (Slice(0, instance(4, "2g.10gb"), 9984, 25),))},
    )
    annotations = {lease_records.REPORT: lease_records.encode_report(report)}
    pod = mig_pod("p", "4g.20gb", node="n", annotations=record((1, 0, "4g.20gb")))
    cluster = ClusterState([mig_node("n", "A100", "A100")], [pod])
    assert shown(cluster) == ["1/0 4g.20gb*"]
    cluster.set_node(mig_node("n", "A100", "A100", annotations=annotations))
    assert shown(cluster) == ["0/0 4g.20gb*", "0/4 2g.10gb*"]
    verdict = PodEvaluator(cluster, "binpack").placements(mig_pod("q", "2x7g.40gb"), "n")
    assert isinstance(verdict, Infeasible)
    assert "0/4 2g.10gb is held by ns/gone" in verdict.sentence


def test_pod_holds_nothing_when_its_card_is_no_longer_divided() -> None:
    """Its instance went with a reboot: the card is whole again, and slices of it are free."""
    pod = mig_pod("p", "4g.20gb", node="n", annotations=record((0, 0, "4g.20gb")))
    node = mig_node_json("n", "A100")
    cluster = ClusterState([msgspec.convert(node, Node)], [pod])
    assert shown(cluster) == ["0/0 4g.20gb*"]
    report = LeaseReport({"u-default-p": (HELD,)})
    node["metadata"]["annotations"][mig_records.INSTANCES] = mig_records.encode_instances([])
    for reported in ({}, {lease_records.REPORT: lease_records.encode_report(report)}):
        node["metadata"]["annotations"] |= reported
        cluster.set_node(msgspec.convert(node, Node))
        assert shown(cluster) == []
        assert cluster.card_usage("n", DeviceId("GPU-n-0")) == NO_USAGE
        assert cluster.card_usage("n", instance(0, "4g.20gb")) == NO_USAGE
        assert not isinstance(
            PodEvaluator(cluster, "binpack").placements(a_pod("q", 30), "n"), Infeasible
        )


@pytest.mark.parametrize("unusable", [{nodes.CORDONED: "0"}, {mig_records.INSTANCES: "{}"}])
def test_nothing_is_placed_on_a_card_that_is_not_open(unusable: dict[str, str]) -> None:
    """Cordoned by people, or described in a way that cannot be read."""
    node = mig_node("n", "A100", present={(0, "1g.5gb", 0): "own"}, annotations=unusable)
    cluster = ClusterState([node])
    for pod in (mig_pod("p", "1g.5gb"), mig_pod("p", "2g.10gb"), inside_pod("p", 4)):
        verdict = PodEvaluator(cluster, "binpack").placements(pod, "n")
        assert isinstance(verdict, Infeasible)
        assert verdict.unresolvable


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        json.dumps([{"card": "GPU-n-0", "start": 1, "profile": "4g.20gb"}]),
        json.dumps([{"card": "GPU-n-0", "start": 0, "profile": "3g.20gb"}]),
        json.dumps([{"card": "GPU-m-0", "start": 0, "profile": "4g.20gb"}]),
        json.dumps([{"card": "GPU-n-0", "start": 0, "profile": "4g.20gb"}] * 2),
    ],
)
def test_record_that_is_wrong_holds_nothing(text: str) -> None:
    """Anybody can write it. The reason is kept for `fenka why`."""
    pod = mig_pod("p", "4g.20gb", node="n", annotations={mig_records.INSTANCE: text})
    cluster = ClusterState([mig_node("n", "A100")], [pod])
    assert shown(cluster) == []
    allocation = cluster.allocation("u-default-p")
    assert allocation is not None
    assert allocation.error


def test_card_node_is_one_object_while_pods_come_and_go() -> None:
    """What is computed for requests of cards stays valid."""
    cluster = ClusterState([mig_node("n", "A100", "T4")])
    before, version = cluster.card_node("n"), cluster.nodes_version
    cluster.set_pod(mig_pod("p", "4g.20gb", node="n", annotations=record((0, 0, "4g.20gb"))))
    for state in ("own", "leaving", "foreign"):
        present: Present = {(0, "4g.20gb", 0): state}
        cluster.set_node(mig_node("n", "A100", "T4", present=present))
        assert cluster.card_node("n") is before
        assert cluster.nodes_version == version
    cluster.set_node(mig_node("n", "A100", "T4", annotations={nodes.CORDONED: "1"}))
    assert cluster.nodes_version > version
    assert [card.model for card in before.cards] == ["A100", "T4"]
