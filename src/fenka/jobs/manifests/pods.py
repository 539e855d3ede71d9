"""Renders the pods of a role: environment, command, volumes and what the scheduler reads.

The kubelet expands `$(NAME)` in commands and variables. What users write is escaped, so that it means the
same as on a workstation.
"""

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from fenka.cluster import pod_groups, training_objects
from fenka.core.request import InvalidRequest
from fenka.jobs import roles
from fenka.jobs.manifests import code, mpi, names
from fenka.jobs.manifests.cards import card_request
from fenka.jobs.manifests.contents import GIT_CREDENTIALS, Contents
from fenka.jobs.manifests.names import Manifest
from fenka.jobs.manifests.volumes import Volume, as_manifests, claim_volumes, host_volumes
from fenka.jobs.roles import Role, RoleName
from fenka.jobs.training import TrainingSpec
from fenka.views.jobs import TRAINERS

Engine = Literal["job", "indexed-job", "jobset"]
"""What runs the pods: a Job of one pod, an Indexed Job of equal pods, or a JobSet."""

INDEX = "$(FENKA_INDEX)"

_NO_CARDS = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Images of frameworks have `all`, and NVIDIA's runtime would give the container every card of its node."""

MAX_TEXT_BYTES = 128 * 1024
"""Of a variable and of a word of a command: Linux's MAX_ARG_STRLEN."""

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
    }
    if spec.kind == "mpi" and not role.runs_command:
        container |= mpi.worker_fields()
    metadata = {
        "labels": spec.label
        | cards.labels
        | _gang(rendering, role)
        | names.labels(spec, role.name)
        | {names.RELEASE: spec.name},
        "annotations": spec.annotation | cards.annotations,
    }
    init = code.init_containers(spec, rendering.contents, image)
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


def _settings(spec: TrainingSpec, role: Role) -> Manifest:
    """Return the fields of a pod's spec that kube-scheduler, the queue and the kubelet read."""
    deadline = spec.time_limit_s
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.grace_s),
        "activeDeadlineSeconds": None if deadline is None else math.ceil(deadline),
        # A Service called REDIS would put REDIS_PORT into the environment.
        "enableServiceLinks": False,
        "schedulerName": spec.scheduler,
        "priorityClassName": names.BACKFILL_CLASS if spec.backfill else spec.priority,
        "nodeSelector": role.resources.selector,
        "tolerations": [toleration(text) for text in spec.toleration],
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secret],
    }


def _command(rendering: Rendering, role: Role) -> list[str]:
    if not role.runs_command:
        return mpi.worker_command()
    alone = rendering.engine == "job"
    before, after = (_COUNT_RESTARTS, "") if alone else ("", _LINGER)
    script = f'{before}{_SUPERVISE}{after}exit "$code"\n'
    return ["sh", "-c", *map(escape, (script, "fenka", *rendering.spec.argv))]


def _environment(rendering: Rendering, role: Role) -> list[Manifest]:
    """Return the variables of a container: the index first, so that later ones may refer to it."""
    spec = rendering.spec
    given = roles.environment(spec, role, INDEX, rendering.host, rendering.port)
    if spec.kind == "mpi" and role.chief:
        given |= mpi.launcher_environment()
    if role.gpu is None:
        given |= _NO_CARDS
    own = {name: escape(value) for name, value in spec.env.items() if name not in GIT_CREDENTIALS}
    for name, value in (given | own).items():
        if len(name) + len(value.encode()) + 2 > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"the variable {name} would have more than {MAX_TEXT_BYTES >> 10} KiB, with which no process "
                "can start: use fewer workers, or a file"
            )
    return [
        _from_pod("FENKA_INDEX", "labels", training_objects.COMPLETION_INDEX),
        *_restarts(rendering),
        *({"name": name, "value": value} for name, value in (given | own).items()),
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
    resources = role.resources
    own = {"cpu": resources.cpu, "memory": resources.memory}
    devices = {} if spec.kind == "mpi" and role.chief else spec.device
    return {name: amount for name, amount in own.items() if amount} | devices


def _volumes(rendering: Rendering, role: Role) -> list[Volume]:
    spec, contents = rendering.spec, rendering.contents
    volumes = list[Volume]()
    if spec.kind != "mpi" or not role.chief or spec.mounts_on_launcher:
        volumes += [*claim_volumes(spec), *host_volumes(spec)]
    if spec.share_memory:
        shared = {"medium": "Memory", "sizeLimit": spec.share_memory}
        volumes.append(Volume("shm", {"emptyDir": shared}, PurePosixPath("/dev/shm")))
    if contents.config_files:
        source = {"configMap": {"name": names.object_name(spec, "config")}}
        volumes += [
            Volume("config", source, PurePosixPath(path), f"file-{index}")
            for index, path in enumerate(contents.config_files)
        ]
    volumes += code.volumes(spec)
    if spec.kind == "mpi":
        volumes.append(mpi.volume(spec))
    return volumes


def _gang(rendering: Rendering, role: Role) -> dict[str, str]:
    """Return the labels of pods that start together.

    MPI's launcher is created when the workers are ready, so it is not one of them.
    """
    spec = rendering.spec
    together = [each for each in roles.roles(spec) if not (spec.kind == "mpi" and each.chief)]
    number = sum(each.replicas for each in together)
    if not spec.gang or number == 1 or role.name not in [each.name for each in together]:
        return {}
    return {
        pod_groups.NAME_LABELS[0]: f"{TRAINERS[spec.kind]}-{spec.name}",
        pod_groups.MINIMUM_LABEL: str(number),
    }


def toleration(text: str) -> Manifest:
    """Return the toleration `all`, `KEY` or `K=V:EFFECT,OPERATOR`. Raises InvalidRequest."""
    if text == "all":
        return {"operator": "Exists"}
    match = _TOLERATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"invalid --toleration {text[:80]!r}: expected all, KEY or K=V:EFFECT, for example "
            "team=vision:NoSchedule"
        )
    fields = {
        "key": match["key"],
        "operator": match["operator"] or ("Equal" if match["value"] is not None else "Exists"),
        "value": match["value"],
        "effect": match["effect"],
    }
    if fields["operator"] == "Exists":
        del fields["value"]
    return without_empty(fields)


_TOLERATION = re.compile(
    r"(?P<key>[A-Za-z0-9][A-Za-z0-9._/-]*)(?:=(?P<value>[A-Za-z0-9._-]*))?"
    r"(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?(?:,(?P<operator>Equal|Exists))?"
)


def escape(text: str) -> str:
    """Return the text so that the kubelet expands nothing in it."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def without_empty(fields: Manifest) -> Manifest:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}
