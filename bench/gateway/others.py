"""Measure what others notice: memory of idle connections, and the delay of a paced client beside floods."""

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator

from bench.gateway.load import connect, request
from bench.gateway.proxies import LOOPBACK, Running

IDLE = 10_000
MEMORY_GOAL_MIB = 200.0
PACED, INTERVAL_S = 500, 0.01
DELAY_GOAL_S = 0.1
SLOW = 600
FLOODS = 2
"""Processes of each flood, each of which connects again as often as its connection is ended."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
BLOCK = b"\x83\x86\x84\x41\x01a"
"""POST http / of authority `a`, by HPACK's static table."""
SLOW_REQUEST = (
    b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 60_000
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


RAPID_RESETS = b"".join(
    frame(1, 5, stream, BLOCK) + frame(3, 0, stream, b"\0\0\0\x08") for stream in range(1, 2001, 2)
)
"""Requests, each of which is cancelled at once."""
CONTROL_FRAMES = frame(6, 0, 0, b"12345678") * 500 + frame(4, 0, 0) * 500
"""Pings and settings, each of which wants an answer."""


def raise_descriptor_limit() -> None:
    """Let this process and its children have descriptors for all connections. Raises OSError."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(hard, 4 * IDLE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def idle_connections() -> int:
    """Return how many connections are opened: IDLE, or what the gateway accepts with its descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(IDLE, hard // 2 - 100)


def idle_memory_mib(proxy: Running) -> float:
    """Return the memory of a proxy with idle connections, each of which has had a request."""
    connections = list[socket.socket]()
    try:
        for _ in range(idle_connections()):
            connections.append(connect(proxy.port))
            request(connections[-1])
        return proxy.memory_mib()
    finally:
        for connection in connections:
            connection.close()


def delays_s(proxy: Running) -> list[float]:
    """Return the sorted delays of requests that are due at fixed times."""
    connection, delays = connect(proxy.port), list[float]()
    began = time.perf_counter()
    for number in range(PACED):
        due = began + number * INTERVAL_S
        time.sleep(max(0.0, due - time.perf_counter()))
        request(connection)
        delays.append(time.perf_counter() - due)
    connection.close()
    return sorted(delays)


def nothing(_: int) -> None:
    """Wait."""
    signal.pause()


def slow_bodies(port: int) -> None:
    """Keep SLOW / FLOODS requests open, each of which sends a byte now and then."""
    poll, connections = select.poll(), list[socket.socket]()
    for _ in range(SLOW // FLOODS):
        connections.append(connect(port))
        connections[-1].setblocking(False)
        with contextlib.suppress(OSError):
            connections[-1].send(SLOW_REQUEST)
    while True:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b"x")
        poll.poll(500)


def flood(frames: bytes) -> Callable[[int], None]:
    """Return a flood that sends these frames again and again."""

    def send(port: int) -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port)) as peer:
                peer.settimeout(1)
                peer.sendall(PREFACE)
                while True:
                    peer.sendall(frames)
                    # It reads what came, as a client would that looks harmless.
                    with contextlib.suppress(BlockingIOError):
                        peer.recv(1 << 20, socket.MSG_DONTWAIT)

    return send


ATTACKS: dict[str, Callable[[int], None]] = {
    "nothing": nothing,
    f"{SLOW} slow bodies": slow_bodies,
    "rapid reset": flood(RAPID_RESETS),
    "pings and settings": flood(CONTROL_FRAMES),
}


@contextlib.contextmanager
def attacked(attack: Callable[[int], None], port: int) -> Iterator[None]:
    """Attack a port from other processes, of the lowest priority, while the block runs."""
    children = list[int]()
    for _ in range(FLOODS):
        child = os.fork()
        if child == 0:
            # The bench itself may run at real-time priority.
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            os.nice(10)
            try:
                attack(port)
            finally:
                os._exit(0)
        children.append(child)
    try:
        time.sleep(1)
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def measure(running: list[Running], gateway: str) -> bool:
    """Print Markdown tables. Return whether the gateway meets the goals."""
    met = True
    print(f"\n| {idle_connections():,} idle connections to | MiB |\n|---|---|")
    for proxy in running:
        try:
            used = idle_memory_mib(proxy)
        except (AssertionError, OSError) as error:
            print(f"| {proxy.name} | {error} |", flush=True)
            met &= proxy.name != gateway
            continue
        met &= proxy.name != gateway or used <= MEMORY_GOAL_MIB
        print(f"| {proxy.name} | {used:,.0f} |", flush=True)
    print(f"\nGoal {MEMORY_GOAL_MIB:.0f} MiB.")
    print("\n| beside | through | p50 ms | p99 ms | maximum ms |\n|---|---|---|---|---|")
    for name, attack in ATTACKS.items():
        for proxy in running:
            try:
                with attacked(attack, proxy.port):
                    delays = delays_s(proxy)
            except (AssertionError, OSError) as error:
                print(f"| {name} | {proxy.name} | {error} | | |", flush=True)
                met &= proxy.name != gateway
                continue
            p50, p99 = delays[PACED // 2], delays[PACED * 99 // 100]
            met &= proxy.name != gateway or delays[-1] < DELAY_GOAL_S
            figures = " | ".join(f"{delay * 1000:.1f}" for delay in (p50, p99, delays[-1]))
            print(f"| {name} | {proxy.name} | {figures} |", flush=True)
    print(f"\nGoal: at most {DELAY_GOAL_S * 1000:.0f} ms each.")
    return met
