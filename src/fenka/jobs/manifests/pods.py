"""Renders the pods of a role: environment, command, volumes and what the scheduler reads.

The kubelet expands `$(NAME)` in commands and variables. Users' words are escaped, so that they mean the same
as on a workstation.
"""

import math
from dataclasses import dataclass
from typing import Literal

from fenka.cluster import pod_groups, training_objects
from fenka.cluster.objects import BACKFILL_CLASS
from fenka.core.request import InvalidRequest
from fenka.jobs import roles
from fenka.jobs.collection import Contents
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.card_requests import card_request
from fenka.jobs.manifests.code_container import code_volumes, init_containers
from fenka.jobs.manifests.common import (
    NO_CARDS,
    escape,
    limits,
    pod_annotations,
    pod_settings,
    variables,
    without_empty,
)
from fenka.jobs.manifests.mpi_pods import (
    launcher_environment,
    mpi_volume,
    worker_command,
    worker_fields,
)
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.pod_security import WORKSPACE, container_security
from fenka.jobs.manifests.volumes import (
    MountedVolume,
    as_manifests,
    claim_volumes,
    config_volumes,
    host_volumes,
    memory_volumes,
    workspace_volumes,
)
from fenka.jobs.repository import GIT_CREDENTIALS
from fenka.jobs.roles import Role, RoleName
from fenka.jobs.training import TrainingSpec
from fenka.views.workloads import TRAINERS

Engine = Literal["job", "indexed-job", "jobset"]
"""The pods' controller: a Job of one pod, an Indexed Job of equal pods, or a JobSet."""

INDEX = "$(FENKA_INDEX)"

_LINGER_S = 10

_EVICTIONS, _FAILURES = "FENKA_EVICTIONS", "FENKA_FAILURES"

_COUNT_RESTARTS = f"""\
FENKA_RESTARTS=$((${{{_EVICTIONS}:-0}} + ${{{_FAILURES}:-0}}))
export FENKA_RESTARTS
"""
"""Adds what the Job controller counts of one pod. A count that is 0 may have no annotation."""

_SUPERVISE = """\
ended= child=
trap 'ended=1; test -z "$child" || kill -TERM "$child" 2>/dev/null' TERM
"$@" & child=$!
test -z "$ended" || kill -TERM "$child"
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
if [ -n "$ended" ] && [ "$code" = 0 ]; then code=143; fi
"""
"""Runs a process. After SIGTERM it has not succeeded, even if it has saved its state and exits with 0."""

_LINGER = f"""\
if [ -z "$ended" ] && [ "$code" != 0 ]; then sleep {_LINGER_S} & wait "$!"; fi
"""
"""Ends the pod of a process later, if the process fails and is one of several.

A process that is evicted makes the others fail. If they were reported first, the job would count a failure
of its own.
"""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A training that is rendered.

    Attributes:
        spec: The training.
        contents: Its files and secrets.
        engine: What runs its pods.
        hami: The cluster reads HAMi's names.
    """

    spec: TrainingSpec
    contents: Contents
    engine: Engine
    hami: bool = True

    def host(self, role: RoleName, index: int) -> str:
        """Return the address of a process."""
        name = self.spec.name
        match self.engine:
            case "job":
                return "localhost"
            case "indexed-job":
                return f"{name}-{index}.{name}"
            case "jobset":
                return f"{name}-{role}-0-{index}.{name}"

    def port(self, role: RoleName, _index: int) -> int:
        """Return the port on which a process serves the others."""
        if self.spec.kind != "tensorflow":
            return roles.MASTER_PORT
        if role == "worker":
            return self.spec.worker_port
        ports = {
            "chief": self.spec.chief,
            "ps": self.spec.ps,
            "evaluator": self.spec.evaluator,
        }
        return ports[role].port


def pod_template(rendering: Rendering, role: Role) -> Manifest:
    """Return the template of a role's pods. Raises InvalidRequest, InvalidSize."""
    spec = rendering.spec
    image = role.resources.image
    if not image:
        raise InvalidRequest("--image is required on Kubernetes")
    cards = card_request(role.gpu, hami=rendering.hami)
    volumes = _volumes(rendering, role)
    container = {
        "name": spec.kind,
        "image": image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": _command(rendering, role),
        "workingDir": spec.working_dir,
        "env": _environment(rendering, role),
        "resources": without_empty({"limits": _limits(spec, role) | cards.limits}),
        "volumeMounts": [volume.mount for volume in volumes if volume.path],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(spec),
    }
    if spec.kind == "mpi" and not role.runs_command:
        container |= worker_fields()
    metadata = {
        "labels": spec.label
        | cards.labels
        | _gang(rendering, role)
        | object_names.labels(spec, role.name)
        | {object_names.RELEASE: spec.name},
        "annotations": pod_annotations(spec) | cards.annotations | _unlabelled(rendering),
    }
    init = init_containers(spec, rendering.contents, image)
    pod = {
        **_settings(spec, role),
        "initContainers": init,
        "containers": [without_empty(container)],
        "volumes": as_manifests(volumes),
    }
    return {
        "metadata": without_empty(metadata),
        "spec": without_empty(pod),
    }


def _unlabelled(rendering: Rendering) -> dict[str, str]:
    negative = rendering.spec.backfill and rendering.engine == "jobset"
    return object_names.NO_PRIORITY_LABEL if negative else {}


def _settings(spec: TrainingSpec, role: Role) -> Manifest:
    """Return the fields of a pod's spec that kube-scheduler, the queue and the kubelet read."""
    deadline = spec.time_limit_s
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.grace_s),
        "activeDeadlineSeconds": None if deadline is None else math.ceil(deadline),
        "priorityClassName": BACKFILL_CLASS if spec.backfill else spec.priority,
        "nodeSelector": role.resources.selector,
        **pod_settings(spec),
    }


def _command(rendering: Rendering, role: Role) -> list[str]:
    if not role.runs_command:
        return worker_command()
    alone = rendering.engine == "job"
    before, after = (_COUNT_RESTARTS, "") if alone else ("", _LINGER)
    script = f'{before}{_SUPERVISE}{after}exit "$code"\n'
    return ["sh", "-c", *map(escape, (script, "fenka", *rendering.spec.argv))]


def _environment(rendering: Rendering, role: Role) -> list[Manifest]:
    """Return the variables of a container: the index first, so that later ones may refer to it."""
    spec = rendering.spec
    given = roles.environment(spec, role, INDEX, rendering.host, rendering.port)
    if spec.kind == "mpi" and role.chief:
        given |= launcher_environment()
    if role.gpu is None:
        given |= NO_CARDS
    if spec.user is not None and spec.working_dir == WORKSPACE:
        given |= {"HOME": WORKSPACE}
    own = {name: value for name, value in spec.env.items() if name not in GIT_CREDENTIALS}
    return [
        _from_pod("FENKA_INDEX", "labels", training_objects.COMPLETION_INDEX),
        *_restarts(rendering),
        *variables(given, own),
    ]


def _restarts(rendering: Rendering) -> list[Manifest]:
    """Return FENKA_RESTARTS, the number of restarts; of a pod that is alone, what its command adds up."""
    match rendering.engine:
        case "jobset":
            return [_from_pod("FENKA_RESTARTS", "labels", training_objects.RESTART_ATTEMPT)]
        case "indexed-job":
            return [{"name": "FENKA_RESTARTS", "value": "0"}]
        case "job":
            counts = "batch.kubernetes.io/job-index"
            return [
                _from_pod(_EVICTIONS, "annotations", f"{counts}-ignored-failure-count"),
                _from_pod(_FAILURES, "annotations", f"{counts}-failure-count"),
            ]


def _from_pod(name: str, field: str, key: str) -> Manifest:
    return {
        "name": name,
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{field}['{key}']"}},
    }


def _limits(spec: TrainingSpec, role: Role) -> dict[str, str]:
    devices = {} if spec.kind == "mpi" and role.chief else spec.device
    return limits(role.resources, devices)


def _volumes(rendering: Rendering, role: Role) -> list[MountedVolume]:
    spec, contents = rendering.spec, rendering.contents
    volumes = list[MountedVolume]()
    if spec.kind != "mpi" or not role.chief or spec.mounts_on_launcher:
        volumes += [*claim_volumes(spec), *host_volumes(spec)]
    volumes += memory_volumes(spec)
    volumes += workspace_volumes(spec)
    volumes += config_volumes(object_names.object_name(spec, "config"), contents)
    volumes += code_volumes(spec)
    if spec.kind == "mpi":
        volumes.append(mpi_volume(spec))
    return volumes


def _gang(rendering: Rendering, role: Role) -> dict[str, str]:
    """Return the labels of pods that start together.

    MPI's launcher is created when the workers are ready, so it is not one of them.
    """
    spec = rendering.spec
    together = [role for role in roles.roles(spec) if not (spec.kind == "mpi" and role.chief)]
    number = sum(role.replicas for role in together)
    if not spec.gang or number == 1 or role.name not in [member.name for member in together]:
        return {}
    return {
        pod_groups.NAME_LABELS[0]: f"{TRAINERS[spec.kind]}-{spec.name}",
        pod_groups.MINIMUM_LABEL: str(number),
    }
