"""A recorded cluster has no names, and is placed on as the one with names."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.autoscaler.plan_case import dry_run, plan_case, what_if
from fenka.autoscaler.recorded.cluster_file import FORMAT, ClusterFile, encode, snapshot_of
from fenka.autoscaler.recorded.pseudonyms import Pseudonyms
from fenka.autoscaler.watch import DaemonSet, ElasticPod
from fenka.cloud.config import AutoscalerConfig, ProviderConfig
from fenka.cluster.objects import Node
from fenka.cluster.pod_groups import TOPOLOGY_ANNOTATIONS, PodGroup
from fenka.cluster.queue_snapshot import SchedulerOptions
from fenka.cluster.state import ClusterState
from fenka.core.nodes.plan import NodePlan
from fenka.core.request import Slice
from fenka.dialects import lease_records
from fenka.dialects.base import CARDS
from tests.builders import T4_MIB, Json, gang_labels, node_json, on_card, pod, sharing, units
from tests.core.builders import device

NO_GROUPS = AutoscalerConfig(cluster="", provider=ProviderConfig(kind="simulated"), groups=())
SECRET = "acme"
"""Part of every name below; nothing of it may be left."""


def recorded(
    nodes: list[Json],
    pods: list[Json],
    groups: list[Json] | None = None,
    *,
    named: bool = False,
    levels: tuple[str, ...] = (),
) -> ClusterFile:
    """Return the file of a cluster, with or without names."""
    read_nodes = [msgspec.convert(each, Node) for each in nodes]
    read_pods = [msgspec.convert(each, ElasticPod) for each in pods]
    read_groups = [msgspec.convert(each, PodGroup) for each in groups or []]
    daemon = {
        "metadata": {"name": f"{SECRET}-agent", "namespace": f"{SECRET}-sys", "uid": "d"},
        "spec": {
            "template": {"spec": {"containers": [{"name": SECRET, "image": f"{SECRET}/agent"}]}}
        },
    }
    daemons = [msgspec.convert(daemon, DaemonSet)]
    if not named:
        state = ClusterState(read_nodes, read_pods)
        state.topology_levels = levels
        names = Pseudonyms(state, read_pods, read_groups, daemons)
        levels = names.topology_levels()
        read_nodes, read_pods = list(map(names.node, read_nodes)), list(map(names.pod, read_pods))
        read_groups, daemons = list(map(names.group, read_groups)), list(map(names.daemon, daemons))
    return ClusterFile(
        format=FORMAT,
        at=1e9,
        names="kept" if named else "pseudonyms",
        scheduler=SchedulerOptions(topology_levels=levels),
        nodes=tuple(read_nodes),
        pods=tuple(read_pods),
        pod_groups=tuple(read_groups),
        daemon_sets=tuple(daemons),
    )


def planned(file: ClusterFile) -> NodePlan:
    """Return which pods start on the nodes of the file, once that has been written and read."""
    read = msgspec.json.decode(encode(file), type=ClusterFile)
    snapshot = snapshot_of(read, NO_GROUPS)
    return dry_run(snapshot, what_if(snapshot, plan_case(snapshot), {}), lambda: 10.0, None)


def named_node(name: str, *sizes: int, **rest: Any) -> Json:
    """Return a node with names everywhere."""
    made = node_json(
        f"{SECRET}-{name}",
        *sizes,
        labels={
            f"{SECRET}.com/team": f"{SECRET}-blue",
            "kubernetes.io/hostname": f"{SECRET}-{name}",
        },
        taints=[{"key": f"{SECRET}.com/only", "value": SECRET, "effect": "NoSchedule"}],
        address=f"{SECRET}.internal",
        **rest,
    )
    made["spec"]["providerID"] = f"aws:///{SECRET}"
    made["status"]["allocatable"][f"{SECRET}.com/fpga"] = "2"
    made["metadata"]["annotations"][f"{SECRET}/note"] = SECRET
    text = made["metadata"]["annotations"][CARDS]
    made["metadata"]["annotations"][CARDS] = text.replace(
        '"healthy":true', f'"healthy":true,"unleasedMiB":64,"unleased":"user {SECRET}"'
    )
    return made


def named_pod(name: str, count: int, **given: Any) -> Json:
    """Return a pod with names everywhere. It selects a team's nodes, and asks for one more resource."""
    labels = {"app": SECRET, **(given.pop("labels", None) or {})}
    annotations = {f"{SECRET}/owner": SECRET, **(given.pop("annotations", None) or {})}
    made = pod(
        f"{SECRET}-{name}",
        {**units(count), "cpu": 1, f"{SECRET}.com/fpga": given.pop("fpga", 0)},
        **{"namespace": f"{SECRET}-ns", "labels": labels, "annotations": annotations, **given},
    )
    made["metadata"]["ownerReferences"] = [{"kind": f"{SECRET}Job", "name": SECRET, "uid": SECRET}]
    made["spec"] |= {
        "schedulerName": f"{SECRET}-scheduler",
        "nodeSelector": {f"{SECRET}.com/team": f"{SECRET}-blue"},
        "tolerations": [{"key": f"{SECRET}.com/only", "operator": "Exists"}],
        "priorityClassName": f"{SECRET}-high",
        "schedulingGates": [{"name": f"{SECRET}/gate"}] if given.get("gated") else [],
        "volumes": [{"name": SECRET, "hostPath": {"path": f"/{SECRET}"}}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {"key": f"{SECRET}.com/team", "operator": "Exists"},
                                {
                                    "key": f"{SECRET}.com/no",
                                    "operator": "NotIn",
                                    "values": [SECRET],
                                },
                            ]
                        }
                    ]
                }
            }
        },
    }
    made["spec"]["containers"][0] |= {"name": SECRET, "image": f"registry.{SECRET}/train"}
    made["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": f"0/1 nodes of {SECRET}",
        }
    ]
    return made


def test_nothing_of_any_name_is_left() -> None:
    """Of nodes, pods, users, labels, images, resources, rules, records, gangs and messages."""
    holder = named_pod("holder", 4, node=f"{SECRET}-a", annotations=on_card(0, 4))
    lingering = lease_records.Lingering(f"{SECRET}-ns/{SECRET}-gone", ())
    report = lease_records.LeaseReport(
        lingering={f"{SECRET}-uid": lingering},
        refused={f"{SECRET}-other": lease_records.Refusal(f"{SECRET} holds the card")},
    )
    there = named_node(
        "a", T4_MIB, annotations={lease_records.REPORT: lease_records.encode_report(report)}
    )
    member = named_pod("member", 4, labels=gang_labels(f"{SECRET}-gang", 2))
    odd = named_pod("odd", 4, labels={"aliyun.com/gpu-count": SECRET})
    group = {
        "metadata": {"name": f"{SECRET}-gang", "namespace": f"{SECRET}-ns", "uid": "g"},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}},
    }
    text = encode(recorded([there], [holder, member, odd, named_pod("g", 1, gated=True)], [group]))
    assert SECRET not in text.decode().lower()
    assert b"namespace-1" in text


def test_names_are_kept_if_that_is_asked_for() -> None:
    """All that a plan reads of them."""
    text = encode(recorded([named_node("a", T4_MIB)], [named_pod("w", 4)], named=True)).decode()
    assert f"{SECRET}-a" in text
    assert f"{SECRET}.com/team" in text


@settings(deadline=None, max_examples=60)
@given(
    holders=st.lists(st.integers(1, 14), max_size=3),
    waiting=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 2)), max_size=6),
    gang=st.lists(st.integers(1, 8), max_size=3),
)
def test_plan_without_names_is_that_with_names(
    holders: list[int], waiting: list[tuple[int, int]], gang: list[int]
) -> None:
    """The same pods start, on the same cards: pseudonyms are in the order of the names."""
    nodes = [named_node("a", T4_MIB), named_node("b", T4_MIB, T4_MIB)]
    places = [("a", 0), ("b", 0), ("b", 1)]
    pods = [
        named_pod(f"h{n}", count, node=f"{SECRET}-{name}", annotations=on_card(card, count))
        for n, (count, (name, card)) in enumerate(zip(holders, places, strict=False))
    ]
    pods += [named_pod(f"w{n}", count, fpga=fpga) for n, (count, fpga) in enumerate(waiting)]
    labels = gang_labels(f"{SECRET}-gang", len(gang))
    pods += [named_pod(f"g{n}", count, labels=labels) for n, count in enumerate(gang)]
    named, without = planned(recorded(nodes, pods, named=True)), planned(recorded(nodes, pods))
    order = sorted(f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in pods)
    found = {
        (order.index(each.request), each.node.replace(f"{SECRET}-a", "node-1"), each.cards)
        for each in named.placements
    }
    shown = {
        (int(each.request.rpartition("-")[2]) - 1, each.node, each.cards)
        for each in without.placements
    }
    assert shown == {
        (number, node.replace(f"{SECRET}-b", "node-2"), cards) for number, node, cards in found
    }
    assert len(named.unserved) == len(without.unserved)


def test_racks_without_names_are_the_same_racks() -> None:
    """Of three nodes two are in one rack, and the gang goes there. What is no level says nothing."""
    level = f"{SECRET}.com/rack"
    nodes = [named_node(name, T4_MIB) for name in "abc"]
    for made, rack in zip(nodes, ("r1", "r2", "r2"), strict=True):
        made["metadata"]["labels"][level] = f"{SECRET}-{rack}"
    required, preferred, unconstrained = TOPOLOGY_ANNOTATIONS
    written = {required: level, preferred: f"{SECRET}.com/row", unconstrained: SECRET}
    pods = [
        named_pod(f"g{n}", 13, labels=gang_labels(f"{SECRET}-gang", 2), annotations=written)
        for n in range(2)
    ]
    file = recorded(nodes, pods, levels=(level,))
    assert SECRET not in encode(file).decode().lower()
    named = planned(recorded(nodes, pods, named=True, levels=(level,)))
    assert {each.node for each in named.placements} == {f"{SECRET}-b", f"{SECRET}-c"}
    assert {each.node for each in planned(file).placements} == {"node-2", "node-3"}
    # A gang of three has no rack.
    third = named_pod("g2", 13, labels=gang_labels(f"{SECRET}-gang", 3), annotations=written)
    for each in pods:
        each["metadata"]["labels"] |= gang_labels(f"{SECRET}-gang", 3)
    assert not planned(recorded(nodes, [*pods, third], levels=(level,))).placements


def test_what_pods_hold_is_kept_also_if_their_nodes_report_other_sizes() -> None:
    """The node says 9 units of 14, the pod's record 4; 64 MiB are no lease's. So 4 units are free, not 9."""
    uid = f"u-{SECRET}-ns-{SECRET}-h"
    report = lease_records.LeaseReport({uid: (Slice(0, device(0, f"{SECRET}-a"), 9 * 1077, 0),)})
    annotations = {lease_records.REPORT: lease_records.encode_report(report)}
    nodes = [named_node("a", T4_MIB, annotations=annotations)]
    holder = named_pod("h", 4, node=f"{SECRET}-a", annotations=on_card(0, 4))
    for count, started in ((4, 1), (5, 0)):
        file = recorded(nodes, [holder, named_pod("w", count)])
        assert len(planned(file).placements) == started


def test_compared_labels_stay_comparable() -> None:
    """`generation > 7` holds for 12 and not for 5, whatever numbers stand for them."""
    nodes = []
    for name, generation in (("a", "5"), ("b", "12")):
        made = named_node(name, T4_MIB)
        made["metadata"]["labels"][f"{SECRET}.com/generation"] = generation
        nodes.append(made)
    waiting = named_pod("w", 4)
    rule = waiting["spec"]["affinity"]["nodeAffinity"]
    terms = rule["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    terms[0]["matchExpressions"] = [
        {"key": f"{SECRET}.com/generation", "operator": "Gt", "values": ["7"]}
    ]
    file = recorded(nodes, [waiting])
    assert b"12" not in b"".join(msgspec.json.encode(node.metadata.labels) for node in file.nodes)
    assert [each.node for each in planned(file).placements] == ["node-2"]


def test_nodes_of_gpushares_own_plugin_keep_their_cards() -> None:
    """They have no inventory: 28 units on two cards, one of which is full."""
    holder = pod("h", units(14), node="n", annotations=on_card(0, 14))
    for count, started in ((14, 1), (15, 0)):
        file = recorded([sharing("n", cards=2)], [holder, pod("w", units(count))])
        assert len(planned(file).placements) == started
