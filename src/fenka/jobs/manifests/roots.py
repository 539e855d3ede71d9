"""Renders the root object: a Job for equal pods that never restart together, else a JobSet.

Each role is an Indexed Job. Sources: batch/v1; jobset.x-k8s.io/v1alpha2.
"""

import math

import msgspec

from fenka.cluster import training_objects
from fenka.core.request import InvalidRequest
from fenka.jobs import roles
from fenka.jobs.manifests import names
from fenka.jobs.manifests.contents import GIT_CREDENTIALS
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.pods import Engine, Rendering, pod_template
from fenka.jobs.roles import Role
from fenka.jobs.training import TrainingSpec

JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"

_INSTALL_JOBSET = (
    "install it with the packaged chart (make chart), by helm upgrade fenka dist/chart -n fenka-system "
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
        names.manifest(
            "Job",
            "batch/v1",
            f"{spec.name}-{role.name}-0",
            names.labels(spec, role.name),
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
        names.manifest("Job", "batch/v1", spec.name, names.labels(spec, role.name), spec=fields),
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
        names.manifest("JobSet", JOBSET_VERSION, spec.name, names.labels(spec), spec=fields), spec
    )


def _replicated_job(rendering: Rendering, role: Role) -> Manifest:
    template = {
        "metadata": {"labels": names.labels(rendering.spec, role.name)},
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
