"""Test the model server of the serving scenarios on a simulated card."""

import json
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import websocket

from tests.waiting import wait_until
from tests.workstation.conftest import Program, Workstation, workstation_at

SERVER = Path(__file__).parents[2] / "e2e" / "scenarios" / "serving" / "model_server.py"


class Served:
    """A model server in a lease, and its ports."""

    def __init__(self, station: Workstation) -> None:
        self.station = station
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.http, self.grpc = one.getsockname()[1], other.getsockname()[1]
        ports = ["env", f"PORT={self.http}", f"GRPC_PORT={self.grpc}"]
        options = ["--version=v7", "--weights-mib=2048", "--cost-us=5000"]
        command = [*ports, sys.executable, str(SERVER), *options]
        self.program: Program = station.run("--name=model", "--gpu-mem=4", "--", *command)
        wait_until(lambda: self.answers() or self.program.process.poll() is not None)

    def answers(self) -> bool:
        """Return whether the server is ready."""
        try:
            return self.get("/healthz") == "ok\n"
        except OSError:
            return False

    def get(self, path: str, body: bytes | None = None) -> str:
        """Return the answer to a GET request, or to a POST request with a body."""
        url = f"http://127.0.0.1:{self.http}{path}"
        answer: bytes = urllib.request.urlopen(url, body, timeout=60).read()
        return answer.decode()


@pytest.fixture
def served() -> Iterator[Served]:
    """Provide a model server on a simulated T4."""
    with workstation_at([]) as station:
        station.start("--simulate", "T4")
        yield Served(station)


def test_answer_is_the_product_with_the_weights(served: Served) -> None:
    """HTTP, events, websocket and gRPC ask the same model."""
    answer = json.loads(served.get("/predict", json.dumps({"input": 7}).encode()))
    assert answer == {"version": "v7", "output": 21}
    assert served.get("/stream?count=3") == "data: 3\n\ndata: 6\n\ndata: 9\n\n"
    echo = websocket.create_connection(f"ws://127.0.0.1:{served.http}/echo", timeout=60)
    echo.send("5")
    assert echo.recv() == "15"
    echo.close()
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc}") as channel:
        predict: Any = channel.unary_unary("/model.Model/Predict")
        count: Any = channel.unary_stream("/model.Model/Count")
        assert predict(b"4", timeout=60) == b"12"
        assert list(count(b"2", timeout=60)) == [b"3", b"6"]
    assert "model_requests 0" in served.get("/metrics")


def test_weights_are_on_the_card_and_requests_take_its_time(served: Served) -> None:
    """The daemon counts the memory by the driver's figures; a kernel of 5 ms cannot take less."""
    (piece,) = served.station.jobs()["model"]["slices"]
    assert 2048 <= piece["used_mib"] < 2500
    began = time.monotonic()
    served.get("/predict", b'{"input": 1}')
    assert time.monotonic() - began >= 0.005


def test_process_ends_when_the_crash_switch_is_used(served: Served) -> None:
    """The client sees the end of its connection."""
    with pytest.raises(OSError, match="closed connection without response"):
        served.get("/crash", b"")
    assert served.program.process.wait(60) == 70
