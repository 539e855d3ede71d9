"""Figures over time from a real Prometheus, whose blocks promtool writes; and from what is none."""

import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fenka.core.units import MIB
from fenka.dashboard.prometheus import NoPrometheus, Prometheus
from fenka.views.board import WaitSums
from tests.waiting import wait_until

START = 1_767_225_600
"""2026-01-01, a multiple of the steps below."""

pytestmark = pytest.mark.process


def metrics() -> str:
    """Return an hour of a container and of its card, a sample a minute. The container has the second half."""
    lines = list[str]()

    def family(name: str, labels: str, values: dict[int, float]) -> None:
        lines.append(f"# TYPE {name} gauge")
        lines.extend(f"{name}{{{labels}}} {value} {at}" for at, value in values.items())

    container = 'namespace="ada",pod="notebook",container="main",node="n",index="0"'
    card = 'node="n",index="0"'
    minutes = [START + 60 * minute for minute in range(61)]
    family(
        "fenka_container_gpu_memory_used_bytes",
        container,
        {at: 1000 * MIB for at in minutes if at >= START + 1800},
    )
    family(
        "fenka_container_gpu_memory_limit_bytes",
        container,
        {at: 4308 * MIB for at in minutes if at >= START + 1800},
    )
    family("fenka_card_utilization_ratio", card, dict.fromkeys(minutes, 0.25))
    family("fenka_card_temperature_celsius", card, {at: 40 + (at % 120) / 60 for at in minutes})
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a Prometheus with these samples."""
    programs = shutil.which("prometheus"), shutil.which("promtool")
    if None in programs:
        pytest.skip("needs prometheus and promtool, as Debian's package has them")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "metrics").write_text(metrics())
    (folder / "prometheus.yml").write_text("{}")
    make = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "metrics", "data"]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=3650d"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log)
    try:
        wait_until(lambda: "Server is ready" in (folder / "log").read_text())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def test_program_has_its_memory_with_the_limit(prometheus: str) -> None:
    """1000 of 4308 MiB in the second half of the hour; before that nothing is known, which is not 0."""
    shown = await Prometheus(prometheus).program("ada", "notebook", 3600, START + 3600)
    memory, busy = shown.series
    assert (memory.name, memory.unit, memory.step) == ("memory", "MiB", 15)
    assert len(memory.mean) == len(memory.highest) == len(memory.limit) == 240
    known = {value for value in memory.mean if value is not None}
    assert (known, {*memory.limit}) == ({1000.0}, {None, 4308.0})
    assert memory.mean[60] is None
    assert memory.mean[-1] == 1000
    assert {*busy.mean} == {None}
    assert shown.problem == ""


async def test_card_has_mean_and_highest_of_each_step(prometheus: str) -> None:
    """A day in steps of 173 s: 40 and 41 degrees alternate each minute, so the highest is 41."""
    shown = await Prometheus(prometheus).card("n", 0, 86_400, START + 3600)
    named = {series.name: series for series in shown.series}
    temperature = named["temperature"]
    assert temperature.step == 173
    assert {value for value in temperature.highest if value is not None} == {41.0}
    assert all(40 < value < 41 for value in temperature.mean if value is not None)
    assert {value for value in named["busy"].mean if value is not None} == {0.25}


async def test_unknown_program_has_no_figures(prometheus: str) -> None:
    """A name with quotes asks for nothing else."""
    shown = await Prometheus(prometheus).program('x"} or vector(1) #', "y", 3600, START + 3600)
    assert {value for series in shown.series for value in series.mean} == {None}
    assert await Prometheus(prometheus).check() == ""


@pytest.mark.parametrize("url", ["prometheus", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    """With an example of one."""
    with pytest.raises(NoPrometheus, match="expected a URL, as http://prometheus"):
        Prometheus(url)


async def test_page_instead_of_prometheus_is_refused() -> None:
    """Its sentence says what to name."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    async with TestServer(app) as server:
        asked = Prometheus(str(server.make_url("/")))
        with pytest.raises(NoPrometheus, match="does not answer as Prometheus does"):
            await asked.check()
        shown = await asked.card("n", 0, 3600, START)
        assert "does not answer as Prometheus does" in shown.problem


async def test_prometheus_that_is_away_costs_a_sentence() -> None:
    """The page stands beside it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        asked = Prometheus(f"http://127.0.0.1:{probe.getsockname()[1]}")
        assert (await asked.check()).startswith("Prometheus does not answer: ")
        shown = await asked.card("n", 0, 3600, START)
    assert shown.problem.startswith("Prometheus does not answer: ")


async def test_waits_are_sums_of_a_day() -> None:
    """12 requests waited for an hour together; why is what the gauge says on average."""
    rows = {
        "seconds_count": [{"metric": {}, "value": [1, "12.2"]}],
        "seconds_sum": [{"metric": {}, "value": [1, "3660"]}],
        "by (reason)": [{"metric": {"reason": "too little memory"}, "value": [1, "1.5"]}],
    }

    async def answer(request: web.Request) -> web.Response:
        query = request.query["query"]
        known = next((found for part, found in rows.items() if part in query), [])
        return web.json_response({"status": "success", "data": {"result": known}})

    app = web.Application()
    app.router.add_get("/api/v1/query", answer)
    async with TestServer(app) as server:
        asked = Prometheus(str(server.make_url("")))
        assert await asked.waits() == WaitSums(
            12, mean_s=300.0, reasons=[("too little memory", 1.5)]
        )
        rows.clear()
        assert await asked.waits() == WaitSums(0)
    assert await Prometheus("http://127.0.0.1:9").waits() is None
