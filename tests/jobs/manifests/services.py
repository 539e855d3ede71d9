"""Services whose objects are known."""

from typing import Any

from fenka.jobs.collection import Contents
from fenka.jobs.manifests.gateway_manifest import GatewaySettings, render_gateway
from fenka.jobs.manifests.scaling_manifest import scaling_policy
from fenka.jobs.manifests.service_manifest import render_address, render_version
from fenka.jobs.service import ServiceSpec

CUSTOM = ServiceSpec(
    name="bert",
    version="v1",
    image="python:3",
    gpu_mem="3",
    gpu_core=30,
    replicas="2",
    restful_port=5000,
    metrics_port=5001,
    command=["python", "serve.py", "$(date)"],
    env={"MODEL": "$(NONE)"},
    data=["models:/models"],
    config_file=["serve.ini:/etc/serve.ini"],
    health_path="/healthz",
    label={"team": "nlp", "servingName": "other"},
    annotation={"note": "x"},
    selector={"zone": "a"},
    toleration=["team=nlp:NoSchedule"],
    service="LoadBalancer",
    working_dir="/srv",
    grace_s=60,
)
TENSORFLOW = ServiceSpec(
    kind="tensorflow",
    name="resnet",
    version="202611221300",
    image="tensorflow/serving:2.16.1-gpu",
    gpu_mem="4",
    replicas="0..4",
    model_name="resnet",
    model_path="/models/resnet",
    target=8,
    up_after_s=15,
    down_after_s=60,
    buffer_timeout_s=240,
    data=["models:/models"],
)
TRITON = ServiceSpec(
    kind="triton",
    name="llm",
    version="v2",
    image="nvcr.io/nvidia/tritonserver:24.05-py3",
    gpus=1,
    model_repository="/models",
    priority="urgent",
    share_memory="",
    service="NodePort",
    command=["--log-verbose=1"],
)
CONTENTS = Contents(config_files={"/etc/serve.ini": b"[serve]\n"})
SETTINGS = GatewaySettings("fenka:1", "IfNotPresent", 2)

SPECS = {"custom": CUSTOM, "tensorflow": TENSORFLOW, "triton": TRITON}


def service_objects(name: str) -> list[dict[str, Any]]:
    """Return all objects of one of these services, with the gateway where it needs one."""
    spec = SPECS[name]
    contents = CONTENTS if spec.config_file else Contents()
    through = spec.range.scales
    objects = render_version(spec, contents, priority="fenka-serving")
    scaling = {spec.version: scaling_policy(spec)} if through else {}
    gateway = render_gateway(spec, "team", SETTINGS, scaling) if through else []
    return [*objects, render_address(spec, gateway=through, scaling=scaling), *gateway]
