"""Services of a workstation, and their clients."""

import http.client
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.workstation.conftest import (
    PROGRAMS,
    Workstation,
    eventually,
    station,
    t4,
    workstation_at,
)

__all__ = ["station", "t4", "workstation_at"]

ANSWER = [sys.executable, str(PROGRAMS / "answer.py")]


@dataclass
class Service:
    """A service of the workstation. port: where its gateway listens."""

    station: Workstation
    name: str = "bert"
    port: int = field(default_factory=free_port)

    def serve(self, version: str, *options: str, command: list[str] | None = None) -> str:
        """Deploy a version whose replicas answer its name."""
        return self.station.ok(
            *("serve", "custom", "--local", "--name", self.name, "--version", version),
            *("--gpu-mem", "3", "--restful-port", str(self.port), *options),
            *("--", *(command or [*ANSWER, version])),
        )

    def get(self, path: str = "/") -> tuple[int, Any]:
        """Return the status and the body of a response; the body is a text if it is no JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, body.decode()

    def answer(self, path: str = "/") -> Any:
        """Return the body of a response that must succeed."""
        status, body = self.get(path)
        assert status == 200, body
        return body

    def status(self) -> Any:
        """Return what the supervisor has recorded."""
        return json.loads((self.directory / "status.json").read_text())

    def replicas(self, state: str = "", version: str = "") -> list[Any]:
        """Return the replicas that have this state and version."""
        return [
            each
            for each in self.status()["replicas"]
            if state in ("", each["state"]) and version in ("", each["version"])
        ]

    def await_ready(self, number: int, version: str = "") -> list[Any]:
        """Return all replicas once there are so many, all ready."""
        eventually(
            lambda: [each["state"] for each in self.replicas(version=version)] == ["Ready"] * number
        )
        return self.replicas(version=version)

    @property
    def directory(self) -> Path:
        """Its directory."""
        return self.station.root / "services" / self.name

    @property
    def guard(self) -> int:
        """Its supervisor's guard."""
        pid: int = self.status()["pid"]
        return pid

    @property
    def supervisor(self) -> int:
        """Its supervisor."""
        (child,) = Path(f"/proc/{self.guard}/task/{self.guard}/children").read_text().split()
        return int(child)

    def programs(self) -> list[int]:
        """Return the processes of all replicas' programs, wherever they are."""
        mark = f"FENKA_RUNTIME={self.station.root}".encode()
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                ours = mark in (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ours and words[:2] == [os.fsencode(word) for word in ANSWER]:
                pids.append(int(path.name))
        return pids

    def hold(self, number: int, until: Path) -> list[threading.Thread]:
        """Send requests that are answered when a file exists."""
        clients = [
            threading.Thread(target=self.answer, args=(f"/hold{until}",), daemon=True)
            for _ in range(number)
        ]
        for client in clients:
            client.start()
        return clients


@pytest.fixture
def service(t4: Workstation) -> Iterator[Service]:
    """A service that is not deployed yet, on a workstation with one T4."""
    service = Service(t4)
    yield service
    for path in (t4.root / "services").glob("*"):
        t4.fenka("serve", "delete", "--local", path.name)
