"""Snapshots of machines as values, and a dashboard of them that is served on a free port."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from fenka.dashboard.guard import Guard
from fenka.dashboard.live import Live
from fenka.dashboard.machine_pages import MachinePages
from fenka.dashboard.page_server import File
from fenka.local.machine_board import Surroundings, Viewer
from fenka.server.listener import listening_socket, serve_app
from fenka.workstation.paths import Runtime
from fenka.workstation.protocol import CardView, JobView, MachineSnapshot, SliceView

TOKEN = "t" * 43

PAGE = {"index.html": File(b"<!doctype html>", "text/html", "no-cache")}


def card(index: int, **fields: Any) -> CardView:
    """A T4 of which nothing is held."""
    common: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "model": "Tesla T4",
        "memory_mib": 15079,
        "healthy": True,
        "context_mib": 100,
        "leased_mib": 0,
        "used_mib": 0,
        "utilisation": 0,
        "free_mib": 15079,
    }
    return CardView(**{**common, **fields})


def program(name: str, index: int = 0, **fields: Any) -> JobView:
    """A program with four units of a card, or one that waits if it has a position."""
    holds = [SliceView(index, f"GPU-{index}", 4308, 4307)]
    waits = "position" in fields
    common: dict[str, Any] = {
        "id": f"id-{name}",
        "name": name,
        "user": "anna",
        "uid": 1000,
        "pid": 100,
        "kind": "run",
        "state": "waiting" if waits else "running",
        "command": ["train", "--password", "secret"],
        "directory": "/home/anna",
        "requested_at": 1000.0,
        "started_at": None if waits else 1001.0,
        "isolation": "namespace",
        "summary": "4",
        "whole": False,
        "slices": [] if waits else holds,
    }
    return JobView(**{**common, **fields})


def machine(*jobs: JobView, cards: list[CardView] | None = None) -> MachineSnapshot:
    """A machine, by default with one T4, whose cards hold what the jobs have."""
    held: dict[int, int] = {}
    for job in jobs:
        for piece in job.slices:
            held[piece.card] = held.get(piece.card, 0) + piece.memory_mib
    shown = cards or [
        card(0, leased_mib=held.get(0, 0), used_mib=held.get(0, 0), free_mib=15079 - held.get(0, 0))
    ]
    return MachineSnapshot(
        version="1",
        pid=1,
        node="here",
        address="127.0.0.1",
        driver="550",
        cuda="12.4",
        simulated=True,
        library_dir="",
        policy="binpack",
        unit_mib=1024,
        cards=shown,
        jobs=list(jobs),
    )


class Served:
    """A dashboard on a port of this machine."""

    def __init__(self, port: int, shown: Live, session: aiohttp.ClientSession) -> None:
        self.port, self.live, self.session = port, shown, session

    async def ask(
        self, path: str, method: str = "GET", token: str = TOKEN, **options: Any
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Send one request. Return the status, the body and the headers of its answer."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= options.pop("headers", {})
        url = f"http://127.0.0.1:{self.port}/{path}"
        async with self.session.request(method, url, headers=headers, **options) as answer:
            return answer.status, await answer.read(), answer.headers


@contextlib.asynccontextmanager
async def served(
    snapshot: MachineSnapshot | None = None,
    *,
    uid: int = 1000,
    acts: bool = True,
    prefix: str = "/",
) -> AsyncIterator[Served]:
    """Serve a dashboard of a machine that does not change. uid: of the user who looks."""
    runtime = Runtime(Path("/nonexistent/fenka"))
    shown = Live(runtime, Viewer(uid, acts=acts), lambda _: Surroundings(), lambda: 5000.0)
    if snapshot is not None:
        shown.show(snapshot)
    app = MachinePages(runtime, shown, PAGE, acts=acts).app(
        Guard(TOKEN, frozenset({"127.0.0.1", "localhost", "::1"}), f"{prefix}api/"), prefix
    )
    listening = listening_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    async with serve_app(app, listening), aiohttp.ClientSession() as session:
        try:
            yield Served(port, shown, session)
        finally:
            shown.fanout.close()
            await asyncio.sleep(0)
