"""The routes that each program serves to its kubelet and to Prometheus."""

from collections.abc import Iterator

import aiohttp
import pytest

from fenka.server.listener import listening_socket
from fenka.server.probes import serve_probes

LOOPBACK = "127.0.0.1"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Program:
    """A program. problem: why it is not ready, empty if it is."""

    problem = "the cards are not known yet"

    def metrics(self) -> Iterator[bytes]:
        """Yield two lines of metrics."""
        yield b"cards 2\n"
        yield b"pods 3\n"


async def ask(port: int, path: str) -> tuple[int, str, str]:
    """Return status, type and text of an answer."""
    url = f"http://{LOOPBACK}:{port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def test_program_is_ready_when_it_has_no_problem() -> None:
    """It is alive meanwhile, or the kubelet would restart a program that waits."""
    program, listening = Program(), listening_socket(LOOPBACK, 0)
    port = listening.getsockname()[1]
    async with serve_probes(listening, lambda: program.problem):
        status, _, text = await ask(port, "/readyz")
        assert (status, text) == (503, "the cards are not known yet\n")
        assert (await ask(port, "/healthz"))[::2] == (200, "ok\n")
        program.problem = ""
        assert (await ask(port, "/readyz"))[::2] == (200, "ok\n")


@pytest.mark.parametrize(
    ("served", "expected"), [(True, (200, METRICS, "cards 2\npods 3\n")), (False, (404,))]
)
async def test_metrics_are_served_in_prometheus_format(
    served: bool, expected: tuple[object, ...]
) -> None:
    """A program without metrics has no such page."""
    program, listening = Program(), listening_socket(LOOPBACK, 0)
    port = listening.getsockname()[1]
    metrics = program.metrics if served else None
    async with serve_probes(listening, lambda: program.problem, metrics):
        assert (await ask(port, "/metrics"))[: len(expected)] == expected
