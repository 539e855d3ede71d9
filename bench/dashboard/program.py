"""Run `fenka dashboard`: the processor's time until its first answer, and its memory with 1 and 20 viewers.

A machine of 8 simulated cards with 24 programs, and an API server with 1,000 nodes of 8 cards and 16,000
pods, of which one changes each second. Memory is the most that was seen after any of a viewer's messages.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.commands import FENKA, server
from tests.workstation.conftest import workstation_at

SERVER = Path(__file__).parents[1] / "extender/api_process.py"
NODES, CARDS, PROGRAMS, VIEWERS = 1000, 8, 24, 20
MESSAGES, DEADLINE_S = 20, 120.0
TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Costs:
    """What the program costs.

    Attributes:
        start_s: Seconds of the processor from its start to the first answer with all cards.
        one_mib, many_mib: Its memory at most, with 1 and with VIEWERS viewers.
    """

    start_s: float
    one_mib: float
    many_mib: float


class _Viewer:
    """Reads the stream in a thread until it ends. read: how many messages of the cards came."""

    def __init__(self, url: str) -> None:
        self.read = 0
        self._came = threading.Condition()
        _, self._answer = _get(url, "/api/live")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        rest = b""
        while piece := self._answer.read1(1 << 18):
            *whole, rest = (rest + piece).split(b"event: world\n")
            with self._came:
                self.read += len(whole)
                self._came.notify_all()

    def wait_for(self, messages: int) -> None:
        """Wait until so many messages were read. Raises TimeoutError."""
        with self._came:
            if not self._came.wait_for(lambda: self.read >= messages, DEADLINE_S):
                raise TimeoutError(f"{self.read} messages were read of {messages}")


def of_machine() -> Costs:
    """Return the costs beside a daemon with 8 cards."""
    with workstation_at([]) as station:
        station.start("--simulate", f"T4*{CARDS}")
        for number in range(PROGRAMS):
            name = ("--name", f"p{number}")
            station.ok("run", "--gpu-mem", "4", "--detach", *name, "--", "sleep", "infinity")
        return _costs(
            (),
            station.environment,
            lambda world: sum(len(card["slices"]) for card in world["cards"]) == PROGRAMS,
        )


def of_cluster() -> Costs:
    """Return the costs beside an API server with 8,000 cards."""
    with server(sys.executable, SERVER, str(NODES), "1") as served:
        options = ("--cluster", "--kubeconfig", str(served.config))
        return _costs(options, os.environ, lambda world: len(world["nodes"]) == NODES)


def _costs(
    options: tuple[str, ...],
    environment: Mapping[str, str],
    complete: Callable[[dict[str, Any]], bool],
) -> Costs:
    with _running(options, environment) as (process, url):
        deadline = time.monotonic() + DEADLINE_S
        while not complete(_world(url)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} does not show all cards")
            time.sleep(0.05)
        start_s = _cpu_s(process.pid)
        viewers = [_Viewer(url)]
        one_mib = _memory_of(process.pid, viewers)
        viewers += [_Viewer(url) for _ in range(VIEWERS - 1)]
        return Costs(start_s, one_mib, _memory_of(process.pid, viewers))


def _memory_of(pid: int, viewers: Sequence[_Viewer]) -> float:
    """Return the most memory in MiB that was seen after any of MESSAGES messages of the last viewer."""
    for viewer in viewers:
        viewer.wait_for(1)
    last, seen = viewers[-1], []
    for _ in range(MESSAGES):
        last.wait_for(last.read + 1)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        (resident,) = (line for line in lines if line.startswith("VmRSS"))
        seen.append(int(resident.split()[1]) / 1024)
    return max(seen)


@contextlib.contextmanager
def _running(
    options: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [FENKA, "dashboard", "--no-open", *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()


def _get(url: str, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=DEADLINE_S)
    token = parts.fragment.removeprefix("token=")
    headers = {"Host": parts.netloc, "Authorization": f"Bearer {token}"}
    connection.request("GET", path, headers=headers)
    return connection, connection.getresponse()


def _world(url: str) -> dict[str, Any]:
    connection, answer = _get(url, "/api/world")
    with contextlib.closing(connection):
        return {"cards": [], "nodes": [], **json.loads(answer.read())}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S
