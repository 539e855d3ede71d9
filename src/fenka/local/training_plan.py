"""Renders a training as processes of this machine, and brings what they need: code, and files for mpirun.

Each process has an address of its own, 127.0.0.1 and a free port. Roles that request cards are the members
of one gang in the daemon's queue; the others run outside of leases.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

from fenka import procfs
from fenka.core.errors import FAILURE, FenkaError
from fenka.core.request import InvalidRequest
from fenka.jobs import archive, job_spec, repository, roles
from fenka.jobs.job_spec import GpuResources, JobSpec
from fenka.jobs.local_ports import LOOPBACK
from fenka.jobs.notebook import listens
from fenka.jobs.roles import Role, RoleName
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import RoleSpec
from fenka.local import workload
from fenka.local.records import OWN, TrainingRecord
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
    variables = repository.clone_variables(spec, str(target), "", credentials=bool(credentials))
    environment = {**os.environ, **credentials, **variables}
    log.parent.mkdir(mode=0o700, parents=True)
    with log.open("w+b") as output:
        try:
            done = subprocess.run(
                ["sh", "-c", repository.CLONE],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Or its next command would write to a directory that may be deleted by then.
                preexec_fn=lambda: procfs.die_with_parent(signal.SIGKILL),
                check=False,
            )
        except FileNotFoundError as why:
            raise CodeNotFetched(f"{why.filename} is not installed here") from None
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if done.returncode:
        reason = repository.failure_reason(printed) or f"it ended with {done.returncode}"
        raise CodeNotFetched(f"git cannot fetch {spec.sync_source}: {reason}")


def _copy(source: Path, target: Path) -> None:
    """Copy what git would not ignore: the same files as to a cluster, and of any size."""
    for name in map(os.fsdecode, archive.files(source)):
        if (source / name).is_dir():
            continue  # a submodule
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name, follow_symlinks=False)


# --- mpirun ---------------------------------------------------------------------------------------------

# The hosts' names resolve to nothing, because Open MPI starts processes without an agent on a host that is
# local, and thus outside of the leases. Ranks reach each other through the loopback interface.

POLL_S = 0.02
"""Between attempts to reach an agent that starts."""

_LOOPBACK = {
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "HYDRA_IFACE": "lo",
}


def _mpi_files(directory: Path) -> Path:
    """Return the directory of the agent, the key and the lists of hosts."""
    return directory / OWN / "mpi"


def _mpi_sockets(record: TrainingRecord) -> Path:
    """Return the directory of the agents' sockets and of temporary files, whose paths must be short."""
    return Path(tempfile.gettempdir()) / f"fenka-{record.uid}"


def _mpi_host(worker: str) -> str:
    """Return the name by which mpirun calls a worker. No name server may know this domain (RFC 6761)."""
    return f"{worker}.invalid"


def prepare_mpi(record: TrainingRecord, directory: Path, workers: Sequence[str]) -> None:
    """Write all files for an attempt. Raises OSError."""
    place = _mpi_files(directory)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    source = resources.files("fenka.jobs.in_pod") / "mpi_agent.py"
    (place / "agent.py").write_text(source.read_text())
    (place / "agent").write_text(f'#!/bin/sh\nexec {shlex.join(_mpi_agent(place))} "$@"\n')
    (place / "agent").chmod(0o700)
    (place / "key").touch(mode=0o600)
    (place / "key").write_text(secrets.token_hex(32))
    hosts = [_mpi_host(worker) for worker in workers]
    slots = roles.slots(record.spec)
    (place / "hosts").write_text(roles.hostfile(hosts, slots, hydra=False))
    (place / "hydra-hosts").write_text(roles.hostfile(hosts, slots, hydra=True))
    remove_mpi_sockets(record)
    _mpi_sockets(record).mkdir(mode=0o700)
    for worker in workers:
        (_mpi_sockets(record) / worker).mkdir()


def remove_mpi_sockets(record: TrainingRecord) -> None:
    """Remove the directory of the agents' sockets."""
    shutil.rmtree(_mpi_sockets(record), ignore_errors=True)


def mpi_agent_command(directory: Path, worker: str) -> list[str]:
    """Return the command of a worker."""
    return [*_mpi_agent(_mpi_files(directory)), "serve", _mpi_host(worker)]


def mpi_launcher_environment(record: TrainingRecord, directory: Path) -> dict[str, str]:
    """Return the variables of the process that calls mpirun."""
    place = PurePosixPath(_mpi_files(directory))
    variables = roles.mpi_environment(place / "agent", place / "hosts", place / "hydra-hosts")
    return {
        **variables,
        **_LOOPBACK,
        "FENKA_AGENT_SOCKETS": str(_mpi_sockets(record)),
        "FENKA_AGENT_KEY": str(place / "key"),
    }


def mpi_worker_environment(record: TrainingRecord, directory: Path, worker: str) -> dict[str, str]:
    """Return the variables of a worker: the launcher's, and a directory for temporary files of its own.

    Open MPI's daemons take each other's files for their own where several share a host's directory. Its own
    option for that directory would be passed on, from daemons to those that they start.
    """
    return {
        **mpi_launcher_environment(record, directory),
        "TMPDIR": str(_mpi_sockets(record) / worker),
    }


def await_agents(record: TrainingRecord, workers: Iterable[str]) -> None:
    """Return when all agents listen. The supervisor ends this process if one fails."""
    for worker in workers:
        while not listens(str(_mpi_sockets(record) / _mpi_host(worker))):
            time.sleep(POLL_S)


def _mpi_agent(place: Path) -> list[str]:
    return [sys.executable, "-IS", str(place / "agent.py")]
