"""What trainings and services of this machine have in common: their options, mounts and directories."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fenka.core.errors import FAILURE
from fenka.core.request import InvalidRequest
from fenka.jobs.processes import JobNotStarted
from fenka.jobs.workload import RoleSpec, WorkloadSpec

NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
"""For processes outside of leases, which could use every card of the machine."""

_REFUSED = {
    "data": "use --data-dir DIRECTORY",
    "checkpoint": "use --data-dir DIRECTORY",
    "toleration": "leave it out",
    "device": "leave it out",
    "queue": "use --priority N",
    "ttl_after_finished_s": "use fenka prune",
}
"""Options that mean something only on a cluster, and what to do instead."""

_ROLE_REFUSED = {
    "selector": "leave it out",
    "cpu": "no limit of processors is enforced here, so leave it out",
    "memory": "no limit of memory is enforced here, so leave it out",
}

_IGNORED = (
    "image",
    "sync_image",
    "tensorboard_image",
    "image_pull_secret",
    "image_pull_policy",
    "share_memory",
    "scheduler",
    "annotation",
    "label",
    "clean_task_policy",
    "mounts_on_launcher",
    "gang",
    "interruptible",
    "security",
    "run_as",
)


def refuse_cluster_options(spec: WorkloadSpec, roles: Mapping[str, RoleSpec]) -> None:
    """Raise InvalidRequest for an option that a workstation cannot provide.

    Args:
        spec: The training, or the version of a service.
        roles: The parts that have options of their own, by the prefix of these.
    """
    given = [(_option(field), advice) for field, advice in _REFUSED.items() if _given(spec, field)]
    given += [
        (prefix + field, advice)
        for prefix, part in {"": spec, **roles}.items()
        for field, advice in _ROLE_REFUSED.items()
        if getattr(part, field)
    ]
    for option, advice in given:
        raise InvalidRequest(f"--{option} requires a cluster: {advice}")


def ignored_options(spec: WorkloadSpec) -> list[str]:
    """Return the options that have no effect on a workstation."""
    return [
        f"--{'no-' if field == 'gang' else ''}{_option(field)}"
        for field in _IGNORED
        if _given(spec, field)
    ]


def _given(spec: WorkloadSpec, field: str) -> bool:
    return field in spec.__struct_fields__ and getattr(spec, field) != getattr(type(spec)(), field)


def _option(field: str) -> str:
    return field.removesuffix("_s").replace("_", "-")


def parse_priority(text: str) -> int:
    """Return the number of `--priority`. Raises InvalidRequest."""
    try:
        return int(text or "0")
    except ValueError:
        raise InvalidRequest(
            f"invalid --priority {text[:40]!r}: on a workstation it is a number, larger ones are served first"
        ) from None


# --- directories ----------------------------------------------------------------------------------------


def working_directory(spec: WorkloadSpec) -> str:
    """Return the directory that is named, else the current one. Raises InvalidRequest."""
    if not _given(spec, "working_dir"):
        return str(Path.cwd())
    if not Path(spec.working_dir).is_dir():
        raise InvalidRequest(
            f"--working-dir {spec.working_dir} is not a directory on this machine: leave it out for the "
            "current one"
        )
    return spec.working_dir


def change_directory(directory: str) -> None:
    """Enter a program's working directory. Raises JobNotStarted."""
    try:
        os.chdir(directory)
    except OSError as why:
        raise JobNotStarted(
            f"the working directory {directory} cannot be entered: {why.strerror}", FAILURE
        ) from None


def check_mounts(spec: WorkloadSpec) -> None:
    """Check that what programs see in another place exists, here and there. Raises InvalidRequest."""
    for option, kind, exists, pairs in (
        ("data-dir", "directory", Path.is_dir, spec.host_mounts),
        ("config-file", "file", Path.is_file, spec.config_files),
    ):
        for source, target in pairs:
            if not exists(Path(source)):
                raise InvalidRequest(f"--{option} {source} is not a {kind} on this machine")
            if not exists(Path(target)):
                raise InvalidRequest(
                    f"--{option} {source}:{target} requires a {kind} {target} to be covered for the "
                    f"programs: create it, or use {source} itself"
                )


def provide_files(spec: WorkloadSpec, directory: Path) -> list[tuple[str, str]]:
    """Return what programs see in other places. Files are copied to a directory: they may change."""
    binds = [pair for pair in spec.host_mounts if pair[0] != pair[1]]
    for number, (source, target) in enumerate(spec.config_files):
        copy = directory / f"file-{number}"
        shutil.copyfile(source, copy)
        binds.append((str(copy), target))
    return binds
