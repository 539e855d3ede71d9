"""Gangs and racks on a cluster: node labels, pod annotations, and what members are told."""

from typing import Any

import msgspec
import pytest

from fenka.cluster.compact import CompactPod
from fenka.cluster.objects import Pod
from fenka.cluster.pod_groups import (
    PREFERRED_TOPOLOGY,
    REQUIRED_TOPOLOGY,
    TOPOLOGY_ANNOTATIONS,
    UNCONSTRAINED_TOPOLOGY,
    gang_proximity,
)
from fenka.cluster.queue_snapshot import InvalidLevels, SchedulerOptions, check_levels, decode
from fenka.core.backfill import complete
from fenka.core.errors import INVALID_INPUT
from fenka.core.topology.domains import Topology
from fenka.dialects.base import InvalidRecord
from tests.builders import T4_MIB, a_node, a_pod, gang_labels, node_json, on_card, pod, units
from tests.cli.command import fenka
from tests.core.builders import device
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import make, pending

ZONE, RACK = LEVELS = ("topology.kubernetes.io/zone", "example.com/rack")
RACKS = {"a": "r1", "b": "r2", "c": "r2", "d": "r3"}


def racks(levels: tuple[str, ...] = LEVELS, **sizes: int) -> ExtenderHarness:
    """Return nodes of as many T4 in racks of one zone: a alone, b with c, and d alone."""
    nodes = [
        node_json(name, *[T4_MIB] * sizes.get(name, 1), labels={ZONE: "z", RACK: rack})
        for name, rack in RACKS.items()
    ]
    cluster = ExtenderHarness(nodes)
    cluster.state.topology_levels = levels
    return cluster


def gang(cluster: ExtenderHarness, size: int, units: int, **annotations: str) -> list[Pod]:
    """Bring the pods of a gang with these annotations: required, preferred or unconstrained."""
    names = dict(zip(("required", "preferred", "unconstrained"), TOPOLOGY_ANNOTATIONS, strict=True))
    given = {names[key]: value for key, value in annotations.items()}
    return [cluster.put(member(f"g-{number}", size, units, given)) for number in range(size)]


def member(name: str, size: int, units: int, annotations: dict[str, str], **rest: Any) -> Pod:
    """Return a pod of gang g."""
    labels = gang_labels("g", size)
    return a_pod(name, units, uid=name, labels=labels, annotations=annotations, **rest)


def placed(cluster: ExtenderHarness, pods: list[Pod]) -> str:
    """Return the nodes of the members."""
    return " ".join(node for each in pods for node in cluster.filter(each))


@pytest.mark.parametrize(
    ("levels", "annotations", "expected"),
    [
        # Two of 14 units: r2 has two cards. Binpack would take a and b.
        (LEVELS, {}, "b c"),
        (LEVELS, {"preferred": RACK}, "b c"),
        (LEVELS, {"required": RACK}, "b c"),
        # All are in one zone; in it the fewest racks count.
        (LEVELS, {"required": ZONE}, "b c"),
        (LEVELS, {"unconstrained": "true"}, "a b"),
        # Another word is none.
        (LEVELS, {"unconstrained": "yes"}, "b c"),
        # Without levels the annotations are Kueue's alone.
        ((), {"required": RACK}, "a b"),
        # A level that is unknown cannot be preferred, so the innermost is.
        (LEVELS, {"preferred": "example.com/row"}, "b c"),
        # The requirement counts first.
        (LEVELS, {"required": RACK, "unconstrained": "true"}, "b c"),
    ],
)
def test_gang_is_placed_in_one_rack(
    levels: tuple[str, ...], annotations: dict[str, str], expected: str
) -> None:
    """Four nodes of one card each, and a gang of two."""
    cluster = racks(levels)
    assert placed(cluster, gang(cluster, 2, 14, **annotations)) == expected


def test_gang_waits_when_no_rack_has_room() -> None:
    """Three of 14 units: r2 has two cards. Preferred, they are on r2 and the first of the others."""
    cluster = racks()
    pods = gang(cluster, 3, 14, required=RACK)
    assert cluster.why(pods[0]) == (
        "no room for all 3 pods of gang g: no GPU fits: 2 of 2 have too little memory; all must be in one "
        "example.com/rack, and r2 has the most room: 2 of the gang's 3 would fit together; position 1 of 1 "
        "in the queue"
    )
    assert cluster.gangs.reserved() == {}
    cluster = racks()
    assert placed(cluster, gang(cluster, 3, 14, preferred=RACK)) == "a b c"


def test_gang_is_told_which_levels_there_are() -> None:
    """kube-scheduler does not retry the pod until it changes."""
    cluster = racks()
    pods = gang(cluster, 2, 1, required="example.com/row\nx" + 100 * "y")
    result = cluster.extender.filter(pods[0], list(RACKS))
    assert set(result.unresolvable) == set(RACKS)
    sentence = result.unresolvable["a"]
    assert sentence.startswith(f"annotation {REQUIRED_TOPOLOGY} is 'example.com/row\\nx")
    assert sentence.endswith(f"y', no topology level: write one of {ZONE}, {RACK}")
    assert len(sentence) < 250
    # Nor has the queue an entry for it.
    cluster.queue.set_pod(pods[0])
    assert not cluster.queue.state.snapshot.entries


def test_replaced_member_goes_to_the_rack_of_the_others() -> None:
    """One of two runs on c. The rack has b, and a is the first by name."""
    cluster = racks()
    for required in ({}, {REQUIRED_TOPOLOGY: RACK}):
        cluster.put(member("g-0", 2, 14, {**on_card(0, 14), **required}, node="c"))
        second = cluster.put(member("g-1", 2, 14, required))
        assert cluster.filter(second) == ["b"]
        cluster.gone("g-0", "g-1")
        cluster.gangs.expire()
    # With b taken, a member that requires the rack waits, and another one goes elsewhere.
    cluster.holds("x", 0, 14, node="b")
    cluster.put(member("g-0", 2, 14, on_card(0, 14), node="c"))
    assert cluster.filter(cluster.put(member("g-1", 2, 14, {}))) == ["a"]
    cluster.gone("g-1")
    cluster.gangs.expire()
    third = cluster.put(member("g-2", 2, 14, {REQUIRED_TOPOLOGY: RACK}))
    assert "r2 has the most room: 0 of the gang's 1" in cluster.why(third)


def test_pod_that_joins_a_started_gang_keeps_to_its_rack() -> None:
    """The gang needs one pod, which runs on c. The next one is placed like a single pod, but in r2."""
    cluster = racks()
    required = {REQUIRED_TOPOLOGY: RACK}
    cluster.put(member("g-0", 1, 14, {**on_card(0, 14), **required}, node="c"))
    joining = cluster.put(member("g-1", 1, 14, required))
    result = cluster.extender.filter(joining, list(RACKS))
    sentence = f"its gang is in another {RACK}, and must be in one"
    assert result.fitting == ["b"]
    assert {name: result.failed[name] for name in "ad"} == {"a": sentence, "d": sentence}
    cluster.holds("x", 0, 14, node="b")
    result = cluster.extender.filter(joining, list(RACKS))
    assert not result.fitting
    assert set(result.failed) == set(RACKS)


def test_pods_are_evicted_only_in_the_rack_that_gets_room() -> None:
    """Three of 14 units never fit one rack of two, whoever is evicted. Two do, and evictions elsewhere would
    be for nothing."""
    cluster = racks()
    for name in RACKS:
        cluster.holds(f"low-{name}", 0, 14, node=name)
    three = gang(cluster, 3, 14, required=RACK)
    assert not cluster.gangs.nodes_after_preemption(three[0], cluster.names, lambda *_: True)
    cluster.gone(*(each.metadata.uid for each in three))
    two = gang(cluster, 2, 14, required=RACK)
    for each in two:
        each.spec.priority = 5
    victims = {name: [f"low-{name}"] for name in RACKS}
    assert set(cluster.extender.preempt(two[0], victims, {})) == {"b", "c"}
    # Without the requirement any of them helps.
    cluster.gone(*(each.metadata.uid for each in two))
    anywhere = gang(cluster, 2, 14)
    for each in anywhere:
        each.spec.priority = 5
    assert set(cluster.extender.preempt(anywhere[0], victims, {})) == set(RACKS)


def test_queue_reserves_one_rack() -> None:
    """a is free at 100, b at 200, c at 300 and d at 150: r2 is the only rack with two cards."""
    cluster = racks()
    for name, at in {"a": 100, "b": 200, "c": 300, "d": 150}.items():
        cluster.holds(f"h-{name}", 0, 14, node=name, runs=at, started=0)
    pods = [
        pending(
            f"g-{number}",
            14,
            labels=gang_labels("g", 2),
            annotations={REQUIRED_TOPOLOGY: RACK},
        )
        for number in range(2)
    ]
    cluster.set(*pods)
    complete(cluster.queue.state.schedule(cluster.gangs.reserved(), 1e9))
    (entry,) = cluster.queue.state.snapshot.entries
    assert entry.reservation is not None
    assert entry.reservation.cards == {device(0, "b"), device(0, "c")}


def test_topology_is_the_same_object_until_labels_change() -> None:
    """It is part of keys of caches, so an equal one must not replace it."""
    cluster = racks()
    topology = cluster.state.topology()
    cluster.state.set_node(a_node("a", T4_MIB, labels={ZONE: "z", RACK: "r1", "other": "x"}))
    assert cluster.state.topology() is topology
    cluster.state.set_node(a_node("a", T4_MIB, labels={ZONE: "z", RACK: "r2"}))
    changed = cluster.state.topology()
    assert changed is not None
    assert changed.domain("a", 1) == ("z", "r2")
    cluster.state.forget_node("a")
    forgotten = cluster.state.topology()
    assert forgotten is not None
    assert forgotten.domain("a", 1) is None


def test_nodes_of_a_gang_follow_its_pods() -> None:
    """A label that changes while a pod runs moves it nowhere; nothing is left at the end."""
    cluster = racks()
    cluster.put(member("g-0", 2, 7, on_card(0, 7), node="c"))
    cluster.put(member("g-1", 2, 7, on_card(0, 7), node="c"))
    assert cluster.state.gang_nodes("default/g") == {"c"}
    cluster.put(a_pod("g-1", 7, uid="g-1", node="c", annotations=on_card(0, 7)))
    assert cluster.state.gang_nodes("default/g") == {"c"}
    cluster.gone("g-0")
    assert cluster.state.gang_nodes("default/g") == frozenset()
    cluster.gone("g-1")
    assert cluster.state._gang_nodes == {}
    assert cluster.state._gangs == {}


def test_members_that_disagree_get_the_innermost_required_level() -> None:
    """As a launcher's pods differ from the workers'."""
    topology = Topology(LEVELS, {})

    def wanted(*texts: tuple[str, str]) -> tuple[bool, int] | None:
        pods = [
            make(f"p{number}", 1, annotations=dict([text])) for number, text in enumerate(texts)
        ]
        proximity = gang_proximity(pods, topology)
        return None if proximity is None else (proximity.required, proximity.level)

    assert wanted() == (False, 1)
    assert wanted((PREFERRED_TOPOLOGY, ZONE)) == (False, 0)
    assert wanted((PREFERRED_TOPOLOGY, ZONE), (PREFERRED_TOPOLOGY, RACK)) == (False, 1)
    assert wanted((REQUIRED_TOPOLOGY, ZONE), (PREFERRED_TOPOLOGY, RACK)) == (True, 0)
    assert wanted((REQUIRED_TOPOLOGY, ZONE), (REQUIRED_TOPOLOGY, RACK)) == (True, 1)
    assert wanted((UNCONSTRAINED_TOPOLOGY, "true")) is None
    assert wanted((UNCONSTRAINED_TOPOLOGY, "true"), (PREFERRED_TOPOLOGY, ZONE)) == (False, 0)
    with pytest.raises(InvalidRecord, match=r"example\.com/row"):
        wanted((REQUIRED_TOPOLOGY, "example.com/row"))
    assert gang_proximity([make("p", 1, annotations={REQUIRED_TOPOLOGY: "x"})], None) is None


def test_annotations_of_topology_are_kept_in_memory() -> None:
    """The scheduler drops what it does not read."""
    given = {REQUIRED_TOPOLOGY: RACK, "other": "x"}
    kept = msgspec.convert(pod("p", units(1), annotations=given), CompactPod)
    assert dict(kept.metadata.annotations) == {REQUIRED_TOPOLOGY: RACK}


@pytest.mark.parametrize(
    ("levels", "why"),
    [
        (("rack", "rack"), "rack is named twice"),
        (("",), "'' is no name of a label"),
        (("a b",), "'a b' is no name of a label"),
        (("/rack",), "'/rack' is no name of a label"),
        (("example.com/rack\n",), "is no name of a label"),
        (("x" * 64,), "is no name of a label"),
        (tuple(f"l{number}" for number in range(17)), "17 topology levels are too many"),
    ],
)
def test_levels_are_refused_when_no_node_can_have_them(levels: tuple[str, ...], why: str) -> None:
    """One sentence, before anything starts."""
    with pytest.raises(InvalidLevels, match=why):
        check_levels(levels)


def test_levels_are_published_with_the_other_options() -> None:
    """So screens, what-ifs and plans place gangs as the scheduler does; an older one publishes none."""
    options = SchedulerOptions(topology_levels=LEVELS)
    assert decode(options.encode()) == options
    assert decode("{}").topology_levels == ()
    with pytest.raises(InvalidRecord, match="named twice"):
        decode('{"topology_levels": ["a", "a"]}')


@pytest.mark.parametrize("words", [["scheduler"], ["autoscaler", "--config", "none.yaml"]])
def test_programs_refuse_wrong_levels_before_they_start(words: list[str]) -> None:
    """No cluster is asked."""
    result = fenka(*words, "--topology-level", "a b")
    assert result.exit_code == INVALID_INPUT
    assert "topology level 'a b' is no name of a label" in result.stderr
