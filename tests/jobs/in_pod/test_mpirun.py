"""Test the launch agent under real mpirun, where Debian's openmpi-bin or mpich is installed.

Each host is an agent of its own on a Unix socket. Its name resolves to nothing, so that no mpirun takes it
for this machine.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil
import pytest

from fenka.jobs import in_pod, roles
from tests.waiting import wait_until

FILES = Path(next(iter(in_pod.__path__)))
RANK = {"openmpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts with agents, and what mpirun needs to use them."""

    program: str
    rank: str
    environment: dict[str, str]

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start mpirun."""
        return subprocess.Popen(
            [self.program, *command],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> tuple[int, str, str]:
        """Return mpirun's exit code, standard output and standard error."""
        process = self.start(*command)
        stdout, stderr = process.communicate()
        return process.returncode, stdout, stderr


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Return the name of an MPI that is installed."""
    if shutil.which(f"mpirun.{request.param}") is None:
        pytest.skip(f"mpirun.{request.param} is not installed: apt-get install openmpi-bin mpich")
    return str(request.param)


@contextlib.contextmanager
def hosts(mpi: str, directory: Path, number: int, slots: int = 1) -> Iterator[Cluster]:
    """Serve hosts while the block runs."""
    directory.mkdir(exist_ok=True)
    shutil.copy(FILES / "mpi_agent.py", directory / "agent.py")
    shutil.copy(FILES / "mpi_agent.sh", directory / "agent")
    (directory / "agent").chmod(0o755)
    (directory / "key").write_text(secrets.token_hex(32))
    names = [f"host-{index}" for index in range(number)]
    (directory / "hosts").write_text(roles.hostfile(names, slots, hydra=False))
    (directory / "hydra").write_text(roles.hostfile(names, slots, hydra=True))
    base = PurePosixPath(directory)
    sockets = directory / "sockets"
    sockets.mkdir()
    environment = {
        **os.environ,
        # Not a version manager's script in front of it.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **roles.mpi_environment(base / "agent", base / "hosts", base / "hydra"),
        "HYDRA_IFACE": "lo",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_oob_tcp_if_include": "lo",
        "FENKA_AGENT_SOCKETS": str(sockets),
    }
    agents = []
    for name in names:
        (directory / name).mkdir()
        own = {**environment, "TMPDIR": str(directory / name)}
        agents.append(subprocess.Popen(["sh", str(directory / "agent"), "serve", name], env=own))
    try:
        wait_until(lambda: len(list(sockets.iterdir())) == number)
        yield Cluster(f"mpirun.{mpi}", RANK[mpi], environment)
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait()


def test_ranks_run_on_all_slots_without_options(mpi: str, tmp_path: Path) -> None:
    """Test that ranks run on all slots without options."""
    with hosts(mpi, tmp_path / "mpi", 3, slots=2) as cluster:
        code, stdout, stderr = cluster.run("sh", "-c", f"echo rank ${cluster.rank}")
    assert (code, sorted(stdout.split("\n")[:-1])) == (0, [f"rank {rank}" for rank in range(6)]), (
        stderr
    )


def test_daemons_start_daemons_through_their_own_agents(mpi: str, tmp_path: Path) -> None:
    """Open MPI does so above 64 hosts."""
    with hosts(mpi, tmp_path / "mpi", 7) as cluster:
        cluster.environment["OMPI_MCA_routed_radix"] = "2"
        code, stdout, stderr = cluster.run("sh", "-c", f"echo ${cluster.rank}")
    assert (code, sorted(map(int, stdout.split()))) == (0, list(range(7))), stderr


def test_exit_code_is_that_of_the_rank_that_fails(mpi: str, tmp_path: Path) -> None:
    """Test that exit code is that of the rank that fails."""
    with hosts(mpi, tmp_path / "mpi", 2) as cluster:
        code, _, stderr = cluster.run("sh", "-c", f'[ "${cluster.rank}" = 0 ] || exit 7')
    assert code == 7, stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_rank_is_left_when_mpirun_is_ended(mpi: str, tmp_path: Path, number: int) -> None:
    """Test that no rank is left when mpirun is ended."""
    with hosts(mpi, tmp_path / "mpi", 2) as cluster:
        mpirun = cluster.start("sh", "-c", f"echo $$ >{tmp_path}/${cluster.rank}; exec sleep 1000")
        files = [tmp_path / "0", tmp_path / "1"]
        wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files))
        ranks = [int(file.read_text()) for file in files]
        mpirun.send_signal(number)
        mpirun.communicate()
        wait_until(lambda: not any(map(psutil.pid_exists, ranks)))


def test_wrong_key_is_refused(mpi: str, tmp_path: Path) -> None:
    """Hydra would wait for daemons that never started."""
    if mpi == "mpich":
        pytest.skip("MPICH's mpirun does not end when ssh fails")
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    with hosts(mpi, tmp_path / "mpi", 2) as cluster:
        cluster.environment["FENKA_AGENT_KEY"] = str(wrong)
        code, stdout, _ = cluster.run("echo", "hello")
    assert code != 0
    assert not stdout
