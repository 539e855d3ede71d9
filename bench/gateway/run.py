"""Measure the gateway between a client and a replica, against a direct connection and against nginx.

Client and replica are loops over epoll with messages of fixed size, so the proxy is what costs. Latency: one
connection, one request after the other. Capacity: requests of 32 connections per second of the proxy's own
processor time, which does not depend on what else the machine does at the moment.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gateway import http2
from bench.gateway.proxies import LOOPBACK, PROXY, free_port, gateway, nginx, processor_s

CONNECTIONS = 32
REQUESTS = 30_000
SEQUENTIAL = 2_000
ROUNDS = 3
LATENCY_GOAL_MS, CAPACITY_GOAL, NGINX_GOAL = 0.5, 3000, 1 / 3

BODY = b'{"inputs": [' + b", ".join(b"0.%03d" % number for number in range(60)) + b"]}"
REQUEST = (
    b"POST /v1/models/bert:predict HTTP/1.1\r\nHost: bert.default\r\nUser-Agent: bench/1\r\n"
    b"Accept: application/json\r\nAccept-Encoding: gzip\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer 0123456789abcdef0123456789abcdef\r\nX-Request-Id: 0123456789\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
RESPONSE = (
    b"HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 12:00:00 GMT\r\nServer: model\r\n"
    b"Content-Type: application/json\r\nX-Model-Version: 7\r\nContent-Length: %d\r\n\r\n%s"
    % (len(BODY), BODY)
)


def serve_replica(listening: socket.socket) -> None:
    """Answer each request with the same response, until killed."""
    poll = select.epoll()
    poll.register(listening, select.EPOLLIN)
    open_connections: dict[int, tuple[socket.socket, bytearray]] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == listening.fileno():
                connection, _ = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                open_connections[connection.fileno()] = connection, bytearray()
                poll.register(connection, select.EPOLLIN)
                continue
            connection, received = open_connections[descriptor]
            data = connection.recv(65536)
            received += data
            if not data:
                del open_connections[descriptor]
                connection.close()
            elif received.endswith(BODY):
                received.clear()
                connection.sendall(RESPONSE)


def connect(port: int) -> socket.socket:
    """Return a connection."""
    connection = socket.create_connection((LOOPBACK, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def request(connection: socket.socket) -> None:
    """Send a request and receive its response."""
    connection.sendall(REQUEST)
    received = b""
    while not received.endswith(BODY):
        received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


def latency_ms(port: int) -> float:
    """Return the median milliseconds of a request on one connection."""
    connection = connect(port)
    for _ in range(100):
        request(connection)
    times = []
    for _ in range(SEQUENTIAL):
        began = time.perf_counter()
        request(connection)
        times.append(time.perf_counter() - began)
    connection.close()
    return statistics.median(times) * 1000


def load(port: int) -> None:
    """Send REQUESTS requests over CONNECTIONS connections."""
    poll = select.epoll()
    connections = {}
    for _ in range(CONNECTIONS):
        connection = connect(port)
        connections[connection.fileno()] = connection, bytearray()
        poll.register(connection, select.EPOLLIN)
        connection.sendall(REQUEST)
    unsent, unanswered = REQUESTS - CONNECTIONS, REQUESTS
    while unanswered:
        for descriptor, _ in poll.poll():
            connection, received = connections[descriptor]
            received += connection.recv(65536)
            if received.endswith(BODY):
                received.clear()
                unanswered -= 1
                if unsent:
                    unsent -= 1
                    connection.sendall(REQUEST)
    for connection, _ in connections.values():
        connection.close()


def capacity(port: int, process: subprocess.Popen[bytes]) -> float:
    """Return how many requests a process serves in a second of its processor time."""
    before = processor_s(process)
    load(port)
    return REQUESTS / (processor_s(process) - before)


def measure(replica: int) -> bool:
    """Alternate all, and print a Markdown table. Return whether the goals are met."""
    direct: list[float] = []
    figures: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.chmod(0o755)
        proxies = []
        if shutil.which("nginx"):
            port = free_port()
            running = nginx(root, PROXY, port, f"{LOOPBACK}:{replica}")
            proxies.append(("nginx", port, stack.enter_context(running)))
        port = free_port()
        proxies.append(("gateway", port, stack.enter_context(gateway(root, replica, port))))
        for _ in range(ROUNDS):
            direct.append(latency_ms(replica))
            for name, port, process in proxies:
                figure = latency_ms(port), capacity(port, process)
                figures.setdefault(name, []).append(figure)
    return report(
        statistics.median(direct),
        {
            name: (
                statistics.median(latency for latency, _ in rows),
                statistics.median(served for _, served in rows),
            )
            for name, rows in figures.items()
        },
    )


def report(direct: float, medians: dict[str, tuple[float, float]]) -> bool:
    """Print the figures. Return whether the goals are met."""
    print("| way to the replica | p50 ms | added ms | requests/s of one core |\n|---|---|---|---|")
    print(f"| direct (baseline) | {direct:.3f} | | |")
    for name, (p50, served) in medians.items():
        print(f"| {name} | {p50:.3f} | {p50 - direct:.3f} | {served:,.0f} |")
    p50, served = medians["gateway"]
    added = p50 - direct
    met = added <= LATENCY_GOAL_MS and served >= CAPACITY_GOAL
    print(f"\nAdded {added:.3f} ms, goal {LATENCY_GOAL_MS} ms.", end=" ")
    print(f"{served:,.0f} requests/s of one core, goal {CAPACITY_GOAL:,}.", end=" ")
    if "nginx" in medians:
        share = served / medians["nginx"][1]
        met = met and share >= NGINX_GOAL
        print(f"That is {share:.2f} of nginx, goal {NGINX_GOAL:.2f}.", end=" ")
    else:
        print("nginx is not installed, so it is not compared: apt install nginx-light.", end=" ")
    print("Goals met." if met else "Goals missed.")
    return met


def main() -> None:
    """Start the replica and measure."""
    listening = socket.create_server((LOOPBACK, 0), backlog=256)
    replica = os.fork()
    if replica == 0:
        serve_replica(listening)
    try:
        met = measure(listening.getsockname()[1])
    finally:
        os.kill(replica, signal.SIGKILL)
        os.waitpid(replica, 0)
    sys.exit(not all((met, http2.measure())))


main()
