"""Test which pods the chart's policy gives to the second scheduler, and for which versions it is rendered."""

import json
from typing import Any

import pytest
import yaml

from fenka.dialects import nvidia
from fenka.dialects.registry import DIALECTS, WITH_HAMI
from tests.deploy.chart import CHART, Json, find, helm, names_of, needs_helm, pod_of

NAME = "fenka-second-scheduler"
GROUP = "admissionregistration.k8s.io"


def rendered(*options: str, **values: Any) -> list[Json]:
    """Render the chart with the second scheduler."""
    given = {"secondScheduler.enabled": True, **values}
    settings = [f"--set-json={key}={json.dumps(value)}" for key, value in given.items()]
    done = helm("template", "fenka", str(CHART), "--namespace", "gpu", *settings, *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def policies(objects: list[Json]) -> set[str]:
    """Return the names of the policies that change pods."""
    return names_of(objects, "MutatingAdmissionPolicy")


@needs_helm
@pytest.mark.parametrize("hami", [False, True])
def test_policy_assigns_pods_of_every_dialect(hami: bool) -> None:
    """Pods with whole cards alone are left to kube-scheduler, unless values name the resource."""
    policy = find(rendered(hamiNames=hami), "MutatingAdmissionPolicy", NAME)["spec"]
    (condition,) = (
        entry["expression"]
        for entry in policy["matchConditions"]
        if entry["name"] == "requests-a-slice"
    )
    resources = {
        name for dialect in (WITH_HAMI if hami else DIALECTS) for name in dialect.RESOURCES
    }
    for name in resources:
        assigned = not name.startswith("nvidia.com/") or name in nvidia.HAMI_ONLY
        assert (json.dumps(name) in condition) == assigned, name
    assert policy["failurePolicy"] == "Ignore"
    expression = policy["mutations"][0]["applyConfiguration"]["expression"]
    assert 'schedulerName: "fenka"' in expression


@needs_helm
def test_policy_has_the_resources_and_namespaces_of_the_values() -> None:
    """A name that ends in `-` is a prefix."""
    selector = {"matchLabels": {"team": "a"}}
    policy = find(
        rendered(
            **{
                "secondScheduler.assign.alsoFor": ["nvidia.com/gpu", "nvidia.com/mig-"],
                "secondScheduler.assign.namespaceSelector": selector,
            }
        ),
        "MutatingAdmissionPolicy",
        NAME,
    )["spec"]
    assert policy["matchConstraints"]["namespaceSelector"] == selector
    (condition,) = (
        entry["expression"]
        for entry in policy["matchConditions"]
        if entry["name"] == "requests-a-slice"
    )
    assert '"nvidia.com/gpu"]' in condition
    assert '|| name.startsWith("nvidia.com/mig-")' in condition


@needs_helm
@pytest.mark.parametrize(
    ("options", "version"),
    [
        ([], "v1"),
        (["--kube-version=v1.36.2"], "v1"),
        (["--api-versions=v1/Pod", f"--api-versions={GROUP}/v1/MutatingAdmissionPolicy"], "v1"),
        (
            ["--api-versions=v1/Pod", f"--api-versions={GROUP}/v1beta1/MutatingAdmissionPolicy"],
            "v1beta1",
        ),
        (["--kube-version=v1.34.0", "--set=admission.mutatingApi=v1beta1"], "v1beta1"),
        (["--kube-version=v1.35.0"], ""),
        (["--api-versions=v1/Pod"], ""),
        (["--set=admission.mutatingApi=none"], ""),
    ],
    ids=str,
)
def test_policies_have_the_version_of_the_api_that_the_cluster_has(
    options: list[str], version: str
) -> None:
    """Without a server the version of Kubernetes counts, so that rendered files are complete."""
    objects = rendered(*options)
    kinds = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    versions = {item["apiVersion"] for item in objects if item["kind"] in kinds}
    assert versions == ({f"{GROUP}/{version}"} if version else set())
    assert policies(objects) == ({NAME, "fenka-queue-gate"} if version else set())


@needs_helm
def test_no_policy_assigns_a_scheduler_that_does_not_run() -> None:
    """Its pods would never start. Values of an older release do not know the policy."""
    for values in (
        {"secondScheduler.enabled": False},
        {"secondScheduler.assign.enabled": False},
        {"secondScheduler.assign": None},
    ):
        assert NAME not in policies(rendered(**values)), values


@needs_helm
def test_second_scheduler_has_the_clusters_version() -> None:
    """Clouds append a suffix of their own to the version."""
    image = "registry.k8s.io/kube-scheduler"
    for options, expected in (
        (["--kube-version=v1.33.5-eks-3025e55"], f"{image}:v1.33.5"),
        (["--set=secondScheduler.image=registry.example.com/s:1"], "registry.example.com/s:1"),
    ):
        pod = pod_of(find(rendered(*options), "Deployment", NAME))
        assert pod["containers"][0]["image"] == expected


@needs_helm
def test_notes_say_whether_pods_must_name_the_scheduler() -> None:
    """Otherwise they would not start, for no visible reason."""
    for api, sentence in (
        ("v1", "card memory get `schedulerName: fenka` by a policy"),
        ("none", "card memory must say `schedulerName: fenka`"),
    ):
        options = ("--set=secondScheduler.enabled=true", f"--set=admission.mutatingApi={api}")
        done = helm("install", "fenka", str(CHART), "-n", "gpu", "--dry-run=client", *options)
        assert done.returncode == 0, done.stderr
        assert sentence in done.stdout.partition("NOTES:\n")[2]
