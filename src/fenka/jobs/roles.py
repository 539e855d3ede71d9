"""Roles: the processes that a training consists of, and what tells each of them about the others.

Both renderings use it. In Kubernetes objects a host is a pod's name, and the kubelet expands an index. Local
processes all listen on the loopback address.

Sources: TF_CONFIG is that of tf.distribute; the variables of PyTorch are those of torch.distributed's env://
initialisation, and torchrun's defaults (PET_*).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from fenka.jobs.job_spec import GpuResources
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.views.workloads import chief_role

RoleName = Literal["launcher", "worker", "ps", "chief", "evaluator"]


MASTER_PORT = 23456
"""arena's port for PyTorch on a cluster."""


Host = Callable[[RoleName, int], str]
"""Returns the address of a process of a role."""


Port = Callable[[RoleName, int], int]
"""Returns the port on which a process of a role serves the others."""


_INDEX = "@INDEX@"


@dataclass(frozen=True, slots=True)
class Role:
    """Processes that differ by their index alone.

    Attributes:
        name: Its name, which is part of the names of pods.
        replicas: Number of processes.
        resources: What each gets. Its image is empty if none was given.
        chief: The first process of the role is the one whose log and end are the training's.
        runs_command: The processes run the user's command; MPI's workers run the launch agent instead.
    """

    name: RoleName
    replicas: int
    resources: RoleSpec
    chief: bool = False
    runs_command: bool = True

    @property
    def gpu(self) -> GpuResources | None:
        """Each process's request for cards; None without any."""
        return self.resources.gpu


def roles(spec: TrainingSpec) -> list[Role]:
    """Return the roles of a training that have processes; the chief's role is the first."""
    parts = _roles(spec)
    chief = chief_role([role.name for role in parts])
    return [replace(role, chief=role.name == chief) for role in parts]


def _roles(spec: TrainingSpec) -> list[Role]:
    workers = _worker(spec)
    if spec.kind == "mpi":
        launcher = RoleSpec(image=spec.image, selector=spec.selector)
        return [
            Role("launcher", 1, launcher),
            Role("worker", spec.workers, workers, runs_command=False),
        ]
    if spec.kind == "pytorch":
        return [Role("worker", spec.workers, workers)]
    if spec.workers == 1 and not (spec.ps.replicas or spec.chief.replicas):
        return [Role("chief", 1, workers), *_optional(spec, "evaluator")]
    return [
        *_optional(spec, "chief"),
        Role("worker", spec.workers, workers),
        *_optional(spec, "ps"),
        *_optional(spec, "evaluator"),
    ]


def environment(
    spec: TrainingSpec, role: Role, index: str, host: Host, port: Port
) -> dict[str, str]:
    """Return what the processes of a role find in their environment, besides the user's variables.

    Args:
        spec: The training.
        role: The role.
        index: The index of the process, or a text that is expanded to it (`$(FENKA_INDEX)`).
        host: Returns the address of a process of a role.
        port: Returns the port on which a process of a role serves the others.
    """
    gpu = _worker(spec).gpu
    variables = {
        "FENKA_JOB": spec.name,
        "workers": str(spec.workers),
        # arena's meaning: the cards of a worker, in the processes of all roles.
        "gpus": str(gpu.cards if gpu else 0),
    }
    if spec.kind == "tensorflow":
        variables["TF_CONFIG"] = _tf_config(spec, role, host, port).replace(f'"{_INDEX}"', index)
    elif spec.kind == "pytorch":
        master = host("worker", 0) if spec.workers > 1 else "localhost"
        variables |= _torch(spec, index, master, str(port("worker", 0)))
    return variables


def slots(spec: TrainingSpec) -> int:
    """Return the ranks that mpirun or torchrun start on each worker by default: one a card, at least one."""
    gpu = _worker(spec).gpu
    return gpu.cards if gpu else 1


def hostfile(hosts: Sequence[str], slots_each: int, *, hydra: bool) -> str:
    """Return the list of hosts for mpirun: Open MPI's form, or that of Hydra (MPICH and Intel MPI)."""
    form = "{}:{}" if hydra else "{} slots={}"
    return "".join(form.format(host, slots_each) + "\n" for host in hosts)


def mpi_environment(
    agent: PurePosixPath, hosts: PurePosixPath, hydra_hosts: PurePosixPath
) -> dict[str, str]:
    """Return what makes mpirun start its daemons through the launch agent.

    Args:
        agent: The program that mpirun calls in place of ssh.
        hosts: Open MPI's list of hosts.
        hydra_hosts: Hydra's.
    """
    return {
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_MCA_orte_default_hostfile": str(hosts),
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(agent),
        "HYDRA_HOST_FILE": str(hydra_hosts),
    }


def _worker(spec: TrainingSpec) -> RoleSpec:
    """Return the workers' resources: the training's own, with what `--worker-*` changes."""
    own = {field: getattr(spec, field) for field in RoleSpec.__struct_fields__}
    return msgspec.structs.replace(RoleSpec(**own), **_set_fields(spec.worker))


def _optional(spec: TrainingSpec, name: Literal["ps", "chief", "evaluator"]) -> list[Role]:
    own = getattr(spec, name)
    if not own.replicas:
        return []
    base = RoleSpec(image=spec.image, selector=spec.selector)
    resources = msgspec.structs.replace(base, **_set_fields(own))
    return [Role(name, own.replicas, resources)]


def _set_fields(role: RoleSpec) -> dict[str, object]:
    """Return the fields that are not at their defaults."""
    default = RoleSpec()
    return {
        field: getattr(role, field)
        for field in RoleSpec.__struct_fields__
        if getattr(role, field) != getattr(default, field)
    }


def _tf_config(spec: TrainingSpec, role: Role, host: Host, port: Port) -> str:
    # The evaluator is no part of the cluster: it reads checkpoints only.
    cluster = {
        role.name: [
            f"{host(role.name, index)}:{port(role.name, index)}" for index in range(role.replicas)
        ]
        for role in roles(spec)
        if role.name != "evaluator"
    }
    task = {"type": role.name, "index": _INDEX}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


def _torch(spec: TrainingSpec, rank: str, master: str, port: str) -> dict[str, str]:
    return {
        "RANK": rank,
        "WORLD_SIZE": str(spec.workers),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
        "PET_NNODES": str(spec.workers),
        "PET_NODE_RANK": rank,
        "PET_NPROC_PER_NODE": spec.nproc_per_node or str(slots(spec)),
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": port,
    }
