"""Test the objects of services: golden files, and what must hold for every service."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.manifests.gateway_manifest import render_gateway
from fenka.jobs.manifests.scaling_manifest import gateway_rules, render_scaled_object
from fenka.jobs.manifests.service_manifest import render_address, render_version
from fenka.jobs.service import ServiceSpec
from tests.jobs.manifests.services import CUSTOM, SETTINGS, SPECS, TRITON, service_objects

GOLDEN = Path(__file__).parent / "golden"
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")

Json = dict[str, Any]


def template(spec: ServiceSpec) -> Json:
    """Return the template of a version's pods."""
    template: Json = render_version(spec, Contents())[0]["spec"]["template"]
    return template


def selects(selector: Json, item: Json) -> bool:
    """Return whether a selector selects pods of this template."""
    return bool(selector.items() <= item["metadata"]["labels"].items())


@pytest.mark.parametrize("name", SPECS)
def test_objects_are_those_of_the_golden_file(name: str) -> None:
    """Each kind has its program, ports, probe and slice."""
    expected = list(yaml.safe_load_all((GOLDEN / f"service-{name}.yaml").read_text()))
    assert json.loads(json.dumps(service_objects(name))) == expected


@pytest.mark.parametrize("name", SPECS)
def test_annotation_describes_the_version_completely(name: str) -> None:
    """An update begins with it."""
    (root, *_) = service_objects(name)
    text = root["metadata"]["annotations"]["fenka.io/spec"]
    assert msgspec.json.decode(text, type=ServiceSpec) == SPECS[name]


def test_no_share_of_the_card_is_configured_in_the_model_server() -> None:
    """The slice is all that the program sees, so a fraction of the card would be one of the slice."""
    assert "memory_fraction" not in json.dumps([service_objects(name) for name in SPECS])


def test_services_select_the_pods_that_they_are_for() -> None:
    """A version's Service selects no other version, and nothing but the common one selects gateways."""
    first = template(CUSTOM)
    second = template(msgspec.structs.replace(CUSTOM, version="v2"))
    version = render_version(CUSTOM, Contents())[1]["spec"]["selector"]
    gateway = render_gateway(CUSTOM, "team", SETTINGS)[0]["spec"]["template"]
    direct = render_address(CUSTOM, gateway=False)["spec"]["selector"]
    through = render_address(CUSTOM, gateway=True)["spec"]["selector"]
    assert [selects(version, pods) for pods in (first, second, gateway)] == [True, False, False]
    assert [selects(direct, pods) for pods in (first, second, gateway)] == [True, True, False]
    assert [selects(through, pods) for pods in (first, second, gateway)] == [False, False, True]


def test_labels_of_users_do_not_change_what_is_selected() -> None:
    """A label called servingName is fenka's."""
    assert template(CUSTOM)["metadata"]["labels"]["servingName"] == "bert"


def test_port_has_one_entry_in_services_when_two_names_share_it() -> None:
    """Kubernetes refuses two ports of one number."""
    spec = msgspec.structs.replace(CUSTOM, metrics_port=5000)
    (port,) = render_version(spec, Contents())[1]["spec"]["ports"]
    assert port == {"name": "http-serving", "port": 5000, "targetPort": "http-serving"}


def test_replica_says_what_its_compute_means() -> None:
    """In the pods' annotation, beside the names of the slice."""
    spec = msgspec.structs.replace(
        CUSTOM, gpu_mem="4", gpu_core=80, gpu_core_mode="weight", cards=1
    )
    pod = template(spec)
    assert pod["metadata"]["annotations"]["fenka.io/core-mode"] == "weight"
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert limits["aliyun.com/gpu-core.percentage"] == "80"


def test_replica_may_run_on_spot_instances_when_its_user_says_so() -> None:
    """An annotation of the user's own does not contradict that."""
    spec = msgspec.structs.replace(
        CUSTOM, interruptible=True, annotation={"fenka.io/interruptible": "false"}
    )
    assert template(spec)["metadata"]["annotations"]["fenka.io/interruptible"] == "true"


def test_replica_sees_no_card_when_it_requests_none() -> None:
    """Images of frameworks would ask for all of them."""
    (container,) = template(msgspec.structs.replace(TRITON, gpus=0))["spec"]["containers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]


def test_image_is_required() -> None:
    """A workstation needs none."""
    with pytest.raises(InvalidRequest) as error:
        render_version(msgspec.structs.replace(CUSTOM, image=""), Contents())
    assert str(error.value) == "--image is required on Kubernetes"


def test_unix_socket_is_refused() -> None:
    """The gateway runs in a pod of its own."""
    spec = msgspec.structs.replace(CUSTOM, unix_socket=True)
    with pytest.raises(InvalidRequest, match="--unix-socket requires a workstation"):
        render_version(spec, Contents())


def test_names_are_valid_when_they_are_as_long_as_allowed() -> None:
    """Services have DNS labels as names."""
    spec = msgspec.structs.replace(
        CUSTOM, name="a" * 43, version="v" * 19, replicas="1..2", config_file=[]
    )
    spec.validate()
    objects = [
        *render_version(spec, Contents()),
        render_address(spec, gateway=True),
        *render_gateway(spec, "team", SETTINGS),
    ]
    for item in objects:
        assert DNS_LABEL.fullmatch(item["metadata"]["name"])
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63


def test_range_from_zero_begins_with_one_replica() -> None:
    """It shows whether the version can start, and is removed when no requests come."""
    spec = msgspec.structs.replace(CUSTOM, replicas="0..3")
    assert render_version(spec, Contents())[0]["spec"]["replicas"] == 1


def test_scaled_object_is_that_of_the_golden_file() -> None:
    """KEDA asks the gateway, and takes the last replica away when the version was idle for --down-after."""
    expected = yaml.safe_load((GOLDEN / "scaled-object.yaml").read_text())
    assert render_scaled_object(SPECS["tensorflow"], "team") == expected


def test_gateway_may_set_the_scale_of_the_versions_that_it_scales_only() -> None:
    """And nothing else of them; without such versions it may not set any."""
    assert gateway_rules("bert", {"v2", "v1"})[2:] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["bert-v1", "bert-v2"],
            "verbs": ["get", "patch"],
        }
    ]
    assert all(set(rule["verbs"]) <= {"get", "list", "watch"} for rule in gateway_rules("bert", ()))


def test_gateway_sends_spans_when_the_cluster_names_a_collector() -> None:
    """Otherwise it has no such option, which an image of an earlier release would refuse."""
    for traces, options in (("", []), ("http://c:4318", ["--traces=http://c:4318"])):
        settings = replace(SETTINGS, traces=traces)
        pod = render_gateway(CUSTOM, "team", settings)[0]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert [word for word in container["args"] if "traces" in word] == options
