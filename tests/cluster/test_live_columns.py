"""Columns that follow the cluster's state: what they remember of nodes stays bounded."""

from fenka.cluster.live_columns import MAX_SPARE_RULES, LiveColumns
from fenka.cluster.state import ClusterState
from fenka.dialects import node_modes
from tests.builders import T4_MIB, a_node, a_pod
from tests.fakes.evaluators import ComparedEvaluator


def test_rules_stay_few_when_a_nodes_error_changes_again_and_again() -> None:
    """Each error is a rule of its own, since it is the sentence that pods get."""
    cluster = ClusterState([a_node("n", T4_MIB), a_node("m", T4_MIB)])
    live = LiveColumns(cluster)
    evaluator = ComparedEvaluator(cluster, "binpack", live)
    for number in range(10 * MAX_SPARE_RULES):
        labels = {node_modes.MODE_LABEL: f"unknown-{number}"}
        cluster.set_node(a_node("n", T4_MIB, labels=labels))
        live.read()
        assert len(live.rules()[0]) <= MAX_SPARE_RULES + 2 * 2
    result = evaluator.filter(a_pod("p", 4), ["n", "m"])
    assert result.fitting == ["m"]
    assert f"unknown-{number} is none of" in result.unresolvable["n"]
