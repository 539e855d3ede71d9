"""Measure the resident memory of `fenka node`, against an interpreter that has only imported its libraries.

The program serves a fake kubelet, a fake API server and simulated cards. Its directories are in a mount
namespace of this process, so root is required, as it is by the program.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[2]))

from fenka.hardware.card_spec import parse_spec
from fenka.hardware.nvml import Driver
from fenka.hardware.simulated_node import SimulatedNode
from fenka.isolation import sandbox
from tests.fakes.api_server import FakeApiServer, kubeconfig
from tests.fakes.in_process import FakeApi
from tests.node.harness import NODE, FakeHardware, FakeKubelet, NodeHarness

CARDS, LEASES, UNITS, OTHER_PODS, PORT, SCRAPES = 8, 64, 8, 46, 19876, 20
GOAL_MIB = 80.0
PRIVATE, SHARED = 1 << 18, 1 << 20
"""Propagation of mounts; the program requires that a container runtime can see its mounts."""
LIBRARIES = (
    "aiohttp.web, cffi, google.protobuf.message, grpc, msgspec, prometheus_client, pynvml, yaml"
)
BASELINE = f"import {LIBRARIES}; print(open('/proc/self/smaps').read(), end='')"


def own_directories() -> None:
    """Give this process empty directories of its own where the program has its files."""
    sandbox.unshare(sandbox.NEW_MOUNTS)
    sandbox.mount(None, Path("/"), sandbox.RECURSIVE | PRIVATE)
    for directory in (Path("/run"), Path("/var/lib")):
        sandbox.mount(None, directory, 0, "tmpfs", "mode=0755")
        sandbox.mount(None, directory, SHARED)
    kubelet = Path("/var/lib/kubelet")
    (kubelet / "pod-resources").mkdir(parents=True)
    (kubelet / "pod-resources/kubelet.sock").symlink_to(kubelet / "pr.sock")


def resident_mib(smaps: str, without: str = "\0") -> float:
    """Return the resident memory of a process. without: end of the path of a mapping that is not counted."""
    total, counted = 0, True
    for line in smaps.splitlines():
        if not line.split()[0].endswith(":"):
            counted = not line.endswith(without)
        elif line.startswith("Rss:") and counted:
            total += int(line.split()[1])
    return total / 1024


async def program_mib(directory: Path, node: SimulatedNode) -> float:
    """Return the memory of the program with its leases, without the simulated cards' shared memory."""
    kubelet, server = FakeKubelet(Path("/var/lib/kubelet"), Path("/run/cdi")), FakeApiServer()
    await kubelet.start()
    await server.start()
    (directory / "kubeconfig").write_text(json.dumps(kubeconfig(server.port)))
    with Driver.open(node.library_dir) as driver:
        hardware = FakeHardware(driver.cards())
    cluster = NodeHarness(directory, FakeApi(server), kubelet, hardware, directory)
    cluster.node(gpushare="true")
    for number in range(OTHER_PODS):
        cluster.pod(f"other-{number}", 0, on=None)
    words = [sys.executable, "-m", "fenka", "node", "--name", NODE, "--metrics-port", str(PORT)]
    words += ["--simulated", str(node.directory), "--kubeconfig", str(directory / "kubeconfig")]
    program = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        await cluster.ready()
        for number in range(LEASES):
            await cluster.run(cluster.pod(f"pod-{number}", UNITS, on=number % CARDS))
        for _ in range(SCRAPES):
            await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{PORT}/metrics").read())
            await asyncio.sleep(0.5)
        smaps = Path(f"/proc/{program.pid}/smaps").read_text()
        return resident_mib(smaps, f"{node.directory}/state")
    finally:
        program.terminate()
        program.wait()
        await kubelet.stop()
        await server.stop()


def main() -> int:
    """Measure both, and print a Markdown table. Return 1 if the goal is missed."""
    if os.geteuid() != 0:
        sys.exit("bench/node requires root, as the node program does")
    imported = resident_mib(subprocess.check_output([sys.executable, "-c", BASELINE], text=True))
    own_directories()
    with tempfile.TemporaryDirectory(prefix="fenka-") as directory:
        node = SimulatedNode.create(Path(directory) / "node", parse_spec(f"A100-80G*{CARDS}"))
        node.start()
        try:
            used = asyncio.run(program_mib(Path(directory), node))
        finally:
            node.stop()
    print("| process | resident MiB |\n|---|---|")
    print(f"| Python with the program's libraries | {imported:.1f} |")
    print(f"| `fenka node`, {CARDS} cards, {LEASES} leases, {OTHER_PODS} other pods | {used:.1f} |")
    verdict = "met" if used <= GOAL_MIB else "missed"
    print(f"\nratio {used / imported:.2f}, goal {GOAL_MIB:.0f} MiB: {verdict}")
    return int(used > GOAL_MIB)


sys.exit(main())
