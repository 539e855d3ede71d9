"""Measure the extender from HTTP in to HTTP out: the real process, called as kube-scheduler does.

``python bench/extender/run.py [--nodes N ...] [--pending N] [--requests N] [--seconds S]`` starts three other
processes: an API server with N nodes of 8 cards and 16 pods each, on which pods end and start all the time,
the scheduler, and a bare aiohttp handler that decodes the same requests and returns the node names (the
baseline). Each request is of its own random size and goes through filter, prioritize and bind over one
connection each, and the baseline in turn. A second series has pods pending, each of its own size too.

Times include everything that the two cores do meanwhile. Prints Markdown tables; exits 1 if a goal is missed.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.extender import workload
from bench.extender.workload import CARDS, PODS_PER_NODE, Json
from tests.fakes.api_server import kubeconfig

PREFIX = "/gpushare-scheduler"
EVENTS_PER_SECOND = 20
MAX_FILTER_MS_PER_1000_NODES = 1.0
MAX_SPREAD, MAX_PENDING_FACTOR = 3.0, 2.0
MAX_RSS_MIB, MAX_START_S = 300, 10.0
START_TIMEOUT_S = 600.0
SETTLE_S = 1.0
"""By then the scheduler has received the pods that were just created."""
HERE = Path(__file__).parent


class Response(NamedTuple):
    """An answer over HTTP."""

    status: int
    body: bytes
    seconds: float
    cpu_s: float
    """Processor time that the server's process has used meanwhile."""


class Client:
    """One connection that stays open, with as little of its own cost as possible. pid: the server's."""

    def __init__(self, port: int, pid: int) -> None:
        self._pid = pid
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, path: str, body: bytes = b"", method: str = "POST") -> Response:
        """Send a request and read the complete answer."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        cpu_s, begun = self._cpu_s(), time.perf_counter()
        self._socket.sendall(head.encode() + body)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        answer_head, _, first = data.partition(b"\r\n\r\n")
        length = int(answer_head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        parts, missing = [first], length - len(first)
        while missing > 0:
            parts.append(self._receive())
            missing -= len(parts[-1])
        took = time.perf_counter() - begun
        cpu_s = self._cpu_s() - cpu_s
        return Response(int(answer_head.split(b" ", 2)[1]), b"".join(parts), took, cpu_s)

    def _cpu_s(self) -> float:
        # Of the main thread, which runs the event loop.
        return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[0]) / 1e9

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the connection was closed")
        return data


@dataclass
class Series:
    """What was measured of some requests. Times are in milliseconds, by verb."""

    nodes: int
    pending: int
    times: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Processor time of the process that answers: what a less busy machine would come near to."""
    bound: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Answers with an error, by the error."""

    def add(self, verb: str, response: Response) -> None:
        """Record an answer."""
        self.times.setdefault(verb, []).append(response.seconds * 1000)
        self.cpu.setdefault(verb, []).append(response.cpu_s * 1000)

    def refuse(self, error: str) -> None:
        """Record an answer with an error."""
        self.refused[error] = self.refused.get(error, 0) + 1


class Cluster:
    """The three processes, and connections to them."""

    def __init__(
        self, nodes: int, control: Client, echo: Client, extender: Client, scheduler_pid: int
    ) -> None:
        self.nodes, self.scheduler_pid = nodes, scheduler_pid
        self.names = [workload.node_name(number) for number in range(nodes)]
        self.control, self.echo, self.extender = control, echo, extender

    def add_pods(self, kind: str, first: int, count: int) -> None:
        """Create pods, and wait until the scheduler has received them."""
        self.control.call(f"/bench/{kind}/{first}/{count}")
        time.sleep(SETTLE_S)

    def body(self, pod: Json, names: Sequence[str]) -> bytes:
        """Return the arguments of filter and prioritize."""
        return msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})

    def verb(self, series: Series, verb: str, body: bytes) -> Any:
        """Return the decoded answer to a verb; None if it was refused."""
        response = self.extender.call(f"{PREFIX}/{verb}", body)
        answer = msgspec.json.decode(response.body) if response.status == 200 else None
        error = response.body.decode() if answer is None else ""
        if isinstance(answer, dict):
            error = answer.get("Error", "")
        if error:
            series.refuse(error)
            return None
        series.add(verb, response)
        return answer

    def schedule(self, series: Series, number: int) -> bool:
        """Send one pod through filter, prioritize and bind; return False if it has to be retried."""
        pod = workload.request(number)
        body = self.body(pod, self.names)
        filtered = self.verb(series, "filter", body)
        series.add("echo", self.echo.call(f"{PREFIX}/filter", body))
        if filtered is None:
            return False
        fitting = filtered["NodeNames"]
        if not fitting:
            return True
        scores = self.verb(series, "prioritize", self.body(pod, fitting))
        if scores is None:
            return False
        meta, best = pod["metadata"], max(scores, key=lambda scored: scored["Score"])["Host"]
        binding = {
            "PodName": meta["name"],
            "PodNamespace": meta["namespace"],
            "PodUID": meta["uid"],
            "Node": best,
        }
        bound = self.verb(series, "bind", msgspec.json.encode(binding))
        series.bound += bound is not None
        return bound is not None

    def measure(self, pending: int, first: int, requests: int, seconds: float) -> Series:
        """Measure a number of requests, or as many as there is time for."""
        series = Series(self.nodes, pending)
        self.add_pods("requests", first, requests)
        until = time.perf_counter() + seconds
        for number in range(first, first + requests):
            while not self.schedule(series, number) and time.perf_counter() < until:
                time.sleep(0.1)
            if time.perf_counter() >= until:
                break
        return series

    def rss_mib(self) -> tuple[int, int]:
        """Return the scheduler's resident memory, now and at its peak."""
        lines = Path(f"/proc/{self.scheduler_pid}/status").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return int(sizes["VmRSS"]) // 1024, int(sizes["VmHWM"]) // 1024


def compiled(folder: str | Path) -> dict[str, str]:
    """Return an environment in which modules are compiled once, as in the image: into the folder."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


@contextlib.contextmanager
def process(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process while the block runs."""
    running = subprocess.Popen([*map(str, command)], **options)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def printed_port(running: subprocess.Popen[bytes]) -> int:
    """Return the port that a process prints once it serves."""
    assert running.stdout is not None
    return int(running.stdout.readline())


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def until_answered(running: subprocess.Popen[bytes], port: int, path: str) -> float:
    """Return the time at which the scheduler first answers a path with 200."""
    give_up = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < give_up:
        if running.poll() is not None:
            raise RuntimeError(f"the scheduler ended with code {running.returncode}")
        with contextlib.suppress(ConnectionError):
            if Client(port, running.pid).call(path, method="GET").status == 200:
                return time.perf_counter()
        time.sleep(0.02)
    raise TimeoutError(f"{path} is not answered")


@dataclass(frozen=True)
class Start:
    """How the scheduler started.

    Attributes:
        ready_s: from its start until it says that it is ready.
        leading_s: until it answers filter, after it has read the cluster again as the leader.
        rss_mib: its memory then.
        peak_mib: the most that it has had by then.
    """

    nodes: int
    ready_s: float
    leading_s: float
    rss_mib: int
    peak_mib: int


@contextlib.contextmanager
def running_cluster(nodes: int, folder: Path) -> Iterator[tuple[Cluster, Start]]:
    """Start the three processes; the block runs when the scheduler leads."""
    python, port = sys.executable, free_port()
    with (
        process(
            python, HERE / "api_process.py", str(nodes), str(EVENTS_PER_SECOND), stdout=-1
        ) as api,
        process(python, HERE / "echo_process.py", stdout=-1) as echo,
        (folder / "scheduler.log").open("wb") as log,
    ):
        config, api_port = folder / "kubeconfig", printed_port(api)
        config.write_text(json.dumps(kubeconfig(api_port)))
        command = [python, "-m", "fenka", "scheduler", "--kubeconfig", str(config)]
        environment = compiled(folder / "bytecode")
        modules = "import fenka.cli.admin.programs, fenka.scheduler.main"
        subprocess.run([python, "-c", modules], env=environment, check=True)
        begun = time.perf_counter()
        command += ["--address", "127.0.0.1", "--port", str(port)]
        with process(*command, stderr=log, env=environment) as scheduler:
            ready_s = until_answered(scheduler, port, "/readyz") - begun
            cluster = Cluster(
                nodes,
                Client(api_port, api.pid),
                Client(printed_port(echo), echo.pid),
                Client(port, scheduler.pid),
                scheduler.pid,
            )
            first = cluster.body(workload.request(0), cluster.names[:1])
            while cluster.verb(Series(nodes, 0), "filter", first) is None:
                time.sleep(0.02)
            leading_s = time.perf_counter() - begun
            yield cluster, Start(nodes, ready_s, leading_s, *cluster.rss_mib())


def quantile(times: Sequence[float], share: float) -> float:
    """Return the time that this share of all stays below."""
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


def met(value: float, goal: float) -> str:
    """Return whether a goal is met."""
    return f"{'met' if value <= goal else 'MISSED'}, {goal:g}"


def print_series(measured: Sequence[Series]) -> bool:
    """Print the times; return whether the goals of filter are met."""
    print(
        "\n| nodes | pods pending | verb | requests | p50 ms | p90 ms | p99 ms | CPU p50 | CPU p99 "
        "| p50 : bare | p50 goal | p99 : p50 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    missed = False
    for series in measured:
        bare = quantile(series.times["echo"], 0.5)
        for verb, times in series.times.items():
            p50, p90, p99 = (quantile(times, share) for share in (0.5, 0.9, 0.99))
            goals = "| |"
            if verb == "filter":
                factor = MAX_PENDING_FACTOR if series.pending else 1.0
                goal = MAX_FILTER_MS_PER_1000_NODES * max(series.nodes / 1000, 1.0) * factor
                goals = f"| {met(p50, goal)} | {p99 / p50:.1f} ({met(p99 / p50, MAX_SPREAD)}) |"
                missed |= p50 > goal or p99 > MAX_SPREAD * p50
            name = "bare aiohttp" if verb == "echo" else verb
            row = f"| {series.nodes:,} | {series.pending} | {name} | {len(times)} |"
            cpu = " | ".join(f"{quantile(series.cpu[verb], share):.2f}" for share in (0.5, 0.99))
            print(f"{row} {p50:.2f} | {p90:.2f} | {p99:.2f} | {cpu} | {p50 / bare:.1f} {goals}")
    for series in measured:
        print(f"\n{series.nodes:,} nodes, {series.pending} pending: {series.bound} pods bound")
        for error, count in series.refused.items():
            print(f"- refused {count} times: {error[:200]}")
    return not missed


def print_starts(starts: Sequence[tuple[Start, tuple[int, int]]]) -> bool:
    """Print how the schedulers started; return whether the goals are met."""
    print(
        "\n| nodes | pods | ready after, s | leading, s | RSS then, MiB | peak | RSS at the end | peak |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for start, (rss_mib, peak_mib) in starts:
        ready = f"{start.ready_s:.1f} ({met(start.ready_s, MAX_START_S)})"
        memory = f"{rss_mib} ({met(rss_mib, MAX_RSS_MIB)})"
        row = f"| {start.nodes:,} | {start.nodes * PODS_PER_NODE:,} | {ready} | {start.leading_s:.1f} |"
        print(f"{row} {start.rss_mib} | {start.peak_mib} | {memory} | {peak_mib} |")
    return all(start.ready_s <= MAX_START_S and rss <= MAX_RSS_MIB for start, (rss, _) in starts)


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--pending", type=int, default=500, help="0: no second series")
    parser.add_argument("--requests", type=int, default=300, help="of a series")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of a series")
    parser.add_argument("--log", type=Path, help="where the scheduler's last log is kept")
    return parser.parse_args()


def main() -> int:
    """Measure and print; return 1 if a goal is missed."""
    options, measured, starts = arguments(), list[Series](), list[tuple[Start, tuple[int, int]]]()
    gc.disable()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    load = os.getloadavg()[0]
    print(
        f"Load average at the start {load:.1f}; nodes of {CARDS} cards and {PODS_PER_NODE} pods; "
        f"{EVENTS_PER_SECOND} events/s"
    )
    for nodes in options.nodes:
        with (
            tempfile.TemporaryDirectory() as folder,
            running_cluster(nodes, Path(folder)) as (cluster, start),
        ):
            measured.append(cluster.measure(0, 0, options.requests, options.seconds))
            if options.pending:
                cluster.add_pods("pending", 0, options.pending)
                first = options.requests
                series = cluster.measure(options.pending, first, options.requests, options.seconds)
                measured.append(series)
            starts.append((start, cluster.rss_mib()))
            if options.log:
                shutil.copy(Path(folder) / "scheduler.log", options.log)
    goals = print_series(measured), print_starts(starts)
    return 0 if all(goals) else 1


if __name__ == "__main__":
    sys.exit(main())
