"""What the informers keep beside the cluster's state."""

from tests.builders import T4_MIB, gang_labels, node_json, pod_json
from tests.scheduler.harness import put_pod, scheduler
from tests.waiting import until


async def test_gang_pods_are_those_with_a_gang_when_pods_come_change_and_go() -> None:
    """A gang is looked up among them alone, however many other pods there are."""
    async with scheduler(node_json("n", T4_MIB)) as (server, one):
        known = one.replica.informers.pod_listener
        single = put_pod(server, "single", 4)
        members = [put_pod(server, f"m{i}", 4, labels=gang_labels("g", 2)) for i in range(2)]
        uids = [pod["metadata"]["uid"] for pod in members]
        await until(lambda: one.knows(single, *members))
        assert set(known.gang_pods.by_uid) == set(uids)
        server.put("pods", pod_json("m0", 4, uid=uids[0]))
        server.remove("pods", "m1", "default")
        await until(lambda: not known.gang_pods.by_gang)
        server.put("pods", members[0])
        await until(lambda: bool(known.gang_pods.by_gang))
        await one.replica.informers.relist()
        assert set(known.gang_pods.by_uid) == {uids[0]}
