"""Test leases where they meet control groups: a process's pod, its memory, and restarts of what serves it.

`make vm` runs this on a node with cgroup v2 and systemd (e2e/virtual_node.py). Other nodes have v1.
"""

import json
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.machine import VIRTUAL
from e2e.scenarios.containers import (
    PRINT_VISIBLE_MIB,
    agent_name,
    lease_files,
    pod,
    visible_mib,
    wait_for_agent,
)
from e2e.scenarios.installation import MEMORY, Installation
from e2e.scenarios.test_usage import MIB, metrics, values_of

SLICES = {("a", "x"): 4308, ("b", "x"): 2154, ("b", "y"): 3231}
"""MiB of 4, 2 and 3 of the 14 units of 15079 MiB."""

# Prints how the driver answers a request for one MiB more than the slice, for all its pages, and for another.
FILL = (
    "import ctypes as c, time; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); p=c.c_void_p(); "
    "t=c.c_size_t(); f=c.c_size_t(); d.cuInit(0); d.cuDevicePrimaryCtxRetain(c.byref(x),0); "
    "d.cuCtxSetCurrent(x); d.cuMemGetInfo_v2(c.byref(f),c.byref(t)); m=t.value>>20; "
    "print(m, *(d.cuMemAlloc_v2(c.byref(p), c.c_size_t(n<<20)) for n in (m+1, m-m%2, 2)), flush=True); "
    "d.cuMemAlloc_v2(c.byref(p), c.c_size_t(m%2<<20)); "
    "time.sleep(100000)"
)
PROGRAM = f'exec python3 -c "{FILL}"'
OUT_OF_MEMORY = 2

# The node program is privileged, and containerd lets such containers see the host's control groups. In a
# container with a namespace of its own, paths of other groups begin with `..`.
OWNERS = """
import ctypes, os
from fenka.node.lease.pod_processes import pod_and_container
assert ctypes.CDLL(None).unshare(0x02000000) == 0, "no cgroup namespace"
for name in os.listdir("/proc"):
    if name.isdecimal():
        uid, container = pod_and_container(int(name))
        if uid:
            print(uid, container)
"""
RAM_MIB = 128
EXCEED_RAM = (
    f'python3 -c "{PRINT_VISIBLE_MIB}"; '
    "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes; "
    'exec python3 -c "bytearray(1 << 30)"'
)


def run_programs(installation: Installation) -> None:
    """Create pods of one and of two containers that fill their slices, and wait until they have done so."""
    installation.cluster.apply(pod("a", f"x=4:{PROGRAM}"))
    installation.cluster.apply(pod("b", f"x=2:{PROGRAM}\ny=3:{PROGRAM}"))
    for (name, container), mib in SLICES.items():
        installation.cluster.wait_for_pod(name)
        expected = [mib, OUT_OF_MEMORY, 0, OUT_OF_MEMORY]

        def printed(name: str = name, container: str = container) -> list[int]:
            output = installation.cluster.kubectl("logs", name, "-c", container)
            # A runtime may have written a warning of its own before.
            line = output.rstrip().rpartition("\n")[2]
            return [int(word) for word in line.split()] if line[:1].isdecimal() else []

        wait_until(f"{name} {container} has filled its slice", printed)
        assert printed() == expected


def used_mib(installation: Installation, node: str) -> dict[tuple[str, str], float]:
    """Return the memory that the node program's metrics show for each container."""
    return {
        (labels["pod"], labels["container"]): value / MIB
        for name, labels, value in metrics(installation, node)
        if name == "fenka_container_gpu_memory_used_bytes"
    }


@pytest.mark.skipif(not VIRTUAL, reason="this machine has cgroup v1: `make vm` has a node with v2")
def test_machine_has_cgroup_v2_alone(installation: Installation, node: str) -> None:
    """The kubelet has put a slice of systemd's, or a group, below its root."""
    machine = installation.cluster.node(node)
    kind = machine.run("stat", "--file-system", "--format=%T", "/sys/fs/cgroup")
    assert kind == "cgroup2fs\n"
    groups = machine.run("ls", "/sys/fs/cgroup").split()
    assert ("kubepods" if VIRTUAL == "cgroupfs" else "kubepods.slice") in groups


def test_each_program_is_counted_for_its_container_when_pods_have_mixed_sizes(
    installation: Installation, node: str
) -> None:
    """All fill their slices to the MiB, and are told apart by their control groups."""
    run_programs(installation)
    wait_until("the memory of all", lambda: used_mib(installation, node) == SLICES)
    samples = metrics(installation, node)
    for name, container in SLICES:
        labels = {"pod": name, "container": container}
        assert values_of(samples, "fenka_container_gpu_processes", **labels) == [1]
    expected = {
        (pod["metadata"]["uid"], status["containerID"].rpartition("/")[2])
        for pod in installation.cluster.list("pods")
        for status in pod["status"]["containerStatuses"]
    }
    assert len(expected) == len(SLICES)
    program = (agent_name(installation, node), "--", "python3", "-c", OWNERS)
    output = installation.cluster.kubectl("-n", "fenka", "exec", *program)
    assert expected <= {tuple(line.split()) for line in output.splitlines()}


def test_leases_are_kept_when_all_that_serves_them_restarts(
    installation: Installation, node: str
) -> None:
    """containerd, the kubelet and the node program are killed. Then one pod ends, and its slice is free."""
    run_programs(installation)
    before = lease_files(installation, node)
    machine = installation.cluster.node(node)
    machine.restart_containerd()
    machine.restart_kubelet()
    agent = agent_name(installation, node)
    machine.run("pkill", "-KILL", "-f", "[n]ode_process")

    def restarted() -> bool:
        status = installation.cluster.get("pod", agent, "fenka")["status"]
        return all(each["restartCount"] and each["ready"] for each in status["containerStatuses"])

    wait_until("the node program's restart", restarted)
    wait_for_agent(installation, node, 14)
    assert lease_files(installation, node) == before
    wait_until("the memory of all", lambda: used_mib(installation, node) == SLICES)
    statuses = [pod["status"]["containerStatuses"] for pod in installation.cluster.list("pods")]
    assert {status["restartCount"] for each in statuses for status in each} == {0}
    installation.cluster.kubectl("delete", "pod", "b", "--now")
    # Ten units are free: 10770 MiB.
    installation.cluster.apply(pod("c", "x=10:"))
    installation.cluster.wait_for_pod("c")
    assert visible_mib(installation, "c", "x") == 10770
    assert visible_mib(installation, "a", "x") == 4308


def test_slice_is_kept_when_a_program_exceeds_its_limit_of_ram(
    installation: Installation, node: str
) -> None:
    """fenka does not change the pod's control group: the kernel ends the program at the pod's own limit."""
    body = json.loads(pod("greedy", f"x=4:{EXCEED_RAM}"))
    limits = {MEMORY: 4, "memory": f"{RAM_MIB}Mi"}
    body["spec"]["containers"][0]["resources"]["limits"] = limits
    installation.cluster.apply(json.dumps(body))

    def status() -> Any:
        found = installation.cluster.get("pod", "greedy")["status"].get("containerStatuses")
        return found[0] if found else {}

    wait_until("the container's restart", lambda: status().get("restartCount"))
    assert status()["lastState"]["terminated"]["reason"] == "OOMKilled"
    output = installation.cluster.kubectl("logs", "greedy", "--previous")
    # Before it there may be a warning of the runtime's.
    assert output.split()[-2:] == ["4308", str(RAM_MIB * MIB)]
    wait_until("its slice again", lambda: "4308" in installation.cluster.kubectl("logs", "greedy"))
    # The directory of one lease, and its record.
    assert len(lease_files(installation, node)) == 2
