"""Measure HTTP/2 with h2load: calls as gRPC makes them, through each proxy, to nginx."""

import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.gateway.proxies import (
    GATEWAY,
    GRPC_PROXY,
    GRPC_REPLICA,
    LOOPBACK,
    NGINX,
    OLD,
    Running,
    free_port,
    nginx,
    proxies,
)

CALLS, ROUNDS, BODY_BYTES = 8000, 3, 400
OLD_GOAL = 5.0


def calls_per_s(proxy: Running, body: Path) -> float:
    """Return how many calls a proxy serves in a second of its processor time."""
    before = proxy.processor_s()
    words = ["h2load", "-n", str(CALLS), "-c", "4", "-m", "8", "-d", str(body)]
    words += ["-H", "te: trailers", "-H", "content-type: application/grpc"]
    output = subprocess.check_output(
        [*words, f"http://{LOOPBACK}:{proxy.port}/model.Model/Infer"], text=True
    )
    succeeded = re.search(r"(\d+) succeeded", output)
    assert succeeded is not None
    assert int(succeeded[1]) == CALLS, output
    return CALLS / (proxy.processor_s() - before)


def measure(old: Path | None) -> bool:
    """Alternate all, and print a Markdown table. Return whether the goal is met."""
    missing = [tool for tool in ("h2load", "nginx") if not shutil.which(tool)]
    if missing:
        print(f"\nHTTP/2 was not measured: {' and '.join(missing)} not installed:", end=" ")
        print("apt install nghttp2-client nginx-light.")
        return True
    figures = dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        root, replica = Path(folder), free_port()
        root.chmod(0o755)
        body = root / "call"
        body.write_bytes(b"x" * BODY_BYTES)
        with (
            nginx(root, GRPC_REPLICA, replica, "0" * 70),
            proxies(root, replica, old, GRPC_PROXY) as running,
        ):
            for _ in range(ROUNDS):
                for proxy in running:
                    figures.setdefault(proxy.name, []).append(calls_per_s(proxy, body))
    medians = {name: statistics.median(rows) for name, rows in figures.items()}
    print("\n| HTTP/2 through | calls/s of one core |\n|---|---|")
    for name, served in medians.items():
        print(f"| {name} | {served:,.0f} |")
    served = medians[GATEWAY]
    print(f"\nThat is {served / medians[NGINX]:.2f} of nginx.", end=" ")
    if OLD not in medians:
        print("The gateway in Python was not measured.")
        return True
    ratio = served / medians[OLD]
    print(f"{ratio:.1f} times the gateway in Python, goal {OLD_GOAL:.0f}.")
    return ratio >= OLD_GOAL
