"""Attack as a tenant with the role `edit` in one namespace, with admission policies and without."""

import json
from typing import Any

import pytest
import yaml

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import installed_with, pod, visible_mib
from e2e.scenarios.installation import MEMORY, Installation, deployment
from e2e.scenarios.tenant import TENANT, Mallory, record, with_annotations
from fenka.cluster import queue_snapshot

UNIT, CARD = 1077, 15079
NODE_OF_PAIR = "sd-cluster-05"


def resized(uid: str, uuid: str) -> dict[str, str]:
    """Return a forged record of a resize from one unit to the whole card."""

    def piece(mib: int) -> list[dict[str, Any]]:
        return [{"card": 0, "uuid": uuid, "memoryMiB": mib, "compute": 0}]

    content = {"version": 1, "pod": uid, "holds": piece(UNIT), "containers": {"x": piece(CARD)}}
    return {"fenka.io/resized": json.dumps({**content, "request": ""})}


def held(installation: Installation, node: str) -> list[int]:
    """Return the allocated MiB of each card, according to the node's report."""
    notes = installation.cluster.get("node", node)["metadata"]["annotations"]
    report = json.loads(notes["fenka.io/leases"])
    total: dict[int, int] = {}
    for slices in report["pods"].values():
        for _, card, mib, _ in slices:
            total[card] = total.get(card, 0) + mib
    return [total.get(card, 0) for card in range(2)]


RECORDS = {
    **record(0, 14),
    "fenka.io/cards": "{}",
    "fenka.io/whole-cards": '{"x":[0]}',
    "fenka.io/resized": "{}",
    "fenka.io/resize-refused": "x",
    "fenka.io/resize-final": "true",
    "tencent.com/predicate-gpu-idx-0": "0",
    "gpushare.alibabacloud.com/core-percentage": "{}",
}


@pytest.mark.versions
def test_tenant_cannot_write_records_or_name_nodes_when_policies_are_installed(
    installation: Installation, mallory: Mallory
) -> None:
    """Try new pods, existing pods and templates; other changes are allowed."""
    for key, value in RECORDS.items():
        with pytest.raises(ClusterError, match=f"annotation {key} is reserved for fenka"):
            mallory.create(with_annotations(pod("a", "x=1:"), **{key: value}))
    with pytest.raises(ClusterError, match=r"spec\.nodeName is set and the pod requests a GPU"):
        mallory.create(pod("a", "x=1:", nodeName=NODE_OF_PAIR))
    with pytest.raises(ClusterError, match=r"spec\.nodeName is set and the pod requests a GPU"):
        mallory.create(pod("a", "init-x=1:\ny=0:", nodeName=NODE_OF_PAIR))
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "forged", "annotations": {queue_snapshot.ANNOTATION: "{}"}},
        "spec": {},
    }
    mallory.create(json.dumps(lease))
    with pytest.raises(ClusterError, match="marks the Lease of fenka's scheduler"):
        mallory.kubectl("label", "lease", "forged", queue_snapshot.LABEL)
    mallory.create(pod("a", "x=1:", schedulingGates=[{"name": "tenant/gate"}]))
    for key, value in RECORDS.items():
        with pytest.raises(ClusterError, match="is reserved for fenka"):
            mallory.annotate("a", **{key: value})
    mallory.annotate("a", **{"fenka.io/resize": "gpu-mem=2", "mine": "x"})
    body = yaml.safe_load(deployment("copied", MEMORY, 1))
    body["spec"]["template"]["metadata"]["annotations"] = record(0, 1)
    mallory.create(json.dumps(body))

    def has_event() -> bool:
        replica_sets = installation.cluster.list("replicasets", TENANT, selector="app=copied")
        return any(
            "is reserved for fenka" in line
            for replica_set in replica_sets
            for line in installation.cluster.events(replica_set["metadata"]["name"], TENANT)
        )

    wait_until("the ReplicaSet's event", has_event)


def base36(number: int) -> str:
    """Return a short name of a number."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[number] if number < 36 else base36(number // 36) + digits[number % 36]


def test_pod_runs_and_ends_when_it_has_as_many_annotations_as_are_served(
    installation: Installation, two_card_node: str, mallory: Mallory
) -> None:
    """The policies' cost does not grow with them, so that kubelets can write the status."""
    installation.wait_for_allocatable(two_card_node, MEMORY, 28)
    notes = {f"{base36(number):0>4}": "" for number in range(60_000)}
    mallory.create(with_annotations(pod("many", "x=1:"), **notes))
    installation.cluster.wait_for_pod("many", TENANT)
    with pytest.raises(ClusterError, match="is reserved for fenka"):
        mallory.annotate("many", **record(0, 14))
    mallory.annotate("many", a="x")
    mallory.kubectl("delete", "pod", "many", "--wait=true", "--timeout=90s")


def test_pod_is_not_placed_when_its_annotations_leave_no_room_for_a_record(
    installation: Installation, mallory: Mallory
) -> None:
    """The API server accepts 256 KiB; with the record nobody could write its status."""
    mallory.create(with_annotations(pod("full", "x=1:"), n="x" * 262_142))

    def is_explained() -> bool:
        events = installation.cluster.events("full", TENANT)
        return any("262143 bytes of annotations" in line for line in events)

    wait_until("the reason is an event", is_explained)
    assert not installation.cluster.get("pod", "full", TENANT)["spec"].get("nodeName")


def test_pod_is_resized_again_after_a_refusal(
    installation: Installation, two_card_node: str, mallory: Mallory
) -> None:
    """With the tenant's own rights; a request that was refused is withdrawn on demand."""
    installation.wait_for_allocatable(two_card_node, MEMORY, 28)
    mallory.create(pod("a", "x=1:"))
    installation.cluster.wait_for_pod("a", TENANT)
    mallory.annotate("a", **{"fenka.io/resize": "gpu-mem=99"})

    def annotations() -> dict[str, str]:
        found: dict[str, str] = installation.cluster.get("pod", "a", TENANT)["metadata"][
            "annotations"
        ]
        return found

    wait_until("it is refused", lambda: "fenka.io/resize-refused" in annotations())
    removal = {"fenka.io/resize": "gpu-mem=2", "fenka.io/resize-refused": None}
    patch = json.dumps({"metadata": {"annotations": removal}})
    mallory.kubectl("patch", "pod", "a", "--type=merge", "-p", patch)
    wait_until("it is granted", lambda: mallory.visible_mib("a") == CARD * 2 // 14)


def test_tenant_cannot_choose_how_long_a_program_outlives_its_pod(
    installation: Installation, two_card_node: str, mallory: Mallory
) -> None:
    """The grace is the pod's own, which a value bounds; without a pod programs are ended."""
    installation.wait_for_allocatable(two_card_node, MEMORY, 28)
    with pytest.raises(ClusterError, match="of 100000 s is too long for a pod that requests a GPU"):
        mallory.create(pod("a", "x=1:", terminationGracePeriodSeconds=100_000))
    mallory.create(pod("a", "x=1:", terminationGracePeriodSeconds=600))
    installation.cluster.wait_for_pod("a", TENANT)
    for refused in ("700", "100000"):
        with pytest.raises(ClusterError, match="terminationGracePeriodSeconds it gets at most 600"):
            mallory.kubectl("delete", "pod", "a", f"--grace-period={refused}", "--wait=false")
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "a"},
        "deleteOptions": {"gracePeriodSeconds": 31},
    }
    path = f"/api/v1/namespaces/{TENANT}/pods/a/eviction"
    with pytest.raises(ClusterError, match="at most 30 s"):
        mallory.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    node = installation.cluster.get("pod", "a", TENANT)["spec"]["nodeName"]
    mallory.kubectl("delete", "pod", "a", "--grace-period=600", "--wait=false")
    mallory.kubectl("delete", "pod", "a", "--grace-period=0", "--force")
    wait_until("the program is ended", lambda: not any(held(installation, node)))


def test_forged_records_gain_nothing_and_block_no_pod_when_policies_are_absent(
    installation: Installation, two_card_node: str, mallory: Mallory
) -> None:
    """Test the second line of defence alone: victims get the free card and see their memory."""
    with installed_with(installation, "admission.enabled=false"):
        installation.wait_for_allocatable(two_card_node, MEMORY, 28)
        # A forged resize, written before the first start.
        mallory.create(pod("liar", "x=1:", schedulingGates=[{"name": "tenant/gate"}]))
        inventory = installation.cluster.get("node", two_card_node)["metadata"]["annotations"][
            "fenka.io/cards"
        ]
        uuid = json.loads(inventory)["cards"][0]["uuid"]
        forged = resized(mallory.uid("liar"), uuid)

        def annotated() -> bool:
            mallory.annotate("liar", **forged)
            return True

        # The API server applies the removal of a policy with a delay.
        wait_until("the policies are gone", annotated)
        gates = installation.cluster.get("pod", "liar", TENANT)["spec"]["schedulingGates"]
        index = [gate["name"] for gate in gates].index("tenant/gate")
        removal = json.dumps([{"op": "remove", "path": f"/spec/schedulingGates/{index}"}])
        mallory.kubectl("patch", "pod", "liar", "--type=json", "-p", removal)
        installation.cluster.wait_for_pod("liar", TENANT)
        assert mallory.visible_mib("liar") == UNIT
        # While it runs, it claims to hold everything, then writes invalid records.
        for forgery in (
            {"scheduler.framework.gpushare.allocation": '{"0":{"0":14,"1":14}}'},
            {"scheduler.framework.gpushare.allocation": '{"0":{"99":1}}'},
            {"scheduler.framework.gpushare.allocation": "nonsense"},
            {"fenka.io/cards": '{"0":"GPU-of-another"}', **record(1, 1)},
        ):
            mallory.annotate("liar", **forgery)
        # A pod that bypasses the scheduler, with a record for a whole card.
        bold = with_annotations(pod("bold", "x=1:", nodeName=two_card_node), **record(1, 14))
        mallory.create(bold)
        # This pod claims to be on the other card.
        mallory.create(pod("wide", "x=7:"))
        installation.cluster.wait_for_pod("wide", TENANT)
        assert held(installation, two_card_node) == [UNIT + 7539, 0]
        mallory.annotate("wide", **record(1, 7))
        installation.cluster.apply(pod("large", "x=13:"))
        installation.cluster.wait_for_pod("large")
        installation.cluster.apply(pod("small", "x=5:"))
        installation.cluster.wait_for_pod("small")
        assert visible_mib(installation, "large", "x") == CARD * 13 // 14
        assert visible_mib(installation, "small", "x") == CARD * 5 // 14
        assert all(mib <= CARD for mib in held(installation, two_card_node))
        assert mallory.visible_mib("liar") == UNIT
        used = installation.cluster.get("resourcequota", "units", TENANT)["status"]["used"]
        assert used[f"requests.{MEMORY}"] == "9"


@pytest.mark.full
def test_pod_is_moved_when_its_node_denies_the_lease(
    installation: Installation, two_card_node: str, mallory: Mallory
) -> None:
    """After a minute it is evicted if a controller replaces it; `fenka why` explains both cases."""
    with installed_with(installation, "admission.enabled=false"):
        installation.wait_for_allocatable(two_card_node, MEMORY, 28)
        installation.cluster.apply(pod("there", "x=8:"))
        installation.cluster.wait_for_pod("there")
        mallory.create(
            with_annotations(pod("alone", "x=8:", nodeName=two_card_node), **record(0, 8))
        )
        body = yaml.safe_load(deployment("again", MEMORY, 8))
        template = body["spec"]["template"]
        template["metadata"]["annotations"] = record(0, 8)
        template["spec"]["nodeName"] = two_card_node
        mallory.create(json.dumps(body))

        def names() -> set[str]:
            pods = installation.cluster.list("pods", TENANT, selector="app=again")
            return {str(pod["metadata"]["name"]) for pod in pods}

        wait_until("the Deployment's pod", lambda: bool(names()))
        first = names()
        wait_until("another pod in its place", lambda: not first & names(), 120)
        assert "FenkaEvicted" in installation.cluster.kubectl(
            "-n", TENANT, "get", "events", "-o", "jsonpath={.items[*].reason}"
        )

        def stuck() -> bool:
            return any(
                "no controller would make another" in message
                for message in installation.cluster.events("alone", TENANT)
            )

        wait_until("the lone pod's event", stuck)
        assert "its node has refused it for more than a minute" in installation.fenka(
            "why", f"{TENANT}/alone"
        )
        assert f"{TENANT}/alone was placed on the same card" in installation.fenka(
            "why", "default/there"
        )
