"""Test what pods of trainings, services and notebooks may do."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.kubernetes.checks import SubmissionRefused, with_defaults
from fenka.jobs.manifests import notebook_manifest
from fenka.jobs.manifests.gateway_manifest import GatewaySettings, render_gateway
from fenka.jobs.manifests.pod_security import secured
from fenka.jobs.manifests.service_manifest import render_version
from fenka.jobs.manifests.training_manifest import render
from fenka.jobs.notebook_spec import NotebookSpec
from fenka.jobs.service import ServiceSpec
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import PodOptions

Json = dict[str, Any]

MPI = TrainingSpec(
    kind="mpi",
    name="mpi-dist",
    image="i",
    gpu_mem="4",
    workers=2,
    command=["run"],
    sync_source="https://example.com/code.git",
    tensorboard=True,
    logdir="/data/logs",
    data=["claim:/data"],
)
CODE = TrainingSpec(
    kind="pytorch", name="alone", image="i", gpu_mem="4", command=["run"], code="src"
)
SERVICE = ServiceSpec(
    name="bert", version="v1", image="i", gpu_mem="3", restful_port=80, command=["serve"]
)
LAB = NotebookSpec(name="lab", image="i", gpu_mem="4", data=["claim:/data"])
IDLE = msgspec.structs.replace(LAB, idle_s=3600.0)


def rendered(spec: PodOptions) -> list[Json]:
    """Return all objects of a job."""
    if isinstance(spec, ServiceSpec):
        gateway = render_gateway(spec, "team", GatewaySettings("fenka"))
        return [*render_version(spec, Contents()), *gateway]
    if isinstance(spec, NotebookSpec):
        parts = notebook_manifest.render(spec, "password")
    else:
        assert isinstance(spec, TrainingSpec)
        parts = render(spec, Contents(code=b"x" if spec.code else b""), jobset=True)
    return [parts.root, *parts.dependents]


def pods(value: object) -> Iterator[Json]:
    """Yield the specs of all pods in objects."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from pods(item)


def violations(pod: Json) -> list[str]:
    """Return what the standard `restricted` forbids of a pod."""
    context = pod.get("securityContext", {})
    found = []
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("seccompProfile")
    if not context.get("runAsNonRoot"):
        found.append("runAsNonRoot")
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f"allowPrivilegeEscalation of {container['name']}")
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.append(f"capabilities of {container['name']}")
    found += [volume["name"] for volume in pod.get("volumes", ()) if "hostPath" in volume]
    return found


@pytest.mark.parametrize("spec", [MPI, CODE, SERVICE, LAB, IDLE])
def test_pods_meet_the_standard_that_their_namespace_enforces(spec: PodOptions) -> None:
    """Trainings with their code and TensorBoard, services with their gateway, and notebooks."""
    found = [violations(pod) for pod in pods(rendered(secured(spec, "restricted")))]
    assert found
    assert not any(found)


@pytest.mark.parametrize("spec", [MPI, CODE, SERVICE, LAB, IDLE])
def test_pods_gain_no_privileges_when_their_namespace_enforces_nothing(spec: PodOptions) -> None:
    """Images that run as root run, with the capabilities that their files need."""
    own = [pod for pod in pods(rendered(secured(spec, ""))) if pod["containers"][0]["image"] == "i"]
    for pod in own:
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "runAsNonRoot" not in pod["securityContext"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert "NET_RAW" in context["capabilities"]["drop"]
            assert "ALL" not in context["capabilities"]["drop"]


@pytest.mark.parametrize("spec", [CODE, SERVICE, LAB])
def test_options_prevail_over_what_the_namespace_enforces(spec: PodOptions) -> None:
    """The API server refuses such pods, or warns."""
    free = secured(msgspec.structs.replace(spec, security="none"), "restricted")
    pod = next(pods(rendered(free)))
    assert "seccompProfile" not in pod.get("securityContext", {})
    assert "securityContext" not in pod["containers"][0]
    other = secured(msgspec.structs.replace(spec, run_as="1000:100"), "")
    pod = next(pods(rendered(other)))
    assert not violations(pod)
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (1000, 100, 100)


def test_processes_have_a_directory_of_their_own_when_they_may_not_use_roots() -> None:
    """/root is closed to other users, and nothing of the image has to be writable."""
    spec = secured(msgspec.structs.replace(CODE, run_as="1000"), "")
    pod = next(pods(rendered(spec)))
    (container,) = pod["containers"]
    assert container["workingDir"] == "/workspace"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/workspace"] == "workspace"
    assert "/workspace/code" in mounts
    assert {"name": "HOME", "value": "/workspace"} in container["env"]
    chosen = msgspec.structs.replace(CODE, security="restricted", working_dir="/work")
    assert secured(chosen, "") == chosen


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"run_as": "jovyan"}, "invalid --run-as 'jovyan': expected UID or UID:GID"),
        ({"run_as": "1:"}, "invalid --run-as '1:'"),
        ({"run_as": "0", "security": "restricted"}, "--security restricted does not allow root"),
    ],
)
@pytest.mark.parametrize("spec", [CODE, SERVICE, LAB])
def test_user_is_refused_when_no_process_can_have_it(
    spec: PodOptions, change: Json, sentence: str
) -> None:
    """One sentence for all kinds."""
    changed = msgspec.structs.replace(spec, **change)
    with pytest.raises(InvalidRequest) as refused:
        changed.validate()  # type: ignore[attr-defined]
    assert str(refused.value).startswith(sentence)


# ---- what the administrator publishes ----


@pytest.mark.parametrize("spec", [CODE, SERVICE, LAB])
def test_published_values_hold_when_an_option_is_not_given(spec: PodOptions) -> None:
    """The scheduler's name first of all."""
    text = '{"scheduler":"fenka","toleration":["gpu"],"image-pull-secret":["r"],"security":"none"}'
    known = with_defaults(msgspec.structs.replace(spec, toleration=["own"]), text)
    (pod, *_) = pods(rendered(known))
    assert pod["schedulerName"] == "fenka"
    assert pod["imagePullSecrets"] == [{"name": "r"}]
    assert known.toleration == ["own"]
    assert known.security == "none"
    assert with_defaults(spec, "{}") == spec


@pytest.mark.parametrize("text", ["{", '{"sceduler":"x"}', '{"toleration":"gpu"}', "[]"])
def test_published_values_are_refused_when_nobody_can_read_them(text: str) -> None:
    """The sentence says who can correct them."""
    with pytest.raises(SubmissionRefused, match="ask the cluster's administrator"):
        with_defaults(LAB, text)
