"""Renders a training: its root object and the objects that the root owns.

Renders the root object: a Job for equal pods that never restart together, else a JobSet.

Each role is an Indexed Job. Sources: batch/v1; jobset.x-k8s.io/v1alpha2.

Objects that the root owns: files, secrets, Services, TensorBoard.
"""

import math
from dataclasses import dataclass

import msgspec

from fenka.cluster import training_objects
from fenka.core.request import InvalidRequest
from fenka.jobs import roles
from fenka.jobs.collection import Contents
from fenka.jobs.manifests import mpi_pods, object_names
from fenka.jobs.manifests.common import toleration, without_empty
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.pod_security import pod_security, tool_security
from fenka.jobs.manifests.pods import Engine, Rendering, pod_template
from fenka.jobs.manifests.volumes import as_manifests, binary_files, claim_volumes, config_files
from fenka.jobs.repository import GIT_CREDENTIALS
from fenka.jobs.roles import Role
from fenka.jobs.training import TrainingSpec

JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"

_INSTALL_JOBSET = (
    "install it by helm upgrade fenka fenka-VERSION.tgz (the chart of a release) -n fenka-system "
    "--reuse-values --set jobset.enabled=true"
)

_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
"""The pod was evicted: by a drain, preemption, a full disk, or because its node is gone."""


def engine(spec: TrainingSpec, *, jobset: bool) -> Engine:
    """Return what runs the training; `jobset`: the cluster has JobSet. Raises InvalidRequest."""
    parts = roles.roles(spec)
    if sum(role.replicas for role in parts) == 1:
        return "job"
    if jobset:
        return "jobset"
    if len(parts) > 1:
        raise InvalidRequest(
            "this job has several roles and requires JobSet, which this cluster does not have: "
            f"{_INSTALL_JOBSET}"
        )
    restarting = {
        "retry": spec.retry,
        "backfill": spec.backfill,
        "interruptible": spec.interruptible,
    }
    option = next((f"--{name}" for name, given in restarting.items() if given), None)
    if option is not None:
        raise InvalidRequest(
            f"{option} for several workers requires JobSet, which this cluster does not have: "
            f"{_INSTALL_JOBSET}"
        )
    return "indexed-job"


def root(rendering: Rendering) -> Manifest:
    """Return the root object, which is not suspended. Raises InvalidRequest, InvalidSize."""
    return _jobset(rendering) if rendering.engine == "jobset" else _single(rendering)


def role_jobs(rendering: Rendering) -> list[Manifest]:
    """Return the Jobs that the root becomes. The API server can check them beforehand."""
    if rendering.engine != "jobset":
        return [root(rendering)]
    spec = rendering.spec
    return [
        object_names.manifest(
            "Job",
            "batch/v1",
            f"{spec.name}-{role.name}-0",
            object_names.labels(spec, role.name),
            spec=_job_spec(rendering, role),
        )
        for role in roles.roles(spec)
    ]


def _single(rendering: Rendering) -> Manifest:
    spec = rendering.spec
    (role,) = roles.roles(spec)
    fields = _job_spec(rendering, role)
    if spec.ttl_after_finished_s is not None:
        fields["ttlSecondsAfterFinished"] = math.ceil(spec.ttl_after_finished_s)
    return _with_spec(
        object_names.manifest(
            "Job", "batch/v1", spec.name, object_names.labels(spec, role.name), spec=fields
        ),
        spec,
    )


def _jobset(rendering: Rendering) -> Manifest:
    spec = rendering.spec
    # A Job may only depend on one that stands before it.
    parts = sorted(roles.roles(spec), key=lambda role: role.name == "launcher")
    rules = [
        {
            "name": "disruption",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    if spec.running_timeout_s is not None:
        rules.append(
            {
                "name": "timeout",
                "action": "FailJobSet",
                "onJobFailureReasons": ["DeadlineExceeded"],
            }
        )
    fields: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": _successful(spec)},
        "failurePolicy": {
            "maxRestarts": spec.retry,
            # Otherwise the next attempt would wait for slices that this one still holds.
            "restartStrategy": "BlockingRecreate",
            "rules": rules,
        },
        "replicatedJobs": [_replicated_job(rendering, role) for role in parts],
    }
    if spec.ttl_after_finished_s is not None:
        fields["ttlSecondsAfterFinished"] = math.ceil(spec.ttl_after_finished_s)
    return _with_spec(
        object_names.manifest(
            "JobSet", JOBSET_VERSION, spec.name, object_names.labels(spec), spec=fields
        ),
        spec,
    )


def _replicated_job(rendering: Rendering, role: Role) -> Manifest:
    template = {
        "metadata": {"labels": object_names.labels(rendering.spec, role.name)},
        "spec": _job_spec(rendering, role),
    }
    job: Manifest = {"name": role.name, "replicas": 1, "template": template}
    if role.name == "launcher":
        job["dependsOn"] = [{"name": "worker", "status": "Ready"}]
    return job


def _job_spec(rendering: Rendering, role: Role) -> Manifest:
    spec = rendering.spec
    fields: Manifest = {
        "completionMode": "Indexed",
        "completions": role.replicas,
        "parallelism": role.replicas,
        **_failures(rendering),
    }
    if spec.running_timeout_s is not None:
        fields["activeDeadlineSeconds"] = math.ceil(spec.running_timeout_s)
    if role.name == "worker" and role.chief and role.replicas > 1 and _first_decides(spec):
        fields["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    fields["template"] = pod_template(rendering, role)
    return fields


def _failures(rendering: Rendering) -> Manifest:
    """Return what happens after failures of pods; an eviction is none of them."""
    ignore = {"rules": [{"action": "Ignore", "onPodConditions": _DISRUPTED}]}
    fail = {"rules": [{"action": "FailJob", "onPodConditions": _DISRUPTED}]}
    match rendering.engine:
        case "job":
            # Unlike backoffLimit, this one counts attempts where the pod can see them.
            return {"backoffLimitPerIndex": rendering.spec.retry, "podFailurePolicy": ignore}
        case "indexed-job":
            return {"backoffLimit": 0}
        case "jobset":
            return {"backoffLimit": 0, "podFailurePolicy": fail}


def _first_decides(spec: TrainingSpec) -> bool:
    return spec.kind == "tensorflow" and spec.success_policy == "ChiefWorker"


def _successful(spec: TrainingSpec) -> list[str]:
    """Return the roles whose success is that of the training."""
    parts = roles.roles(spec)
    chief = parts[0].name
    if spec.kind == "tensorflow" and spec.success_policy == "AllWorkers":
        return [role.name for role in parts if role.name in ("chief", "worker")]
    return [chief]


def _with_spec(manifest: Manifest, spec: TrainingSpec) -> Manifest:
    """Add the spec as it was submitted, without secrets."""
    public = msgspec.structs.replace(
        spec,
        env={name: value for name, value in spec.env.items() if name not in GIT_CREDENTIALS},
    )
    fields = {"kind": spec.kind, **msgspec.to_builtins(public)}
    text = msgspec.json.encode(fields).decode()
    manifest["metadata"]["annotations"] = {training_objects.SPEC: text}
    return manifest


TENSORBOARD_IMAGE = "tensorflow/tensorflow:2.16.1"
"""Used without `--tensorboard-image`."""
TENSORBOARD_PORT = 6006


def dependents(rendering: Rendering) -> list[Manifest]:
    """Return all objects that the root owns. Raises InvalidRequest."""
    spec, contents = rendering.spec, rendering.contents
    objects = list[Manifest]()
    if spec.kind == "mpi":
        hosts = [rendering.host("worker", index) for index in range(spec.workers)]
        objects += mpi_pods.dependents(spec, contents, hosts)
    if contents.code:
        archive = {"code.tar.gz": contents.code}
        objects.append(
            binary_files(object_names.object_name(spec, "code"), object_names.labels(spec), archive)
        )
    objects += config_files(
        object_names.object_name(spec, "config"), object_names.labels(spec), contents
    )
    if contents.credentials:
        data = mpi_pods.encoded(dict(contents.credentials))
        name = object_names.object_name(spec, "git")
        objects.append(
            object_names.manifest(
                "Secret", "v1", name, object_names.labels(spec), type="Opaque", data=data
            )
        )
    if rendering.engine == "indexed-job":
        objects.append(_headless_service(spec))
    if spec.tensorboard:
        objects += _tensorboard(spec)
    return objects


def _headless_service(spec: TrainingSpec) -> Manifest:
    """Return the Service that gives the pods names; a JobSet makes its own."""
    fields = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {training_objects.JOB: spec.name, training_objects.ROLE: "worker"},
    }
    return object_names.manifest("Service", "v1", spec.name, object_names.labels(spec), spec=fields)


def _tensorboard(spec: TrainingSpec) -> list[Manifest]:
    """Return TensorBoard and its Service."""
    name, labels = (
        object_names.object_name(spec, "tensorboard"),
        object_names.labels(spec, "tensorboard"),
    )
    volumes = claim_volumes(spec)
    container = {
        "name": "tensorboard",
        "image": spec.tensorboard_image or TENSORBOARD_IMAGE,
        "imagePullPolicy": spec.image_pull_policy,
        "command": [
            "tensorboard",
            f"--logdir={spec.logdir}",
            f"--port={TENSORBOARD_PORT}",
            # TensorBoard has no login: it listens where its Service reaches it, and nowhere else.
            "--host=$(POD_IP)",
        ],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": TENSORBOARD_PORT}],
        "readinessProbe": {"tcpSocket": {"port": TENSORBOARD_PORT}},
        "volumeMounts": [volume.mount for volume in volumes],
        "securityContext": tool_security(spec),
    }
    pod: Manifest = {
        "enableServiceLinks": False,
        "securityContext": pod_security(spec),
        "containers": [without_empty(container)],
        "volumes": as_manifests(volumes),
    }
    pod = without_empty(pod)
    if spec.toleration:
        pod["tolerations"] = [toleration(text) for text in spec.toleration]
    if spec.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": secret} for secret in spec.image_pull_secret]
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    ports = [{"name": "http", "port": TENSORBOARD_PORT, "targetPort": "http"}]
    service = {"type": "NodePort", "selector": labels, "ports": ports}
    return [
        object_names.manifest("Deployment", "apps/v1", name, labels, spec=deployment),
        object_names.manifest("Service", "v1", name, labels, spec=service),
    ]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects of a training.

    Attributes:
        root: The Job or JobSet; it is not suspended.
        dependents: What it owns; without owner references, which name the root's UID.
        role_jobs: The Jobs that the root becomes.
    """

    root: Manifest
    dependents: list[Manifest]
    role_jobs: list[Manifest]


def render(
    spec: TrainingSpec, contents: Contents, *, jobset: bool = True, hami: bool = True
) -> Rendered:
    """Return the objects of a valid training.

    Args:
        spec: The training.
        contents: Its files and secrets.
        jobset: The cluster has JobSet.
        hami: The cluster reads HAMi's names.

    Raises:
        InvalidRequest, InvalidSize: It cannot run on this cluster.
    """
    spec.validate_tensorboard()
    rendering = Rendering(spec, contents, engine(spec, jobset=jobset), hami)
    return Rendered(root(rendering), dependents(rendering), role_jobs(rendering))
