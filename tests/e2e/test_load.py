"""Test the open-loop load generator of the serving scenarios."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from e2e.scenarios.serving.load import Request, arrivals, quantile, read, run, windows
from tests.coroutines import synchronous


def test_arrivals_have_each_phases_count_and_do_not_change_between_runs() -> None:
    """10 a second for 3 s, then 200 a second for 2 s."""
    times = arrivals([(10, 3), (200, 2)])
    assert sum(time < 3 for time in times) == 30
    assert len(times) == 430
    assert times == sorted(times) == arrivals([(10, 3), (200, 2)])
    assert times != arrivals([(10, 3), (200, 2)], seed=2)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.5, 10),  # 20 * 0.5 = 10 values are at most 10
        (0.95, 19),
        (1, 20),
        (0.01, 1),
    ],
)
def test_quantile_is_a_value_that_enough_others_do_not_exceed(share: float, expected: int) -> None:
    """The values are 1 to 20."""
    assert quantile([float(value) for value in range(20, 0, -1)], share) == expected


def test_windows_group_requests_by_when_they_were_to_be_sent() -> None:
    """A window without requests is left out."""
    requests = [Request(at, 0, 0, 200) for at in (100, 104.9, 105, 121)]
    grouped = [(begin, [each.at for each in group]) for begin, group in windows(requests, 5)]
    assert grouped == [(100, [100, 104.9]), (105, [105]), (120, [121])]


class Server:
    """Answers only when all requests are there. Some answers are wrong."""

    def __init__(self, expected: int) -> None:
        self.all_here = asyncio.Barrier(expected)

    async def predict(self, request: web.Request) -> web.Response:
        """Fail for 1 and 2 each in its way, answer 3 wrongly, and the others right."""
        number = (await request.json())["input"]
        await self.all_here.wait()
        if number == 1:
            assert request.transport is not None
            request.transport.close()
        if number == 2:
            return web.Response(status=503, text="no replica")
        return web.json_response({"version": "v1", "output": number * 3 + (number == 3)})


@synchronous
async def test_requests_are_sent_in_time_when_none_is_answered(tmp_path: Path) -> None:
    """A closed loop would never send the last ones; each latency contains the wait."""
    server, app = Server(5), web.Application()
    app.router.add_post("/predict", server.predict)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    file = tmp_path / "requests"
    try:
        with file.open("w") as output:
            await run(f"http://127.0.0.1:{runner.addresses[0][1]}", [0, 0, 0, 0, 0.2], output)
    finally:
        await runner.cleanup()
    requests = read(file)
    assert len(requests) == len(file.read_text().splitlines()) == 5
    assert sorted(request.status for request in requests) == [0, 200, 200, 200, 503]
    answered = [request for request in requests if request.status == 200]
    assert sorted(request.right for request in answered) == [False, True, True]
    assert {request.version for request in answered} == {"v1"}
    first, last = requests[0], requests[-1]
    assert first.latency_s >= last.at - first.at
