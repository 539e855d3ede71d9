"""Names of a job's objects, their labels, and the paths of fenka's files in its pods."""

from pathlib import PurePosixPath
from typing import Any, Protocol

from fenka.cluster import service_objects, training_objects

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
