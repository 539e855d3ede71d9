"""Helpers for lease scenarios: pods of several containers, and programs that run inside them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.artifacts import CHART
from e2e.cluster import wait_until
from e2e.scenarios.installation import MEMORY, WORKLOAD, Installation

FILES = ("/run/fenka/leases", "/var/lib/fenka/node")
PRINT_VISIBLE_MIB = (
    "import ctypes as c; d=c.CDLL('libcuda.so.1'); x=c.c_void_p(); t=c.c_size_t(); f=c.c_size_t(); "
    "d.cuInit(0); d.cuDevicePrimaryCtxRetain(c.byref(x),0); d.cuCtxSetCurrent(x); "
    "d.cuMemGetInfo_v2(c.byref(f),c.byref(t)); print(t.value>>20)"
)
# A patched dynamic linker ignores /etc/ld.so.preload, and the driver is loaded by its path.
BYPASS_LIBRARY = """
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


def pod(name: str, containers: str, **spec: Any) -> str:
    """Return a pod of containers `name=units:command`. Names of init containers begin with `init-`."""
    listed: dict[str, list[Any]] = {"containers": [], "initContainers": []}
    for line in containers.splitlines():
        container, _, rest = line.strip().partition("=")
        units, _, command = rest.partition(":")
        kind = "initContainers" if container.startswith("init-") else "containers"
        listed[kind].append(
            {
                "name": container,
                "image": WORKLOAD,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", command or "exec sleep 100000"],
                "resources": {"limits": {MEMORY: int(units)}},
            }
        )
    body = {"terminationGracePeriodSeconds": 0, **listed, **spec}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body})


def visible_mib(installation: Installation, name: str, container: str) -> int:
    """Return the MiB of device memory that a program in the container sees."""
    output = installation.cluster.kubectl(
        "exec", name, "-c", container, "--", "python3", "-c", PRINT_VISIBLE_MIB
    )
    return int(output)


def agent_name(installation: Installation, node: str) -> str:
    """Return the name of the node's agent pod, or "" while there is none."""
    pods = installation.cluster.list("pods", "fenka", selector="component=gpushare-device-plugin")
    names = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]
    return str(names[0]) if names else ""


def card_server_pod(installation: Installation, node: str) -> str:
    """Return the name of the pod that serves the simulated cards of a node."""
    (name,) = [
        pod["metadata"]["name"]
        for pod in installation.cluster.list("pods", "fenka")
        if pod["metadata"]["name"].startswith("fenka-cards") and pod["spec"]["nodeName"] == node
    ]
    return str(name)


def inject_fault(installation: Installation, node: str, act: str) -> None:
    """Call a method of the node's simulated driver, such as `lose(0)`."""
    program = (
        "from pathlib import Path; from fenka.hardware.simulated_node import SimulatedNode; "
        f"SimulatedNode(Path('/run/fenka/simulated')).{act}"
    )
    server = card_server_pod(installation, node)
    installation.cluster.kubectl("-n", "fenka", "exec", server, "--", "python3", "-c", program)


def lease_files(installation: Installation, node: str) -> list[str]:
    """Return the names of lease files on a node."""
    lines = installation.cluster.node(node).run("ls", "-A", *FILES).split()
    return [line for line in lines if line[:-1] not in FILES]


def wait_for_no_leases(installation: Installation, node: str) -> None:
    """Wait until no file of a lease is left on the node."""
    wait_until(f"no lease files on {node}", lambda: not lease_files(installation, node))
    assert "fenka" not in installation.cluster.node(node).run("ls", "/var/run/cdi")


def escape_single_quotes(program: str) -> str:
    """Escape a program for a shell's single quotes."""
    return program.replace("'", "'\"'\"'")


def fetch_from_agent(installation: Installation, node: str, path: str) -> str:
    """Return the answer of the node's agent on its metrics port."""
    agent = installation.cluster.get("pod", agent_name(installation, node), "fenka")
    return installation.cluster.fetch(f"http://{agent['status']['podIP']}:9445{path}")


@contextmanager
def installed_with(installation: Installation, *changes: str) -> Iterator[None]:
    """Change values of fenka's release (helm's --set-json) inside the `with` block."""
    helm = ("upgrade", "fenka", str(CHART), "-n", "fenka", "--reuse-values")
    options = [part for change in changes for part in ("--set-json", change)]
    installation.cluster.helm(*helm, *options)
    try:
        yield
    finally:
        installation.cluster.helm("rollback", "fenka", "-n", "fenka")


def wait_for_agent(installation: Installation, node: str, units: int) -> None:
    """Wait until the node runs the current agent and the kubelet reports these allocatable units."""

    def current() -> bool:
        daemon_sets = installation.cluster.list(
            "daemonsets", "fenka", selector="app.kubernetes.io/name=fenka"
        )
        return all(
            daemon_set["status"].get("observedGeneration") == daemon_set["metadata"]["generation"]
            and daemon_set["status"].get("updatedNumberScheduled", 0)
            == daemon_set["status"]["desiredNumberScheduled"]
            for daemon_set in daemon_sets
            if "node" in daemon_set["metadata"]["name"]
        )

    wait_until("the release's current agents", current)

    def registered() -> bool:
        return "is registered" in installation.cluster.kubectl(
            "-n", "fenka", "logs", agent_name(installation, node)
        )

    wait_until("a registered agent", registered)
    installation.wait_for_allocatable(node, MEMORY, units)
