"""Filter, queue and `why` on random clusters: they answer the same question, and must agree."""

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fenka.cluster.explain import explain, explain_nodes
from fenka.cluster.node_admission import ineligibility_reasons
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.dialects import gpushare
from tests.builders import T4_MIB, Json, node_json
from tests.core.builders import device
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import UNSCHEDULABLE, make

CARDS = 2
UNITS = 14

NODES = st.lists(
    st.fixed_dictionaries(
        {
            "unschedulable": st.sampled_from([False, False, False, True]),
            "taints": st.sampled_from(
                [[], [], [{"key": "team", "value": "a", "effect": "NoSchedule"}]]
            ),
            "annotations": st.sampled_from(["", "", "0", "0,1"]).map(
                lambda cards: {"fenka.io/cordoned": cards}
            ),
            "labels": st.sampled_from([{}, {"zone": "east"}]),
        }
    ),
    min_size=1,
    max_size=3,
)
HOLDERS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, UNITS)), max_size=8)
PENDING = st.lists(
    st.fixed_dictionaries(
        {
            "units": st.integers(1, UNITS + 1),
            "cards": st.sampled_from([1, 1, 1, 2, 3]),
            "zone": st.sampled_from(["", "", "east"]),
            "tolerates": st.booleans(),
            "priority": st.sampled_from([None, 0, 5]),
            "namespace": st.sampled_from(["a", "b"]),
        }
    ),
    min_size=1,
    max_size=4,
)


def pending(number: int, wanted: Json) -> Pod:
    """Return a pod that kube-scheduler has found no node for."""
    spec: Json = {}
    if wanted["zone"]:
        spec["nodeSelector"] = {"zone": wanted["zone"]}
    if wanted["tolerates"]:
        spec["tolerations"] = [{"key": "team", "operator": "Exists"}]
    labels = {gpushare.COUNT: str(wanted["cards"])} if wanted["cards"] > 1 else {}
    return make(
        f"p{number}",
        wanted["units"],
        number,
        priority=wanted["priority"],
        namespace=wanted["namespace"],
        labels=labels,
        spec=spec,
        said=UNSCHEDULABLE,
    )


def a_cluster(
    nodes: list[dict[str, Any]], holders: list[tuple[int, int]]
) -> tuple[ExtenderHarness, list[Json]]:
    """Return nodes of two T4 each, with holders that fit there; each is of 14 units."""
    made = [node_json(f"n{i}", *[T4_MIB] * CARDS, **given_) for i, given_ in enumerate(nodes)]
    cluster, free = ExtenderHarness(made), dict[tuple[int, int], int]()
    for number, (at, count) in enumerate(holders):
        where = (at // CARDS) % len(nodes), at % CARDS
        left = free.setdefault(where, UNITS)
        if count <= left:
            free[where] = left - count
            cluster.holds(f"h{number}", where[1], count, f"n{where[0]}")
    return cluster, made


def eligible(cluster: ExtenderHarness, pod: Pod, names: list[str]) -> list[str]:
    """Return those of the nodes that kube-scheduler would offer by the rules that concern nodes."""
    nodes = ((name, cluster.state.node(name)) for name in names)
    return [name for name, it in nodes if it is not None and not ineligibility_reasons(pod, it)]


@settings(max_examples=80)
@given(NODES, HOLDERS, PENDING)
def test_filter_queue_and_why_agree_when_one_pod_is_pending(
    nodes: list[dict[str, Any]], holders: list[tuple[int, int]], wanted: list[Json]
) -> None:
    """Alone in the queue a pod gets a node exactly if `why` shows one, and if filter finds one."""
    cluster, made = a_cluster(nodes, holders)
    pod = pending(0, wanted[0])
    snapshot = ClusterSnapshot.of(msgspec.convert(made, list[Node]), cluster.pods.values())
    verdicts = explain_nodes(pod, snapshot)
    fits_by_why = [each.node for each in verdicts.nodes if each.fits]
    cluster.set(pod)
    offered = eligible(cluster, pod, cluster.names)
    fits_by_filter = cluster.extender.filter(pod, offered).fitting if offered else []
    assert sorted(fits_by_filter) == fits_by_why
    entries = cluster.queue.refreshed().entries()
    placed = [it.node for entry in entries for it in entry.placements]
    assert bool(placed) == bool(fits_by_why)
    assert set(placed) <= set(fits_by_why)
    if not entries:
        # The queue knows no node that could ever hold it.
        assert verdicts.hints
        assert cluster.queue.position(pod) == ""


def _wanted(units: int, zone: str = "", priority: int | None = None) -> Json:
    fixed = {"cards": 1, "tolerates": False, "namespace": "a"}
    return {"units": units, "zone": zone, "priority": priority, **fixed}


_PLAIN: dict[str, Any] = {"unschedulable": False, "taints": [], "annotations": {}, "labels": {}}


@settings(max_examples=80)
@given(NODES, HOLDERS, PENDING)
# 5 + 1 + 5 of 14 units are on one card of the eastern node, and 10 on the other. The first one, which was
# answered and is not bound, must not be counted again: 5 + 5 + 1 + 5 would be too much.
@example(
    [_PLAIN, {**_PLAIN, "labels": {"zone": "east"}}],
    [],
    [_wanted(1), _wanted(10), _wanted(5), _wanted(5, "east", 5)],
)
def test_pods_are_placed_as_the_queue_shows_when_they_are_asked_about_in_any_order(
    nodes: list[dict[str, Any]], holders: list[tuple[int, int]], wanted: list[Json]
) -> None:
    """An entry that fits is answered with its node, whoever is asked about first; another one is not.

    Afterwards no card is overcommitted, and the order of service was that of the queue.
    """
    cluster, _ = a_cluster(nodes, holders)
    pods = [pending(number, each) for number, each in enumerate(wanted)]
    cluster.set(*pods)
    entries = cluster.queue.refreshed().entries()
    shown = {entry.pending.id: entry for entry in entries}
    for pod in reversed(pods):
        offered = eligible(cluster, pod, cluster.names)
        fitting = cluster.extender.filter(pod, offered).fitting if offered else []
        entry = shown.get(pod.metadata.uid)
        if entry is None or not entry.placements:
            assert fitting == []
        else:
            assert entry.placements[0].node in fitting
    for entry in entries:
        if entry.placements:
            (pod,) = entry.pending.pods
            offered = eligible(cluster, pod, cluster.names)
            ranked = cluster.extender.prioritize(pod, cluster.extender.filter(pod, offered).fitting)
            cluster.bind(pod, max(ranked, key=lambda it: it[1])[0])
            assert cluster.state.is_assumed(pod.metadata.uid)
    for name in cluster.names:
        for card in range(CARDS):
            used = cluster.state.card_usage(name, device(card, name))
            assert used.memory_mib <= T4_MIB


@settings(max_examples=60)
@given(NODES, HOLDERS, PENDING)
def test_positions_are_distinct_and_in_the_order_of_service(
    nodes: list[dict[str, Any]], holders: list[tuple[int, int]], wanted: list[Json]
) -> None:
    """`position 2 of 3` is what each pod is told; priorities never increase along the queue."""
    cluster, _ = a_cluster(nodes, holders)
    pods = [pending(number, each) for number, each in enumerate(wanted)]
    cluster.set(*pods)
    entries = cluster.queue.refreshed().entries()
    total = len(entries)
    for rank, entry in enumerate(entries, 1):
        (pod,) = entry.pending.pods
        assert cluster.queue.position(pod) == f"; position {rank} of {total} in the queue"
    priorities = [entry.pending.priority for entry in entries]
    assert priorities == sorted(priorities, reverse=True)
    assert all(bool(entry.why) != bool(entry.placements) for entry in entries)


@settings(max_examples=60)
@given(NODES, HOLDERS, PENDING)
def test_explanation_changes_nothing_and_names_each_node_once(
    nodes: list[dict[str, Any]], holders: list[tuple[int, int]], wanted: list[Json]
) -> None:
    """Hints are found by trying what other pods' end would change; afterwards all is as before."""
    cluster, made = a_cluster(nodes, holders)
    snapshot = ClusterSnapshot.of(msgspec.convert(made, list[Node]), cluster.pods.values())
    before = {name: snapshot.state.allocations(name) for name in cluster.names}
    for number, each in enumerate(wanted):
        explanation = explain(pending(number, each), snapshot, ())
        assert [verdict.node for verdict in explanation.nodes] == cluster.names
        assert all(verdict.fits == (not verdict.reasons) for verdict in explanation.nodes)
        assert explanation.state == "pending"
        assert explanation.hints
        assert {name: snapshot.state.allocations(name) for name in cluster.names} == before


@settings(max_examples=60)
@given(NODES, HOLDERS, PENDING)
def test_pod_fits_as_soon_as_a_hint_has_come_true(
    nodes: list[dict[str, Any]], holders: list[tuple[int, int]], wanted: list[Json]
) -> None:
    """`it starts when P ends`: once P is gone, filter finds a node."""
    cluster, made = a_cluster(nodes, holders)
    pod = pending(0, wanted[0])
    snapshot = ClusterSnapshot.of(msgspec.convert(made, list[Node]), cluster.pods.values())
    for hint in explain(pod, snapshot, ()).hints:
        if not hint.startswith("it starts when"):
            continue
        ending = hint.split()[3].partition("/")[2]
        left = [it for it in snapshot.pods if it.metadata.name != ending]
        after = explain(pod, ClusterSnapshot.of(snapshot.nodes, left), ())
        assert any(verdict.fits for verdict in after.nodes)
