"""Test that the chart restricts fenka's own accounts to the fields that its programs write."""

import json
import re
from typing import Any

import pytest

from fenka.cluster import autoscaling, queue_snapshot
from fenka.cluster.objects import QUEUE_GATE
from fenka.dialects import (
    base,
    gpushare,
    lease_records,
    mig_records,
    nvidia,
    pod_records,
    resize_records,
)
from fenka.dialects.registry import WITH_HAMI
from fenka.node.free_cards import PREFER_NO_SCHEDULE, TAINT
from fenka.node.mig_layouts import STATE
from fenka.node.node_api import RESET
from fenka.scheduler.controllers import REQUEUED_LABEL
from tests.deploy.chart import Json, find, needs_helm, pod_of, render

POLICY = "ValidatingAdmissionPolicy"
GROUP = {"name": "t4", "id": "g", "types": ["t"], "max": 1, "labels": {"team": "a"}}
AUTOSCALER = {"enabled": True, "config": {"cluster": "c", "groups": [GROUP]}}


def expressions(account: str, **values: Any) -> dict[str, str]:
    """Return the variables of one account's policy."""
    spec = find(render(**values), POLICY, f"fenka-{account}")["spec"]
    return {entry["name"]: entry["expression"] for entry in spec["variables"]}


def own(expression: str) -> tuple[list[str], list[str]]:
    """Return the names that an account may write on nodes and on pods."""
    found = re.search(r"variables\.ofNode \? (\[.*?\]) : (\[.*?\])\)", expression)
    assert found, expression
    return json.loads(found[1]), json.loads(found[2])


@needs_helm
def test_node_program_may_write_its_reports_label_and_marks() -> None:
    """The names are those of the code. Its label is that of MIG layouts."""
    variables = expressions("node")
    on_nodes, on_pods = own(variables["annotationsWritten"])
    assert set(on_nodes) == {
        *(base.CARDS, mig_records.INSTANCES, lease_records.REPORT, RESET),
        *(autoscaling.RECLAIM_AT, autoscaling.RECLAIM_SOURCE),
    }
    marks = {dialect.ASSIGNED for dialect in WITH_HAMI} - {""}
    assert set(on_pods) == {*marks, nvidia.RECORD, *resize_records.RECORDS}
    assert own(variables["labelsWritten"]) == ([STATE], [])
    assert json.loads(variables["effects"]) == {TAINT: PREFER_NO_SCHEDULE}
    assert f'["{gpushare.COUNT}"]' in variables["resourcesWritten"]
    assert own(variables["fieldsWritten"]) == (["taints"], [])


@needs_helm
@pytest.mark.parametrize("takes_back", [False, True])
def test_scheduler_may_write_positions_labels_of_retries_and_its_gate(takes_back: bool) -> None:
    """It resizes pods only where growth is taken back, and writes nothing on nodes."""
    variables = expressions("scheduler", **{"scheduler.takeGrowthBack": takes_back})
    resize = [resize_records.REQUEST] if takes_back else []
    assert own(variables["annotationsWritten"]) == ([], [queue_snapshot.POSITION, *resize])
    assert own(variables["labelsWritten"]) == ([], [REQUEUED_LABEL])
    assert own(variables["fieldsWritten"]) == ([], ["schedulingGates"])
    assert f'gate.name in ["{QUEUE_GATE}"]' in variables["gatesWritten"]
    assert "taints" not in variables


@needs_helm
def test_autoscaler_may_write_its_marks_and_the_groups_labels() -> None:
    """The labels of groups are those of its configuration; it has no policy where it is not installed."""
    variables = expressions("autoscaler", autoscaler=AUTOSCALER)
    on_nodes, on_pods = own(variables["annotationsWritten"])
    assert set(on_nodes) == {
        *(autoscaling.SLOT, autoscaling.PIN, autoscaling.PLANNED_PODS),
        *(autoscaling.SPOT_ADMIT, autoscaling.PROTECTED_UNTIL, *autoscaling.KEPT_FROM_OTHERS),
    }
    assert on_pods == [autoscaling.PLANNED]
    marks = [autoscaling.ORDER, autoscaling.GROUP, autoscaling.CAPACITY]
    assert own(variables["labelsWritten"]) == ([*marks, "team"], [])
    assert set(json.loads(variables["effects"])) == {autoscaling.ENDING, autoscaling.RECLAIMED}
    assert "has(oldObject.metadata.deletionTimestamp)" in variables["endWritten"]
    names = [each["metadata"]["name"] for each in render() if each["kind"] == POLICY]
    assert "fenka-autoscaler" not in names


@needs_helm
@pytest.mark.parametrize("account", ["node", "scheduler", "autoscaler"])
def test_policy_covers_updates_of_all_subresources_by_the_account(account: str) -> None:
    """A status or ephemeral containers are written by subresources of their own."""
    spec = find(render(autoscaler=AUTOSCALER), POLICY, f"fenka-{account}")["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["nodes", "nodes/*", "pods", "pods/*"]
    assert rule["operations"] == ["UPDATE"]
    (condition,) = spec["matchConditions"]
    user = f"system:serviceaccount:gpu:fenka-{account}"
    assert condition["expression"] == f'request.userInfo.username == "{user}"'
    assert spec["failurePolicy"] == "Fail"


@needs_helm
def test_bindings_carry_the_records_of_all_dialects_and_what_is_asked_inside_only() -> None:
    """The API server copies their annotations to pods. The fake API server refuses the same."""
    (records,) = find(render(), POLICY, "fenka-binding")["spec"]["variables"]
    (others,) = (
        entry
        for entry in find(render(), POLICY, "fenka-records")["spec"]["variables"]
        if entry["name"] == "records"
    )
    more = set(json.loads(records["expression"])) - set(json.loads(others["expression"]))
    assert more == {*pod_records.ON_BINDINGS} - {*pod_records.RECORDS} == {mig_records.INSIDE}


@needs_helm
def test_dashboard_may_ask_pods_for_their_usage_only() -> None:
    """RBAC grants all ports and paths of all pods in the namespace. Without the page there is no policy."""
    objects = render(dashboard={"page": {"enabled": True}})
    spec = find(objects, POLICY, "fenka-dashboard")["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["operations"], rule["resources"]) == (["CONNECT"], ["pods/proxy"])
    (validation,) = spec["validations"]
    assert "object.path == '/usage'" in validation["expression"]
    assert "!request.name.contains(':')" in validation["expression"]
    names = [each["metadata"]["name"] for each in render() if each["kind"] == POLICY]
    assert "fenka-dashboard" not in names


@needs_helm
def test_tokens_without_a_node_are_refused_unless_the_value_admits_them() -> None:
    """Values of an older release do not have the value."""

    def first(**values: Any) -> str:
        validations = find(render(**values), POLICY, "fenka-node")["spec"]["validations"]
        return str(validations[0]["expression"])

    assert first() == first(**{"admission.nodeClaim": None}) == "variables.node != ''"
    assert first(**{"admission.nodeClaim": False}) == "variables.node != '' || true"


@needs_helm
def test_programs_with_powerful_tokens_prefer_nodes_that_share_no_cards() -> None:
    """A program that escapes from a slice would find the token on its node."""
    objects = render(
        autoscaler=AUTOSCALER,
        secondScheduler={"enabled": True},
        dashboard={"page": {"enabled": True}},
    )
    node = find(objects, "DaemonSet", "fenka-node")
    sharing = {
        expression["key"]
        for term in pod_of(node)["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
    }
    labels: Json = node["spec"]["template"]["metadata"]["labels"]
    for component in ("scheduler", "autoscaler", "second-scheduler", "dashboard"):
        affinity = pod_of(find(objects, "Deployment", f"fenka-{component}"))["affinity"]
        preferred = "preferredDuringSchedulingIgnoredDuringExecution"
        (term,) = affinity["nodeAffinity"][preferred]
        expressions = term["preference"]["matchExpressions"]
        assert {expression["key"] for expression in expressions} == sharing
        assert {expression["operator"] for expression in expressions} == {"DoesNotExist"}
        programs, replicas = affinity["podAntiAffinity"][preferred]
        selector = programs["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert selector.items() <= labels.items()
        assert programs["weight"] > replicas["weight"]


@needs_helm
def test_schedulers_affinity_is_the_operators_when_values_have_one() -> None:
    """The chart's preferences are a default."""
    chosen: Json = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    pod = pod_of(find(render(**{"scheduler.affinity": chosen}), "Deployment", "fenka-scheduler"))
    assert pod["affinity"] == chosen
