"""The cases of a lease on a real kubelet and containerd: whose slice it is, and what outlives what."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.kit import MEMORY, WORKLOAD, World, deployment

NODE = "sd-cluster-05"
FILES = ("/run/fenka/leases", "/var/lib/fenka/node")
CAP = (
    "import ctypes as c; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); t=c.c_size_t(); f=c.c_size_t(); "
    "d.cuInit(0); d.cuDevicePrimaryCtxRetain(c.byref(x),0); d.cuCtxSetCurrent(x); "
    "d.cuMemGetInfo_v2(c.byref(f),c.byref(t)); print(t.value>>20)"
)
# A dynamic linker that reads another file than /etc/ld.so.preload, and the driver by its own path.
CHEAT = """
import os, sys
linker = open("/lib64/ld-linux-x86-64.so.2", "rb").read()
open("/tmp/linker", "wb").write(linker.replace(b"/etc/ld.so.preload", b"/etc/ld.so.nothing"))
os.chmod("/tmp/linker", 0o755)
program = '''
import ctypes as c, time
d = c.CDLL("/run/fenka/driver/libcuda.so.1")
x, p = c.c_void_p(), c.c_void_p()
print(d.cuInit(0), d.cuDevicePrimaryCtxRetain(c.byref(x), 0), d.cuCtxSetCurrent(x),
      d.cuMemAlloc_v2(c.byref(p), c.c_size_t(6 << 30)), flush=True)
time.sleep(1000)
'''
os.execv("/tmp/linker", ["/tmp/linker", sys.executable, "-c", program])
"""


@pytest.fixture(scope="module")
def sharing(world: World) -> Iterator[str]:
    """A sharing node, for all tests here: without the label the agent would end each time."""
    world.label("sd-cluster-04", "gpushare-", "cgpu-")
    world.label(NODE, "cgpu-", "gpushare=true")
    yield NODE
    world.label(NODE, "gpushare-")


@pytest.fixture
def node(world: World, sharing: str) -> Iterator[str]:
    """The sharing node, empty; afterwards nothing of a lease is left on it."""
    world.wait_for_allocatable(sharing, MEMORY, 14)
    yield sharing
    world.cluster.kubectl("delete", "deployment,pod", "--all", "--now")
    machine = world.cluster.node(sharing)

    def left() -> list[str]:
        return [it for it in machine.run("ls", "-A", *FILES).split() if it[:-1] not in FILES]

    wait_until("nothing is left", lambda: not left(), 60)
    assert "fenka" not in machine.run("ls", "/var/run/cdi")


def pod(name: str, containers: str, **spec: str) -> str:
    """A pod of containers `name=units:command` (init containers begin with `init-`)."""
    listed: dict[str, list[Any]] = {"containers": [], "initContainers": []}
    for line in containers.splitlines():
        at, _, rest = line.strip().partition("=")
        units, _, command = rest.partition(":")
        kind = "initContainers" if at.startswith("init-") else "containers"
        listed[kind].append(
            {
                "name": at,
                "image": WORKLOAD,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", command or "exec sleep 100000"],
                "resources": {"limits": {MEMORY: int(units)}},
            }
        )
    body = {"terminationGracePeriodSeconds": 0, **listed, **spec}
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}
    return json.dumps(made)


def cap(world: World, name: str, container: str) -> int:
    """MiB that a program in the container sees."""
    told = world.cluster.kubectl("exec", name, "-c", container, "--", "python3", "-c", CAP)
    return int(told)


def agent(world: World, node: str) -> str:
    """The node's agent; empty while there is none."""
    found = world.cluster.list("pods", "fenka", selector="component=gpushare-device-plugin")
    names = [it["metadata"]["name"] for it in found if it["spec"]["nodeName"] == node]
    return str(names[0]) if names else ""


@pytest.mark.usefixtures("node")
def test_several_containers_and_init_containers(world: World) -> None:
    """Each has its own slice, and an init container may use the ids that an app container gets again."""
    shown = f'python3 -c "{CAP}"'
    world.cluster.apply(pod("many", f"init-a=4:{shown}\nx=4:\ny=2:"))
    world.cluster.wait_for_pod("many")
    assert [cap(world, "many", it) for it in ("x", "y")] == [4308, 2154]
    assert world.cluster.kubectl("logs", "many", "-c", "init-a").strip() == "4308"
    annotations = world.cluster.get("pod", "many")["metadata"]["annotations"]
    assert annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"


def test_nobody_starts_who_was_not_placed(world: World, node: str) -> None:
    """A node chosen by hand: the sentence is in the pod's event."""
    world.cluster.apply(pod("by-hand", "x=2:", nodeName=node))
    world.wait_for_event("by-hand", "not placed by fenka's scheduler extender")


@pytest.mark.usefixtures("node")
def test_a_container_that_restarts_keeps_its_slice(world: World) -> None:
    """The same lease, without a new Allocate."""
    world.cluster.apply(pod("again", f'x=4:python3 -c "{CAP}"; sleep 1; exit 1'))

    def restarted() -> bool:
        status = world.cluster.get("pod", "again")["status"]
        return any(it["restartCount"] > 0 for it in status.get("containerStatuses", []))

    wait_until("a second life", restarted, 60)
    assert world.cluster.kubectl("logs", "again", "--previous").strip() == "4308"
    wait_until("its limit again", lambda: "4308" in world.cluster.kubectl("logs", "again"), 30)


def test_kubelet_and_agent_come_and_go(world: World, node: str) -> None:
    """Pods go on with what they have, and the next one starts."""
    world.cluster.apply(pod("stays", "x=4:"))
    world.cluster.wait_for_pod("stays")
    world.cluster.node(node).restart_kubelet()
    world.wait_for_allocatable(node, MEMORY, 14)
    world.cluster.apply(pod("second", "x=4:"))
    world.cluster.wait_for_pod("second")
    before = agent(world, node)
    world.cluster.kubectl("-n", "fenka", "delete", "pod", before, "--force", "--grace-period=0")

    def back() -> bool:
        now = agent(world, node)
        return now not in ("", before) and "is registered" in world.cluster.kubectl(
            "-n", "fenka", "logs", now
        )

    # Without its plugin the kubelet fails a pod at once that the scheduler still sends.
    wait_until("another agent", back, 60)
    world.wait_for_allocatable(node, MEMORY, 14)
    world.cluster.apply(pod("third", "x=4:"))
    world.cluster.wait_for_pod("third")
    assert [cap(world, it, "x") for it in ("stays", "second", "third")] == [4308, 4308, 4308]


def test_fourteen_at_once(world: World, node: str) -> None:
    """A lost race with the runtime's cache would show as a start that is tried again."""
    world.cluster.apply(deployment("crowd", MEMORY, 1, replicas=14))
    pods = world.wait_for_running("crowd", 14)
    assert {it["spec"]["nodeName"] for it in pods} == {node}


def test_a_lost_card(world: World, node: str) -> None:
    """The kubelet hears of it, and of its return."""
    (cards,) = [
        it["metadata"]["name"]
        for it in world.cluster.list("pods", "fenka")
        if it["metadata"]["name"].startswith("fenka-cards") and it["spec"]["nodeName"] == node
    ]

    def fault(act: str) -> None:
        program = textwrap.dedent(f"""\
            from pathlib import Path
            from fenka.hardware.simulated import SimulatedNode
            SimulatedNode(Path("/run/fenka/simulated")).{act}(0)
            """)
        world.cluster.kubectl("-n", "fenka", "exec", cards, "--", "python3", "-c", program)

    fault("lose")
    world.wait_for_allocatable(node, MEMORY, 0)
    fault("recover")
    world.wait_for_allocatable(node, MEMORY, 14)


@pytest.mark.usefixtures("node")
def test_who_leaves_the_library_out_is_ended(world: World) -> None:
    """A dynamic linker of its own, and the driver by its own path: told from outside within 15 s."""
    world.cluster.apply(pod("cheat", "x=2:"))
    world.cluster.wait_for_pod("cheat")
    told = world.cluster.kubectl(
        "exec",
        "cheat",
        "--",
        "sh",
        "-c",
        f"python3 -c '{_quoted(CHEAT)}'; echo ended $?",
        timeout=40,
    )
    assert told.split() == ["0", "0", "0", "0", "ended", "137"]
    world.wait_for_event("cheat", "without fenka's library")


def _quoted(program: str) -> str:
    return program.replace("'", "'\"'\"'")
