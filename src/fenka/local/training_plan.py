"""Renders a training as processes of this machine: values in, values out.

Each process has an address of its own, 127.0.0.1 and a free port. Roles that request cards are the members
of one gang in the daemon's queue; the others run outside of leases.

Brings a training's code to its directory, before anything is requested of the daemon.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fenka.core.errors import FAILURE, FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs import collection, training
from fenka.jobs.job_spec import (
    MAX_EVICTION_GRACE_S,
    MAX_MEMBERS,
    MAX_PRIORITY,
    GpuResources,
    JobSpec,
)
from fenka.jobs.notebook import LOOPBACK
from fenka.jobs.training import Role, RoleName, TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.local import workload
from fenka.local.workload import NO_CARDS, parse_priority
from fenka.views.workloads import TRAINERS, instance_name

DEADLINE_SLACK_S = 1.0
"""The daemon ends a process this long after its supervisor should have, which knows why it ends."""

Address = tuple[RoleName, int]
"""A role and the index of a process in it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a training.

    Attributes:
        name: Its name on screens, such as `mpi-dist-worker-0`.
        role: Its role.
        index: Its number within the role.
        chief: Its log and its end are the training's.
        required: The training succeeds when all required processes have.
        lease: Its rank among the processes with cards; None without cards.
    """

    name: str
    role: Role
    index: int
    chief: bool
    required: bool
    lease: int | None

    @property
    def gpu(self) -> GpuResources | None:
        """What it gets of the cards."""
        return self.role.gpu

    @property
    def address(self) -> Address:
        """Its role and index."""
        return self.role.name, self.index


def processes(spec: TrainingSpec) -> list[Process]:
    """Return the processes of a training, the chief first. Raises InvalidRequest."""
    all_roles = training.roles(spec)
    number = sum(role.replicas for role in all_roles)
    if number > MAX_MEMBERS:
        raise InvalidRequest(
            f"a training on a workstation has at most {MAX_MEMBERS} processes, not {number}"
        )
    planned = list[Process]()
    leases = 0
    for role in all_roles:
        for index in range(role.replicas):
            lease = leases if role.gpu else None
            leases += role.gpu is not None
            chief = role.chief and index == 0
            name = instance_name(spec.name, TRAINERS[spec.kind], role.name, index)
            required = _required(spec, role, chief=chief)
            planned.append(Process(name, role, index, chief, required, lease))
    return planned


def _required(spec: TrainingSpec, role: Role, *, chief: bool) -> bool:
    if spec.kind == "pytorch":
        return True
    if spec.kind == "tensorflow" and spec.success_policy == "AllWorkers":
        return role.name in ("chief", "worker")
    return chief


def lease_request(spec: TrainingSpec, planned: Iterable[Process], directory: str) -> JobSpec | None:
    """Return what the daemon is asked for, a gang; None if no process gets cards. Raises InvalidRequest."""
    members = [process.gpu for process in planned if process.gpu]
    if not members:
        return None
    limit_s = spec.time_limit_s
    request = JobSpec(
        spec.argv,
        members[0],
        name=spec.name,
        kind="training",
        directory=directory,
        gang=len(members),
        members=members,
        priority=-MAX_PRIORITY if spec.backfill else parse_priority(spec.priority),
        time_limit_s=None if limit_s is None else limit_s + DEADLINE_SLACK_S,
        eviction_grace_s=min(spec.grace_s, MAX_EVICTION_GRACE_S) if spec.backfill else None,
    )
    request.validate()
    return request


def environment(
    spec: TrainingSpec,
    process: Process,
    ports: Mapping[Address, int],
    restarts: int,
) -> dict[str, str]:
    """Return the variables of a process besides those of its lease.

    Args:
        spec: The training.
        process: The process.
        ports: The ports on which processes serve the others.
        restarts: How often the processes were started again.
    """
    variables = training.environment(
        spec,
        process.role,
        str(process.index),
        host=lambda _role, _index: LOOPBACK,
        port=lambda role, index: ports.get((role, index), 0),
    )
    if process.gpu is None:
        variables |= NO_CARDS
    variables |= {"FENKA_INDEX": str(process.index), "FENKA_RESTARTS": str(restarts)}
    return variables | spec.env


def refuse_cluster_options(spec: TrainingSpec) -> None:
    """Raise InvalidRequest for an option that a workstation cannot provide."""
    parts: dict[str, RoleSpec] = {
        "worker-": spec.worker,
        "ps-": spec.ps,
        "chief-": spec.chief,
        "evaluator-": spec.evaluator,
    }
    workload.refuse_cluster_options(spec, parts)


LOG = "init-code"
"""The directory of git's output among the logs: on a cluster, the container of this name has it."""


class CodeNotFetched(FenkaError):
    """The code could not be brought."""

    exit_code = FAILURE


def bring(spec: TrainingSpec, credentials: Mapping[str, str], directory: Path, log: Path) -> None:
    """Clone or copy the code to `directory/code`. Raises CodeNotFetched, InvalidRequest, OSError."""
    if spec.sync_source:
        _clone(spec, credentials, directory / "code" / spec.project, log)
    elif spec.code:
        _copy(Path(spec.code), directory / "code")


def _clone(spec: TrainingSpec, credentials: Mapping[str, str], target: Path, log: Path) -> None:
    variables = collection.clone_variables(spec, str(target), "", credentials=bool(credentials))
    environment = {**os.environ, **credentials, **variables}
    log.parent.mkdir(mode=0o700, parents=True)
    with log.open("w+b") as output:
        try:
            done = subprocess.run(
                ["sh", "-c", collection.CLONE],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Or its next command would write to a directory that may be deleted by then.
                preexec_fn=lambda: workload.die_with_parent(signal.SIGKILL),
                check=False,
            )
        except FileNotFoundError as why:
            raise CodeNotFetched(f"{why.filename} is not installed here") from None
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if done.returncode:
        reason = collection.failure_reason(printed) or f"it ended with {done.returncode}"
        raise CodeNotFetched(f"git cannot fetch {spec.sync_source}: {reason}")


def _copy(source: Path, target: Path) -> None:
    """Copy what git would not ignore: the same files as to a cluster, and of any size."""
    for name in map(os.fsdecode, collection.files(source)):
        if (source / name).is_dir():
            continue  # a submodule
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name, follow_symlinks=False)
