"""Test the images of jobs: what they are for works in pods."""

import pytest

from e2e.cluster import Cluster
from e2e.images import GIT, TRAINING
from e2e.repository import Repository
from e2e.test_harness import pod

# One write a rank: print would write the end of the line separately, and lines of two ranks could mix.
SUM_OF_RANKS = """
import sys
from mpi4py import MPI
sys.stdout.write(f"sum={MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)}\\n")
"""


def run_to_end(cluster: Cluster, namespace: str, text: str, name: str) -> str:
    """Create a pod, wait until it has succeeded, and return its output."""
    cluster.apply(text, namespace)
    cluster.wait_for_pod(name, namespace, phase="Succeeded")
    return cluster.kubectl("-n", namespace, "logs", name)


def test_pod_clones_a_branch_from_the_git_daemon_by_its_services_name(
    cluster: Cluster, namespace: str
) -> None:
    """The clone has the branch's latest commit and its files."""
    repository = Repository(cluster, namespace)
    repository.commit({"train.py": "print('main')\n"})
    commit = repository.commit({"train.py": "1\n", "data.txt": "two\n"}, branch="tuned")
    script = f"git clone -q -b tuned {repository.url} && cd project && git rev-parse HEAD && cat *"
    text = pod("clone", GIT, cluster.nodes[1].name, ["sh", "-ec", script], restartPolicy="Never")
    assert run_to_end(cluster, namespace, text, "clone").split() == [commit, "two", "1"]


@pytest.mark.parametrize(
    ("command", "version"),
    [
        ("mpirun.openmpi --allow-run-as-root --oversubscribe", "OpenRTE"),
        ("env MPI4PY_MPIABI=mpich mpirun.mpich", "HYDRA"),
    ],
)
def test_ranks_of_each_mpi_add_their_numbers_in_the_training_image(
    cluster: Cluster, namespace: str, command: str, version: str
) -> None:
    """mpi4py's wheel works with both."""
    script = f'{command} --version; {command} -np 3 python3 -c "$PROGRAM"'
    container = {"env": [{"name": "PROGRAM", "value": SUM_OF_RANKS}]}
    node = cluster.nodes[0].name
    argv = ["sh", "-ec", script]
    text = pod("ranks", TRAINING, node, argv, container=container, restartPolicy="Never")
    output = run_to_end(cluster, namespace, text, "ranks")
    assert version in output
    assert output.count("sum=6") == 3
