"""Test the autoscaler that the chart installs: its rights, its configuration and its options."""

from typing import Any

import pytest
import yaml

from fenka.autoscaler.demand import Demand, pending_demand
from fenka.autoscaler.inputs import AutoscalerOptions
from fenka.cloud.config_file import decode_config
from fenka.cluster.autoscaling import ORDERS_MAP, SHAPES_MAP, STATUS_MAP
from fenka.kubernetes import autoscaler_reader
from tests.autoscaler.snapshots import snapshot
from tests.deploy.chart import CHART, T4, Json, find, helm, names_of, needs_helm, pod_of, render

NAME = "fenka-autoscaler"
CONFIG: Json = {
    "cluster": "demo",
    "provider": {"kind": "simulated", "scenario": "/cloud/scenario.json", "state": "/cloud/state"},
    "groups": [{"name": "t4", "types": ["t4.x"], "zones": ["a"], "max": 4, "price": 11.63}],
}


def rendered(**values: Any) -> list[Json]:
    """Return the objects of a chart with the autoscaler."""
    return render(**{"autoscaler.enabled": True, "autoscaler.config": CONFIG, **values})


@needs_helm
def test_autoscaler_is_not_installed_unless_it_is_enabled() -> None:
    """Also with the values of an older release."""
    for values in ({}, {"autoscaler": None}):
        assert NAME not in names_of(render(**values), "Deployment", "ClusterRole", "ServiceAccount")


@needs_helm
def test_chart_says_what_is_missing_when_there_is_no_configuration() -> None:
    """It could only fail in its pod."""
    done = helm("template", "fenka", str(CHART), "--set", "autoscaler.enabled=true")
    assert done.returncode != 0
    assert "autoscaler.config: name the cluster" in done.stderr


@needs_helm
def test_configuration_is_the_one_of_the_values() -> None:
    """The program reads what the chart writes."""
    data = find(rendered(), "ConfigMap", f"{NAME}-config")["data"]["config.yaml"]
    assert yaml.safe_load(data) == CONFIG
    assert decode_config(data.encode()).groups[0].max == 4


@needs_helm
def test_new_pods_start_when_the_configuration_changes() -> None:
    """The program reads it once."""
    changed = {**CONFIG, "cluster": "other"}
    pods = [
        find(objects, "Deployment", NAME)["spec"]["template"]["metadata"]["annotations"]
        for objects in (rendered(), rendered(), rendered(**{"autoscaler.config": changed}))
    ]
    assert pods[0] == pods[1] != pods[2]


@needs_helm
def test_autoscaler_counts_the_pods_of_schedulers_that_call_fenka_only() -> None:
    """A node would stay without pods that name another one. Values of an older release have no names."""

    def names(**values: Any) -> list[str]:
        (container,) = pod_of(find(rendered(**values), "Deployment", NAME))["containers"]
        return [
            option.partition("=")[2]
            for option in container["args"]
            if option.startswith("--scheduler-name")
        ]

    assert names() == names(**{"scheduler.order.schedulerNames": None}) == ["default-scheduler"]
    second = {"enabled": True, "schedulerName": "gpu"}
    assert names(secondScheduler=second) == ["default-scheduler", "gpu"]
    assert names(**{"scheduler.bindsFor": ["own"]}) == ["own"]


@needs_helm
def test_autoscaler_runs_unprivileged_with_options_that_it_has() -> None:
    """Its lease is the one that fenka groups reads."""
    objects = rendered(
        **{"hamiNames": True, "scheduler.bindsFor": ["fenka"], "scheduler.topologyLevels": ["rack"]}
    )
    pod = pod_of(find(objects, "Deployment", NAME))
    (container,) = pod["containers"]
    # The sentence about a wrong configuration is in the pod's status.
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert container["args"] == [
        "autoscaler",
        "--config=/etc/fenka/autoscaler/config.yaml",
        f"--lease={NAME}",
        "--topology-level=rack",
        "--scheduler-name=fenka",
        "--hami-names",
    ]
    names = {f"--{name.replace('_', '-')}" for name in AutoscalerOptions.__struct_fields__}
    assert {each.partition("=")[0] for each in container["args"][2:]} <= names
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["ports"] == [{"name": "metrics", "containerPort": AutoscalerOptions().port}]
    assert find(objects, "ConfigMap", "fenka")["data"]["autoscalerName"] == NAME


@needs_helm
def test_autoscaler_has_exactly_the_documented_rights() -> None:
    """In the whole cluster, and in its own namespace."""
    objects = rendered()
    rights = {
        resource: rule["verbs"]
        for rule in find(objects, "ClusterRole", NAME)["rules"]
        for resource in rule["resources"]
    }
    assert rights == {
        "nodes": ["get", "list", "watch", "patch", "delete"],
        "pods": ["get", "list", "watch", "patch", "delete"],
        "pods/status": ["patch"],
        "pods/eviction": ["create"],
        "daemonsets": ["list", "watch"],
        "podgroups": ["list", "watch"],
        "poddisruptionbudgets": ["list", "watch"],
        "events": ["create", "patch"],
    }
    rules = find(objects, "Role", f"{NAME}-leader")["rules"]
    named = {name: rule["verbs"] for rule in rules for name in rule.get("resourceNames", ())}
    maps = {ORDERS_MAP, SHAPES_MAP, STATUS_MAP}
    assert named == {name: ["get", "patch"] for name in (NAME, *maps)}


@pytest.mark.parametrize("kind", ["karpenter", "ess"])
@needs_helm
def test_only_karpenter_adds_rights_to_node_claims(kind: str) -> None:
    """Other providers call their cloud."""
    config = {**CONFIG, "provider": {"kind": kind}}
    objects = rendered(**{"autoscaler.config": config})
    rules = find(objects, "ClusterRole", NAME)["rules"]
    has_claims = any("nodeclaims" in rule["resources"] for rule in rules)
    assert has_claims == (kind == "karpenter")
    assert (f"{NAME}-claims" in names_of(objects, "Role")) == (kind == "karpenter")


@needs_helm
def test_no_node_is_bought_for_pods_of_the_chart() -> None:
    """Whatever keeps them pending, such as an upgrade that cannot start: they request no cards."""
    objects = rendered(
        **{
            "simulatedCards": [T4],
            "secondScheduler": {"enabled": True, "image": "kube-scheduler"},
        }
    )
    workloads = [document for document in objects if "template" in document.get("spec", {})]
    pods = tuple(
        {
            "metadata": {"name": workload["metadata"]["name"], "uid": f"{number}"},
            "spec": pod_of(workload),
            "status": {"phase": "Pending"},
        }
        for number, workload in enumerate(workloads)
    )
    assert {NAME, "fenka-scheduler", "fenka-node"} <= {pod["metadata"]["name"] for pod in pods}
    assert pending_demand(snapshot(pods=pods)) == Demand()


@needs_helm
def test_credentials_are_passed_as_environment() -> None:
    """They are in a Secret that the chart does not make."""
    source = [{"secretRef": {"name": "cloud"}}]
    (container,) = pod_of(find(rendered(**{"autoscaler.envFrom": source}), "Deployment", NAME))[
        "containers"
    ]
    assert container["envFrom"] == source


@needs_helm
def test_commands_find_what_the_autoscaler_publishes_and_its_configuration() -> None:
    """ConfigMap kube-public/fenka names its namespace, and its Lease."""
    objects = rendered()
    published = find(objects, "ConfigMap", "fenka")["data"]
    configuration = find(objects, "ConfigMap", f"{published[autoscaler_reader.NAME]}-config")
    assert autoscaler_reader.CONFIG_KEY in configuration["data"]
    (container,) = find(objects, "Deployment", NAME)["spec"]["template"]["spec"]["containers"]
    assert f"--lease={published[autoscaler_reader.NAME]}" in container["args"]
    assert published[autoscaler_reader.NAMESPACE] == "gpu"
    assert autoscaler_reader.NAME not in find(render(), "ConfigMap", "fenka")["data"]
