"""Renders a notebook: a Deployment and a Service, the password in a Secret.

A notebook that ends when it is idle is a Job, since a Deployment would start it again. When the root Job has
completed, it stays: it owns the other objects, and the Jobs of later runs.
"""

import math
from importlib import resources
from pathlib import PurePosixPath

import msgspec

from fenka.cluster import training_objects
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.card_requests import CardRequest, card_request
from fenka.jobs.manifests.common import (
    escape,
    limits,
    pod_annotations,
    pod_settings,
    variables,
    without_empty,
)
from fenka.jobs.manifests.mpi_pods import encoded
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.pod_security import WORKSPACE, container_security, pod_security
from fenka.jobs.manifests.training_manifest import Rendered
from fenka.jobs.manifests.volumes import MountedVolume, as_manifests, claim_volumes
from fenka.jobs.notebook_spec import NotebookSpec

ROLE = "notebook"
PORT = 8888
SERVICE_PORT = 80

_JUPYTERS_GROUP = 100
"""Jupyter's images run as a user of this group, which can then write to claims."""

_MOST_RESTARTS = 2**31 - 1
"""A notebook is restarted after each failure, as that of a Deployment is."""

_START = (
    'for python in python3 python; do command -v "$python" >/dev/null && exec "$python" -I "$0" "$@"; done\n'
    'echo "fenka: this image has no Python: use an image with Jupyter" >&2; exit 127\n'
)


def render(spec: NotebookSpec, password: str, *, hami: bool = True) -> Rendered:
    """Return the objects of a valid notebook.

    Args:
        spec: The notebook.
        password: The password of its login page.
        hami: The cluster reads HAMi's names.

    Raises:
        InvalidRequest, InvalidSize: No pod can request its cards.
    """
    cards = card_request(spec.gpu, hami=hami)
    root = _deployment(spec, cards) if spec.idle_s is None else _job(spec, spec.name, cards)
    text = msgspec.json.encode(spec).decode()
    root["metadata"]["annotations"] = {training_objects.SPEC: text}
    ingress = [_ingress(spec)] if spec.ingress else []
    owned = [_service(spec), *ingress, _secret(spec, password), _files(spec)]
    return Rendered(root, owned, [root])


def render_run(spec: NotebookSpec, number: int) -> Manifest:
    """Return the Job of a later run of a notebook that ended. Raises InvalidRequest, InvalidSize."""
    return _job(spec, f"{spec.name}-run-{number}", card_request(spec.gpu))


def _labels(spec: NotebookSpec) -> dict[str, str]:
    return {"app": spec.name} | object_names.labels(spec, ROLE)


def _selector(spec: NotebookSpec) -> dict[str, str]:
    return {training_objects.JOB: spec.name, training_objects.ROLE: ROLE}


def _deployment(spec: NotebookSpec, cards: CardRequest) -> Manifest:
    fields = {
        "replicas": 1,
        # The slice, and a claim for one node, must be free before the next pod starts.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _selector(spec)},
        "template": _pod_template(spec, cards, "Always"),
    }
    return object_names.manifest("Deployment", "apps/v1", spec.name, _labels(spec), spec=fields)


def _job(spec: NotebookSpec, name: str, cards: CardRequest) -> Manifest:
    fields = {"backoffLimit": _MOST_RESTARTS, "template": _pod_template(spec, cards, "OnFailure")}
    return object_names.manifest("Job", "batch/v1", name, _labels(spec), spec=fields)


def _pod_template(spec: NotebookSpec, cards: CardRequest, restart: str) -> Manifest:
    amounts = limits(spec, {}) | cards.limits
    volumes = [*claim_volumes(spec), _files_volume(spec)]
    if spec.user:
        # The image's user has a home directory, another one may have none.
        volumes.append(MountedVolume("workspace", {"emptyDir": {}}, PurePosixPath(WORKSPACE)))
    secret = {"name": object_names.object_name(spec, ROLE), "key": "password"}
    container = {
        "name": ROLE,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": _command(spec),
        "workingDir": WORKSPACE if spec.user else "",
        "env": [
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": secret}},
            *variables({"HOME": WORKSPACE} if spec.user else {}, spec.env),
        ],
        "ports": [{"name": "jupyter", "containerPort": PORT}],
        "resources": {"limits": amounts, "requests": amounts},
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2},
        "volumeMounts": [volume.mount for volume in volumes],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(spec),
    }
    pod = {
        "restartPolicy": restart,
        **pod_settings(spec),
        "securityContext": pod_security(spec, _JUPYTERS_GROUP if spec.data else None),
        "priorityClassName": spec.priority,
        "nodeSelector": spec.selector,
        "containers": [without_empty(container)],
        "volumes": as_manifests(volumes),
    }
    metadata = {
        "labels": spec.label | cards.labels | _labels(spec) | {object_names.RELEASE: spec.name},
        "annotations": pod_annotations(spec) | cards.annotations,
    }
    return {"metadata": without_empty(metadata), "spec": without_empty(pod)}


def _command(spec: NotebookSpec) -> list[str]:
    words = ["--port", str(PORT)]
    if spec.idle_s is not None:
        words += ["--idle", str(math.ceil(spec.idle_s))]
    if spec.data:
        words += ["--root", escape(spec.mounts[0][1])]
    return ["sh", "-c", escape(_START), str(object_names.NOTEBOOK_SERVER), *words]


def _files_volume(spec: NotebookSpec) -> MountedVolume:
    source = {"configMap": {"name": object_names.object_name(spec, ROLE)}}
    return MountedVolume("fenka", source, PurePosixPath(object_names.NOTEBOOK_SERVER.parent))


def _files(spec: NotebookSpec) -> Manifest:
    file = object_names.NOTEBOOK_SERVER.name
    data = {file: (resources.files("fenka.jobs.in_pod") / file).read_text()}
    return object_names.manifest(
        "ConfigMap",
        "v1",
        object_names.object_name(spec, ROLE),
        object_names.labels(spec),
        data=data,
    )


def _secret(spec: NotebookSpec, password: str) -> Manifest:
    return object_names.manifest(
        "Secret",
        "v1",
        object_names.object_name(spec, ROLE),
        object_names.labels(spec),
        type="Opaque",
        data=encoded({"password": password}),
    )


def _service(spec: NotebookSpec) -> Manifest:
    fields = {
        "type": spec.service,
        "ports": [{"name": "jupyter", "port": SERVICE_PORT, "targetPort": PORT}],
        "selector": _selector(spec),
    }
    return object_names.manifest("Service", "v1", spec.name, _labels(spec), spec=fields)


def _ingress(spec: NotebookSpec) -> Manifest:
    backend = {"service": {"name": spec.name, "port": {"name": "jupyter"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    fields = {
        "rules": [{"host": spec.ingress, "http": {"paths": [path]}}],
        "tls": [{"hosts": [spec.ingress], "secretName": spec.tls_secret}]
        if spec.tls_secret
        else [],
    }
    return object_names.manifest(
        "Ingress", "networking.k8s.io/v1", spec.name, _labels(spec), spec=without_empty(fields)
    )
