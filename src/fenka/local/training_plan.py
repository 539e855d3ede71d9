"""Renders a training as processes of this machine.

Each process has an address of its own, 127.0.0.1 and a free port. Roles that request cards are the members
of one gang in the daemon's queue; the others run outside of leases.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fenka.core.request import InvalidRequest
from fenka.jobs import job_spec, roles
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.jobs.local_ports import LOOPBACK
from fenka.jobs.roles import Role, RoleName
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.local import workload
from fenka.local.records import TrainingRecord
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
        """Its share of the cards."""
        return self.role.gpu

    @property
    def address(self) -> Address:
        """Its role and index."""
        return self.role.name, self.index


def processes(spec: TrainingSpec) -> list[Process]:
    """Return the processes of a training, the chief first. Raises InvalidRequest."""
    all_roles = roles.roles(spec)
    number = sum(role.replicas for role in all_roles)
    if number > job_spec.MAX_MEMBERS:
        raise InvalidRequest(
            f"a training on a workstation has at most {job_spec.MAX_MEMBERS} processes, not {number}"
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
        priority=-job_spec.MAX_PRIORITY if spec.backfill else parse_priority(spec.priority),
        time_limit_s=None if limit_s is None else limit_s + DEADLINE_SLACK_S,
        eviction_grace_s=min(spec.grace_s, job_spec.MAX_EVICTION_GRACE_S)
        if spec.backfill
        else None,
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
    variables = roles.environment(
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


def time_left_s(record: TrainingRecord) -> float | None:
    """Return the seconds until a start must end: by its own limit, or by that of the training."""
    spec = record.spec
    limits = [spec.time_limit_s] if spec.time_limit_s is not None else []
    if spec.running_timeout_s is not None:
        since = record.started_at or time.time()
        limits.append(max(since + spec.running_timeout_s - time.time(), 0))
    return min(limits, default=None)


def refuse_cluster_options(spec: TrainingSpec) -> None:
    """Raise InvalidRequest for an option that a workstation cannot provide."""
    parts: dict[str, RoleSpec] = {
        "worker-": spec.worker,
        "ps-": spec.ps,
        "chief-": spec.chief,
        "evaluator-": spec.evaluator,
    }
    workload.refuse_cluster_options(spec, parts)


# --- mpirun ---------------------------------------------------------------------------------------------

# The hosts' names resolve to nothing, because Open MPI starts processes without an agent on a host that is
# local, and thus outside of the leases. Ranks reach each other through the loopback interface.
