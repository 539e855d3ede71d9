"""Renders the pods of a role: environment, command, volumes and what the scheduler reads.

The kubelet expands `$(NAME)` in commands and variables. Users' words are escaped, so that they mean the same
as on a workstation.

The init container that brings the code: by git, or from the archive of `--code`.

MPI's pods have the launch agent, its key and the list of hosts.
"""

import base64
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath
from typing import Literal

from fenka.cluster import pod_groups, training_objects
from fenka.cluster.objects import BACKFILL_CLASS
from fenka.core.request import InvalidRequest
from fenka.jobs import roles
from fenka.jobs.collection import Contents
from fenka.jobs.manifests import common
from fenka.jobs.manifests.card_requests import card_request
from fenka.jobs.manifests.common import (
    NO_CARDS,
    WORKSPACE,
    Manifest,
    MountedVolume,
    as_manifests,
    claim_volumes,
    config_volumes,
    container_security,
    escape,
    host_volumes,
    limits,
    memory_volumes,
    pod_annotations,
    pod_settings,
    tool_security,
    variables,
    without_empty,
    workspace_volumes,
)
from fenka.jobs.repository import CLONE, GIT_CREDENTIALS, clone_variables
from fenka.jobs.roles import Role, RoleName
from fenka.jobs.training import TrainingSpec
from fenka.views.workloads import TRAINERS

INIT_CONTAINER = "init-code"
SYNC_IMAGE = "alpine/git"
"""Used without `--sync-image`."""

_UNPACK = 'set -eu; tar -xzf "$ARCHIVE" -C "$DIRECTORY"'


def code_directory(spec: TrainingSpec) -> PurePosixPath:
    """Return the directory that receives the code."""
    return PurePosixPath(spec.working_dir) / "code"


def init_containers(spec: TrainingSpec, contents: Contents, image: str) -> list[Manifest]:
    """Return the container that brings the code, if any. `image`: that of the role's processes."""
    if spec.sync_source:
        return [
            _container(spec, spec.sync_image or SYNC_IMAGE, CLONE, _git_variables(spec, contents))
        ]
    if spec.code:
        variables = {"ARCHIVE": str(common.CODE_ARCHIVE), "DIRECTORY": str(code_directory(spec))}
        unpack = _container(spec, image, _UNPACK, _values(variables))
        unpack["volumeMounts"].append(_archive(spec).mount)
        return [unpack]
    return []


def code_volumes(spec: TrainingSpec) -> list[MountedVolume]:
    """Return the volumes of the code."""
    if not (spec.sync_source or spec.code):
        return []
    directory = MountedVolume("code", {"emptyDir": {}}, code_directory(spec))
    archive = _archive(spec)
    own = [MountedVolume(archive.name, archive.source, None)] if spec.code else []
    return [directory, *own]


def _archive(spec: TrainingSpec) -> MountedVolume:
    source = {"configMap": {"name": common.object_name(spec, "code")}}
    return MountedVolume("code-archive", source, common.CODE_ARCHIVE.parent)


def _container(spec: TrainingSpec, image: str, script: str, variables: list[Manifest]) -> Manifest:
    fields = {
        "name": INIT_CONTAINER,
        "image": image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": ["sh", "-c", script],
        "env": variables,
        "volumeMounts": [{"name": "code", "mountPath": str(code_directory(spec))}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": tool_security(spec) if spec.sync_source else container_security(spec),
    }
    return without_empty(fields)


def _git_variables(spec: TrainingSpec, contents: Contents) -> list[Manifest]:
    secret = common.object_name(spec, "git")
    credentials = [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": secret, "key": name, "optional": True}},
        }
        for name in GIT_CREDENTIALS
        if contents.credentials
    ]
    directory = str(code_directory(spec) / spec.project)
    variables = clone_variables(
        spec, directory, contents.revision, credentials=bool(contents.credentials)
    )
    return [*credentials, *_values(variables)]


def _values(variables: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


AGENT_PORT = 23457
"""The launch agents listen on it."""


def worker_command() -> list[str]:
    """Return the command of a worker: it waits for mpirun's daemons to be started."""
    return ["sh", str(common.AGENT), "serve"]


def worker_fields() -> Manifest:
    """Return what else a worker's container has. It is ready when its agent listens."""
    return {
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}],
        "readinessProbe": {"tcpSocket": {"port": AGENT_PORT}, "periodSeconds": 2},
    }


def launcher_environment() -> dict[str, str]:
    """Return what makes mpirun use the agents.

    Without the interface, MPICH's daemons are told a host name of the launcher that nothing resolves.
    """
    variables = roles.mpi_environment(common.AGENT, common.HOSTS, common.HYDRA_HOSTS)
    return variables | {"HYDRA_IFACE": "eth0"}


def mpi_volume(spec: TrainingSpec) -> MountedVolume:
    """Return the volume with the agent, the hosts and the key."""
    sources = [
        {
            "configMap": {
                "name": common.object_name(spec, "mpi"),
                "items": [
                    {"key": "agent", "path": "agent", "mode": 0o555},
                    {"key": "agent.py", "path": "agent.py", "mode": 0o444},
                    {"key": "hosts", "path": "hosts", "mode": 0o444},
                    {"key": "hydra-hosts", "path": "hydra-hosts", "mode": 0o444},
                ],
            }
        },
        {"secret": {"name": common.object_name(spec, "mpi")}},
    ]
    return MountedVolume("mpi", {"projected": {"sources": sources}}, common.AGENT.parent)


def dependents(spec: TrainingSpec, contents: Contents, hosts: list[str]) -> list[Manifest]:
    """Return the ConfigMap and the Secret of the agents. hosts: the workers' addresses."""
    slots = roles.slots(spec)
    name, labels = common.object_name(spec, "mpi"), common.labels(spec)
    files = {
        "agent": _file("mpi_agent.sh"),
        "agent.py": _file("mpi_agent.py"),
        "hosts": roles.hostfile(hosts, slots, hydra=False),
        "hydra-hosts": roles.hostfile(hosts, slots, hydra=True),
    }
    secrets = {"key": contents.key}
    if contents.ssh_keys:
        private, public = contents.ssh_keys
        secrets |= {"ssh-key": private, "ssh-key.pub": public}
    return [
        common.manifest("ConfigMap", "v1", name, labels, data=files),
        common.manifest("Secret", "v1", name, labels, type="Opaque", data=encoded(secrets)),
    ]


def encoded(secrets: dict[str, str]) -> dict[str, str]:
    """Return the data of a Secret."""
    return {name: base64.b64encode(text.encode()).decode() for name, text in secrets.items()}


def _file(name: str) -> str:
    return (resources.files("fenka.jobs.in_pod") / name).read_text()


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
        | common.labels(spec, role.name)
        | {common.RELEASE: spec.name},
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
    return common.NO_PRIORITY_LABEL if negative else {}


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
    volumes += config_volumes(common.object_name(spec, "config"), contents)
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
