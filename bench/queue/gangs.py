"""Measure the scheduler while some hundred gangs wait: pauses of its event loop, and a stranger's pod.

``python bench/queue/gangs.py [--gangs N] [--namespaces N] [--nodes N] [--seconds S]`` starts an API server
and the scheduler. N gangs of 4 pods of sizes of their own wait, for which no room is. A client in place of
kube-scheduler has their members filtered one after the other, each again after a backoff of 10 s. Another
reads ``/queue`` every 2 s. Every second a stranger's single pod of another namespace is filtered and bound.

The pauses are those of an answer to ``/readyz`` over a connection of its own, asked every 20 ms. "CPU" is
what the main thread has computed meanwhile: a busy machine makes the times longer. Prints a Markdown table;
exits 1 if a goal is missed.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.extender import workload
from bench.extender.run import (
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

MAX_PAUSE_S, MAX_BOUND_S = 0.2, 2.0
BACKOFF_S = 10.0
POLL_S, QUEUE_S, STRANGER_S = 0.02, 2.0, 1.0
Json = workload.Json


def body(asked: Json, names: list[str]) -> bytes:
    """Return the arguments of filter."""
    return msgspec.json.encode({"Pod": asked, "Nodes": None, "NodeNames": names})


class Load:
    """What happens beside the measured calls, and what was measured."""

    def __init__(self, port: int, pid: int, names: list[str], gangs: int, namespaces: int) -> None:
        self.names, self.pods = names, workload.gangs(gangs, namespaces)
        self._port, self._pid = port, pid
        self.ended = threading.Event()
        self.pauses, self.bound = list[Response](), list[Response]()
        self.queue, self.members = list[Response](), list[Response]()
        self.kube_scheduler = threading.Lock()

    def client(self) -> Client:
        """Return a connection of its own."""
        return Client(self._port, self._pid)

    def poll(self) -> None:
        """Ask whether the scheduler is ready."""
        client = self.client()
        while not self.ended.wait(POLL_S):
            self.pauses.append(client.call("/readyz", method="GET"))

    def read_queue(self) -> None:
        """Read the queue as the dashboard does."""
        while not self.ended.wait(QUEUE_S):
            # The scheduler ends connections that are idle for longer.
            self.queue.append(self.client().call(f"{PREFIX}/queue", method="GET"))

    def ask_members(self) -> None:
        """Have the members filtered as kube-scheduler retries them."""
        client, pause_s = self.client(), BACKOFF_S / max(len(self.pods), 1)
        bodies = [body(each_pod, self.names) for each_pod in self.pods]
        while not self.ended.is_set():
            for asked in bodies:
                with self.kube_scheduler:
                    self.members.append(client.call(f"{PREFIX}/filter", asked))
                if self.ended.wait(pause_s):
                    return

    def bind_strangers(self, requests: int) -> None:
        """Filter and bind single pods."""
        client = self.client()
        for number in range(requests):
            if self.ended.wait(STRANGER_S):
                return
            stranger = workload.request(number)
            meta = stranger["metadata"]
            begun = time.perf_counter()
            with self.kube_scheduler:
                filtered = client.call(f"{PREFIX}/filter", body(stranger, self.names))
                fitting = msgspec.json.decode(filtered.body)["NodeNames"]
                if not fitting:
                    continue
                binding = {
                    "PodName": meta["name"],
                    "PodNamespace": meta["namespace"],
                    "PodUID": meta["uid"],
                    "Node": fitting[0],
                }
                answer = client.call(f"{PREFIX}/bind", msgspec.json.encode(binding))
            if not msgspec.json.decode(answer.body)["Error"]:
                took = time.perf_counter() - begun
                cpu = filtered.cpu_s + answer.cpu_s
                self.bound.append(Response(200, b"", took, cpu))


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gangs", type=int, default=500)
    parser.add_argument("--namespaces", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40)
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> Load:
    """Start the programs, let everything happen for some seconds, and return what was measured."""
    python = sys.executable
    api = stack.enter_context(
        process(python, HERE / "api_process.py", str(options.nodes), "5", stdout=-1)
    )
    api_port, config, port = printed_port(api), folder / "kubeconfig", free_port()
    config.write_text(json.dumps(kubeconfig(api_port)))
    log = stack.enter_context((folder / "scheduler.log").open("wb"))
    running = stack.enter_context(
        process(
            *(python, "-m", "fenka", "scheduler", "--kubeconfig", config),
            *("--address", "127.0.0.1", "--port", str(port), "--max-nodes", "1"),
            stderr=log,
            env=compiled(folder / "bytecode"),
        )
    )
    until_answered(running, port, "/readyz")
    names = [workload.node_name(number) for number in range(options.nodes)]
    load = Load(port, running.pid, names, options.gangs, options.namespaces)
    client, control = load.client(), Client(api_port, api.pid)
    while client.call(f"{PREFIX}/filter", body(workload.request(0), names[:1])).status != 200:
        time.sleep(0.05)
    control.call(f"/bench/requests/0/{int(options.seconds)}")
    control.call(f"/bench/gangs/{options.gangs}/{options.namespaces}")
    time.sleep(5)
    jobs = (load.poll, load.read_queue, load.ask_members)
    threads = [threading.Thread(target=job) for job in jobs]
    threads.append(threading.Thread(target=load.bind_strangers, args=(int(options.seconds),)))
    before = cpu_s(running.pid)
    for thread in threads:
        thread.start()
    time.sleep(options.seconds)
    load.ended.set()
    for thread in threads:
        thread.join()
    busy = (cpu_s(running.pid) - before) / options.seconds
    print(
        f"{options.gangs} gangs of {workload.MEMBERS} in {options.namespaces} namespaces, "
        f"{options.nodes} nodes, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs: "
        f"the main thread was busy {busy:.0%}\n"
    )
    return load


def cpu_s(pid: int) -> float:
    """Return the processor time of a process's main thread, which runs the event loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    """Measure and print."""
    options = arguments()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        load = measure(options, folder, stack)
    print("| what | times | p50 s | p99 s | longest s | longest CPU s | goal |")
    print("|---|---|---|---|---|---|---|")
    missed = False
    rows = (
        ("an answer to /readyz", load.pauses, MAX_PAUSE_S),
        ("a stranger's pod bound", load.bound, MAX_BOUND_S),
        ("filter of a waiting member", load.members, None),
        ("GET /queue", load.queue, None),
    )
    for name, answers, goal in rows:
        times = [answer.seconds for answer in answers] or [float("inf")]
        cpu = max((answer.cpu_s for answer in answers), default=float("inf"))
        p50, p99, longest = quantile(times, 0.5), quantile(times, 0.99), max(times)
        met = "" if goal is None else f"{'met' if longest <= goal else 'MISSED'}, {goal:g}"
        missed |= goal is not None and longest > goal
        row = f"| {name} | {len(answers)} | {p50:.3f} | {p99:.3f} | {longest:.3f} | {cpu:.3f} |"
        print(f"{row} {met} |")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
