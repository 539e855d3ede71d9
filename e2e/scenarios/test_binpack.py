"""Repeat gpushare's binpack test on two nodes: four steps, each with its table."""

from e2e.scenarios.installation import MEMORY, Installation, deployment

STEPS = [
    # deployment, replicas, GiB of each, then: sorted units of both nodes, units in the cluster
    ("binpack-1", 1, 2, [0, 2], "2/28 (7%)"),
    ("binpack-2", 2, 8, [8, 10], "18/28 (64%)"),
    ("binpack-3", 1, 2, [8, 12], "20/28 (71%)"),
    ("binpack-4", 1, 5, [12, 13], "25/28 (89%)"),
]


def test_pods_are_packed_onto_the_fullest_node_when_the_policy_is_binpack(
    shared: Installation,
) -> None:
    """After every step the table equals the article's, and each container sees its units."""
    nodes = {node.name: node.address for node in shared.cluster.nodes}
    for name, replicas, units, after, total in STEPS:
        command = "env | grep ALIYUN_COM_GPU_MEM | sort; exec sleep 100000"
        shared.cluster.apply(deployment(name, MEMORY, units, replicas, command))
        for pod in shared.wait_for_running(name, replicas):
            logs = shared.cluster.kubectl("logs", pod["metadata"]["name"])
            assert "ALIYUN_COM_GPU_MEM_DEV=14" in logs
            assert f"ALIYUN_COM_GPU_MEM_CONTAINER={units}" in logs
        table = shared.inspect().splitlines()
        header = "NAME IPADDRESS GPU0(Allocated/Total) GPU Memory(GiB)"
        assert table[0].split("  ")[0] == "NAME"
        assert " ".join(table[0].split()) == header
        rows = [line.split() for line in table[1:3]]
        assert {row[0]: row[1] for row in rows} == nodes
        assert sorted(int(row[2].partition("/")[0]) for row in rows) == after
        assert all(row[2] == row[3] and row[2].endswith("/14") for row in rows)
        assert table[-2] == "Allocated/Total GPU Memory In Cluster:"
        assert table[-1].strip() == total
