"""Renders what the pods of trainings and services have in common.

The kubelet expands `$(NAME)` in commands and variables. Users' words are escaped, so that they mean the same
as on a workstation.

Names of a job's objects, their labels, and the paths of fenka's files in its pods.

Renders the security context of pods, and chooses it as a namespace requires.

Sources: Kubernetes' Pod Security Standards.

Volumes of pods: claims, directories of nodes, files.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol, TypeVar

import msgspec

from fenka.cluster import service_objects, training_objects
from fenka.cluster.autoscaling import INTERRUPTIBLE
from fenka.core.request import InvalidRequest
from fenka.jobs.collection import Contents
from fenka.jobs.workload import DEFAULT_WORKING_DIR, PodOptions, RoleSpec, WorkloadSpec

Manifest = dict[str, Any]
"""An object of Kubernetes as JSON has it."""


class NamedJob(Protocol):
    """A training or a notebook, as far as its objects are named after it."""

    @property
    def name(self) -> str:
        """The name of the root object."""

    @property
    def kind(self) -> str:
        """The kind of job."""

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims and their paths. Raises InvalidRequest."""


RELEASE = "release"
"""Label by which arena's users select the pods of a job."""

FILES = PurePosixPath("/etc/fenka")
AGENT = FILES / "mpi" / "agent"
HOSTS = FILES / "mpi" / "hosts"
HYDRA_HOSTS = FILES / "mpi" / "hydra-hosts"
KEY = FILES / "mpi" / "key"
NOTEBOOK_SERVER = FILES / "notebook" / "notebook_server.py"
CODE_ARCHIVE = FILES / "code" / "code.tar.gz"

NO_PRIORITY_LABEL = {"alpha.jobset.sigs.k8s.io/node-selector": "true"}
"""Annotation of pods that JobSet's webhook leaves as they are.

JobSet 0.11 and 0.12 label pods with their priority. The API server refuses labels that begin with a minus.
"""


def labels(spec: NamedJob, role: str = "") -> dict[str, str]:
    """Return the labels of an object of a job; `role` for those of one role."""
    own = {training_objects.JOB: spec.name, training_objects.KIND: spec.kind}
    return own | {training_objects.ROLE: role} if role else own


def service_labels(service: str, role: str) -> dict[str, str]:
    """Return the labels of an object of a service."""
    kind = {training_objects.KIND: service_objects.SERVICE_KIND, training_objects.ROLE: role}
    return {service_objects.SERVICE: service, **kind}


def object_name(spec: NamedJob, purpose: str) -> str:
    """Return the name of a dependent object."""
    return f"{spec.name}-{purpose}"


def manifest(
    kind: str, api_version: str, name: str, labels: dict[str, str], **fields: Any
) -> Manifest:
    """Return an object with its metadata."""
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


S = TypeVar("S", bound=PodOptions)

ENFORCED = "pod-security.kubernetes.io/enforce"
"""Label of a namespace: the Pod Security Standard that its pods must meet."""

WORKSPACE = "/workspace"
"""Working directory of users who have no access to root's."""

UNPRIVILEGED = 65532
"""The user of containers whose image is fenka's choice, where the image's own is root."""

_DROPPED = ["MKNOD", "NET_RAW", "SETFCAP", "SETPCAP"]
"""Capabilities that no training, model server or notebook needs, whose image may run as root."""


def secured(spec: S, enforced: str) -> S:
    """Return a job with the security that its namespace enforces. `enforced`: a Pod Security Standard."""
    if spec.security == "auto":
        level = "restricted" if enforced == "restricted" else "baseline"
        spec = msgspec.structs.replace(spec, security=level)
    unprivileged = isinstance(spec, WorkloadSpec) and _is_unprivileged(spec)
    if unprivileged and getattr(spec, "working_dir", "") == DEFAULT_WORKING_DIR:
        spec = msgspec.structs.replace(spec, working_dir=WORKSPACE)
    return spec


def pod_security(spec: PodOptions, group: int | None = None) -> Manifest:
    """Return the securityContext of a pod. group: what owns its volumes if no option says so."""
    context: Manifest = {}
    if spec.security != "none":
        context["seccompProfile"] = {"type": "RuntimeDefault"}
    if _is_unprivileged(spec):
        context["runAsNonRoot"] = True
    if spec.user is not None:
        user, own = spec.user
        context |= {"runAsUser": user, "runAsGroup": own}
        group = own
    if group is not None:
        context |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def container_security(spec: PodOptions) -> Manifest:
    """Return the securityContext of a container that runs the user's image."""
    if spec.security == "none":
        return {}
    dropped = ["ALL"] if _is_unprivileged(spec) else _DROPPED
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": dropped}}


def tool_security(spec: PodOptions) -> Manifest:
    """Return the securityContext of a container with an image of tools, which needs no user of its own."""
    context = container_security(spec)
    if spec.security == "restricted" and spec.user is None:
        context |= {"runAsUser": UNPRIVILEGED}
    return context


def _is_unprivileged(spec: PodOptions) -> bool:
    return spec.security == "restricted" or (spec.user is not None and spec.user[0] > 0)


MAX_TEXT_BYTES = 128 * 1024
"""Of a variable and of a word of a command: Linux's MAX_ARG_STRLEN."""

NO_CARDS = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Images of frameworks have `all`, and NVIDIA's runtime would give the container every card of its node."""

INTERRUPTIBLE_POD = {INTERRUPTIBLE: "true"}


def pod_settings(spec: PodOptions) -> Manifest:
    """Return fields of a pod's spec that kube-scheduler and the kubelet read. Raises InvalidRequest."""
    return {
        # A Service called REDIS would put REDIS_PORT into the environment.
        "enableServiceLinks": False,
        "securityContext": pod_security(spec),
        "schedulerName": spec.scheduler,
        "tolerations": [toleration(text) for text in spec.toleration],
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secret],
    }


def pod_annotations(spec: PodOptions) -> dict[str, str]:
    """Return the annotations of a pod, except for those about its cards."""
    return spec.annotation | (INTERRUPTIBLE_POD if spec.interruptible else {})


def limits(resources: RoleSpec, devices: Mapping[str, str]) -> dict[str, str]:
    """Return the limits of a container, except for its cards."""
    own = {"cpu": resources.cpu, "memory": resources.memory}
    return {name: amount for name, amount in own.items() if amount} | dict(devices)


def variables(given: Mapping[str, str], own: Mapping[str, str]) -> list[Manifest]:
    """Return the variables of a container.

    Args:
        given: fenka's, which may refer to others.
        own: The user's, which prevail.

    Raises:
        InvalidRequest: No process can start with one of them.
    """
    values = {**given, **{name: escape(value) for name, value in own.items()}}
    for name, value in values.items():
        if len(name) + len(value.encode()) + 2 > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"the variable {name} would have more than {MAX_TEXT_BYTES >> 10} KiB, with which no process "
                "can start: use fewer workers, or a file"
            )
    return [{"name": name, "value": value} for name, value in values.items()]


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


@dataclass(frozen=True, slots=True)
class MountedVolume:
    """A volume and where a container sees it.

    Attributes:
        name: Its name in the pod. Several mounts may share one volume.
        source: The volume's source.
        path: Where the container sees it; None if only an init container does.
        sub_path: The part of the volume that is mounted; empty for all.
    """

    name: str
    source: Manifest
    path: PurePosixPath | None
    sub_path: str = ""

    @property
    def mount(self) -> Manifest:
        """The container's mount."""
        mount = {"name": self.name, "mountPath": str(self.path)}
        return mount | {"subPath": self.sub_path} if self.sub_path else mount


def as_manifests(volumes: Iterable[MountedVolume]) -> list[Manifest]:
    """Return the pod's volumes."""
    sources = {volume.name: volume.source for volume in volumes}
    return [{"name": name, **source} for name, source in sources.items()]


def claim_volumes(spec: NamedJob) -> list[MountedVolume]:
    """Return the claims of a job. Raises InvalidRequest."""
    claims = list(dict.fromkeys(claim for claim, _ in spec.mounts))
    return [
        MountedVolume(
            f"data-{claims.index(claim)}",
            {"persistentVolumeClaim": {"claimName": claim}},
            PurePosixPath(path),
        )
        for claim, path in spec.mounts
    ]


def host_volumes(spec: WorkloadSpec) -> list[MountedVolume]:
    """Return the directories of the nodes. Raises InvalidRequest."""
    return [
        MountedVolume(f"host-{index}", {"hostPath": {"path": host}}, PurePosixPath(path))
        for index, (host, path) in enumerate(spec.host_mounts)
    ]


def memory_volumes(spec: WorkloadSpec) -> list[MountedVolume]:
    """Return the memory that processes share by files."""
    if not spec.share_memory:
        return []
    shared = {"medium": "Memory", "sizeLimit": spec.share_memory}
    return [MountedVolume("shm", {"emptyDir": shared}, PurePosixPath("/dev/shm"))]


def workspace_volumes(spec: WorkloadSpec) -> list[MountedVolume]:
    """Return the working directory of processes without access to root's."""
    if spec.working_dir != WORKSPACE:
        return []
    return [MountedVolume("workspace", {"emptyDir": {}}, PurePosixPath(WORKSPACE))]


def config_volumes(name: str, contents: Contents) -> list[MountedVolume]:
    """Return the files of `--config-file`, which are in the ConfigMap of this name."""
    source = {"configMap": {"name": name}}
    return [
        MountedVolume("config", source, PurePosixPath(path), f"file-{index}")
        for index, path in enumerate(contents.config_files)
    ]


def config_files(name: str, labels: dict[str, str], contents: Contents) -> list[Manifest]:
    """Return the ConfigMap with the files of `--config-file`, if there are any."""
    files = enumerate(contents.config_files.values())
    data = {f"file-{index}": content for index, content in files}
    return [binary_files(name, labels, data)] if data else []


def binary_files(name: str, labels: dict[str, str], files: dict[str, bytes]) -> Manifest:
    """Return a ConfigMap with files by their names."""
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    return manifest("ConfigMap", "v1", name, labels, binaryData=data)
