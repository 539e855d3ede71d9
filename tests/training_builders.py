"""Objects of training jobs for tests, as fenka's renderer and other operators make them, as JSON."""

from datetime import UTC, datetime
from typing import Any

from fenka.cluster.training_objects import (
    COMPLETION_INDEX,
    JOB,
    JOBSET_NAME,
    KIND,
    RESTART_ATTEMPT,
    ROLE,
    SUBMITTED,
)
from tests.builders import Json, pod

NOON = 1_600_000_000
"""2020-09-13 12:26:40 UTC: when jobs of tests are created."""


def moment(after_s: float = 0) -> str:
    """Return a time this long after NOON, as Kubernetes writes it."""
    return datetime.fromtimestamp(NOON + after_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(type_: str, after_s: float = 0, message: str = "") -> Json:
    """Return a condition that has become true."""
    return {
        "type": type_,
        "status": "True",
        "message": message,
        "lastTransitionTime": moment(after_s),
    }


def job_set(name: str, kind: str = "mpi", *, roles: dict[str, int], **given: Any) -> Json:
    """Return the root object of a job of several pods, resumed unless `suspend` is given."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _root_metadata(name, kind, given),
        "spec": {
            "suspend": given.get("suspend", False),
            "replicatedJobs": [
                {
                    "name": role,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": count,
                            "completions": count,
                            "template": _template(given, role),
                        }
                    },
                }
                for role, count in roles.items()
            ],
        },
        "status": {"conditions": given.get("conditions", [])},
    }


def batch_job(name: str, kind: str, role: str, **given: Any) -> Json:
    """Return the root object of a job of one pod."""
    job: Json = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _root_metadata(name, kind, given),
        "spec": {
            "suspend": given.get("suspend", False),
            "parallelism": 1,
            "completions": 1,
            "template": _template(given),
        },
        "status": {"conditions": given.get("conditions", []), **given.get("status", {})},
    }
    job["metadata"]["labels"][ROLE] = role
    return job


def _root_metadata(name: str, kind: str, given: Json) -> Json:
    submitted = {} if given.get("suspend") else {SUBMITTED: moment()}
    return {
        "name": name,
        "namespace": given.get("namespace", "default"),
        "uid": given.get("uid", f"root-{name}"),
        "labels": {JOB: name, KIND: kind, **given.get("labels", {})},
        "annotations": {**submitted, **given.get("annotations", {})},
        "creationTimestamp": given.get("created", moment()),
    }


def _template(given: Json, role: str = "") -> Json:
    """Return the template of a role's pods. `limits`: the cards of each role's container."""
    limits = given.get("limits", {}).get(role)
    containers = [{"name": "main", "resources": {"limits": limits}}] if limits else []
    return {"spec": {"priorityClassName": given.get("priority", ""), "containers": containers}}


def member(job: str, role: str, index: int = 0, limits: Json | None = None, **given: Any) -> Json:
    """Return a pod of a job of fenka."""
    name = given.pop("name", f"{job}-{role}-0-{index}-x7k2p")
    labels = {
        JOB: job,
        ROLE: role,
        "release": job,
        JOBSET_NAME: job,
        COMPLETION_INDEX: str(index),
        RESTART_ATTEMPT: str(given.pop("attempt", 0)),
        **given.pop("labels", {}),
    }
    created = given.pop("created", moment())
    deleted = given.pop("deleted", None)
    made = pod(name, limits, labels=labels, uid=given.pop("uid", f"u-{name}"), **given)
    made["metadata"]["creationTimestamp"] = created
    if deleted:
        made["metadata"]["deletionTimestamp"] = deleted
    return made


def foreign_job(name: str, kind: str, conditions: list[Json] | None, **given: Any) -> Json:
    """Return a job of another operator."""
    return {
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": given.get("namespace", "default"),
            "uid": given.get("uid", f"{kind}-{name}"),
            "creationTimestamp": given.get("created", moment()),
        },
        "spec": given.get("spec", {}),
        "status": {"conditions": conditions, **given.get("status", {})},
    }
