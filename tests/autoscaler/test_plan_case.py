"""Tests the planning case of a cluster: what is pending, what is there, what is coming."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fenka.autoscaler.demand import UNLIMITED_S, pending_demand
from fenka.autoscaler.plan_case import plan_case, unserved_pods, within_most
from fenka.autoscaler.snapshot import Shape, Snapshot
from fenka.autoscaler.stores import failed_order
from fenka.autoscaler.watch import DaemonSet
from fenka.cloud.config import ScaleOut, SpotRules
from fenka.cloud.port import TYPE_LABEL
from fenka.cluster.autoscaling import (
    CAPACITY,
    GROUP,
    INTERRUPTIBLE,
    PROTECTED_UNTIL,
    SPOT_ADMIT,
    OrderRecord,
    Slot,
    encode_time,
)
from fenka.cluster.node_admission import exclusion
from fenka.cluster.pod_groups import REQUIRED_TOPOLOGY
from fenka.core.nodes.case import (
    BuyLimits,
    CaseNode,
    CaseRequest,
    Gang,
    NewCard,
    NodeGroup,
    PlanningCase,
)
from fenka.core.nodes.plan import NodePlan, make_plan
from fenka.core.nodes.problem import ZONE_LABEL
from tests.autoscaler.snapshots import (
    NOW,
    T4,
    config,
    elastic_node,
    group,
    instance,
    offer,
    snapshot,
)
from tests.builders import T4_MIB, Json, gang_labels, on_card, pod_json
from tests.mig_builders import inside_pod_json, mig_node_json, mig_pod_json


def case_of(given: Snapshot) -> PlanningCase:
    """The case."""
    return plan_case(given).case


def planned(given: Snapshot) -> NodePlan:
    """The plan of a snapshot."""
    return make_plan(case_of(given), lambda: 10.0)


def bought(given: Snapshot) -> int:
    """How many nodes the plan buys."""
    return sum(each.count for each in planned(given).nodes)


def the_request(pod: Json, **fields: Any) -> CaseRequest:
    """The request of the only pod."""
    (request,) = case_of(snapshot(pods=(pod,), **fields)).requests
    return request


def why_not(pod: Json, *others: Json, **fields: Any) -> str:
    """Why no node is bought for the pod."""
    found = plan_case(snapshot(pods=(pod, *others), **fields))
    return found.unserved[pod["metadata"]["uid"]]


SPOT = {CAPACITY: "spot", GROUP: "spot"}


def with_spec(pod: Json, **spec: Any) -> Json:
    """The pod with more in its spec."""
    return {**pod, "spec": {**pod["spec"], **spec}}


def order(*slots: Slot, state: str = "asked", **fields: Any) -> OrderRecord:
    """An order of offer t4."""
    known = {"group": "t4", "type": "t4.x", "zone": "a", "capacity": "on-demand", "price": 4.0}
    return OrderRecord(**{**known, "slots": slots, "state": state, "written_at": NOW, **fields})


# ---- who is pending ----


def test_pod_is_a_request_with_all_that_decides_where_it_fits() -> None:
    """Of an amount of 4 units; CPU and memory are kube-scheduler's own."""
    pod = pod_json("a", 4, priority=7, annotations={"fenka.io/interruptible": "true"})
    resources = {"aliyun.com/gpu-mem": "4", "cpu": "1500m", "memory": "1Gi", "x.io/fpga": "2"}
    pod["spec"]["containers"][0]["resources"] = {"limits": resources, "requests": resources}
    toleration = {"key": "k", "operator": "Exists", "effect": "NoSchedule"}
    made = with_spec(
        pod, nodeSelector={"disk": "ssd"}, tolerations=[toleration], activeDeadlineSeconds=600
    )
    request = the_request(made)
    assert (request.name, request.priority, request.cards) == ("default/a", 7, 1)
    assert request.memory is not None
    assert (request.memory.units, request.memory.unit_mib) == (4, 1024)
    assert (request.cpu_milli, request.memory_mib) == (1500, 1024)
    assert request.resources == {"x.io/fpga": 2}
    assert request.selector == {"disk": "ssd"}
    assert request.tolerations[0].key == "k"
    assert request.interruptible
    assert request.duration_s == 630  # and the grace period of 30 s


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"schedulingGates": [{"name": "example.com/quota"}]}},
        {"spec": {"nodeName": "gpu-1"}},
        {"status": {"phase": "Succeeded"}},
        {"metadata": {"deletionTimestamp": "2027-01-15T08:00:00Z"}},
        {"spec": {"schedulerName": "another"}},
        {"metadata": {"creationTimestamp": "2027-01-15T07:59:50Z"}},
    ],
)
def test_pod_causes_no_purchase_when_it_is_not_in_the_line(change: Json) -> None:
    """Gated by others, bound, finished, being deleted, of another scheduler, or younger than the delay."""
    pod = pod_json("a", 4)
    made = {**pod, **{key: {**pod[key], **value} for key, value in change.items()}}
    settings = config(scale_out=ScaleOut(delay=30))
    given = snapshot(pods=(made,), config=settings, schedulers=frozenset({"default-scheduler"}))
    assert case_of(given).requests == ()


def test_pod_counts_when_only_fenkas_own_gate_keeps_it() -> None:
    """The scheduler removes it when it is the pod's turn, which needs a node."""
    pod = with_spec(pod_json("a", 4), schedulingGates=[{"name": "fenka.io/queue"}])
    assert the_request(pod).name == "default/a"


def test_pod_without_cards_causes_no_purchase() -> None:
    """Other autoscalers buy nodes without cards."""
    assert case_of(snapshot(pods=(pod_json("a"),))).requests == ()


_TERMS = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"affinity": {"podAffinity": _TERMS}}, "its required affinity to pods"),
        ({"affinity": {"podAntiAffinity": _TERMS}}, "its required anti-affinity to pods"),
        (
            {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]},
            "its required spread",
        ),
        ({"resourceClaims": [{"name": "claim"}]}, "its resource claims"),
    ],
)
def test_pod_is_unserved_when_a_case_cannot_express_its_rules(spec: Json, words: str) -> None:
    """It must not cause a purchase that may not help it."""
    sentence = why_not(with_spec(pod_json("a", 4), **spec))
    assert sentence.startswith(f"no node is bought for it, because {words}")


def test_pod_is_unserved_when_two_containers_request_cards() -> None:
    """Each of their slices may be on another card, or on the same."""
    pod = pod_json("a", 4, 4)
    for container in pod["spec"]["containers"]:
        container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    assert "2 of its containers request cards" in why_not(pod)


@pytest.mark.parametrize("pod", [mig_pod_json("a", "1g.5gb"), inside_pod_json("a", 4)])
def test_pod_is_unserved_when_it_requests_instances(pod: Json) -> None:
    """Whether a new node divides its cards is not known before it is there."""
    assert "it requests MIG instances, and nodes are planned for cards" in why_not(pod)


def test_pod_is_unserved_when_it_requires_nvlink() -> None:
    """How the cards of a new node are connected is not known before it is there."""
    pod = pod_json("a", 4)
    pod["metadata"]["annotations"] = {"fenka.io/topology": "required"}
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    assert "it requires NVLink between its cards" in why_not(pod)


def test_divided_card_counts_once_and_takes_no_slices() -> None:
    """Its instances are no cards of the planning case."""
    node = mig_node_json("gpu", "A100", "T4", present={(0, "1g.5gb", 0): "own"})
    case = case_of(snapshot(nodes=(node,), pods=(pod_json("waits", 99),)))
    assert [(card.model, card.closed) for card in case.nodes[0].cards] == [
        ("A100", True),
        ("T4", False),
    ]


def test_gang_is_planned_for_when_all_of_its_pods_exist() -> None:
    """Two of two; with two of three it waits for the third."""
    pair = [pod_json(name, 4, labels=gang_labels("g", 2)) for name in "ab"]
    case = case_of(snapshot(pods=tuple(pair)))
    assert {request.gang for request in case.requests} == {"default/g"}
    assert set(case.gangs) == {"default/g"}
    parts = [pod_json(name, 4, labels=gang_labels("g", 3)) for name in "ab"]
    assert why_not(*parts) == "its gang g has 2 of the 3 pods that start together"


RACK = "example.com/rack"


def in_racks(
    *pods: Json, levels: tuple[str, ...] = ("topology.kubernetes.io/zone", RACK)
) -> Snapshot:
    """Return a cluster with two nodes of rack r1 and one of r2, and these pods."""
    nodes = (
        elastic_node(name, T4_MIB, labels={"topology.kubernetes.io/zone": "a", RACK: rack})
        for name, rack in {"n": "r1", "m": "r1", "o": "r2"}.items()
    )
    view = snapshot(nodes=tuple(nodes), pods=pods)
    view.state.topology_levels = levels
    return view


def requiring(label: str, *names: str, **given: Any) -> list[Json]:
    """Return pods of a gang of two that requires this level."""
    written = {REQUIRED_TOPOLOGY: label, **given.pop("annotations", {})}
    labels = gang_labels("g", 2)
    return [pod_json(name, 4, labels=labels, annotations=written, **given) for name in names]


def test_gang_is_planned_for_in_one_rack_when_it_requires_one() -> None:
    """The rule of its case has the level and those around it. Preferred levels make no rule."""
    case = case_of(in_racks(*requiring(RACK, "a", "b")))
    assert case.gangs == {"default/g": Gang(same=("topology.kubernetes.io/zone", RACK))}
    case = case_of(in_racks(*requiring("topology.kubernetes.io/zone", "a", "b")))
    assert case.gangs == {"default/g": Gang(same=("topology.kubernetes.io/zone",))}
    pods = [pod_json(name, 4, labels=gang_labels("g", 2)) for name in "ab"]
    assert case_of(in_racks(*pods)).gangs == {"default/g": Gang()}
    # Kueue's annotations are its own where fenka has no levels.
    assert case_of(in_racks(*requiring(RACK, "a", "b"), levels=())).gangs == {"default/g": Gang()}


def test_member_is_planned_for_beside_those_that_have_started() -> None:
    """One runs on o, so the other selects its zone and its rack."""
    running = requiring(RACK, "a", node="o", annotations=on_card(0, 4))
    case = case_of(in_racks(*running, *requiring(RACK, "b")))
    assert [dict(each.selector) for each in case.requests] == [
        {"topology.kubernetes.io/zone": "a", RACK: "r2"}
    ]


def test_gang_is_unserved_when_its_topology_cannot_be_planned() -> None:
    """New nodes are of no known host, and a gang in two racks is in no single one."""
    levels = ("topology.kubernetes.io/zone", RACK, "kubernetes.io/hostname")
    sentences = pending_demand(
        in_racks(*requiring("kubernetes.io/hostname", "a", "b"), levels=levels)
    ).unserved.values()
    assert "its gang must be on one node, and nodes are planned one by one" in sentences
    running = [
        *requiring(RACK, "a", node="n", annotations=on_card(0, 4)),
        *requiring(RACK, "b", node="o", annotations=on_card(0, 4)),
    ]
    sentences = pending_demand(in_racks(*running, *requiring(RACK, "c"))).unserved.values()
    assert f"its gang has started in several {RACK}, and must be in one" in sentences
    sentences = pending_demand(in_racks(*requiring("row", "a", "b"))).unserved.values()
    assert any(
        sentence.startswith(f"annotation {REQUIRED_TOPOLOGY} is 'row'") for sentence in sentences
    )


def test_gang_is_unserved_when_one_of_its_pods_is() -> None:
    """It starts whole or not at all."""
    labels = gang_labels("g", 2)
    apart = with_spec(pod_json("b", 4, labels=labels), affinity={"podAntiAffinity": _TERMS})
    sentence = why_not(pod_json("a", 4, labels=labels), apart)
    assert sentence.startswith("b of its gang is left out: no node is bought for it")


# ---- what is there ----


def the_node(*pods: Json, **given: Any) -> CaseNode:
    """The node `gpu` of one T4 with these pods."""
    node = elastic_node("gpu", T4_MIB, **given)
    (found,) = case_of(snapshot(nodes=(node,), pods=(*pods, pod_json("waits", 14)))).nodes
    return found


def test_node_has_what_its_pods_hold() -> None:
    """Of 14 units 4 are 4308 MiB; a pod without cards holds CPU."""
    bound = pod_json("a", 4, node="gpu", annotations=on_card(0, 4))
    plain = pod_json("b", node="gpu")
    plain["spec"]["containers"] = [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]
    node = the_node(bound, plain)
    assert (node.held.pods, node.held.cpu_milli) == (2, 2000)
    assert (node.cpu_milli, node.memory_mib, node.pods) == (8000, 32 * 1024, 110)
    (card,) = node.cards
    assert (card.memory_mib, card.held_mib, card.closed) == (T4_MIB, 4308, False)


def test_room_counts_as_free_when_its_pod_is_being_deleted() -> None:
    """Evicted pods and preemption's victims would have a node too many bought."""
    bound = pod_json("a", 14, node="gpu", annotations=on_card(0, 14))
    assert the_node(bound).cards[0].held_mib == T4_MIB
    bound["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:10Z"
    assert the_node(bound).cards[0].held_mib == 0
    # It should have ended long ago, and may never: its node may be gone.
    bound["metadata"]["deletionTimestamp"] = "2027-01-15T07:00:00Z"
    assert the_node(bound).cards[0].held_mib == T4_MIB


@pytest.mark.parametrize(
    "given",
    [
        {"unschedulable": True},
        {"ready": "False"},
        {"taints": [{"key": "fenka.io/ending", "effect": "NoSchedule"}]},
        {"taints": [{"key": "fenka.io/reclaimed", "effect": "NoSchedule"}]},
    ],
)
def test_node_is_left_out_when_nobody_may_be_placed_there(given: Json) -> None:
    """Also from pods that tolerate everything."""
    node = elastic_node("gpu", T4_MIB, **given)
    assert case_of(snapshot(nodes=(node,), pods=(pod_json("a", 4),))).nodes == ()


def test_nothing_is_bought_when_the_pod_fits_a_node_there() -> None:
    """14 - 4 units are free; with 11 wanted a node is bought."""
    bound = pod_json("a", 4, node="gpu", annotations=on_card(0, 4))
    node = elastic_node("gpu", T4_MIB)
    assert bought(snapshot(nodes=(node,), pods=(bound, pod_json("b", 10)))) == 0
    assert bought(snapshot(nodes=(node,), pods=(bound, pod_json("b", 11)))) == 1


def test_node_affinity_decides_though_a_case_cannot_express_it() -> None:
    """The rule becomes a label of the machines that it admits."""
    terms = [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd", "nvme"]}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod = with_spec(pod_json("a", 4), affinity={"nodeAffinity": required})
    nodes = tuple(
        elastic_node(name, T4_MIB, labels={"disk": disk})
        for name, disk in (("slow", "hdd"), ("fast", "nvme"))
    )
    given = snapshot(nodes=nodes, pods=(pod,))
    (placement,) = planned(given).placements
    assert placement.node == "fast"
    found = plan_case(snapshot(nodes=nodes[:1], pods=(pod,)))
    sentences = unserved_pods(found, make_plan(found.case, lambda: 10.0))
    assert list(sentences.values()) == [
        "0/1 groups help: 1 that its affinity, the node's mode or an earlier misfit excludes"
    ]


def test_mode_of_a_node_decides_what_it_admits() -> None:
    """A node of mode cgpu shares memory, not compute."""
    pod = pod_json("a", 4)
    limits = {"aliyun.com/gpu-mem": "4", "aliyun.com/gpu-core.percentage": "20"}
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    node = elastic_node("gpu", T4_MIB, labels={"ack.node.gpu.schedule": "cgpu"})
    assert bought(snapshot(nodes=(node,), pods=(pod,))) == 1
    assert bought(snapshot(nodes=(node,), pods=(pod_json("a", 4),))) == 0


# ---- what is coming ----


def test_nothing_is_bought_when_a_node_is_coming_already() -> None:
    """10 units are planned for it, 4 are free: one pod of 4 fits, a second one does not."""
    pod = pod_json("a", 10)
    uid = pod["metadata"]["uid"]
    orders = {"t4-1": order(Slot(state="asked", pods=(uid,), cards=((0,),)))}
    second, third = pod_json("b", 4), pod_json("c", 4)
    assert bought(snapshot(pods=(pod,), orders=orders)) == 0
    given = snapshot(pods=(pod, second), orders=orders)
    assert bought(given) == 0
    assert planned(given).placements[0].node == "coming:t4-1:0"
    assert bought(snapshot(pods=(pod, second, third), orders=orders)) == 1


def test_room_of_a_planned_pod_is_free_when_it_runs_elsewhere() -> None:
    """It was bound to a node that had room sooner."""
    pod = pod_json("a", 14, node="elsewhere")
    uid = pod["metadata"]["uid"]
    orders = {"t4-1": order(Slot(state="asked", pods=(uid,), cards=((0,),)))}
    assert bought(snapshot(pods=(pod, pod_json("b", 14)), orders=orders)) == 0


def test_node_without_inventory_counts_as_its_shape() -> None:
    """It has joined, and its cards are not known yet."""
    orders = {"t4-1": order(Slot(state="joined", instance="i-1", node="new"))}
    node = elastic_node("new", provider_id="sim:///a/i-1", inventory=False)
    given = snapshot(
        nodes=(node,),
        pods=(pod_json("a", 14),),
        orders=orders,
        instances=[instance(order="demo-t4-1-0")],
    )
    assert [each.name for each in case_of(given).nodes] == ["coming:t4-1:0"]
    assert bought(given) == 0


def test_planned_pods_hold_their_room_while_their_node_is_pinned() -> None:
    """The node offers its cards, and its pod is not bound yet."""
    pod = pod_json("a", 14)
    slot = Slot(state="offering", instance="i-1", node="gpu", pods=(pod["metadata"]["uid"],))
    orders = {"t4-1": order(msgspec.structs.replace(slot, cards=((0,),), offering_at=NOW))}
    given = snapshot(
        nodes=(elastic_node("gpu", T4_MIB),), pods=(pod, pod_json("b", 4)), orders=orders
    )
    assert case_of(given).nodes[0].cards[0].held_mib == T4_MIB
    assert bought(given) == 1


# ---- what may be bought ----


def the_group(given: Snapshot) -> NodeGroup:
    """The only group of the case."""
    (found,) = case_of(given).groups
    return found


def test_seen_shape_decides_before_the_configured_one() -> None:
    """The node that came had less than was thought."""
    cards = (NewCard(model="Tesla T4", memory_mib=15000),)
    seen = {"t4.x": Shape(cpu_milli=3800, memory_mib=13000, cards=cards)}
    assert the_group(snapshot()).cpu_milli == T4.cpu_milli
    found = the_group(snapshot(shapes=seen))
    assert (found.cpu_milli, found.cards) == (3800, cards)


def test_daemon_sets_take_their_part_when_they_run_on_the_group() -> None:
    """4000 - 250; another one selects other nodes."""
    daemons = [
        {
            "metadata": {"name": name, "namespace": "kube-system"},
            "spec": {
                "template": {
                    "spec": {
                        "nodeSelector": selector,
                        "containers": [{"name": "c", "resources": {"requests": {"cpu": "250m"}}}],
                    }
                }
            },
        }
        for name, selector in (("proxy", {"kubernetes.io/os": "linux"}), ("other", {"disk": "x"}))
    ]
    given = snapshot(daemons=[msgspec.convert(each, DaemonSet) for each in daemons])
    found = the_group(given)
    assert (found.cpu_milli, found.pods) == (3750, 109)


@pytest.mark.parametrize(
    ("requests", "cpu_milli"),
    [
        ({"cpu": "4"}, 0),
        ({"cpu": "4001m"}, 4000),
        ({"cpu": "1", "memory": "1Ti"}, 4000),
        ({"cpu": "1", "x.io/none": "1"}, 4000),
        ({"cpu": "1", "aliyun.com/gpu-mem": "1"}, 3000),
        ({"cpu": "9" * 19, "memory": "9e30"}, 4000),
    ],
)
def test_daemon_set_takes_nothing_when_its_pod_cannot_start(requests: Json, cpu_milli: int) -> None:
    """Any tenant may create one, and the groups would have room for nobody."""
    container = {"name": "c", "resources": {"requests": requests}}
    template = {"spec": {"containers": [container], "tolerations": [{"operator": "Exists"}]}}
    metadata = {"name": "hostile", "namespace": "tenant"}
    made = {"metadata": metadata, "spec": {"template": template}}
    assert the_group(snapshot(daemons=[msgspec.convert(made, DaemonSet)])).cpu_milli == cpu_milli


def test_offer_has_no_stock_when_it_is_backed_off_or_above_its_cap() -> None:
    """It is tried again later."""
    assert the_group(snapshot()).stock is None
    failed = {"t4-1": failed_order(offer().key, "out of stock", "", NOW - 100)}
    assert the_group(snapshot(orders=failed)).stock == 0
    forgotten = {"t4-1": failed_order(offer().key, "out of stock", "", NOW - 200)}
    assert the_group(snapshot(orders=forgotten)).stock is None
    spot = group(capacity="spot", spot=SpotRules(cap=3.9))
    market = offer(price=4.0, capacity="spot")
    assert the_group(snapshot(config=config(spot), offers=[market])).stock == 0


def test_spot_admits_those_who_end_within_its_protection() -> None:
    """An hour, less 180 s until the node offers its cards: 3420 s."""
    spot = group(capacity="spot", spot=SpotRules(protection=3600))
    deadlines = {3390: 1, 3391: 0}  # and 30 s of grace
    for deadline, nodes in deadlines.items():
        pod = with_spec(pod_json("a", 4), activeDeadlineSeconds=deadline)
        assert bought(snapshot(config=config(spot), pods=(pod,))) == nodes
    assert bought(snapshot(config=config(spot), pods=(pod_json("a", 4),))) == 0


def test_spot_admits_everybody_when_its_group_says_so() -> None:
    """The article's cluster marks nothing."""
    spot = group(capacity="spot", spot=SpotRules(admit="all"))
    assert the_group(snapshot(config=config(spot))).protection_s == UNLIMITED_S
    assert bought(snapshot(config=config(spot), pods=(pod_json("a", 4),))) == 1


@pytest.mark.parametrize(
    ("labels", "annotations", "pod", "nodes"),
    [
        (SPOT, {}, {}, 1),
        (SPOT, {}, {"annotations": {INTERRUPTIBLE: "true"}}, 0),
        (SPOT, {SPOT_ADMIT: "all"}, {}, 0),
        (SPOT, {PROTECTED_UNTIL: encode_time(NOW + 90)}, {"deadline": 60}, 0),
        (SPOT, {PROTECTED_UNTIL: encode_time(NOW + 90)}, {"deadline": 61}, 1),
        # It is none of ours: the scheduler admits every pod there.
        ({CAPACITY: "spot"}, {}, {}, 0),
    ],
)
def test_room_of_a_spot_node_counts_for_the_pods_that_the_scheduler_admits(
    labels: Json, annotations: Json, pod: Json, nodes: int
) -> None:
    """By two different rules a pod would wait for ever, or a node be bought in vain."""
    deadline = pod.get("deadline")
    made = pod_json("a", 4, annotations=pod.get("annotations"))
    if deadline is not None:
        made = with_spec(made, activeDeadlineSeconds=deadline)
    document = elastic_node("n", T4_MIB, labels=labels, annotations=annotations)
    given = snapshot(nodes=(document,), pods=(made,))
    given.state.set_time(NOW)
    assert bought(given) == nodes
    admitted = exclusion(given.state, "n", next(iter(given.pods.values()))) is None
    assert admitted is (nodes == 0)


def test_max_is_that_of_all_offers_of_a_group() -> None:
    """Three nodes are wanted, zone a has two, and the group may have two."""
    both = group(zones=("a", "b"), max=2)
    offers = [offer(stock=2), offer(zone="b", price=5.0)]
    pods = tuple(pod_json(name, 14) for name in "abc")
    found = plan_case(snapshot(config=config(both), offers=offers, pods=pods))
    first = make_plan(found.case, lambda: 10.0)
    assert sum(each.count for each in first.nodes) == 3
    narrower = within_most(found, first)
    assert narrower is not None
    second = make_plan(narrower, lambda: 10.0)
    assert [(each.group, each.count) for each in second.nodes] == [("t4:t4.x:a", 2)]
    assert within_most(replace(found, case=narrower), second) is None


def test_nodes_that_there_are_count_for_max_and_limits() -> None:
    """One is running, one is asked for: of three one may be bought, of the price 12 - 8."""
    settings = config(group(max=3), limits=BuyLimits(nodes=3, price=12.0, cards={"Tesla T4": 3}))
    given = snapshot(
        config=settings,
        orders={"t4-2": order(Slot(state="asked"))},
        instances=[instance("i-1")],
        pods=tuple(pod_json(name, 14) for name in "abcd"),
    )
    found = the_group(given)
    assert (found.size, found.max) == (2, 3)
    limits = case_of(given).limits
    assert (limits.nodes, limits.price, limits.cards) == (1, 4.0, {"Tesla T4": 1})
    assert bought(given) == 1


def test_group_grows_to_its_min_without_any_pod() -> None:
    """By its cheapest offer."""
    settings = config(group(min=2, zones=("a", "b")))
    offers = [offer(price=5.0), offer(zone="b")]
    plan = planned(
        snapshot(config=settings, offers=offers, instances=[instance(offer=offers[0].key)])
    )
    assert [(each.group, each.count) for each in plan.nodes] == [("t4:t4.x:b", 1)]


def test_offer_is_left_out_for_pods_that_it_was_found_not_to_help() -> None:
    """Others may still have it, and equal ones of another namespace: the pod's owner may be the reason."""
    pods = (pod_json("a", 4), pod_json("b", 5), pod_json("c", 4, namespace="other"))
    found = plan_case(snapshot(pods=pods))
    uids = {uid for name, uid in found.pods.items() if name == "default/a"}
    rules = pending_demand(snapshot(pods=pods)).rules
    unhelpful_offer = {offer().key: frozenset(rules[uid].pod_class for uid in uids)}
    plan = planned(snapshot(pods=pods, unhelpful=unhelpful_offer))
    assert {each.request for each in plan.placements} == {"default/b", "other/c"}
    assert [each.request for each in plan.unserved] == ["default/a"]


def test_pod_is_told_why_it_waits_beside_a_node_on_which_it_did_not_start() -> None:
    """It seemed to be served there, so that it got neither another node nor a reason."""
    labels = {GROUP: "t4", CAPACITY: "on-demand", TYPE_LABEL: "t4.x", ZONE_LABEL: "a"}
    given = {"nodes": (elastic_node("idle", T4_MIB, labels=labels),), "pods": (pod_json("a", 4),)}
    (rules,) = pending_demand(snapshot(**given)).rules.values()
    found = plan_case(snapshot(**given, unhelpful={offer().key: frozenset({rules.pod_class})}))
    plan = make_plan(found.case, lambda: 10.0)
    assert not plan.placements
    assert list(unserved_pods(found, plan).values()) == [
        "0/1 groups help: 1 that its affinity, the node's mode or an earlier misfit excludes"
    ]
