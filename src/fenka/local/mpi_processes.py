"""Files, variables and agents that mpirun needs for processes of this machine."""

import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath

from fenka.jobs import roles
from fenka.jobs.notebook import listens
from fenka.local.records import OWN, TrainingRecord

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
