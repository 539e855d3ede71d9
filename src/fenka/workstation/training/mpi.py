"""What mpirun needs on one machine: launch agents on Unix sockets, their key, and lists of hosts.

The hosts' names resolve to nothing, because Open MPI starts processes without an agent on a host that is
local, and thus outside of the leases. Ranks reach each other through the loopback interface.
"""

import contextlib
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath

from fenka.jobs import roles
from fenka.workstation.records import OWN, TrainingRecord

POLL_S = 0.02
"""Between attempts to reach an agent that starts."""

_LOOPBACK = {
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "HYDRA_IFACE": "lo",
}


def files(directory: Path) -> Path:
    """Return the directory of the agent, the key and the lists of hosts."""
    return directory / OWN / "mpi"


def sockets(record: TrainingRecord) -> Path:
    """Return the directory of the agents' sockets and of temporary files, whose paths must be short."""
    return Path(tempfile.gettempdir()) / f"fenka-{record.uid}"


def host(worker: str) -> str:
    """Return the name by which mpirun calls a worker. No name server may know this domain (RFC 6761)."""
    return f"{worker}.invalid"


def prepare(record: TrainingRecord, directory: Path, workers: Sequence[str]) -> None:
    """Write all files for an attempt. Raises OSError."""
    place = files(directory)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    source = resources.files("fenka.jobs") / "mpi_agent" / "mpi_agent.py"
    (place / "agent.py").write_text(source.read_text())
    (place / "agent").write_text(f'#!/bin/sh\nexec {shlex.join(_agent(place))} "$@"\n')
    (place / "agent").chmod(0o700)
    (place / "key").touch(mode=0o600)
    (place / "key").write_text(secrets.token_hex(32))
    hosts = [host(worker) for worker in workers]
    slots = roles.slots(record.spec)
    (place / "hosts").write_text(roles.hostfile(hosts, slots, hydra=False))
    (place / "hydra-hosts").write_text(roles.hostfile(hosts, slots, hydra=True))
    remove_sockets(record)
    sockets(record).mkdir(mode=0o700)
    for worker in workers:
        (sockets(record) / worker).mkdir()


def remove_sockets(record: TrainingRecord) -> None:
    """Remove the directory of the agents' sockets."""
    shutil.rmtree(sockets(record), ignore_errors=True)


def agent_command(directory: Path, worker: str) -> list[str]:
    """Return the command of a worker."""
    return [*_agent(files(directory)), "serve", host(worker)]


def launcher_environment(record: TrainingRecord, directory: Path) -> dict[str, str]:
    """Return the variables of the process that calls mpirun."""
    place = PurePosixPath(files(directory))
    variables = roles.mpi_environment(place / "agent", place / "hosts", place / "hydra-hosts")
    return {
        **variables,
        **_LOOPBACK,
        "FENKA_AGENT_SOCKETS": str(sockets(record)),
        "FENKA_AGENT_KEY": str(place / "key"),
    }


def worker_environment(record: TrainingRecord, directory: Path, worker: str) -> dict[str, str]:
    """Return the variables of a worker: the launcher's, and a directory for temporary files of its own.

    Open MPI's daemons take each other's files for their own where several share a host's directory. Its own
    option for that directory would be passed on, from daemons to those that they start.
    """
    return {
        **launcher_environment(record, directory),
        "TMPDIR": str(sockets(record) / worker),
    }


def await_agents(record: TrainingRecord, workers: Iterable[str]) -> None:
    """Return when all agents listen. The supervisor ends this process if one fails."""
    for worker in workers:
        while not _listens(sockets(record) / host(worker)):
            time.sleep(POLL_S)


def _listens(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return True
    return False


def _agent(place: Path) -> list[str]:
    return [sys.executable, "-IS", str(place / "agent.py")]
