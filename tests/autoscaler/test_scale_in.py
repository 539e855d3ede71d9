"""Which nodes end, and what their end does when others act meanwhile or the program is killed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.autoscaler.demand import pending_demand
from fenka.autoscaler.scale_in import (
    MAX_LOOKS,
    SCALE_IN,
    SETTLE_S,
    Marked,
    ScaleInActor,
    ScaleInDecision,
    decide_scale_in,
)
from fenka.cloud.config import ScaleIn as Rules
from fenka.cloud.port import InstanceState
from fenka.cluster.autoscaling import (
    CAPACITY,
    ENDING,
    GROUP,
    INTERRUPTIBLE,
    KEEP,
    ORDER,
    RECLAIM_AT,
    RECLAIMED,
    AutoscalerStatus,
    ElasticNodeStatus,
    OrderRecord,
    Slot,
    encode_time,
)
from fenka.core.nodes.problem import ZONE_LABEL
from tests.autoscaler.evictions import FakeCloud, Killed, World
from tests.autoscaler.snapshots import NOW, config, elastic_node, group, instance, offer, snapshot
from tests.builders import T4_MIB, Json, gang_labels, on_card, pod_json
from tests.builders import pod as plain_pod

OWNED = [{"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}]
LONG = NOW - 100_000.0
TAINT = {"key": ENDING, "effect": "NoSchedule"}


def node(name: str = "n", *, of: str = "t4", cards: int = 1, **given: Any) -> Json:
    """A node that was bought."""
    labels = {GROUP: of, CAPACITY: given.pop("capacity", "on-demand"), ORDER: f"{of}-1"}
    labels |= given.pop("labels", {})
    sizes = [T4_MIB] * cards
    return elastic_node(name, *sizes, provider_id=f"sim:///a/i-{name}", labels=labels, **given)


def machine(name: str = "n", of: str = "t4", **fields: Any) -> Any:
    """The instance of a node, which was launched long ago."""
    given = {"offer": offer(of).key, "launched_at": LONG, **fields}
    return instance(f"i-{name}", f"{of}-1", **given)


def job(name: str = "p", units: int = 4, *, on: str = "", **given: Any) -> Json:
    """A pod with cards; it runs on a node, or is pending."""
    annotations = {**(on_card(0, units) if on else {}), **given.pop("annotations", {})}
    phase = "Running" if on else "Pending"
    made = pod_json(name, units, node=on, annotations=annotations, uid=name, phase=phase, **given)
    made["metadata"]["ownerReferences"] = OWNED
    return made


def helper(name: str = "h", *, on: str = "n", cpu: str = "1", **given: Any) -> Json:
    """A running pod without cards."""
    made = plain_pod(name, {"cpu": cpu}, node=on, uid=name, **given)
    made["metadata"]["ownerReferences"] = OWNED
    return made


def idle(*names: str, since: float = NOW - 600) -> AutoscalerStatus:
    """A status by which nodes have been idle since then."""
    return AutoscalerStatus(nodes={name: ElasticNodeStatus("t4", "idle", since) for name in names})


def decide(
    *nodes: Json,
    pods: tuple[Json, ...] = (),
    marked: Mapping[str, Marked] | None = None,
    rules: Rules | None = None,
    groups: tuple[Any, ...] = (),
    **fields: Any,
) -> ScaleInDecision:
    """Decide about nodes whose instances run, and which were idle for the delay."""
    names = [each["metadata"]["name"] for each in nodes]
    given = {"instances": tuple(map(machine, names)), "status": idle(*names), **fields}
    seen = snapshot(
        nodes=nodes, pods=pods, config=config(*groups, scale_in=rules or Rules()), **given
    )
    return decide_scale_in(seen, marked or {})


def states(decided: ScaleInDecision) -> dict[str, str]:
    """Return the states of the nodes."""
    return {name: status.state for name, status in decided.states.items()}


def steps(decided: ScaleInDecision) -> list[tuple[str, str]]:
    """Return actions and nodes."""
    return [(step.action, step.node.metadata.name) for step in decided.steps]


# --- idle nodes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since", "delay", "cooldown", "launched", "until", "marked"),
    [
        (NOW, 600, 0, LONG, NOW + 600, False),
        (NOW - 599, 600, 0, LONG, NOW + 1, False),
        (NOW - 600, 600, 0, LONG, None, True),
        (NOW - 600, 600, 600, NOW - 500, NOW + 100, False),
        (NOW - 600, 600, 600, NOW - 600, None, True),
        (NOW, 0, 0, NOW, None, True),
    ],
)
def test_idle_node_ends_after_delay_and_cooldown(
    since: float, delay: float, cooldown: float, launched: float, until: float | None, marked: bool
) -> None:
    """Both have to be over: the delay since it is idle, and the pause since the last scale-out."""
    decided = decide(
        node(),
        rules=Rules(delay=delay, cooldown=cooldown),
        instances=(machine(launched_at=launched),),
        status=idle("n", since=since),
    )
    status = decided.states["n"]
    assert steps(decided) == ([("mark", "n")] if marked else [])
    assert (status.state, status.since, status.until) == (
        ("ending", NOW, None) if marked else ("idle", since, until)
    )


def test_clock_starts_when_a_node_becomes_idle() -> None:
    """Also for a leader that has never seen it."""
    for status in (
        AutoscalerStatus(),
        AutoscalerStatus(nodes={"n": ElasticNodeStatus("t4", "in use", LONG)}),
    ):
        assert decide(node(), status=status).states["n"].since == NOW


def test_pause_counts_from_the_last_order_that_came() -> None:
    """A failed one brought nothing."""
    record = OrderRecord(
        group="t4",
        type="t4.x",
        zone="a",
        capacity="on-demand",
        slots=(Slot(state="gone"),),
        state="gone",
        price=4.0,
        written_at=NOW - 200,
        asked_at=NOW - 100,
    )
    decided = decide(node(), orders={"o": record})
    assert decided.states["n"].until == NOW + 500


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (job(on="n"), "in use"),
        (plain_pod("w", {"nvidia.com/gpu": "1"}, node="n"), "in use"),
        (plain_pod("m", {"nvidia.com/mig-1g.10gb": "1"}, node="n"), "in use"),
        ({**job(on="n"), "status": {"phase": "Succeeded"}}, "ending"),
        (job("pending", 15), "ending"),
        (job("fits", 14), "kept: a pending pod could use it"),
        (helper(), "in use"),  # There is no other node.
    ],
)
def test_node_is_in_use_when_a_pod_needs_it(pod: Json, expected: str) -> None:
    """A T4 has 14 units."""
    assert states(decide(node(), pods=(pod,))) == {"n": expected}


@pytest.mark.parametrize("own", [True, False])
def test_idle_node_ends_when_only_pods_wait_that_did_not_start_on_one_like_it(own: bool) -> None:
    """A volume of theirs may not exist; every idle node would be paid for as long as they wait."""
    bought = node(labels={"node.kubernetes.io/instance-type": "t4.x", ZONE_LABEL: "a"})
    waiting = job("w", 14)
    (rules,) = pending_demand(snapshot(pods=(waiting,))).rules.values()
    other = replace(offer().key, zone="b")
    unhelpful = {offer().key if own else other: frozenset({rules.pod_class})}
    decided = decide(bought, pods=(waiting,), unhelpful=unhelpful)
    assert states(decided) == {"n": "ending" if own else "kept: a pending pod could use it"}


def test_node_is_kept_when_pods_that_are_taken_back_could_use_it() -> None:
    """They still save their state on the node that goes. Also a gang, whose other member ends with it."""
    going = node("going", taints=[{"key": RECLAIMED, "effect": "NoSchedule"}])
    other = node("other", labels={KEEP: "true"})
    labels = gang_labels("g", 2)
    pods = (job("a", 10, on="going", labels=labels), job("b", 10, on="other", labels=labels))
    uids = frozenset({"a", "b"})
    decided = decide(going, other, node(), pods=pods, evicted=uids)
    assert states(decided)["n"] == "kept: a pending pod could use it"
    tainted = decide(going, other, TAINTED, pods=pods, marked=marked(), evicted=uids)
    assert steps(tainted) == [("unmark", "n")]


def test_node_is_idle_when_only_its_own_pods_are_left() -> None:
    """DaemonSets' pods and the kubelet's own."""
    daemon, mirror = helper("d"), helper("m")
    daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "d", "uid": "d"}]
    mirror["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    assert steps(decide(node(), pods=(daemon, mirror))) == [("mark", "n")]


def test_node_is_in_use_when_a_pod_is_planned_or_nominated_for_it() -> None:
    """Plans and preemption know where their pods go."""
    record = OrderRecord(
        group="t4",
        type="t4.x",
        zone="a",
        capacity="on-demand",
        slots=(Slot(state="offering", instance="i-n", node="n", pods=("p",)),),
        state="offering",
        price=4.0,
        written_at=LONG,
    )
    assert states(decide(node(), pods=(job("p", 15),), orders={"t4-1": record})) == {"n": "in use"}
    nominated = job("p", 15, status={"nominatedNodeName": "n"})
    assert states(decide(node(), pods=(nominated,))) == {"n": "in use"}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (node(labels={KEEP: "true"}), KEEP),
        (node(annotations={KEEP: "true"}), KEEP),
        (node(labels={KEEP: "false"}), ""),
        # Every node that was bought has these, so that other autoscalers leave it alone.
        (node(annotations={"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"}), ""),
        (node(annotations={"karpenter.sh/do-not-disrupt": "true"}), ""),
    ],
)
def test_node_is_kept_when_a_person_says_so(made: Json, why: str) -> None:
    """Other autoscalers' annotations are fenka's own."""
    assert states(decide(made)) == {"n": f"kept: {why}" if why else "ending"}


def edited(made: Json, **fields: Any) -> Json:
    """Return a pod with other metadata or spec."""
    for name, value in fields.items():
        made["metadata" if name in ("annotations", "ownerReferences", "labels") else "spec"][
            name
        ] = value
    return made


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (
            edited(helper(), annotations={"karpenter.sh/do-not-disrupt": "true"}),
            "has karpenter.sh/do-not-disrupt",
        ),
        (
            edited(
                helper(), annotations={"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
            ),
            "has cluster-autoscaler.kubernetes.io/safe-to-evict=false",
        ),
        (edited(helper(), volumes=[{"name": "v", "emptyDir": {}}]), "has a local volume"),
        (
            edited(helper(), volumes=[{"name": "v", "hostPath": {"path": "/"}}]),
            "has a local volume",
        ),
        (edited(helper(), volumes=[{"name": "v", "configMap": {"name": "c"}}]), ""),
        (
            edited(helper(), ownerReferences=[]),
            "has no controller that would make it anew",
        ),
    ],
)
def test_node_is_kept_when_a_pod_may_not_be_evicted(pod: Json, why: str) -> None:
    """It would fit on the other node."""
    decided = decide(node(), node("other", labels={KEEP: "true"}), pods=(pod,))
    assert states(decided)["n"] == (f"kept: default/h {why}" if why else "ending")


@pytest.mark.parametrize(("allowed", "state"), [(2, "ending"), (1, "kept"), (0, "kept")])
def test_node_is_kept_when_a_budget_does_not_allow_all_evictions(allowed: int, state: str) -> None:
    """Two pods are covered."""
    budget = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}},
        "status": {"disruptionsAllowed": allowed},
    }
    made = world(
        node(),
        node("other", labels={KEEP: "true"}),
        helper("x", labels={"app": "a"}),
        helper("y", labels={"app": "a"}),
        budgets=(budget,),
    )
    decided = decide_scale_in(made.snapshot(), {})
    assert states(decided)["n"].startswith(state)
    if state == "kept":
        assert states(decided)["n"] == "kept: disruption budget default/b is exhausted"


def test_pods_without_cards_must_fit_elsewhere_together() -> None:
    """Nodes have 8 cores: 5 + 5 do not fit beside each other, so one of two nodes ends."""
    keeper = node("other", labels={KEEP: "true"})
    pods = helper("x", on="a", cpu="5"), helper("y", on="b", cpu="5")
    decided = decide(node("a"), node("b"), keeper, pods=pods)
    assert steps(decided) == [("mark", "a")]
    assert states(decided)["b"] == "in use"
    decided = decide(node("a"), node("b"), keeper, pods=(pods[0], helper("y", on="b", cpu="3")))
    assert steps(decided) == [("mark", "a"), ("mark", "b")]


def test_dearest_nodes_end_first_and_the_min_stays() -> None:
    """Three idle nodes of two groups, each of which keeps one."""
    groups = group("t4", min=1), group("dear", min=0, price=9.0)
    nodes = node("a"), node("b"), node("c", of="dear")
    decided = decide(
        *nodes,
        groups=groups,
        instances=(machine("a"), machine("b"), machine("c", of="dear")),
    )
    assert steps(decided) == [("mark", "c"), ("mark", "a")]
    assert states(decided)["b"] == "kept: group t4 has a min of 1"
    again = decide(*nodes[:2], groups=groups, status=idle("a", "b", since=NOW - 50))
    assert again.states["a"].since == NOW - 50
    assert states(again) == {"a": "idle", "b": "kept: group t4 has a min of 1"}


def test_clock_goes_on_when_the_min_keeps_a_node_for_a_while() -> None:
    """Otherwise two idle nodes would take turns in being kept."""
    status = AutoscalerStatus(
        nodes={"n": ElasticNodeStatus("t4", "kept: group t4 has a min of 1", NOW - 700)}
    )
    decided = decide(node(), status=status, groups=(group("t4", min=1),))
    assert decided.states["n"].since == NOW - 700
    assert steps(decide(node(), status=status)) == [("mark", "n")]


def test_nothing_is_decided_when_the_cloud_was_not_read() -> None:
    """What cannot be read is never none."""
    assert decide(node(), instances_at=None) == ScaleInDecision()


def test_nodes_of_others_and_those_taken_back_are_left_alone() -> None:
    """Reclaim decides about the latter."""
    foreign = elastic_node("f", T4_MIB)
    taken = node("r", taints=[{"key": RECLAIMED, "effect": "NoSchedule"}])
    assert decide(foreign, taken) == ScaleInDecision()


def test_only_some_nodes_are_looked_at_in_a_pass_when_a_pod_waits() -> None:
    """The others stay idle until the next pass; without a pod that could use one, all end at once."""
    nodes = [node(f"n{number:02}") for number in range(MAX_LOOKS + 2)]
    assert len(decide(*nodes, pods=(job("w", 15),)).steps) == len(nodes)
    waiting = decide(*nodes, pods=(job("w", 14),))
    assert not waiting.steps
    assert list(states(waiting).values()) == [
        *["kept: a pending pod could use it"] * MAX_LOOKS,
        "idle",
        "idle",
    ]


@pytest.mark.parametrize(("ago", "state"), [(299, None), (300, "ending")])
def test_node_ends_when_its_take_back_is_overdue(ago: float, state: str | None) -> None:
    """It costs money and admits nobody, whoever wrote the notice."""
    taken = node(
        taints=[{"key": RECLAIMED, "effect": "NoSchedule"}],
        annotations={RECLAIM_AT: encode_time(NOW - ago)},
    )
    assert states(decide(taken)).get("n") == state


# --- marked nodes ---------------------------------------------------------------------------------------


def marked(*pods: str, since: float = NOW - SETTLE_S) -> dict[str, Marked]:
    """Node n was marked when these pods were there."""
    return {"n": Marked(since, frozenset(pods))}


TAINTED = node(taints=[TAINT])
OTHER = node("other", labels={KEEP: "true"})


@pytest.mark.parametrize(
    ("pods", "known", "expected"),
    [
        ((), (), ("end", "")),
        ((helper(),), ("h",), ("empty", "")),
        ((helper(),), (), ("unmark", "default/h has come")),
        ((job(on="n"),), (), ("unmark", "default/p has come")),
        ((job(on="n"),), ("p",), ("unmark", "its cards are in use")),
        ((job("w", 14),), (), ("unmark", "a pending pod could use it")),
        ((job("w", 15),), (), ("end", "")),
        (
            (edited(helper(), annotations={"karpenter.sh/do-not-disrupt": "true"}),),
            ("h",),
            ("unmark", "default/h has karpenter.sh/do-not-disrupt"),
        ),
        ((helper(cpu="9"),), ("h",), ("unmark", "its pods have no room elsewhere any more")),
    ],
)
def test_marked_node_is_looked_at_again(
    pods: tuple[Json, ...], known: tuple[str, ...], expected: tuple[str, str]
) -> None:
    """Whatever has changed, the node stays and may be used again."""
    decided = decide(TAINTED, OTHER, pods=pods, marked=marked(*known))
    (step,) = decided.steps
    assert (step.action, step.why.removeprefix("the node stays: ")) == expected
    assert states(decided)["n"] == ("ending" if step.action in ("end", "empty") else "idle") or pods


def test_pods_of_marked_nodes_must_still_fit_elsewhere_together() -> None:
    """A pod took room of the node that both count on: 8 cores are left for 5 + 5."""
    nodes = [node(name, taints=[TAINT]) for name in ("a", "b")]
    decided = decide(
        *nodes,
        OTHER,
        pods=(helper("x", on="a", cpu="5"), helper("y", on="b", cpu="5")),
        marked={
            "a": Marked(NOW - SETTLE_S, frozenset(["x"])),
            "b": Marked(NOW - SETTLE_S, frozenset(["y"])),
        },
    )
    assert steps(decided) == [("empty", "a"), ("unmark", "b")]


def test_marked_node_waits_until_schedulers_know() -> None:
    """Their last bindings may be on their way."""
    assert not steps(decide(TAINTED, marked=marked(since=NOW - SETTLE_S + 1)))


def test_marked_node_waits_for_its_last_pods() -> None:
    """They still end."""
    ends = helper()
    ends["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert not steps(decide(TAINTED, OTHER, pods=(ends,), marked=marked("h")))


def test_pods_that_were_evicted_from_it_do_not_hold_a_marked_node() -> None:
    """They are pending for a moment, and have room elsewhere; without room they count."""
    again = helper("h2", on="")
    again["status"]["phase"] = "Pending"
    assert steps(decide(TAINTED, OTHER, pods=(again,), marked=marked("h"))) == [("end", "n")]
    assert steps(decide(TAINTED, pods=(again,), marked=marked("h"))) == [("unmark", "n")]


def test_marked_node_stays_when_its_group_would_fall_below_its_min() -> None:
    """Another one was lost meanwhile."""
    decided = decide(TAINTED, marked=marked(), groups=(group("t4", min=1),))
    assert steps(decided) == [("unmark", "n")]


@pytest.mark.parametrize(
    ("instances", "missing", "ends"),
    [
        ((machine(state=InstanceState.ENDING),), {}, True),
        ((), {"sim:///a/i-n": NOW}, True),
        ((), {}, False),
    ],
)
def test_node_is_removed_when_its_instance_has_ended(
    instances: Any, missing: Any, ends: bool
) -> None:
    """The program was killed between the two; what is not read yet is waited for."""
    decided = decide(TAINTED, marked=marked(), instances=instances, missing=missing)
    assert steps(decided) == ([("end", "n")] if ends else [])
    assert all(step.instance is None for step in decided.steps)


# --- repacking ------------------------------------------------------------------------------------------

REPACK = Rules(delay=0, cooldown=0, mode="repack", repack_saves=3.0)
YES = {INTERRUPTIBLE: "true"}


def in_use(*names: str) -> AutoscalerStatus:
    """A status by which nodes have been in use for long."""
    return AutoscalerStatus(nodes={name: ElasticNodeStatus("t4", "in use", LONG) for name in names})


def test_repack_empties_a_node_whose_pods_fit_elsewhere() -> None:
    """4 of 14 units move beside 10; the other node's pods may not move."""
    pods = job("x", 4, on="a", annotations=YES), job("y", 10, on="b")
    decided = decide(node("a"), node("b"), pods=pods, rules=REPACK, status=in_use("a", "b"))
    assert steps(decided) == [("mark", "a")]
    assert decided.steps[0].why == "4 an hour is saved: its pods have room elsewhere"


@pytest.mark.parametrize(
    ("change", "pods"),
    [
        ("mode", (job("x", 4, on="a", annotations=YES), job("y", 10, on="b"))),
        ("saves", (job("x", 4, on="a", annotations=YES), job("y", 10, on="b"))),
        ("", (job("x", 4, on="a"), job("y", 10, on="b"))),
        ("", (job("x", 5, on="a", annotations=YES), job("y", 10, on="b"))),
        ("", (job("x", 4, on="a", annotations=YES), helper(on="a"), job("y", 10, on="b"))),
        ("", (job("x", 4, on="a", annotations=YES), job("y", 10, on="b"), job("w", 15))),
    ],
)
def test_repack_does_nothing_when_a_condition_fails(change: str, pods: tuple[Json, ...]) -> None:
    """Its mode, the saving, interruptible pods, exact room, all pods of the node, nobody pending."""
    rules = {
        "mode": Rules(delay=0, cooldown=0),
        "saves": Rules(delay=0, cooldown=0, mode="repack", repack_saves=4.0),
    }.get(change, REPACK)
    decided = decide(node("a"), node("b"), pods=pods, rules=rules, status=in_use("a", "b"))
    assert not steps(decided)


def test_repack_moves_one_node_at_a_time() -> None:
    """Two nodes must not count on one gap."""
    pods = (
        job("x", 4, on="a", annotations=YES),
        job("y", 4, on="b", annotations=YES),
        job("z", 10, on="c"),
    )
    nodes = node("a"), node("b"), node("c")
    decided = decide(*nodes, pods=pods, rules=REPACK, status=in_use("a", "b", "c"))
    assert steps(decided) == [("mark", "a")]
    tainted = node("a", taints=[TAINT])
    decided = decide(
        tainted,
        *nodes[1:],
        pods=pods,
        rules=REPACK,
        status=in_use("a", "b", "c"),
        marked={"a": Marked(NOW, frozenset(["x"]))},
    )
    assert not steps(decided)


def test_repack_moves_gangs_whole_or_not_at_all() -> None:
    """A member elsewhere that is not interruptible keeps all; else it is evicted, and first."""
    labels = gang_labels("g", 2)
    here = job("here", 4, on="a", annotations=YES, labels=labels)
    nodes = node("a"), node("b")
    for annotations, expected in ((YES, [("mark", "a")]), ({}, [])):
        there = job("there", 4, on="b", annotations=annotations, labels=labels)
        fixed = job("fixed", 1, on="b")
        decided = decide(*nodes, pods=(here, there, fixed), rules=REPACK, status=in_use("a", "b"))
        assert steps(decided) == expected
    there = job("there", 4, on="b", annotations=YES, labels=labels)
    decided = decide(
        node("a", taints=[TAINT]),
        nodes[1],
        pods=(here, there),
        rules=REPACK,
        status=in_use("a", "b"),
        marked={"a": Marked(NOW - SETTLE_S, frozenset(["here"]))},
    )
    (step,) = decided.steps
    assert [each.pod.metadata.name for each in step.removals] == ["there", "here"]


def test_repack_is_given_up_when_the_mode_is_switched_off() -> None:
    """The node may be used again."""
    decided = decide(
        TAINTED, pods=(job(on="n", annotations=YES),), marked=marked("p"), status=in_use("n")
    )
    assert steps(decided) == [("unmark", "n")]


# --- the actor ------------------------------------------------------------------------------------------


def world(*objects: Json, budgets: tuple[Json, ...] = (), **fields: Any) -> World:
    """A cluster whose nodes have been idle for the delay, with their instances."""
    given = {"config": config(), **fields}
    nodes = [each for each in objects if each["kind"] == "Node"]
    names = [each["metadata"]["name"] for each in nodes]
    made = World(FakeCloud(*map(machine, names)), **given)
    for each in objects:
        made.server.put("nodes" if each["kind"] == "Node" else "pods", each)
    for each in budgets:
        made.server.put("poddisruptionbudgets", each)
    made.status = idle(*names)
    return made


def taints(made: World) -> list[Json]:
    """Return the taints of node n."""
    written: list[Json] = made.server.get("nodes", "n")["spec"]["taints"]
    return written


def test_idle_node_is_marked_then_ended_with_its_instance() -> None:
    """Two looks with a pause between."""
    made, actor = world(node()), ScaleInActor()
    assert made.act(actor)["n"].state == "ending"
    assert taints(made) == [TAINT]
    assert made.recorder.notes == [("n", SCALE_IN, "idle for 600 s: the node ends")]
    made.now += 1
    made.act(actor)
    assert made.cloud.ended == []
    made.now += SETTLE_S
    made.act(actor)
    assert made.cloud.ended == ["i-n"]
    assert made.server.all("nodes") == []


def test_pod_that_comes_meanwhile_stays_and_the_taint_goes() -> None:
    """Also one that only the API server knows in the last moment."""
    made, actor = world(node()), ScaleInActor()
    made.act(actor)
    made.now += SETTLE_S
    seen = made.snapshot()
    made.server.put("pods", job(on="n"))
    known, made.snapshot = made.snapshot, lambda: seen  # type: ignore[method-assign]
    made.act(actor)
    assert made.cloud.ended == []
    made.snapshot = known  # type: ignore[method-assign]
    made.act(actor)
    assert taints(made) == []
    assert made.recorder.notes[-1] == ("n", SCALE_IN, "the node stays: default/p has come")
    assert not made.server.ended
    assert made.act(actor)["n"].state == "in use"


def test_pods_without_cards_are_evicted_before_the_node_ends() -> None:
    """It ends when they are gone."""
    made, actor = world(node(), OTHER, helper()), ScaleInActor()
    made.act(actor)
    made.now += SETTLE_S
    made.act(actor)
    assert made.server.ended == [("evict", "h", None)]
    made.act(actor)
    assert made.cloud.ended == []
    made.server.end_pods()
    made.act(actor)
    assert made.cloud.ended == ["i-n"]


def test_pod_stays_when_it_returns_to_a_node_whose_taint_it_tolerates() -> None:
    """Otherwise it would be evicted again and again."""
    made, actor = world(node(), OTHER, helper()), ScaleInActor()
    made.act(actor)
    made.now += SETTLE_S
    made.act(actor)
    made.server.end_pods()
    made.server.put("pods", helper("h2"))
    made.act(actor)
    assert taints(made) == []
    assert len(made.server.ended) == 1


def test_node_stays_when_a_person_removes_the_taint() -> None:
    """It is idle for the delay again before it is marked another time."""
    made, actor = world(node()), ScaleInActor()
    made.act(actor)
    made.now += 1
    made.act(actor)
    free = made.server.get("nodes", "n")
    made.server.put("nodes", {**free, "spec": {**free["spec"], "taints": []}})
    made.now += SETTLE_S
    status = made.act(actor)["n"]
    assert (status.state, status.until) == ("idle", made.now + 600)
    assert made.cloud.ended == []


def test_node_is_not_ended_before_the_cluster_shows_its_taint() -> None:
    """A snapshot that is late shows no newcomers either."""
    made, actor = world(node()), ScaleInActor()
    late = made.snapshot()
    made.act(actor)
    made.snapshot = lambda: replace(late, now=made.now)  # type: ignore[method-assign]
    made.now += SETTLE_S
    assert made.act(actor)["n"].state == "ending"
    assert made.cloud.ended == []
    assert len(made.server.writes) == 1


def test_nothing_is_done_when_another_replica_leads() -> None:
    """Nor after an await."""
    made = world(node())
    made.leads = False
    made.act(ScaleInActor())
    assert not made.server.writes


def test_every_interruption_converges_to_the_same_end() -> None:
    """Kill the program before each of its writes; another leader goes on and remembers nothing."""
    killed = 0
    for kill_after in range(20):
        made = world(node(), OTHER, helper())
        actor, made.kill_after = ScaleInActor(), kill_after
        for _ in range(8):
            try:
                made.act(actor)
            except Killed:
                killed += 1
                actor, made.kill_after = ScaleInActor(), None
            made.server.end_pods()
            made.now += SETTLE_S + 1
            if not any(each["metadata"]["name"] == "n" for each in made.server.all("nodes")):
                break
        assert made.cloud.ended == ["i-n"]
        assert [each["metadata"]["name"] for each in made.server.all("nodes")] == ["other"]
        assert [each["metadata"]["name"] for each in made.server.all("pods")] == []
        if made.kill_after:
            break
    # Taint, eviction, end of the instance, deletion of the Node.
    assert killed == 4


def test_killed_between_instance_and_node_leaves_a_node_that_the_next_leader_removes() -> None:
    """The cloud lists the instance as ending, or no longer."""
    for state in (InstanceState.ENDING, None):
        made = world(node(taints=[TAINT]))
        made.cloud.listed.clear()
        if state is not None:
            made.cloud.listed["i-n"] = machine(state=state)
        made.act(ScaleInActor())
        assert made.server.all("nodes") == []
        assert made.cloud.ended == []


# --- whatever happens -----------------------------------------------------------------------------------

_PODS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", ""]),
        st.integers(1, 15),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    pods=_PODS,
    arrivals=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["a", "b", "c"])), max_size=2),
    mode=st.sampled_from(["idle", "repack"]),
    least=st.integers(0, 2),
    kill=st.none() | st.integers(0, 8),
)
def test_no_node_ends_that_a_pod_holds_and_no_pending_pod_loses_its_room(
    pods: list[tuple[str, int, bool, bool]],
    arrivals: list[tuple[int, str]],
    mode: Any,
    least: int,
    kill: int | None,
) -> None:
    """Pods arrive at any moment, and the program is killed at any write."""
    objects = [node("a"), node("b"), node("c")]
    used: dict[str, int] = {}
    for number, (on, units, interruptible, cards) in enumerate(pods):
        name, annotations = f"p{number}", YES if interruptible else {}
        if not cards:
            objects.append(helper(name, on=on or "a", annotations=annotations))
            continue
        if on and used.get(on, 0) + units > 14:
            continue
        used[on] = used.get(on, 0) + units if on else 0
        objects.append(job(name, units, on=on, annotations=annotations))
    rules = Rules(delay=0, cooldown=0, mode=mode)
    made = world(*objects, config=config(group("t4", min=least), scale_in=rules))
    made.status, made.kill_after = in_use("a", "b", "c"), kill
    pending = [units for on, units, _, cards in pods if cards and not on]
    actor = ScaleInActor()
    for turn in range(8):
        for when, where in arrivals:
            there = [each["metadata"]["name"] for each in made.server.all("nodes")]
            if when == turn and where in there and used.get(where, 0) + 1 <= 14:
                made.server.put("pods", job(f"new{turn}{where}", 1, on=where))
        before = {each["spec"].get("nodeName") for each in made.server.all("pods")}
        ended = len(made.cloud.ended)
        try:
            made.act(actor)
        except Killed:
            actor, made.kill_after = ScaleInActor(), None
        for name in made.cloud.ended[ended:]:
            assert name.removeprefix("i-") not in before
        made.server.end_pods()
        made.now += SETTLE_S + 1
    left = {each["metadata"]["name"] for each in made.server.all("nodes")}
    assert len(left) >= least
    if len(left) < len("abc"):
        # An empty node has 14 units.
        assert not [units for units in pending if units <= 14]
