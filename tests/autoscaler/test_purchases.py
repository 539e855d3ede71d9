"""Plans as orders, and what events say of them."""

from fenka.autoscaler.buyer import purchases, summary, without_stale
from fenka.autoscaler.plan_case import plan_case
from fenka.cluster.autoscaling import Slot
from fenka.core.nodes.plan import make_plan
from tests.autoscaler.snapshots import config, group, instance, snapshot
from tests.autoscaler.test_plan_case import order
from tests.builders import gang_labels, pod_json


def test_event_says_what_the_pods_own_group_costs() -> None:
    """Two nodes of one group, one of another: each pod's event is about its own."""
    groups = group("a", price=3.49, labels={"is": "a"}), group("b", price=7.0, labels={"is": "b"})
    pods = [pod_json(name, 10, uid=name) for name in ("p", "q", "r")]
    for pod, label in zip(pods, "aab", strict=True):
        pod["spec"]["nodeSelector"] = {"is": label}
    case = plan_case(snapshot(config=config(*groups), pods=tuple(pods)))
    plan = make_plan(case.case, lambda: 1.0)
    assert summary(case, plan) == {
        "default/p": "2 nodes of a asked for, 6.98 an hour",
        "default/q": "2 nodes of a asked for, 6.98 an hour",
        "default/r": "1 node of b asked for, 7 an hour",
    }


def test_node_is_not_bought_when_its_pods_are_gone_since_the_plan() -> None:
    """The others' nodes are, and are numbered from 0."""
    pods = [pod_json(name, 14, uid=name) for name in ("p", "q", "r")]
    case = plan_case(snapshot(pods=tuple(pods)))
    plan = make_plan(case.case, lambda: 1.0)
    pods[1]["spec"]["nodeName"] = "elsewhere"
    now = snapshot(pods=tuple(pods))
    (record,) = purchases(now, case, without_stale(now, case, plan)).values()
    assert {slot.pods for slot in record.slots} == {("p",), ("r",)}


def test_gang_is_not_bought_for_when_a_member_is_gone_since_the_plan() -> None:
    """It starts whole or not at all; the pod beside it gets its node."""
    pods = [pod_json(name, 14, uid=name, labels=gang_labels("g", 2)) for name in ("p", "q")]
    pods.append(pod_json("alone", 14, uid="alone"))
    case = plan_case(snapshot(pods=tuple(pods)))
    plan = make_plan(case.case, lambda: 1.0)
    now = snapshot(pods=tuple(pods[1:]))
    (record,) = purchases(now, case, without_stale(now, case, plan)).values()
    assert [slot.pods for slot in record.slots] == [("alone",)]


def test_slot_forgets_pods_that_are_gone_when_it_gets_others() -> None:
    """Whoever creates and deletes pods all the time fills neither ConfigMap nor Node."""
    known = Slot(state="known", instance="i-1", pods=("gone",), cards=((0,),))
    orders = {"t4-1": order(known)}
    now = snapshot(orders=orders, pods=(pod_json("p", 14, uid="p"),), instances=(instance("i-1"),))
    case = plan_case(now)
    (record,) = purchases(now, case, make_plan(case.case, lambda: 1.0)).values()
    assert (record.slots[0].pods, record.slots[0].cards) == (("p",), ((0,),))
