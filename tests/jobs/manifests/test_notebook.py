"""Test the objects of notebooks: golden files, and what the article's users rely on."""

import ast
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fenka.cluster.objects import Pod
from fenka.core.request import InvalidRequest
from fenka.formats.quantities import InvalidSize
from fenka.jobs.manifests import notebook_manifest
from fenka.jobs.manifests.training_manifest import Rendered
from fenka.jobs.notebook_spec import NotebookSpec, validate_password
from tests.builders import pod

GOLDEN = Path(__file__).parent / "golden"
PASSWORD = "mypassw0rd"

ARTICLE = NotebookSpec(
    name="tf-notebook",
    image="tensorflow/tensorflow:1.4.1-gpu-py3",
    gpu_mem="4",
    service="LoadBalancer",
)
IDLE = NotebookSpec(
    name="lab",
    image="quay.io/jupyter/base-notebook",
    gpu_mem="4",
    gpu_core=30,
    cpu="2",
    memory="4Gi",
    service="NodePort",
    data=["work:/home/jovyan/work $(date)", "sets:/data"],
    idle_s=7200,
)

Json = dict[str, Any]


def objects(rendered: Rendered) -> list[Json]:
    """Return all objects; the mounted program is tested elsewhere."""
    everything = json.loads(json.dumps([rendered.root, *rendered.dependents]))
    everything[-1]["data"]["notebook_server.py"] = "python"
    return list(everything)


@pytest.mark.parametrize(("name", "spec"), [("notebook", ARTICLE), ("notebook-idle", IDLE)])
def test_objects_are_those_of_the_golden_file(name: str, spec: NotebookSpec) -> None:
    """A Deployment that runs always, and a Job that ends when it is idle."""
    expected = list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))
    assert objects(notebook_manifest.render(spec, PASSWORD)) == expected


@pytest.mark.parametrize("spec", [ARTICLE, IDLE])
@pytest.mark.parametrize("interruptible", [True, False])
def test_pods_say_that_they_may_run_on_spot_instances(
    spec: NotebookSpec, interruptible: bool
) -> None:
    """Only if their user says so; the running one, and the Job of a later run."""
    spec = msgspec.structs.replace(spec, interruptible=interruptible)
    roots = [notebook_manifest.render(spec, PASSWORD).root, notebook_manifest.render_run(spec, 2)]
    for root in roots:
        annotations = root["spec"]["template"]["metadata"].get("annotations", {})
        assert annotations.get("fenka.io/interruptible") == ("true" if interruptible else None)


def test_objects_are_those_of_the_article_but_for_the_password() -> None:
    """Who knows the article's YAML finds its fields in fenka's."""
    deployment, service, *_ = objects(notebook_manifest.render(ARTICLE, PASSWORD))
    assert deployment["spec"]["replicas"] == 1
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"]["app"] == deployment["metadata"]["labels"]["app"]
    (container,) = template["spec"]["containers"]
    units = {"aliyun.com/gpu-mem": "4"}
    assert container["resources"] == {"limits": units, "requests": units}
    assert [port["containerPort"] for port in container["ports"]] == [8888]
    assert [each["name"] for each in container["env"]] == ["PASSWORD"]
    assert service["metadata"]["name"] == "tf-notebook"
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"] == [{"name": "jupyter", "port": 80, "targetPort": 8888}]
    selector = service["spec"]["selector"].items()
    assert selector == deployment["spec"]["selector"]["matchLabels"].items()
    assert selector <= template["metadata"]["labels"].items()


def test_password_is_in_no_object_but_the_secret() -> None:
    """Whoever may read pods may not read passwords."""
    for item in objects(notebook_manifest.render(IDLE, PASSWORD)):
        assert PASSWORD not in json.dumps(item)
    secret = next(
        each
        for each in notebook_manifest.render(IDLE, PASSWORD).dependents
        if each["kind"] == "Secret"
    )
    assert secret["data"] == {"password": "bXlwYXNzdzByZA=="}


def test_later_run_has_the_same_pods_when_it_is_started() -> None:
    """The Service and the claims of the first run are those of the next."""
    first, run = (
        notebook_manifest.render(IDLE, PASSWORD).root,
        notebook_manifest.render_run(IDLE, 2),
    )
    assert run["metadata"]["name"] == "lab-run-2"
    assert run["spec"] == first["spec"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "Lab_1"}, "invalid job name 'Lab_1': use lowercase letters, digits and '-', "),
        ({"image": ""}, "--image is required on Kubernetes; for a notebook on this machine"),
        (
            {"service": "Ingress"},
            "invalid --service 'Ingress': expected LoadBalancer, NodePort, Cl",
        ),
        ({"data": ["pvc"]}, "invalid --data 'pvc': expected CLAIM:PATH, for example"),
        ({"data": ["a:/a", "b:/a"]}, "two --data have the same path: use different paths"),
        ({"idle_s": 5}, "--idle must be at least 60s, got 5s"),
        ({"memory": "many"}, "invalid --memory 'many': expected an amount such as 2 or 4Gi"),
        ({"cpu": "-1"}, "invalid --cpu '-1': expected an amount such as 2 or 500m"),
    ],
)
def test_notebook_is_refused_when_a_field_is_invalid(change: Json, sentence: str) -> None:
    """One sentence, and nothing is created."""
    with pytest.raises(InvalidRequest) as refused:
        msgspec.structs.replace(ARTICLE, **change).validate()
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("cards", "error"),
    [
        ({"gpu_core": 101, "gpu_core_mode": "weight"}, InvalidRequest),
        ({"gpu_mem": "much"}, InvalidSize),
    ],
)
def test_notebook_is_refused_when_pods_cannot_request_its_slice(
    cards: Json, error: type[Exception]
) -> None:
    """The same rules as for trainings."""
    with pytest.raises(error):
        notebook_manifest.render(msgspec.structs.replace(ARTICLE, **cards), PASSWORD)


@pytest.mark.parametrize("password", ["", "a\nb", "\0", "\ud800", "x" * 1025])
def test_password_is_refused_when_nobody_could_use_it(password: str) -> None:
    """An empty one would let everybody in."""
    with pytest.raises(InvalidRequest):
        validate_password(password)


def test_documented_profiles_of_jupyterhub_request_slices_that_fenka_reads() -> None:
    """KubeSpawner writes the overrides as limits and requests of the pod's container."""
    document = (Path(__file__).parents[3] / "docs" / "do" / "jupyterhub.md").read_text()
    start = document.index("c.KubeSpawner.profile_list")
    end = document.index("\n]\n", start)
    text = document[start:end].partition("= ")[2] + "\n]"
    overrides = [profile["kubespawner_override"] for profile in ast.literal_eval(text)]
    requests = []
    for override in overrides:
        limits = override.get("extra_resource_limits", {})
        assert override.get("extra_resource_guarantees", {}) == limits
        demand = msgspec.convert(pod("jupyter-alice", limits), Pod).demand()
        assert demand.invalid is None
        requests.append(demand.amounts)
    assert requests == [
        {"aliyun.com/gpu-mem": 4},
        {"aliyun.com/gpu-mem": 8, "aliyun.com/gpu-core.percentage": 50},
        {},
    ]
