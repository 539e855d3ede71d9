"""Repeat gpushare's binpack test on two nodes: four steps, each with its table."""

from collections.abc import Iterator

import pytest

from e2e.scenarios.installation import MEMORY, Installation, deployment

NODES = {"sd-cluster-04": "192.168.1.214", "sd-cluster-05": "192.168.1.215"}
STEPS = [
    # deployment, replicas, GiB of each, then: sorted units of both nodes, units in the cluster
    ("binpack-1", 1, 2, [0, 2], "2/28 (7%)"),
    ("binpack-2", 2, 8, [8, 10], "18/28 (64%)"),
    ("binpack-3", 1, 2, [8, 12], "20/28 (71%)"),
    ("binpack-4", 1, 5, [12, 13], "25/28 (89%)"),
]


@pytest.fixture
def nodes(installation: Installation) -> Iterator[dict[str, str]]:
    """Let both nodes share their cards."""
    for name in NODES:
        installation.label(name, "cgpu-", "gpushare=true")
    for name in NODES:
        installation.wait_for_allocatable(name, MEMORY, 14)
    yield NODES
    installation.cluster.kubectl("delete", "deployment", "--all", "--now")
    for name in NODES:
        installation.label(name, "gpushare-")
    for name in NODES:
        installation.wait_for_allocatable(name, MEMORY, 0)


def test_pods_are_packed_onto_the_fullest_node_when_the_policy_is_binpack(
    installation: Installation, nodes: dict[str, str]
) -> None:
    """After every step the table equals the article's, and each container sees its units."""
    for name, replicas, units, after, total in STEPS:
        command = "env | grep ALIYUN_COM_GPU_MEM | sort; exec sleep 100000"
        installation.cluster.apply(deployment(name, MEMORY, units, replicas, command))
        for pod in installation.wait_for_running(name, replicas):
            logs = installation.cluster.kubectl("logs", pod["metadata"]["name"])
            assert "ALIYUN_COM_GPU_MEM_DEV=14" in logs
            assert f"ALIYUN_COM_GPU_MEM_CONTAINER={units}" in logs
        table = installation.inspect().splitlines()
        header = "NAME IPADDRESS GPU0(Allocated/Total) GPU Memory(GiB)"
        assert table[0].split("  ")[0] == "NAME"
        assert " ".join(table[0].split()) == header
        rows = [line.split() for line in table[1:3]]
        assert {row[0]: row[1] for row in rows} == nodes
        assert sorted(int(row[2].partition("/")[0]) for row in rows) == after
        assert all(row[2] == row[3] and row[2].endswith("/14") for row in rows)
        assert table[-2] == "Allocated/Total GPU Memory In Cluster:"
        assert table[-1].strip() == total
