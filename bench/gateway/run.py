"""Measure the gateway between clients and a replica, against nginx and the gateway in Python, in one run.

Latency: one connection, one request after the other. Capacity: requests of 32 connections per second of the
processor time of all of a proxy's processes, which does not depend on what else the machine does then.
"""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.commands import machine
from bench.gateway import http2, others
from bench.gateway.load import REQUESTS, latency_ms, load, serve_replica
from bench.gateway.proxies import GATEWAY, LOOPBACK, NGINX, OLD, Running, proxies

ROUNDS = 3
LATENCY_GOAL_MS, OLD_GOAL = 0.2, 1.0


def capacity(proxy: Running) -> float:
    """Return how many requests a proxy serves in a second of its processor time."""
    before = proxy.processor_s()
    load(proxy.port)
    return REQUESTS / (proxy.processor_s() - before)


def measure(replica: int, old: Path | None) -> bool:
    """Alternate all, and print Markdown tables. Return whether the goals are met."""
    direct: list[float] = []
    figures: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.chmod(0o755)
        running = stack.enter_context(proxies(root, replica, old))
        for _ in range(ROUNDS):
            direct.append(latency_ms(replica))
            for proxy in running:
                figures.setdefault(proxy.name, []).append((latency_ms(proxy.port), capacity(proxy)))
        met = report(
            statistics.median(direct),
            {
                name: (
                    statistics.median(latency for latency, _ in rows),
                    statistics.median(served for _, served in rows),
                )
                for name, rows in figures.items()
            },
        )
        return others.measure(running, GATEWAY) and met


def report(direct: float, medians: dict[str, tuple[float, float]]) -> bool:
    """Print the figures. Return whether the goals are met."""
    print("| HTTP/1.1 | p50 ms | added ms | requests/s of one core |\n|---|---|---|---|")
    print(f"| direct (baseline) | {direct:.3f} | | |")
    for name, (p50, served) in medians.items():
        print(f"| {name} | {p50:.3f} | {p50 - direct:.3f} | {served:,.0f} |")
    p50, served = medians[GATEWAY]
    met = p50 - direct <= LATENCY_GOAL_MS
    print(f"\nAdded {p50 - direct:.3f} ms, goal {LATENCY_GOAL_MS} ms.", end=" ")
    if OLD in medians:
        ratio = served / medians[OLD][1]
        met = met and ratio >= OLD_GOAL
        print(f"{ratio:.2f} times the gateway in Python, goal {OLD_GOAL:.0f}.", end=" ")
    else:
        print("The gateway in Python was not measured: --old PATH.", end=" ")
    if NGINX in medians:
        print(f"That is {served / medians[NGINX][1]:.2f} of nginx.")
    else:
        print("nginx is not installed, so it is not compared: apt install nginx-light.")
    return met


def main() -> None:
    """Start the replica and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--old", type=Path, help="a tree with the gateway in Python, and .venv with what it needs"
    )
    old = parser.parse_args().old
    with contextlib.suppress(OSError, ValueError):
        others.raise_descriptor_limit()
    listening = socket.create_server((LOOPBACK, 0), backlog=1024)
    replica = os.fork()
    if replica == 0:
        serve_replica(listening)
    try:
        met = measure(listening.getsockname()[1], old)
    finally:
        os.kill(replica, signal.SIGKILL)
        os.waitpid(replica, 0)
    met = http2.measure(old) and met
    print(f"\n{machine()}. {'Goals met.' if met else 'Goals missed.'}")
    sys.exit(not met)


main()
