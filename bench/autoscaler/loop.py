"""Measure the autoscaler's program: its cost with nothing to do, and how soon pending pods have an order.

The program runs as a process against an API server and a cloud that stand in. Its cost is that of its own
process; the stand-ins are in this one. The baseline of the cost is the same program in an empty cluster.
"""

import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from tests.autoscaler.harness import scenario
from tests.autoscaler.test_program import Program, waiting_pod
from tests.builders import T4_MIB, Json, node_json, on_card, pod_json
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.waiting import wait_until

NODES, PODS = 1000, 8
SETTLE_S, IDLE_S = 15.0, 60.0
ORDERS = 20

GOAL_CPU, GOAL_S = 0.01, 2.0


def cluster(nodes: int) -> FakeApiServer:
    """Return a cluster with so many nodes of two T4s, each with pods of 4 units and plain ones."""
    server = FakeApiServer()
    for number in range(nodes):
        name = f"gpu-{number}"
        server.put("nodes", node_json(name, T4_MIB, T4_MIB))
        for pod in range(PODS):
            units = (4,) if pod % 2 else ()
            record = on_card(pod // 2 % 2, 4) if units else {}
            made = pod_json(f"{name}-{pod}", *units, node=name, annotations=record)
            server.put("pods", made)
    return server


def idle_share(program: Program) -> float:
    """Return the part of a core that the program takes with nothing to do."""
    with program.running() as process:
        wait_until(lambda: program.read("readyz"))
        time.sleep(SETTLE_S)
        watched = psutil.Process(process.pid)
        processes = [watched, *watched.children(recursive=True)]
        before = sum(sum(each.cpu_times()[:2]) for each in processes)
        time.sleep(IDLE_S)
        after = sum(sum(each.cpu_times()[:2]) for each in processes)
    return (after - before) / IDLE_S


def order_seconds(program: Program, server: FakeApiServer) -> list[float]:
    """Return how long pods were pending until their order was sent, one after the other."""
    taken = []
    with program.running():
        wait_until(lambda: program.read("readyz"))
        time.sleep(SETTLE_S)
        for number in range(ORDERS):
            begin = time.monotonic()
            create(server, waiting_pod(f"new-{number}"))
            wait_until(lambda number=number: len(program.machines()) > number)  # type: ignore[misc]
            taken.append(time.monotonic() - begin)
    return taken


def create(server: FakeApiServer, pod: Json) -> None:
    """Create a pod as users do: the server's own thread has to see it at once."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/api/v1/namespaces/default/pods",
        data=json.dumps(pod).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


def main() -> int:
    """Print a table; return 1 if a goal is missed."""
    print("| cluster | idle, of a core | pending to order: median | p95 |\n|---|---|---|---|")
    missed = False
    for nodes in (0, NODES):
        server = cluster(nodes)
        with tempfile.TemporaryDirectory() as folder, in_thread(server, Path(folder)) as kubeconfig:
            program = Program(Path(folder), kubeconfig, scenario())
            share, taken = idle_share(program), order_seconds(program, server)
        late = statistics.quantiles(taken, n=20)[-1]
        missed |= share > GOAL_CPU or late > GOAL_S
        print(
            f"| {nodes} nodes, {nodes * PODS} pods | {share:.2%} | {statistics.median(taken):.2f} s "
            f"| {late:.2f} s |"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
