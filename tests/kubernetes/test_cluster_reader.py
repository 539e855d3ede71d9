"""One reading of a cluster."""

import time

from fenka.cluster.autoscaling import CAPACITY, GROUP, PROTECTED_UNTIL, encode_time
from fenka.cluster.node_admission import exclusion
from fenka.kubernetes.reader import read_cluster
from fenka.views.node_rows import cluster_nodes
from tests.builders import T4_MIB, node, node_json, on_card, pod, pod_json, sharing, units
from tests.fakes.api_server import api_server


async def test_reading_shows_the_same_when_it_is_of_holding_pods_only() -> None:
    """Fields that are not decoded then make no difference to what pods hold."""
    shared, exclusive = sharing("shared", cards=2), node("whole", resources={"nvidia.com/gpu": 8})
    pods = [
        pod("recorded", units(4), node="shared", annotations=on_card(1, 4), uid="a"),
        pod("foreign", units(3), node="shared", uid="b"),
        pod("hostile", units(2), node="shared", annotations=on_card(9, 2), uid="c"),
        pod("whole-card", {"nvidia.com/gpu": 1}, node="whole", uid="d"),
        pod("pending", units(4), uid="e"),
    ]
    for each in pods:
        each["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "j", "uid": "j"}]
        each["spec"]["tolerations"] = [{"key": "k", "operator": "Exists"}]
    async with api_server() as server, server.api() as api:
        for each in (shared, exclusive):
            server.put("nodes", each)
        for each in pods:
            server.put("pods", each)
        holding, everything = await read_cluster(api), await read_cluster(api, all_pods=True)
    assert [each.metadata.name for each in everything.pods if not each.spec.node_name] == [
        "pending"
    ]
    rows = cluster_nodes(holding)
    assert rows == cluster_nodes(everything)
    assert [(row.name, row.allocated, row.whole) for row in rows] == [
        ("shared", 9, 0),
        ("whole", 0, 1),
    ]
    for uid in "abcd":
        first, second = (each.state.allocation(uid) for each in (holding, everything))
        assert (first and first.placements) == (second and second.placements)


async def test_reading_knows_the_time_by_which_spot_nodes_are_protected() -> None:
    """Otherwise `fenka why` would say that no pod may use them."""
    day, labels = 86400, {CAPACITY: "spot", GROUP: "t4"}
    short = pod_json("short", 4)
    short["spec"]["activeDeadlineSeconds"] = 60
    async with api_server() as server, server.api() as api:
        for name, left in (("protected", day), ("over", -day)):
            until = {PROTECTED_UNTIL: encode_time(time.time() + left)}
            server.put("nodes", node_json(name, T4_MIB, labels=labels, annotations=until))
        server.put("pods", short)
        snapshot = await read_cluster(api, all_pods=True)
    (pending,) = snapshot.pods
    assert exclusion(snapshot.state, "protected", pending) is None
    assert exclusion(snapshot.state, "over", pending) is not None
