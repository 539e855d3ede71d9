"""Volumes of pods: claims, directories of nodes, files."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from fenka.jobs.collection import Contents
from fenka.jobs.manifests.object_names import Manifest, NamedJob, manifest
from fenka.jobs.manifests.pod_security import WORKSPACE
from fenka.jobs.workload import WorkloadSpec


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
