"""The init container that brings the code: by git, or from the archive of `--code`."""

from pathlib import PurePosixPath

from fenka.jobs.collection import Contents
from fenka.jobs.manifests import object_names
from fenka.jobs.manifests.common import without_empty
from fenka.jobs.manifests.object_names import Manifest
from fenka.jobs.manifests.pod_security import container_security, tool_security
from fenka.jobs.manifests.volumes import MountedVolume
from fenka.jobs.repository import CLONE, GIT_CREDENTIALS, clone_variables
from fenka.jobs.training import TrainingSpec

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
        variables = {
            "ARCHIVE": str(object_names.CODE_ARCHIVE),
            "DIRECTORY": str(code_directory(spec)),
        }
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
    source = {"configMap": {"name": object_names.object_name(spec, "code")}}
    return MountedVolume("code-archive", source, object_names.CODE_ARCHIVE.parent)


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
    secret = object_names.object_name(spec, "git")
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
