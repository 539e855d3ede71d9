"""What keeps a node from offering its cards is an event on the Node."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fenka.node import main
from fenka.node.config import NodeConfig
from fenka.node.main import PreflightError, report_unregistered
from fenka.node.start_report import NOT_SERVING, PATIENCE_S, Patience, report
from tests.builders import node
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.fakes.clock import Clock
from tests.waiting import until


def notes(server: FakeApiServer) -> list[tuple[str, str, str]]:
    """Return name, reason and note of each event."""
    return [
        (event["regarding"]["name"], event["reason"], event["note"])
        for event in server.all("events")
    ]


def test_event_is_written_when_the_program_does_not_serve(tmp_path: Path) -> None:
    """It has no watch and no loop yet."""
    server = FakeApiServer.of(nodes=[node("n")])
    with in_thread(server, tmp_path) as kubeconfig:
        report(kubeconfig, "n", "no NVIDIA driver")
    assert notes(server) == [("n", NOT_SERVING, "fenka: no cards are offered: no NVIDIA driver")]


def test_failed_report_is_only_logged_when_there_is_no_node(tmp_path: Path) -> None:
    """The reason itself must not be lost by it."""
    server = FakeApiServer.of()
    with in_thread(server, tmp_path) as kubeconfig:
        report(kubeconfig, "n", "no NVIDIA driver")
    assert notes(server) == []


def test_preflight_error_is_an_event_and_still_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod's restarts alone do not say why."""

    def refuse(_: Path) -> None:
        raise PreflightError("docker serves no CDI devices")

    monkeypatch.setattr(main, "check_mounts", refuse)
    server = FakeApiServer.of(nodes=[node("n")])
    with in_thread(server, tmp_path) as kubeconfig:
        config = NodeConfig(name="n", kubeconfig=kubeconfig, state=tmp_path / "state")
        with pytest.raises(PreflightError):
            main.run(config)
    ((_, _, note),) = notes(server)
    assert note.endswith("docker serves no CDI devices")


def test_reason_is_reported_once_when_it_lasts() -> None:
    """A driver that comes within a minute is no event, and another reason is a new one."""
    reported: list[str] = []
    clock = Clock()
    patience = Patience(reported.append, clock)
    patience.failed("a")
    clock.now += PATIENCE_S - 1
    patience.failed("a")
    assert reported == []
    clock.now += 1
    patience.failed("a")
    patience.failed("a")
    patience.failed("b")
    clock.now += PATIENCE_S
    patience.failed("b")
    patience.failed("")
    clock.now += PATIENCE_S
    patience.failed("")
    assert reported == ["a", "b"]


@pytest.mark.parametrize(("problem", "told"), [("not registered with the kubelet", 1), ("", 0)])
async def test_registration_is_an_event_when_the_kubelet_lacks_it_for_a_minute(
    problem: str, told: int
) -> None:
    """The readiness probe alone says it to nobody who does not look."""
    events: list[tuple[str, str]] = []
    clock, looks = Clock(), 0

    async def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        clock.now += max(seconds, PATIENCE_S / 2)
        await asyncio.sleep(0)

    api: Any = SimpleNamespace(
        synced=True, node_event=lambda reason, note: events.append((reason, note))
    )
    task = asyncio.create_task(report_unregistered(api, lambda: problem, clock, sleep))
    await until(lambda: looks > 6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(events) == told
    assert all(note.endswith(problem) for _, note in events)
