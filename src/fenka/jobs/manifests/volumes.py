"""Volumes of pods: claims, directories of nodes, files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from fenka.jobs.manifests.names import Job, Manifest
from fenka.jobs.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class Volume:
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


def as_manifests(volumes: Iterable[Volume]) -> list[Manifest]:
    """Return the pod's volumes."""
    sources = {volume.name: volume.source for volume in volumes}
    return [{"name": name, **source} for name, source in sources.items()]


def claim_volumes(spec: Job) -> list[Volume]:
    """Return the claims of a job. Raises InvalidRequest."""
    claims = list(dict.fromkeys(claim for claim, _ in spec.mounts))
    return [
        Volume(
            f"data-{claims.index(claim)}",
            {"persistentVolumeClaim": {"claimName": claim}},
            PurePosixPath(path),
        )
        for claim, path in spec.mounts
    ]


def host_volumes(spec: TrainingSpec) -> list[Volume]:
    """Return the directories of the nodes. Raises InvalidRequest."""
    return [
        Volume(f"host-{index}", {"hostPath": {"path": host}}, PurePosixPath(path))
        for index, (host, path) in enumerate(spec.host_mounts)
    ]
