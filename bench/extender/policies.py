"""Compare the cost of filter by policy: a scheduler for each, on one cluster and asked about the same pods.

``python bench/extender/policies.py [--policy P …] [--nodes N] [--requests N] [--max-nodes N]`` sends each
pod's filter to every scheduler, in rotating order, and binds the pod by one. So a ratio to the first policy
is of two calls that follow each other, which a busy machine slows down alike. All times include what the
scheduler does meanwhile: it follows the cluster's events and learns its workload.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.extender import workload
from bench.extender.run import (
    EVENTS_PER_SECOND,
    HERE,
    PREFIX,
    Client,
    Response,
    compiled,
    free_port,
    printed_port,
    process,
    quantile,
    until_answered,
)
from tests.fakes.api_server import kubeconfig

SETTLE_S = 5.0
"""By then each scheduler has learnt from the pods that exist."""


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", nargs="+", default=["binpack", "bid-price", "fgd"])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--max-nodes", type=int, default=1, help="the chart's default is 1")
    return parser.parse_args()


def asked(clients: list[Client], requests: int, names: list[str]) -> list[list[Response]]:
    """Return each scheduler's answers."""
    answers: list[list[Response]] = [[] for _ in clients]
    for number in range(requests):
        pod = workload.request(number)
        body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})
        for turn in range(len(clients)):
            which = (number + turn) % len(clients)
            answers[which].append(clients[which].call(f"{PREFIX}/filter", body))
        which = number % len(clients)
        fitting = msgspec.json.decode(answers[which][-1].body)["NodeNames"]
        if fitting:
            meta = pod["metadata"]
            binding = {
                **{"PodName": meta["name"], "PodNamespace": meta["namespace"]},
                **{"PodUID": meta["uid"], "Node": fitting[0]},
            }
            clients[which].call(f"{PREFIX}/bind", msgspec.json.encode(binding))
    return answers


def print_rows(policies: list[str], answers: list[list[Response]]) -> None:
    """Print the table."""
    print(
        "| policy | p50 ms | p99 ms | CPU p50 ms | CPU mean ms | p50 ratio | CPU ratio | of sums |"
    )
    print("|---|---|---|---|---|---|---|---|")
    base = answers[0]
    for policy, mine in zip(policies, answers, strict=True):
        times = [answer.seconds * 1000 for answer in mine]
        cpu = [answer.cpu_s * 1000 for answer in mine]
        pairs = list(zip(mine, base, strict=True))
        by_time = median(answer.seconds / other.seconds for answer, other in pairs)
        by_cpu = median(answer.cpu_s / max(other.cpu_s, 1e-9) for answer, other in pairs)
        of_sums = sum(cpu) / sum(other.cpu_s * 1000 for other in base)
        print(
            f"| {policy} | {quantile(times, 0.5):.2f} | {quantile(times, 0.99):.2f} | {median(cpu):.2f} "
            f"| {mean(cpu):.2f} | {by_time:.2f} | {by_cpu:.2f} | {of_sums:.2f} |"
        )


def main() -> None:
    """Measure and print."""
    options, python = arguments(), sys.executable
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = stack.enter_context(
            process(
                *(python, HERE / "api_process.py", str(options.nodes), str(EVENTS_PER_SECOND)),
                stdout=-1,
            )
        )
        api_port, config = printed_port(api), folder / "kubeconfig"
        config.write_text(json.dumps(kubeconfig(api_port)))
        names = [workload.node_name(number) for number in range(options.nodes)]
        first = {"Pod": workload.request(0), "Nodes": None, "NodeNames": names[:1]}
        clients = []
        for policy in options.policy:
            port = free_port()
            command = (
                *(python, "-m", "fenka", "scheduler", "--kubeconfig", config),
                *("--policy", policy, "--lease", f"fenka-{policy}"),
                *("--max-nodes", str(options.max_nodes)),
                *("--address", "127.0.0.1", "--port", str(port)),
            )
            log = stack.enter_context((folder / f"{policy}.log").open("wb"))
            running = stack.enter_context(
                process(*command, stderr=log, env=compiled(folder / "bytecode"))
            )
            until_answered(running, port, "/readyz")
            client = Client(port, running.pid)
            while client.call(f"{PREFIX}/filter", msgspec.json.encode(first)).status != 200:
                time.sleep(0.05)
            clients.append(client)
        Client(api_port, api.pid).call(f"/bench/requests/0/{options.requests}")
        time.sleep(SETTLE_S)
        load = os.getloadavg()[0]
        answers = asked(clients, options.requests, names)
    print(f"{options.nodes:,} nodes, --max-nodes {options.max_nodes}, {options.requests} pods")
    print(f"load average {load:.1f} on {os.cpu_count()} CPUs\n")
    print_rows(options.policy, answers)


if __name__ == "__main__":
    main()
