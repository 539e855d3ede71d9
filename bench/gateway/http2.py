"""Measure HTTP/2 with h2load: calls as gRPC makes them, through nginx and the gateway, to nginx."""

import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.gateway.proxies import (
    GRPC_PROXY,
    GRPC_REPLICA,
    LOOPBACK,
    free_port,
    gateway,
    nginx,
    processor_s,
)

CALLS, ROUNDS, BODY_BYTES = 8000, 3, 400
GOAL = 3000


def calls_per_s(process: subprocess.Popen[bytes], port: int, body: Path) -> float:
    """Return how many calls a process serves in a second of its processor time; 0 if any failed."""
    before = processor_s(process)
    words = ["h2load", "-n", str(CALLS), "-c", "4", "-m", "8", "-d", str(body)]
    words += ["-H", "te: trailers", "-H", "content-type: application/grpc"]
    output = subprocess.check_output(
        [*words, f"http://{LOOPBACK}:{port}/model.Model/Infer"], text=True
    )
    succeeded = re.search(r"(\d+) succeeded", output)
    assert succeeded is not None
    return int(succeeded[1]) / (processor_s(process) - before)


def measure() -> bool:
    """Alternate both, and print a Markdown table. Return whether the goal is met."""
    missing = [tool for tool in ("h2load", "nginx") if not shutil.which(tool)]
    if missing:
        print(f"\nHTTP/2 was not measured: {' and '.join(missing)} not installed:", end=" ")
        print("apt install nghttp2-client nginx-light.")
        return True
    replica, ports = free_port(), (free_port(), free_port())
    figures: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        body = root / "call"
        body.write_bytes(b"x" * BODY_BYTES)
        with (
            nginx(root, GRPC_REPLICA, replica, "0" * 70),
            nginx(root, GRPC_PROXY, ports[0], f"{LOOPBACK}:{replica}") as baseline,
            gateway(root, replica, ports[1]) as measured,
        ):
            for _ in range(ROUNDS):
                figures[0].append(calls_per_s(baseline, ports[0], body))
                figures[1].append(calls_per_s(measured, ports[1], body))
    base, served = (statistics.median(each) for each in figures)
    print("\n| HTTP/2 through | calls/s of one core |\n|---|---|")
    print(f"| nginx (baseline) | {base:,.0f} |\n| gateway | {served:,.0f} |")
    print(f"\n{served:,.0f} calls/s of one core, goal {GOAL:,}: {served / base:.2f} of nginx.")
    return served >= GOAL
