"""Nodes that are taken back: who is told, which pods end when, and what interrupted passes leave."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.autoscaler.reclaim import RECLAIM, Reclaimer, Removal, decide_reclaims
from fenka.cloud.port import InstanceState, ReclaimNotice
from fenka.cluster.autoscaling import (
    CAPACITY,
    ENDING,
    GROUP,
    ORDER,
    RECLAIM_AT,
    RECLAIMED,
    OrderRecord,
    Slot,
    encode_time,
)
from tests.autoscaler.evictions import FakeCloud, Killed, World
from tests.autoscaler.snapshots import NOW, config, elastic_node, group, instance, offer, snapshot
from tests.builders import T4_MIB, Json, gang_labels, on_card, pod_json
from tests.fakes.api_server import Refusal

SPOT = group("spot", capacity="spot")
OFFER = offer("spot", capacity="spot").key
AT = NOW + 300
OWNED = [{"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}]


def node(name: str = "n", *, at: float | None = AT, own: bool = True, **given: Any) -> Json:
    """A spot node that is taken back at a time."""
    labels = {GROUP: "spot", CAPACITY: "spot", ORDER: "spot-1"} if own else {}
    annotations = {} if at is None else {RECLAIM_AT: encode_time(at)}
    return elastic_node(
        name,
        T4_MIB,
        provider_id=f"sim:///a/i-{name}",
        labels=labels,
        annotations={**annotations, **given.pop("annotations", {})},
        **given,
    )


def machine(name: str = "n", **fields: Any) -> Any:
    """The instance of a node."""
    return instance(f"i-{name}", "spot-1", offer=OFFER, **fields)


def pod(name: str = "p", *, on: str = "n", grace: int | None = 30, **given: Any) -> Json:
    """A running pod with 4 units."""
    made = pod_json(name, 4, node=on, annotations=on_card(0, 4), phase="Running", uid=name, **given)
    made["metadata"]["ownerReferences"] = OWNED
    if grace is not None:
        made["spec"]["terminationGracePeriodSeconds"] = grace
    return made


def ending(made: Json, at: float) -> Json:
    """Return the pod as it is being deleted, until a time."""
    made["metadata"]["deletionTimestamp"] = encode_time(at)
    return made


def removals(*pods: Json, now: float = NOW, **fields: Any) -> list[Removal]:
    """Return what is decided about the pods of node n."""
    nodes = fields.pop("nodes", (node(),))
    instances = fields.pop("instances", (machine(),))
    seen = snapshot(
        nodes=nodes, pods=pods, now=now, config=config(SPOT), instances=instances, **fields
    )
    (reclaim,) = decide_reclaims(seen).reclaims
    return list(reclaim.removals)


@pytest.mark.parametrize(
    ("left", "own", "grace", "forced"),
    [
        (300, 30, 30, False),
        (300, None, 30, False),  # Kubernetes' default.
        (300, 0, 1, False),  # 0 would delete the object while the program runs.
        (300, 250, 250, False),
        (41, 30, 30, False),
        (40, 30, 30, True),  # 40 - 30 - 10 = 0.
        (300, 290, 290, True),  # 300 - 290 - 10 = 0.
        (300, 3600, 290, True),  # What is left less 10 s.
        (120, 3600, 110, True),
        (11, 30, 1, True),
        (5, 30, 1, True),
        (-60, 30, 1, True),
    ],
)
def test_pods_have_the_smaller_of_their_grace_and_what_is_left(
    left: float, own: int | None, grace: int, forced: bool
) -> None:
    """Budgets are respected until `time - own grace - 10 s`."""
    (removal,) = removals(pod(grace=own), nodes=(node(at=NOW + left),))
    assert (removal.grace_s, removal.forced) == (grace, forced)


@pytest.mark.parametrize(
    ("ends_in", "grace"),
    [(30, None), (290, None), (291, 290), (600, 290)],
)
def test_pod_that_ends_already_is_hurried_when_it_would_not_end_in_time(
    ends_in: float, grace: int | None
) -> None:
    """The node ends in 300 s: pods have 290."""
    decided = removals(ending(pod(grace=600), NOW + ends_in))
    assert [each.grace_s for each in decided] == ([] if grace is None else [grace])


def test_pod_is_not_hurried_again_when_it_ends_in_a_second() -> None:
    """Also when the node should be gone already."""
    now = AT + 60
    assert not removals(ending(pod(), now + 1), now=now)
    assert removals(ending(pod(), now + 30), now=now)


def test_pods_that_belong_to_the_node_stay() -> None:
    """DaemonSets' pods and the kubelet's own end with it, and finished ones hold nothing."""
    daemon, mirror, finished = pod("daemon"), pod("mirror"), pod("finished")
    daemon["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "d", "uid": "d"}]
    mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    finished["status"]["phase"] = "Succeeded"
    assert not removals(daemon, mirror, finished)


def test_gang_ends_whole_and_its_member_on_the_node_last() -> None:
    """If the pass is interrupted, that member still says that the others have to end."""
    labels = gang_labels("g", 3)
    pods = pod("here", labels=labels), pod("there", on="m", labels=labels), pod("other", on="m")
    decided = removals(*pods, nodes=(node(), node("m", at=None)))
    assert [each.pod.metadata.name for each in decided] == ["there", "here"]
    assert [each.grace_s for each in decided] == [None, 30]


def test_gang_elsewhere_stays_when_its_member_on_the_node_ends_already() -> None:
    """It may be the next attempt of the gang."""
    labels = gang_labels("g", 2)
    here = ending(pod("here", labels=labels), NOW + 30)
    assert not removals(
        here, pod("again", on="m", labels=labels), nodes=(node(), node("m", at=None))
    )


@pytest.mark.parametrize(
    ("own", "notice", "at"),
    [(None, AT, AT), (AT, AT + 60, AT), (AT + 60, AT, AT), (AT, None, AT)],
)
def test_earliest_notice_counts(own: float | None, notice: float | None, at: float) -> None:
    """The annotation, or what the provider sees."""
    notices = (
        []
        if notice is None
        else [
            ReclaimNotice("i-n", notice, "market"),
            ReclaimNotice("i-x", NOW, ""),
        ]
    )
    seen = snapshot(
        nodes=(node(at=own),), config=config(SPOT), instances=(machine(),), notices=notices
    )
    (reclaim,) = decide_reclaims(seen).reclaims
    assert reclaim.takeback.at == at
    assert reclaim.takeback.noticed


def test_nothing_is_decided_when_there_is_no_notice() -> None:
    """Neither for nodes that others started."""
    seen = snapshot(
        nodes=(node(at=None), node("m", at=None, own=False)),
        pods=(pod(),),
        config=config(SPOT),
        instances=(machine(),),
    )
    assert not decide_reclaims(seen).reclaims


def test_nodes_of_others_are_taken_back_too_when_their_annotation_says_so() -> None:
    """Such as those of a group that somebody else scales: pods leave, and no offer is backed off."""
    seen = snapshot(nodes=(node(own=False),), pods=(pod(),), config=config(SPOT))
    (reclaim,) = decide_reclaims(seen).reclaims
    assert reclaim.announce
    assert reclaim.backs_off is None
    assert len(reclaim.removals) == 1


def lost(ready: str, *, missing: bool = True, **fields: Any) -> Any:
    """Return what is decided of a node without notice."""
    labels = {"node.kubernetes.io/instance-type": "t4.x", "topology.kubernetes.io/zone": "a"}
    made = node(at=None, ready=ready, taints=fields.pop("taints", []))
    made["metadata"]["labels"] |= labels
    seen = snapshot(
        nodes=(made,),
        pods=(pod(),),
        config=config(SPOT),
        missing={"sim:///a/i-n": NOW} if missing else {},
        **fields,
    )
    return decide_reclaims(seen).reclaims


def test_lost_node_is_taken_back_without_grace_when_neither_cloud_nor_kubelet_has_it() -> None:
    """Its pods' objects go at once, so that controllers make them anew."""
    (reclaim,) = lost("Unknown")
    assert not reclaim.takeback.noticed
    assert reclaim.backs_off == OFFER
    assert [(each.grace_s, each.forced) for each in reclaim.removals] == [(0, True)]
    assert reclaim.takeback.sentence(NOW) == "spot instance is taken back without notice"


def test_node_is_not_lost_when_it_answers_or_was_ended_here() -> None:
    """The cloud's list may be late, and scale-in ends nodes itself."""
    assert not lost("True")
    assert not lost("Unknown", missing=False)
    assert not lost("Unknown", taints=[{"key": ENDING, "effect": "NoSchedule"}])


def test_node_is_lost_when_the_cloud_ends_it() -> None:
    """Its kubelet still runs, so the programs are told."""
    (reclaim,) = lost("True", instances=(machine(state=InstanceState.ENDING),), missing=False)
    assert [(each.grace_s, each.forced) for each in reclaim.removals] == [(1, True)]


@given(
    left=st.integers(-600, 4000),
    own=st.none() | st.integers(0, 4000),
    steps=st.lists(st.floats(0.1, 120), min_size=1, max_size=30),
    blocked=st.booleans(),
)
def test_every_pod_ends_before_its_node_whatever_its_budget_says(
    left: int, own: int | None, steps: list[float], blocked: bool
) -> None:
    """Play passes at any times: no pod has a deadline after the node's end, if a pass came in time."""
    at, now, ends = NOW + left, NOW, None
    for step in steps:
        made = pod(grace=own)
        if ends is not None:
            made = ending(made, ends)
        decided = removals(made, nodes=(node(at=at),), now=now)
        for removal in decided:
            assert removal.grace_s is not None
            assert removal.grace_s >= 1
            assert removal.grace_s <= max(30 if own is None else own, 1)
            if removal.forced or not blocked:
                ends = min(now + removal.grace_s, ends or 1e18)
                # API times are in whole seconds.
                assert ends <= max(at - 10, now + 1) + 1
        now += step
    if now - step >= at - 10:
        assert ends is not None


def test_node_is_not_lost_when_its_order_ended_it() -> None:
    """It was of half a gang, or not ready in time. An order also says so of what the cloud has ended."""
    order = OrderRecord(
        group="spot",
        type="t4.x",
        zone="a",
        capacity="spot",
        slots=(Slot(state="ending", instance="i-n", node="n"),),
        state="ending",
        price=3.0,
        written_at=NOW,
    )
    fields: dict[str, Any] = {
        "instances": (machine(state=InstanceState.ENDING),),
        "orders": {"spot-1": order},
        "missing": False,
    }
    assert not lost("True", **fields)
    assert lost("True", taints=[{"key": RECLAIMED, "effect": "NoSchedule"}], **fields)


# --- the actor ------------------------------------------------------------------------------------------


def world(*pods: Json, **given: Any) -> World:
    """A cluster with one node that is taken back, and pods."""
    made = World(FakeCloud(machine()), config=config(SPOT))
    made.server.put("nodes", node(**given))
    for each in pods:
        made.server.put("pods", each)
    return made


def taints(made: World, name: str = "n") -> list[Json]:
    """Return the taints of a node."""
    found: list[Json] = made.server.get("nodes", name)["spec"]["taints"]
    return found


def test_notice_taints_the_node_tells_people_and_evicts_pods() -> None:
    """The offer is backed off, and a second pass does nothing more."""
    made = world(pod())
    states = made.act(Reclaimer())
    assert taints(made) == [{"key": RECLAIMED, "effect": "NoSchedule"}]
    sentence = f"spot instance is taken back at {encode_time(AT)[11:]}, in 300 s"
    assert made.recorder.notes == [("n", RECLAIM, sentence), ("p", RECLAIM, sentence)]
    assert made.server.ended == [("evict", "p", 30)]
    (failed,) = made.orders.records.values()
    assert (failed.group, failed.failure, failed.state) == ("spot", "taken back", "failed")
    assert (states["n"].state, states["n"].since, states["n"].until) == ("taken back", NOW, AT)
    made.now += 5
    assert made.act(Reclaimer())["n"].since == NOW
    assert len(made.server.ended) == 1
    assert len(made.orders.records) == 1
    assert len(made.recorder.notes) == 2


def test_other_taints_are_kept_with_fields_that_fenka_does_not_know() -> None:
    """A list is replaced as a whole."""
    other = {"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
    made = world(taints=[other])
    made.act(Reclaimer())
    assert taints(made)[0] == other
    node_ = made.server.get("nodes", "n")
    del node_["metadata"]["annotations"][RECLAIM_AT]
    made.server.put("nodes", node_)
    made.act(Reclaimer())
    assert taints(made) == [other]
    assert made.recorder.notes[-1][2] == "the take-back was withdrawn"


def test_budget_holds_a_pod_until_its_grace_begins() -> None:
    """At 300 - 30 - 10 = 260 s it is deleted whatever the budget says."""
    made = world(pod(labels={"app": "a"}))
    budget = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}},
        "status": {"disruptionsAllowed": 0},
    }
    made.server.put("poddisruptionbudgets", budget)
    for elapsed in (0, 5, 259):
        made.now = NOW + elapsed
        made.act(Reclaimer())
        assert made.server.ended == []
    made.now = NOW + 260
    made.act(Reclaimer())
    assert made.server.ended == [("delete", "p", 30)]


def test_deleted_pod_says_that_its_end_is_a_disruption() -> None:
    """A Job that restarts after disruptions does not count a failure."""
    made = world(pod(), at=NOW + 20)
    made.act(Reclaimer())
    (condition,) = made.server.get("pods", "p", "default")["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "DisruptionTarget",
        "True",
        RECLAIM,
    )
    assert made.server.ended == [("delete", "p", 10)]


@pytest.mark.parametrize("missing_right", [True, False])
def test_pod_of_a_lost_node_has_failed_before_it_is_removed(missing_right: bool) -> None:
    """A Job waits for that; a status that cannot be written keeps nothing."""
    made = world(pod(), at=None, ready="Unknown")
    made.cloud.listed["i-n"] = machine(state=InstanceState.ENDING)
    phases = list[tuple[str, bool]]()
    known = made.server.handle

    def handle(method: str, path: str, *rest: Any) -> Json:
        if path.endswith("/status"):
            meta = made.server.get("pods", "p", "default")["metadata"]
            phases.append((rest[1]["status"].get("phase", ""), "deletionTimestamp" in meta))
            if missing_right:
                raise Refusal(403, "Forbidden", "no")
        return known(method, path, *rest)

    made.server.handle = handle  # type: ignore[method-assign, assignment]
    made.act(Reclaimer())
    # The chart's policy lets only a pod fail that is being deleted.
    assert set(phases) == {("", False), ("Failed", True)}
    assert made.server.ended == [("delete", "p", 1), ("delete", "p", 0)]
    assert not made.server.all("pods")


def test_gang_waits_for_a_budget_whole_until_the_members_grace_begins() -> None:
    """Half of it would have lost its work for nothing."""
    labels = {**gang_labels("g", 2), "app": "a"}
    made = world(pod("here", labels=gang_labels("g", 2)), pod("there", on="m", labels=labels))
    made.server.put("nodes", node("m", at=None))
    budget = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}},
        "status": {"disruptionsAllowed": 0},
    }
    made.server.put("poddisruptionbudgets", budget)
    made.act(Reclaimer())
    assert made.server.ended == []
    made.now = NOW + 260
    made.act(Reclaimer())
    assert made.server.ended == [("delete", "here", 30)]


def test_pods_of_the_same_name_stay_when_they_are_others() -> None:
    """A controller made them anew between the snapshot and the eviction."""
    made = world(pod())
    seen = made.snapshot()
    made.server.put("pods", {**pod(), "metadata": {**pod()["metadata"], "uid": "new"}})
    made.snapshot = lambda: seen  # type: ignore[method-assign]
    made.act(Reclaimer())
    assert made.server.ended == []


def test_nothing_is_done_when_another_replica_leads() -> None:
    """It does all of this."""
    made = world(pod())
    made.leads = False
    made.act(Reclaimer())
    assert not made.server.writes
    assert not made.server.ended


def test_event_says_that_the_annotation_is_no_time() -> None:
    """And nothing is done."""
    made = world(pod(), at=None, annotations={RECLAIM_AT: "soon"})
    made.act(Reclaimer())
    ((name, _, note),) = made.recorder.notes
    assert name == "n"
    assert "'soon' is no time: write it as 2026-01-31T18:02:00Z" in note
    assert not made.server.ended


def test_every_interrupted_pass_is_completed_by_the_next_one() -> None:
    """Kill the program before each of its writes; the end is the same, and the offer fails once."""
    labels = gang_labels("g", 2)
    for kill_after in range(20):
        made = world(pod("here", labels=labels), pod("there", on="m", labels=labels), pod("alone"))
        made.server.put("nodes", node("m", at=None))
        made.kill_after = kill_after
        try:
            made.act(Reclaimer())
        except Killed:
            pass
        else:
            break
        made.kill_after = None
        made.act(Reclaimer())
        assert {name for _, name, _ in made.server.ended} == {"here", "there", "alone"}
        assert taints(made) == [{"key": RECLAIMED, "effect": "NoSchedule"}]
        assert len(made.orders.records) == 1
    # Taint, ConfigMap, three evictions.
    assert kill_after == 5
